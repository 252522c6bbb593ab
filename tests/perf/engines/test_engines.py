"""`perf engines`: the arithmetic of its report, its conversation with an engine, and our own driver."""

from __future__ import annotations

import argparse
import ast
import json
import sys
from collections.abc import Iterator, Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import ClassVar

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from space_model.checkpoint.checkpoint import Checkpoint
from space_model.make_model import Size, random_llama
from space_server.step_cost import BENDS, CROWDS, DEPTHS, StepCost

from perf.engines.compare import Cell, PointResult, chats_at, chats_of, measure, prompts_of, rank
from perf.engines.drivers import openai_driver
from perf.engines.drivers.openvino_driver import check_weights
from perf.engines.drivers.spaceserve_driver import PLAIN, Bound, open_engine, synthetic_arm
from perf.engines.gguf_llama import bfloat16_tensors, gguf_name, neighbours, widened
from perf.engines.process import DRIVERS, Answer, EngineFailed, EngineProcess, EngineSpec, Point
from perf.harness import PerfError, main

PAIR = Point(2, 8, 4)
FAKE = """
import os

class Fake:
    def __init__(self, settings):
        self.settings = settings
        print("an engine's own words")  # on stdout: they must not end in the conversation
        os.system("echo and those of its libraries")
    def facts(self):
        return {"version": "1", "arms": ["slow", "fast"], "settings": str(self.settings["threads"]), "lacks": "all"}
    def prepare(self, arm, prompts, max_tokens):
        pass
    def run(self, arm, prompts, max_tokens):
        if max_tokens == 13:
            raise ValueError("13 is bad luck")
        if max_tokens == 14:
            os._exit(7)
        each = 0.5 if arm == "slow" else 0.125
        given = max_tokens - (max_tokens == 15)
        return [[7] * given for _ in prompts], [[1.0 + each * n for n in range(given)] for _ in prompts]

def open_engine(settings):
    if settings["threads"] == 99:
        raise OSError("no such many threads")
    return Fake(settings)
"""


def test_a_batch_is_timed_while_all_of_its_sequences_run() -> None:
    answer = Answer([[5, 6, 7, 8], [5, 6, 7, 8]], [[1.0, 2.0, 3.0, 4.0], [2.0, 3.0, 5.0, 6.0]])
    assert answer.tokens_per_second(PAIR) == 3 / 2.0  # from 2.0, where both have begun, to 4.0, where one has all


def test_tokens_that_come_together_all_count() -> None:
    answer = Answer([[5, 6, 7, 8]], [[1.0, 3.0, 3.0, 3.0]])
    assert answer.tokens_per_second(Point(1, 8, 4)) == 3 / 2.0


def test_a_prefill_is_timed_until_its_last_first_token() -> None:
    assert Answer([[5], [5]], [[1.0], [4.0]]).tokens_per_second(Point(2, 512, 1)) == 2 * 512 / 4.0


@pytest.mark.parametrize(
    ("outputs", "seconds", "reason"),
    [
        ([[5, 6, 7, 8]], [[1.0, 2.0, 3.0, 4.0]], "answered 1 of 2"),
        ([[5, 6, 7, 8], [5, 6, 7]], [[1.0, 2.0, 3.0, 4.0], [1.0, 2.0, 3.0]], "3 tokens at 3 times, not the 4"),
        ([[5, 6, 7, 8]] * 2, [[1.0, 2.0, 3.0, 4.0], [1.0, 2.0, 3.0]], "4 tokens at 3 times"),
        ([[5, 6, 7, 8]] * 2, [[1.0, 2.0, 3.0, 4.0], [1.0, 3.0, 2.0, 4.0]], "do not grow"),
        ([[5, 6, 7, 8]] * 2, [[1.0, 2.0, 3.0, 4.0], [9.0, 9.1, 9.2, 9.3]], "Ask for more by --new-tokens"),
    ],
)
def test_an_answer_of_another_length_or_without_time_is_refused(
    outputs: Sequence[Sequence[int]], seconds: Sequence[Sequence[float]], reason: str
) -> None:
    with pytest.raises(EngineFailed, match=reason):
        Answer(outputs, seconds).tokens_per_second(PAIR)


def test_ids_are_the_same_up_to_the_first_that_differs() -> None:
    one, other = Answer([[1, 2, 3, 4], [1, 2, 3, 4]], []), Answer([[1, 2, 9, 4], [1, 2, 3, 4]], [])
    assert one.same_ids(other) == 6 / 8


class Scripted:
    """Records its turns in a list that engines share."""

    def __init__(self, name: str, turns: list[str], fails_at: int = 99) -> None:
        self.spec, self.arms = EngineSpec(name, "", Path()), ["x", "y"]
        self._turns, self._fails_at = turns, fails_at

    def prepare(self, arm: str, prompts: Sequence[Sequence[int]], point: Point) -> None:
        pass

    def run(self, arm: str, prompts: Sequence[Sequence[int]], point: Point) -> Answer:
        self._turns.append(self.spec.name + arm)
        if len(self._turns) > self._fails_at and arm == "y":
            raise EngineFailed("gone")
        return Answer([[5, 6]], [[1.0, 1.5]])


def test_every_other_round_is_in_reverse_and_an_arm_that_fails_is_left_out() -> None:
    turns: list[str] = []
    cells = measure(
        [Scripted("a", turns), Scripted("b", turns, fails_at=4)], Point(1, 8, 2), [[1]], num_rounds=3, seconds=99
    )
    assert turns == ["ax", "ay", "bx", "by", *("by", "bx", "ay", "ax"), *("ax", "ay", "bx")]
    assert [(cell.name, cell.rates, cell.failure) for cell in cells] == [
        ("a: x", [2.0] * 3, None), ("a: y", [2.0] * 3, None), ("b: x", [2.0] * 3, None), ("b: y", [], "b: gone"),
    ]  # fmt: skip
    assert [cell.same_ids for cell in cells][:3] == [1.0] * 3


def test_every_prefill_has_a_prompt_of_its_own() -> None:
    seen: list[tuple[int, ...]] = []

    class Asked(Scripted):
        def run(self, arm: str, prompts: Sequence[Sequence[int]], point: Point) -> Answer:
            seen.extend(tuple(ids) for ids in prompts)
            return Answer([[5]], [[1.0]])

    measure([Asked("a", []), Asked("b", [])], Point(1, 20, 1), [list(range(20))], num_rounds=3, seconds=60.0)
    assert len({ids[0] for ids in seen}) == len(seen) == 12
    assert {tuple(sorted(ids)) for ids in seen} == {tuple(range(20))}


def test_without_time_there_is_one_round() -> None:
    turns: list[str] = []
    measure([Scripted("a", turns)], Point(1, 8, 2), [[1]], num_rounds=5, seconds=0)
    assert turns == ["ax", "ay"]


def test_ratios_are_of_one_round_and_to_the_fastest_engine_that_is_not_ours() -> None:
    ours = Cell("spaceserve", "plain", [10.0, 30.0, 20.0])
    drafts = Cell("spaceserve", "SPACE at .78", [40.0, 60.0, 20.0], bound={"speed_up": 3.0})
    best, slow = Cell("b", "x", [20.0, 20.0, 10.0]), Cell("c", "x", [1.0, 1.0, 99.0])
    result = PointResult(PAIR, [ours, drafts, best, slow])
    assert result.best_other is best
    ratio = result.against_best(drafts)
    assert ratio is not None
    assert (ratio.median, ratio.num) == (2.0, 3)  # of 2, 3 and 2: not 40 / 20 of the medians alone
    assert result.bound_against_best(drafts) == 20.0 * 3.0 / 20.0
    assert result.bound_against_best(ours) is None
    assert [rank(value) for value in (1.2, 1.1, 1.0, 0.9, 0.8)] == ["ahead", "level", "level", "level", "behind"]


def test_without_another_engine_there_is_no_ratio() -> None:
    ours = Cell("spaceserve", "plain", [10.0])
    result = PointResult(PAIR, [ours, Cell("b", "x", failure="b: gone")])
    assert (result.best_other, result.against_best(ours)) == (None, None)


# ------------------------------------------------------------------------------------------- the conversation


@pytest.fixture(scope="module")
def driver(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("drivers") / "fake_driver.py"
    file.write_text(FAKE)
    return file


@pytest.fixture
def fake(driver: Path, tmp_path: Path) -> Iterator[EngineProcess]:
    spec = EngineSpec("fake", sys.executable, driver)
    with EngineProcess(spec, {"threads": 2}, num_threads=2, log=tmp_path / "log") as engine:
        yield engine


def test_an_engine_in_its_own_process_answers_in_json_whatever_it_prints(fake: EngineProcess, tmp_path: Path) -> None:
    assert (fake.arms, fake.facts["settings"]) == (["slow", "fast"], "2")
    fake.prepare("slow", [[1], [2]], PAIR)
    assert fake.run("slow", [[1], [2]], PAIR).tokens_per_second(PAIR) == 4.0
    assert fake.run("fast", [[1], [2]], PAIR).tokens_per_second(PAIR) == 16.0
    assert (tmp_path / "log").read_text().split("\n")[:2] == ["an engine's own words", "and those of its libraries"]
    resident = fake.resident_mib
    assert resident is None or resident > 1


def test_a_question_that_fails_is_reported_and_the_next_one_is_answered(fake: EngineProcess) -> None:
    with pytest.raises(EngineFailed, match=r"ValueError: 13 is bad luck"):
        fake.run("slow", [[1]], Point(1, 1, 13))
    assert fake.run("slow", [[1]], Point(1, 1, 2)).outputs == [[7, 7]]


def test_an_engine_that_dies_is_named_with_its_status_and_its_log(fake: EngineProcess, tmp_path: Path) -> None:
    with pytest.raises(EngineFailed, match=rf"its process has ended with 7\. .* {tmp_path / 'log'}\."):
        fake.run("slow", [[1]], Point(1, 1, 14))


def test_an_engine_that_cannot_be_opened_says_why(driver: Path) -> None:
    with pytest.raises(EngineFailed, match="OSError: no such many threads"):
        EngineProcess(EngineSpec("fake", sys.executable, driver), {"threads": 99}, num_threads=1, log=None)
    with pytest.raises(EngineFailed, match="/no/python cannot be started"):
        EngineProcess(EngineSpec("fake", "/no/python", driver), {}, num_threads=1, log=None)


def flags(driver: Path, *more: str) -> list[str]:
    out = ["--without", "spaceserve", "--without", "transformers", "--driver", f"fake={driver}"]
    return [*out, "--engine", f"fake={sys.executable}", "--batch", "1,2", "--prompt-tokens", "8", *more]


def test_the_report_has_every_figure_in_both_files(
    driver: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = flags(driver, "--new-tokens", "5,9", "--prefill-tokens", "16", "--rounds", "2", "--out", str(tmp_path))
    assert main(["engines", *asked]) == 0
    assert "| fake: fast | **8** | **16** | 16 | 1.00 |" in capsys.readouterr().out
    (model,) = json.loads((tmp_path / "engines.json").read_text())["models"]
    assert [(point["name"], point["best_other"]) for point in model["points"]] == [
        ("batch 1", "fake: fast"),
        ("batch 2", "fake: fast"),
        ("prefill 16", "fake: slow"),
    ]
    assert model["points"][0]["cells"][0]["rates"] == [2.0, 2.0]
    assert model["points"][0]["cells"][0]["against_best"]["median"] == 0.25
    assert "| fake | 1 |" in (tmp_path / "engines.md").read_text()


def test_an_answer_too_short_fails_that_point_alone(driver: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["engines", *flags(driver, "--new-tokens", "4,15", "--rounds", "1")]) == 1
    text = capsys.readouterr().out
    assert "WRONG: batch 2: fake: It gave 14 tokens at 14 times, not the 15 asked." in text
    assert "| fake: slow | 2 | failed |" in text


@pytest.mark.parametrize(
    ("more", "reason"),
    [
        (["--engine", "vllm=x"], "'vllm' is no engine; known are spaceserve,"),
        (["--engine", "vllm"], "it must read NAME=PYTHON"),
        (["--without", "fake"], "--without leaves no engine"),
        (["--new-tokens", "4,5,6"], "one for each of the 2 batches"),
        (["--new-tokens", "1"], "at least 2"),
        (["--new-tokens", "2000"], "exceed the window of 1024"),
    ],
)
def test_a_flag_that_cannot_be_used_is_refused_in_one_line(
    driver: Path, more: list[str], reason: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["engines", *flags(driver, *more)]) == 2
    error = capsys.readouterr().err.strip()
    assert reason in error
    assert "\n" not in error


def test_prompts_are_all_different_and_equally_long() -> None:
    prompts = prompts_of(Checkpoint.open("demo"), Point(32, 128, 64))
    assert {len(prompt) for prompt in prompts} == {128}
    assert len({tuple(prompt) for prompt in prompts}) == 32


# ------------------------------------------------------------------------------------------- our own drive


def test_our_arms_give_the_same_ids_as_many_as_asked(tmp_path: Path) -> None:
    folder = random_llama(tmp_path / "small", Size(64, 2, 2, 96, 500, 256, 8))
    chances = (0.84, 0.81, 0.78, 0.75, 0.72)
    engine = open_engine(
        {
            "checkpoint": str(folder), "dtype": "bfloat16", "threads": 1, "most_sequences": 2, "most_ids": 40,
            "synthetic_acceptance": [chances], "own_drafts": False,
        }
    )  # fmt: skip
    assert engine.facts()["arms"] == [PLAIN, "SPACE at .78"] == [PLAIN, synthetic_arm(chances)]
    prompts = [[10, 20, 30], [40, 50, 60]]
    answers = []
    for arm in engine.facts()["arms"]:
        engine.prepare(arm, prompts, 12)
        answers.append(Answer(*engine.run(arm, prompts, 12)))
        assert answers[-1].tokens_per_second(Point(2, 3, 12)) > 0
    assert answers[0].same_ids(answers[1]) == 1.0
    assert set(engine.bounds(2, 10)) == {"SPACE at .78"}


def cost(per_row: float) -> StepCost:
    """A step takes 1 s, and each of its rows so much more."""
    return StepCost([1.0, *(0.0 for _ in CROWDS), *(0.0 for _ in range(5 + len(DEPTHS))), *(per_row for _ in BENDS)])


def test_the_bound_takes_all_drafts_where_rows_are_free_and_none_where_they_are_dear() -> None:
    chances = (0.5,) * 5
    free = Bound.of(cost(0.0), chances, max_drafts=5, num_sequences=1, num_context=0)
    assert free.tokens_per_step == pytest.approx(sum(0.5**n for n in range(6)), rel=1e-3)
    assert free.speed_up == pytest.approx(free.tokens_per_step)
    assert free.cost == 1.0
    dear = Bound.of(cost(100.0), chances, max_drafts=5, num_sequences=1, num_context=0)
    assert (dear.speed_up, dear.num_rows) == (1.0, 1.0)


# ------------------------------------------------------------------------------------------- any server


class Completions(BaseHTTPRequestHandler):
    """Two events for each prompt: one id, then the rest; without ids for a prompt that begins with 9."""

    def do_GET(self) -> None:
        self._answer(b'{"data": [{"id": "m"}]}')

    def do_POST(self) -> None:
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        assert (asked["stream"], asked["ignore_eos"], asked["temperature"]) == (True, True, 0)
        events = b""
        for ids in ([7], [8] * (asked["max_tokens"] - 1)):
            with_ids = {} if asked["prompt"][0] == 9 else {"token_ids": ids}
            events += b"data: " + json.dumps({"choices": [{"text": "x", **with_ids}]}).encode() + b"\n\n"
        self._answer(events + b"data: [DONE]\n\n")

    def _answer(self, body: bytes) -> None:
        self.send_response(200)
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *values: object) -> None:
        pass


def test_a_running_server_is_an_engine() -> None:
    with ThreadingHTTPServer(("127.0.0.1", 0), Completions) as server:
        Thread(target=server.serve_forever, daemon=True).start()
        engine = openai_driver.open_engine({"url": f"http://127.0.0.1:{server.server_port}/v1"})
        answer = Answer(*engine.run("over HTTP", [[1, 2], [3, 4]], 4))
        shared = openai_driver.open_engine({"url": f"http://127.0.0.1:{server.server_port}", "clients": 2})
        outputs, seconds = shared.run("over HTTP", [[1], [2], [3]], 4)
        with pytest.raises(ValueError, match="does not return token ids"):
            engine.run("over HTTP", [[9]], 4)
        server.shutdown()
    assert (engine.facts()["version"], answer.outputs) == ("m", [[7, 8, 8, 8]] * 2)
    assert outputs == [[7, 8, 8, 8]] * 3  # of two processes
    assert all(times[0] > 0 and len(times) == 4 for times in [*answer.seconds, *seconds])


class OwnCompletions(Completions):
    """Answers as spaceserve does; `asked` collects the requests' `speculation`."""

    asked: ClassVar[list[str]] = []

    def do_GET(self) -> None:
        self._answer(b'{"data": [{"id": "m"}], "speculation": {}}')

    def do_POST(self) -> None:
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.asked.append(asked["speculation"])
        self._answer(b'data: {"choices": [{"token_ids": [7]}]}\n\ndata: [DONE]\n\n')


def test_a_server_of_ours_is_asked_with_and_without_drafts() -> None:
    with ThreadingHTTPServer(("127.0.0.1", 0), OwnCompletions) as server:
        Thread(target=server.serve_forever, daemon=True).start()
        engine = openai_driver.open_engine({"url": f"http://127.0.0.1:{server.server_port}"})
        arms = engine.facts()["arms"]
        for arm in arms:
            assert engine.run(arm, [[1]], 1)[0] == [[7]]
        server.shutdown()
    assert arms == ["over HTTP, plain", "over HTTP, drafts"]
    assert OwnCompletions.asked == ["off", "auto"]


def test_questions_go_through_the_chat_template_and_long_ones_are_left_out(tmp_path: Path) -> None:
    file = tmp_path / "questions.jsonl"
    turns = ["Why?", "Why is the sky blue? " * 40, "How?"]
    file.write_text("".join(json.dumps({"turns": [turn]}) + "\n" for turn in turns))
    options = argparse.Namespace(prompts=file, prompt_tokens=60, new_tokens=[8])
    chats = chats_of("demo", Checkpoint.open("demo"), options)
    assert len(chats) == 2
    assert chats_at(Point(2, 60, 8), chats, file) == chats
    with pytest.raises(PerfError, match=r"has 2 prompts of at most 60 tokens; batch 3 needs 3"):
        chats_at(Point(3, 60, 8), chats, file)


# ------------------------------------------------------------------------------------------- other formats


def test_weights_that_optimum_quantised_unasked_are_refused(tmp_path: Path) -> None:
    (tmp_path / "openvino_model.xml").write_text('<data element_type="bf16" />')
    check_weights(tmp_path)
    (tmp_path / "openvino_model.xml").write_text('<data element_type="bf16" /><data element_type="u8" />')
    with pytest.raises(ValueError, match=r"weights in u8\. Uninstall nncf, and convert again: optimum-cli"):
        check_weights(tmp_path)


def test_every_weight_is_found_bit_by_bit_and_named_as_llama_cpp_does(tmp_path: Path) -> None:
    folder = random_llama(tmp_path / "small", Size(64, 1, 2, 96, 500, 128, 8))
    ours = load_file(folder / "model.safetensors")
    found = dict(bfloat16_tensors(folder))
    assert found.keys() == ours.keys()
    for name, bits in found.items():
        assert torch.equal(torch.from_numpy(bits.view(np.int16).copy()), ours[name].view(torch.int16))
    norm = ours["model.norm.weight"]
    assert torch.equal(torch.from_numpy(widened(found["model.norm.weight"])), norm.float())
    assert gguf_name("model.layers.3.mlp.down_proj.weight") == "blk.3.ffn_down.weight"
    assert gguf_name("model.embed_tokens.weight") == "token_embd.weight"
    with pytest.raises(ValueError, match="no plain Llama's"):
        gguf_name("model.layers.0.self_attn.q_proj.bias")


def test_rotary_pairs_become_neighbours() -> None:
    rows = np.arange(8).reshape(8, 1)  # two heads of four: pairs are (0, 2), (1, 3)
    assert neighbours(rows, 2).ravel().tolist() == [0, 2, 1, 3, 4, 6, 5, 7]


def test_the_drivers_need_nothing_of_ours_in_another_interpreter() -> None:
    for file in sorted(DRIVERS.glob("*.py")):
        names = []
        for node in ast.walk(ast.parse(file.read_text())):
            names += [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            names += [str(node.module)] if isinstance(node, ast.ImportFrom) else []
        foreign = [name for name in names if name.split(".")[0] not in sys.stdlib_module_names]
        assert (foreign == []) == (file.name != "spaceserve_driver.py"), file.name
