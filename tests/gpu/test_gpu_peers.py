"""`make gpu-peers`: its plan, how engines are found and started, what fails, and the report of all slices."""

import json
import os
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path

import pytest
import torch
from perf.engines.process import Answer, EngineFailed, EngineSpec, Point

from gpu import __main__ as gpu_main
from gpu import test_peers
from gpu.llama import DRY
from gpu.peers import ACCEPTED, PEERS, Command, Peer, Server, ServerFailed, Weights
from gpu.report import TARGETS, Notes, Record, Report
from gpu.side_by_side import COLUMNS, OURS, SIDE_BY_SIDE, TABLE, main
from gpu.stages import LONGEST, PEER_STAGES, STAGES, Slice
from gpu.test_peers import DEPTHS, Comparison, Sizes, tokens_per_step

ROOT = Path(__file__).parents[2]

ANSWERS = """
import sys
from http.server import BaseHTTPRequestHandler, HTTPServer
class Health(BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()
HTTPServer(("127.0.0.1", int(sys.argv[1])), Health).serve_forever()
"""


def server(code: str, folder: Path, start_seconds: float = 20.0) -> Server:
    return Server(
        "other", lambda port: Command([sys.executable, "-c", code, str(port)], dict(os.environ)),
        log=folder / "log", start_seconds=start_seconds,
    )  # fmt: skip


# ------------------------------------------------------------------------------------------------- plan


def test_the_plan_has_a_slice_for_each_engine_and_kind_and_for_each_number_of_drafts(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["--plan", "--out", str(tmp_path)]) == 0
    said = capsys.readouterr()
    *lines, last = said.out.splitlines()
    assert [line.split()[0] for line in lines] == [
        "weights",
        *(
            f"{name}-{kind}"
            for name in PEERS
            for kind in ("plain-1", "plain-2", *(f"drafts-{n + 1}" for n in range(len(DEPTHS))), "first-token")
        ),
    ]
    assert last == "15 slices: ≤ 60 minutes"
    assert all(stage.seconds <= LONGEST for stage in PEER_STAGES.values())
    assert "pip install vllm; then --peer vllm=" in said.err
    assert 'pip install "sglang[all]"' in said.err


def test_neither_command_runs_the_others_stages(capsys: pytest.CaptureFixture[str]) -> None:
    assert not PEER_STAGES.keys() & {*STAGES, *TARGETS}
    assert gpu_main.main(["--plan"]) == 0
    assert "vllm" not in capsys.readouterr().out
    with pytest.raises(SystemExit):
        main(["--plan", "--stages", "worker"])


@pytest.mark.parametrize("name", PEER_STAGES)
def test_every_stage_has_a_function(name: str) -> None:
    assert hasattr(test_peers, f"test_{name.replace('-', '_')}")


def test_slices_measure_every_number_of_streams_once() -> None:
    sizes = Sizes()
    shares = [one.share(sizes.batches) for one in Slice.all_of("vllm-plain")]
    assert sorted(number for share in shares for number in share) == [1, 8, 32, 64, 128, 256]
    assert [one.share(sizes.depths) for one in Slice.all_of("vllm-drafts")] == [[1], [2], [3], [5]]
    assert sizes.draft_batches == (1, 8, 32, 64, 128)
    assert sizes.prompts == ((1, 2048), (8, 2048), (32, 512), (1, 50))


def test_make_gpu_peers_passes_on_what_it_is_told() -> None:
    words = ["make", "-n", "gpu-peers", "DRY=1", "FLAGS=--peer vllm=env/bin/python"]
    said = subprocess.run(words, cwd=ROOT, check=True, capture_output=True, text=True).stdout
    assert "-m gpu.side_by_side --dry --peer vllm=env/bin/python" in said


def test_an_interpreter_for_an_unknown_engine_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["--plan", "--peer", "tgi=python"])
    assert "must read NAME=PYTHON, with a NAME of vllm, sglang" in capsys.readouterr().err


# ------------------------------------------------------------------------------------------------- engines


def test_an_engine_that_is_not_installed_is_named_with_what_installs_it() -> None:
    absent = Peer("other", "Other", "no_such_engine", "other==1", PEERS["vllm"].flags)
    assert f"Other is not installed in {sys.executable}." in absent.missing(sys.executable)
    assert "other/bin/pip install other==1; then --peer other=other/bin/python" in absent.missing(sys.executable)
    assert "/no/python cannot be run" in absent.missing("/no/python")
    assert Peer("other", "Other", "json", "", PEERS["vllm"].flags).missing(sys.executable) == ""


def test_every_engine_drafts_at_our_rates() -> None:
    weights = Weights(Path("weights"), DRY)
    assert sum(ACCEPTED) + 1 == pytest.approx(3.736, abs=1e-3)
    plain, drafting = (PEERS["vllm"].command("python", weights, 8000, k, [1, 128]).words for k in (0, 3))
    assert "--speculative-config" not in plain
    speculative = json.loads(drafting[drafting.index("--speculative-config") + 1])
    assert speculative["synthetic_acceptance_rates"] == [0.84, 0.6804, 0.5307]
    graphs = json.loads(drafting[drafting.index("--compilation-config") + 1])["cudagraph_capture_sizes"]
    assert (graphs[0], graphs[-1]) == (4, 512)
    made = PEERS["sglang"].command("python", weights, 8000, 3, [1, 128])
    assert made.environment["SGLANG_SIMULATE_ACC_LEN"] == "3.051"
    assert made.environment["PYTHONPATH"] == ""
    assert made.words[made.words.index("--speculative-num-draft-tokens") + 1] == "4"


def test_weights_are_written_once_and_others_read_them_without_masks_or_heads(tmp_path: Path) -> None:
    weights = Weights(tmp_path / "weights", DRY)
    assert weights.make(torch.device("cpu"))
    assert not weights.make(torch.device("cpu"))
    ours, plain = (json.loads((folder / "config.json").read_text()) for folder in (weights.ours, weights.plain))
    assert (ours["space"]["num_masks"], ours["space"]["recurrent_head"]["num_drafts"]) == (5, 5)
    assert "space" not in plain
    assert {file.name for file in weights.plain.iterdir()} == {
        "config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json",
    }  # fmt: skip
    assert (weights.plain / "model.safetensors").samefile(weights.ours / "model.safetensors")


def test_a_server_that_answers_is_used_and_ended(tmp_path: Path) -> None:
    with server(ANSWERS, tmp_path) as running:
        assert running.code is None
    assert running.code is not None


def test_a_server_that_dies_at_its_start_is_reported_with_its_last_words(tmp_path: Path) -> None:
    with pytest.raises(ServerFailed, match=r"other ended with status 3\. It said last: no memory"):
        server("import sys; print('no memory'); sys.exit(3)", tmp_path).__enter__()


def test_a_server_that_does_not_answer_in_time_is_ended_and_reported(tmp_path: Path) -> None:
    silent = server("import time; print('loading', flush=True); time.sleep(600)", tmp_path, start_seconds=1.5)
    begun = time.monotonic()
    with pytest.raises(ServerFailed, match=r"other did not answer within 1\.5 s\. It said last: loading"):
        silent.__enter__()
    assert silent.code is not None
    assert time.monotonic() - begun < 15


# ------------------------------------------------------------------------------------------------- turns


class FakeEngine:
    """Answers at a given time a token, two tokens a step; `dies` in its third turn."""

    def __init__(self, spec: EngineSpec, turns: list[str], seconds: float, *, dies: bool = False) -> None:
        self.spec, self.arms = spec, ["over HTTP, plain", "over HTTP, drafts"]
        self._turns, self._seconds, self._dies = turns, seconds, dies

    def prepare(self, arm: str, prompts: Sequence[Sequence[int]], point: object) -> None:
        pass

    def run(self, arm: str, prompts: Sequence[Sequence[int]], point: Point) -> Answer:
        self._turns.append(f"{self.spec.name} {arm.split()[-1]}")
        if self._dies and self._turns.count(self._turns[-1]) == 3:
            raise EngineFailed("Connection refused")
        times = [self._seconds * (1 + (n + 1) // 2) for n in range(point.new_tokens)]
        return Answer([list(range(point.new_tokens)) for _ in prompts], [times for _ in prompts])


def compared(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stage: str, *, peer_dies: bool = False, peer_starts: bool = True
) -> tuple[Record, list[str], str]:
    """The record of a slice that is measured on fakes, all turns, and why it failed."""
    turns: list[str] = []

    class Fakes(Comparison):
        def _open(self, name: str, command: object) -> list[FakeEngine]:  # type: ignore[override]
            if name != OURS and not peer_starts:
                self._failed(f"{name} did not answer within 1 s. It said last: loading")
                return []
            spec = EngineSpec(name, "", Path())
            return [FakeEngine(spec, turns, 0.25 if name == OURS else 0.5, dies=peer_dies and name != OURS)]

    monkeypatch.setattr(Weights, "make", lambda *_: False)
    options: Mapping[str, object] = {"--peer": [], "--shape": "8b"}
    config = type("Config", (), {"getoption": lambda self, name, default=None: options.get(name, default)})()
    notes = Notes(Record(stage, True, "here"), tmp_path / f"{stage}.json", 60.0, Slice(stage))
    why = ""
    with ExitStack() as stack:
        comparison = Fakes(notes, config, stack)
        name, _, kind = stage.partition("-")
        try:
            getattr(comparison, kind.replace("-", "_"))(name)
            outcome = "passed"
        except pytest.fail.Exception as error:
            outcome, why = "failed", str(error)
    notes.close(outcome, why, 1.0)
    found = Record.read(tmp_path / f"{stage}.json")
    assert found is not None
    return found, turns, why


def rows(record: Record) -> list[dict[str, str]]:
    head, *found = record.tables[TABLE]
    assert head == list(COLUMNS)
    return [dict(zip(head, row, strict=True)) for row in found]


def test_engines_take_turns_and_every_other_round_is_in_reverse(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    record, turns, _ = compared(tmp_path, monkeypatch, "vllm-plain")
    forth = ["spaceserve plain", "spaceserve drafts", "vllm plain"]
    assert turns == [*forth, *forth, *forth[::-1]] * 2  # to warm up, then two rounds, of 1 and of 2 streams
    found = rows(record)
    assert [(row["what"], row["size"], row["engine"], row["drafts"], row["ours/theirs"][:5]) for row in found[:4]] == [
        ("plain", "1", "spaceserve", "off", "2.000"), ("plain", "1", "spaceserve", "auto", "2.000"),
        ("plain", "1", "vllm", "off", "–"), ("auto/plain", "1", "spaceserve", "auto", "1.000"),
    ]  # fmt: skip
    assert (found[0]["rounds"], found[0]["same ids"], found[0]["tokens a step"]) == ("2", "1.00", "1.99")
    assert "A second server of ours stands in for vLLM." in record.notes[0]


def test_an_engine_that_dies_is_reported_and_ours_is_measured_to_the_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    record, _, why = compared(tmp_path, monkeypatch, "vllm-plain", peer_dies=True)
    assert why.startswith("plain at 1: vllm: Connection refused")
    assert {(row["engine"], row["size"]) for row in rows(record)} >= {(OURS, "1"), (OURS, "2")}
    assert record.outcome == "failed"


def test_an_engine_that_does_not_start_is_reported_and_ours_is_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    record, turns, why = compared(tmp_path, monkeypatch, "vllm-drafts", peer_starts=False)
    assert why.count("did not answer within 1 s") == 2  # of the two numbers of drafts of a dry run
    assert {turn.split()[0] for turn in turns} == {OURS}
    assert {row["ours/theirs"] for row in rows(record)} == {"–"}


def test_the_first_token_is_in_milliseconds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    record, _, _ = compared(tmp_path, monkeypatch, "sglang-first-token")
    ours, theirs = rows(record)[:2]
    assert (ours["median"], ours["unit"], theirs["median"], ours["ours/theirs"][:5]) == ("250", "ms", "500", "0.500")


def test_tokens_that_come_together_are_one_step() -> None:
    assert tokens_per_step(Answer([[1] * 5], [[1.0, 2.0, 2.0, 3.0, 3.0]])) == 2.0


# ------------------------------------------------------------------------------------------------- report


def record_of(
    name: str, *cells: tuple[str, str, str, str, float, str], outcome: str = "passed", why: str = ""
) -> Record:
    """`cells`: what, size, engine, drafts, median, ours/theirs."""
    made = []
    for what, size, engine, drafts, median, ratio in cells:
        unit = "ms" if what == "first token" else "tokens/s"
        row = {"what": what, "size": size, "engine": engine, "drafts": drafts, "median": f"{median:g}", "unit": unit}
        made.append([row.get(column, ratio if column == "ours/theirs" else "–") for column in COLUMNS])
    return Record(name, False, "here", outcome=outcome, why=why, tables={TABLE: [list(COLUMNS), *made]})


def test_the_report_takes_the_best_number_of_drafts_of_the_other_and_says_what_is_met(tmp_path: Path) -> None:
    records = [
        record_of(
            "vllm-plain-1", ("plain", "1", OURS, "off", 200.0, "1.06 (≥ 1.05, ≤ 1.07)"),
            ("plain", "1", OURS, "auto", 500.0, "2.5"), ("plain", "1", "vllm", "off", 188.0, "–"),
            ("auto/plain", "1", OURS, "auto", 500.0, "2.5"),
        ),
        *(
            record_of(name, ("drafts", "1", OURS, "auto", 500.0, ratio), ("drafts", "1", "vllm", k, rate, "–"))
            for name, k, rate, ratio in (("vllm-drafts-1", "k=1", 300.0, "1.7"), ("vllm-drafts-4", "k=5", 450.0, "1.1"))
        ),
        record_of(
            "vllm-first-token", ("first token", "1 × 50", OURS, "off", 21.0, "1.2"),
            ("first token", "1 × 50", "vllm", "off", 17.0, "–"),
        ),
        record_of("sglang-plain-1", outcome="not run", why="SGLang is not installed in python."),
    ]  # fmt: skip
    report = Report(tmp_path, dry=False, catalogue=SIDE_BY_SIDE)
    text = report.markdown({record.stage: record for record in records})
    assert text.startswith("# Engines side by side on one GPU\n")
    assert "| plain | 1 | 200 tokens/s | 188 tokens/s | 1.06 (≥ 1.05, ≤ 1.07) | ≥ 1.05 | met |" in text
    assert "| drafts | 1 | 500 tokens/s | 450 tokens/s (k=5) | 1.1 | ≥ 1.30 | missed |" in text
    assert "| auto/plain | 1 | 500 tokens/s | – | 2.5 | ≥ 0.995 | met |" in text
    assert "| first token | 1 × 50 | 21 ms | 17 ms | 1.2 | ours ≤ 4 plain steps (20.0 ms) | missed |" in text
    assert "SGLang: SGLang is not installed in python." in text


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_stage_of_each_kind_runs_dry_over_real_servers(tmp_path: Path) -> None:
    stages = ["weights", "vllm-drafts", "sglang-first-token"]
    assert main(["--dry", "--out", str(tmp_path), "--stages", *stages]) == 0
    text = (tmp_path / "report.md").read_text()
    assert "| drafts | 2 |" in text
    assert "| first token | 2 × 16 |" in text
    assert "dry run: means nothing" in text
    found = json.loads((tmp_path / "report.json").read_text())["stages"]
    assert {name: record["outcome"] for name, record in found.items()} == dict.fromkeys(stages, "passed")
    assert {row["same ids"] for row in rows(Record(**found["vllm-drafts"]))} == {"1.00"}
