"""Bits per byte through the worker's own network, against transformers on the same windows."""

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from space_eval.flags import RecordError
from space_eval.quality.perplexity import PerplexityMeter, TextScore, load_texts, windows
from space_model.heads.output_head import OutputHead
from space_model.loading.load import load_model
from space_model.testing import END, tiny_checkpoint
from transformers import AutoModelForCausalLM, AutoTokenizer

TEXT = "def area(r):\n    return 3.14159 * r * r  # of a circle, in the unit of r squared\n" * 2


@pytest.fixture(scope="module", params=["llama", "gemma2", "mistral"])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_checkpoint(tmp_path_factory.mktemp(request.param), request.param, window=64)


@pytest.fixture(scope="module")
def tokenizer(folder: Path) -> Any:
    return AutoTokenizer.from_pretrained(folder)


@pytest.fixture
def meter(folder: Path, tokenizer: Any) -> PerplexityMeter:
    return PerplexityMeter(load_model(folder, dtype="float32"), tokenizer, length=48, stride=20)


def nats_by_transformers(folder: Path, ids: list[int], length: int, stride: int) -> float:
    """Each window whole; an id counts in the first window that predicts it."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    nats: dict[int, float] = {}
    start = 0
    while True:
        piece = torch.tensor([ids[start : start + length]])
        with torch.inference_mode():
            logits = model(piece).logits[0].double()
        costs = torch.nn.functional.cross_entropy(logits[:-1], piece[0, 1:], reduction="none")
        for offset, cost in enumerate(costs.tolist(), start=1):
            nats.setdefault(start + offset, cost)
        if start + length >= len(ids):
            assert nats.keys() == set(range(1, len(ids)))
            return sum(nats.values())
        start += stride


def test_a_long_text_costs_what_transformers_says(folder: Path, tokenizer: Any, meter: PerplexityMeter) -> None:
    ids = [END, *tokenizer(TEXT, add_special_tokens=False)["input_ids"]]
    assert len(ids) > 3 * 48
    score = meter.score(TEXT)
    nats = nats_by_transformers(folder, ids, 48, 20)
    assert score.nats == pytest.approx(nats, rel=1e-5)
    assert (score.num_tokens, score.num_bytes) == (len(ids) - 1, len(TEXT.encode()))
    assert score.perplexity == pytest.approx(math.exp(nats / (len(ids) - 1)), rel=1e-4)
    assert score.bits_per_byte == pytest.approx(nats / math.log(2) / len(TEXT), rel=1e-5)


def test_without_a_beginning_of_text_the_first_token_is_given(
    folder: Path, meter: PerplexityMeter, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = AutoTokenizer.from_pretrained(folder)
    own.bos_token = None
    monkeypatch.setattr(meter, "_tokenizer", own)
    ids = own("ab = c", add_special_tokens=False)["input_ids"]
    score = meter.score("ab = c")
    assert score.nats == pytest.approx(nats_by_transformers(folder, ids, 48, 20), rel=1e-5)
    assert (score.num_tokens, score.num_bytes) == (len(ids) - 1, 5)
    assert meter.score("a") == meter.score("") == TextScore(0.0, 0, 0)


def test_a_uniform_model_needs_the_logarithm_of_its_vocabulary(tmp_path: Path) -> None:
    model = load_model(tiny_checkpoint(tmp_path, vocab_size=128, num_masks=0), dtype="float32")
    model._head = OutputHead(torch.zeros(128, model.facts.hidden_size), None)
    score = PerplexityMeter(model, AutoTokenizer.from_pretrained(tmp_path)).score("one character is one token")
    assert score.perplexity == pytest.approx(128)
    assert score.bits_per_byte == pytest.approx(7)


@given(st.integers(0, 60), st.integers(2, 20), st.data())
@settings(deadline=None)
def test_every_id_but_the_first_counts_once(num_ids: int, length: int, data: st.DataObject) -> None:
    stride = data.draw(st.integers(1, length - 1))
    counted: list[int] = []
    for number, window in enumerate(windows(num_ids, length, stride)):
        assert window.end - window.start <= length
        assert window.first_counted - window.start >= (1 if number == 0 else length - stride)
        counted += range(window.first_counted, window.end)
    assert counted == list(range(1, num_ids))


@pytest.mark.parametrize("stride", [0, 8, 9])
def test_a_stride_that_skips_ids_is_refused(stride: int) -> None:
    with pytest.raises(ValueError, match=r"stride must lie in 1\.\.7"):
        list(windows(20, 8, stride))


def test_texts_come_from_records_a_file_or_a_folder(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"text": "one"}\n{"content": "two", "text": null}\n')
    (tmp_path / "b.txt").write_text("three")
    assert load_texts(str(tmp_path / "a.jsonl")) == {"0": "one", "1": "two"}
    assert load_texts(str(tmp_path / "b.txt")) == load_texts(str(tmp_path)) == {"b.txt": "three"}


def test_unusable_texts_are_named(tmp_path: Path) -> None:
    with pytest.raises(RecordError, match=r"has no \.txt, \.md or \.py file"):
        load_texts(str(tmp_path))
    (tmp_path / "b.txt").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(RecordError, match=r"b\.txt cannot be read as text"):
        load_texts(str(tmp_path))
