"""The worker's step under each rule yields what enumeration says, and its text where the verdict is the served one."""

import json
from dataclasses import replace
from importlib.resources import files
from pathlib import Path

import numpy as np
import pytest
from space_eval.__main__ import main
from space_eval.distribution import octal_checkpoint
from space_eval.exact_law import chi_square_p, counts_of
from space_eval.generation import Generation, Step, generate
from space_eval.verdict_rules import Rule
from space_eval.verdicts_law import ModelLaws, run_law
from space_eval.verdicts_report import decoding_row, same_places, tokens_per_step
from space_eval.verdicts_step import Place, ruled_worker
from space_kernels.draft_head import NUM_CANDIDATES
from space_model.load import load_model
from space_model.space_model import SpaceModel
from space_model.testing import tiny_checkpoint
from space_proto import worker_pb2 as pb
from space_server.controller import FixedLayout
from space_server.worker import Worker

PROMPT = [1, 4, 2]
EMBEDDED = Path(str(files("space_demo")))


@pytest.fixture(scope="module")
def octal(tmp_path_factory: pytest.TempPathFactory) -> SpaceModel:
    return load_model(octal_checkpoint(tmp_path_factory.mktemp("octal"), seed=3), dtype="float32")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_checkpoint(tmp_path_factory.mktemp("tiny"), tie_word_embeddings=False)


@pytest.mark.parametrize("rule", list(Rule))
def test_simulated_steps_yield_the_enumerated_number_of_tokens(rule: Rule, octal: SpaceModel) -> None:
    laws = ModelLaws(octal, 1.0)
    wanted = run_law(laws, rule, tuple(PROMPT), num_drafts=2, depth=2)
    worker, stepper = ruled_worker(octal, rule, num_drafts=2, seed=7)
    texts: list[Generation] = []
    for seed in range(120):
        sampling = pb.Sampling(seed=seed, temperature=1.0)
        texts += generate(worker, [PROMPT], sampling=sampling, max_tokens=4, max_draft_length=2)
    tokens = np.array([1 + text.steps[0].num_accepted for text in texts])
    assert abs(tokens.mean() - wanted.tokens_in_first_step) < 4 * tokens.std() / np.sqrt(len(tokens))
    pairs = counts_of([text.tokens[:2] for text in texts], vocab_size=8, depth=2)
    assert chi_square_p(pairs, wanted.law) > 1e-3
    assert len(stepper.places) == sum(step.num_drafted > 0 for text in texts for step in text.steps)


def text_of(worker: Worker, k: int) -> list[int]:
    sampling = pb.Sampling(seed=5, temperature=0.9)
    return next(generate(worker, [[20, 30, 40]], sampling=sampling, max_tokens=24, max_draft_length=k)).tokens


@pytest.mark.parametrize("rule", [Rule.COUPLING, Rule.ARGMAX])
def test_the_coupled_verdict_gives_the_served_text_whatever_is_drafted(rule: Rule, folder: Path) -> None:
    model = load_model(folder)
    plain = text_of(Worker(model, num_blocks=40, controller=FixedLayout.full(0)), 0)
    assert text_of(ruled_worker(model, rule, num_drafts=3, seed=0)[0], 3) == plain


def test_drafts_were_drawn_from_the_laws_that_judge_them(folder: Path) -> None:
    worker, stepper = ruled_worker(load_model(folder), Rule.TOKEN_WISE, num_drafts=3, seed=0)
    text_of(worker, 3)
    assert stepper.places
    for place in stepper.places:
        assert 0 < place.first_draft[Rule.TOKEN_WISE] <= 1
        assert 0 <= place.same_drafts[Rule.BLOCK] <= place.num_drafted
    assert stepper._q.sum(axis=1) == pytest.approx(1)
    assert stepper._q[:, list(worker.facts.mask_ids)].max(initial=0.0) == 0


def test_the_laws_of_drafts_are_known_where_the_draft_head_is_compiled() -> None:
    model = load_model(EMBEDDED, dtype="bfloat16")
    head = model.draft_head
    assert head is not None
    found = []
    for model.draft_head in (head, replace(head, compiled=None)):
        worker, stepper = ruled_worker(model, Rule.TOKEN_WISE, num_drafts=3, seed=0)
        tokens = text_of(worker, 3)
        found.append((tokens, [place.first_draft for place in stepper.places]))
        assert ((stepper._q > 0).sum(axis=1) <= NUM_CANDIDATES).all()
    assert found[0] == found[1]


def text(*steps: tuple[int, int]) -> Generation:
    """From (drafted, accepted) of each step; ids that do not repeat."""
    ids = iter(range(1000))
    made = [Step(tuple(next(ids) for _ in range(a + 1)), d, a) for d, a in steps]
    return Generation([0], first=[next(ids)], steps=made)


def test_a_row_counts_tokens_and_stands_by_position() -> None:
    row = decoding_row(Rule.BLOCK, 0.8, 2, [text((2, 2), (2, 0)), text((2, 1), (1, 1))])
    assert row.tokens_per_step == (3 + 1 + 2 + 2) / 4
    assert row.reached == (3 / 4, 1 / 3)
    assert (row.num_texts, row.num_steps, row.looping) == (2, 4, 0)


def test_the_standard_error_is_over_texts() -> None:
    mean, error = tokens_per_step([text((2, 2), (2, 2)), text((2, 0), (2, 0))])
    assert mean == 2
    assert error == pytest.approx(np.std([3, 1], ddof=1) / np.sqrt(2))
    assert np.isnan(tokens_per_step([text((2, 2))])[1])


def test_places_compare_rules_on_the_same_drafts() -> None:
    chances = {Rule.COUPLING: 0.4, Rule.TOKEN_WISE: 0.5, Rule.ARGMAX: 0.3, Rule.PUBLISHED: 0.5}
    drawn = [Place(2, chances, {Rule.TOKEN_WISE: 1.0, Rule.BLOCK: 1.0 + gain}) for gain in (0.1, 0.3)]
    found = same_places(1.0, 2, drawn, drawn)
    assert found.first_draft == {"coupling": 0.4, "token-wise": 0.5, "argmax": 0.3}
    assert found.gain == pytest.approx(0.2)
    assert found.gain_error == pytest.approx(0.1)


def test_the_command_writes_tables_record_and_figures(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    prompts = tmp_path / "two.jsonl"
    prompts.write_text('{"prompt": "def add(a, b):"}\n{"question": "Why?"}\n', encoding="utf-8")
    out = tmp_path / "report"
    flags = ["--model", str(folder), "--prompts", str(prompts), "--max-tokens", "8", "--k", "2", "9"]
    flags += ["--temperature", "1", "--draws", "200", "--out", str(out)]
    assert main(["verdicts", *flags]) == 0
    record = json.loads((out / "verdicts.json").read_text(encoding="utf-8"))
    assert {row["max_drafts"] for row in record["decoding"]} == {2, 5}  # as many as there are masks
    assert {row["rule"] for row in record["decoding"]} == set(Rule)
    worst = {row["rule"]: row["total_variation"] for row in record["errors"] if row["case"].startswith("worst")}
    assert worst.pop("published") == pytest.approx(0.25)
    assert max(worst.values()) < 1e-12
    assert (out / "verdicts.md").read_text(encoding="utf-8") in capsys.readouterr().out
    for name in ("tokens", "positions", "error"):
        assert (out / f"verdicts-{name}.png").stat().st_size > 10_000


@pytest.mark.parametrize(
    ("flags", "words"),
    [(["--k", "0"], "--k must be at least 1; got 0"), (["--max-tokens", "512"], "leaves no room for a prompt")],
)
def test_settings_that_mean_nothing_are_refused_in_one_line(
    flags: list[str], words: str, folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    prompts = tmp_path / "one.txt"
    prompts.write_text("x", encoding="utf-8")
    assert main(["verdicts", "--model", str(folder), "--prompts", str(prompts), *flags]) == 2
    assert words in capsys.readouterr().err


def test_a_plain_checkpoint_is_refused_by_name(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plain = tiny_checkpoint(tmp_path / "plain", num_masks=0)
    prompts = tmp_path / "one.txt"
    prompts.write_text("x", encoding="utf-8")
    assert main(["verdicts", "--model", str(plain), "--prompts", str(prompts)]) == 2
    assert "has no masks" in capsys.readouterr().err
