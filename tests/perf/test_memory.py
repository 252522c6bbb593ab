"""The memory table is arithmetic that a loaded model agrees with."""

from pathlib import Path

import pytest
from space_train.estimate import SHAPES

from perf.harness import main
from perf.memory import DRAFT_MODELS, Serving, adapter, check, side, sides_table, slot

SERVING = Serving(8, 2048, 5, 32, 384)


def test_the_sums_are_those_of_the_shapes() -> None:
    space = side(SHAPES["7b"], None, SERVING)
    assert space.weights == 2 * 6_738_415_616  # Llama 2 7B has so many
    assert slot(SHAPES["7b"], SERVING) == 512 * 1024
    assert space.keys_values == 8 * 2048 * 512 * 1024
    assert space.reserved == 8 * 6 * 512 * 1024
    assert space.drafting == adapter(SHAPES["7b"], SERVING) < space.weights / 50
    assert space.total == space.weights + space.for_drafts + space.keys_values


def test_a_draft_model_brings_its_weights_and_its_own_keys_and_values() -> None:
    draft = DRAFT_MODELS["tinyllama-1.1b"]
    second = side(SHAPES["7b"], draft, SERVING)
    assert draft.num_parameters == 1_100_048_384
    assert second.drafting == 2 * draft.num_parameters
    assert second.drafting_keys_values == 8 * 2054 * slot(draft, SERVING)
    assert second.for_drafts > 10 * side(SHAPES["7b"], None, SERVING).for_drafts


@pytest.mark.parametrize("name", DRAFT_MODELS)
def test_draft_models_are_smaller_than_what_they_draft_for(name: str) -> None:
    assert DRAFT_MODELS[name].num_parameters < SHAPES["1b"].num_parameters


def test_the_table_says_that_it_is_computed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["memory", "--models", "1b", "--drafts", "llama-160m", "--out", str(tmp_path)]) == 0
    text = capsys.readouterr().out
    assert "Computed from shapes, not measured" in text
    assert "| 1B | SPACE | 2.3 GiB |" in text
    assert (tmp_path / "memory.md").read_text(encoding="utf-8") == text


def test_a_model_that_is_not_there_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["memory", "--models", "/no/such/folder"]) == 2
    assert "/no/such/folder" in capsys.readouterr().err


def test_the_document_has_the_table_that_is_computed() -> None:
    drafts = [DRAFT_MODELS["tinyllama-1.1b"], DRAFT_MODELS["llama-160m"]]
    table = sides_table(list(SHAPES.values()), drafts, SERVING)
    document = Path(__file__).parents[2] / "router" / "guides" / "BENCHMARKS.md"
    assert table in document.read_text(encoding="utf-8")


@pytest.mark.slow
def test_what_is_computed_is_what_memory_grows_by() -> None:
    for server, part, computed, measured in check():
        assert measured == pytest.approx(computed, rel=0.1), (server, part)
