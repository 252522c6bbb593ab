"""Random checkpoints to measure speed with."""

from __future__ import annotations

from pathlib import Path

import pytest
from safetensors.torch import load_file
from space_common.worker.client import WorkerClient
from space_model.loading.load import load_model
from space_model.make_model import SIZES, Size, main, random_llama
from space_server.speculation.controller import FixedLayout
from space_server.worker import Worker
from tokenizers import Tokenizer
from tokenizers.decoders import DecodeStream

SMALL = Size(64, 2, 2, 96, 500, 128, 8)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return random_llama(tmp_path_factory.mktemp("random") / "small", SMALL)


def test_it_is_served_with_five_masks_and_a_draft_head(folder: Path) -> None:
    model = load_model(folder, num_threads=1)
    assert (model.facts.num_masks, model.facts.has_draft_head, str(model.facts.dtype)) == (5, True, "torch.bfloat16")
    router = WorkerClient(Worker(model, num_blocks=8, controller=FixedLayout.full(5)))
    sequence = router.generate([60, 61, 62], max_tokens=20)
    assert len(sequence.tokens) == 20
    assert max(report.stats.mask_rows for report in router.reports) == 30


def test_every_id_is_text_of_its_own(folder: Path) -> None:
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    assert tokenizer.get_vocab_size() == SMALL.vocab_size
    words = [tokenizer.decode([id_]) for id_ in range(300, SMALL.vocab_size)]
    assert len({word.strip() for word in words}) == len(words)
    stream = DecodeStream(skip_special_tokens=False)
    assert all(stream.step(tokenizer, id_) for id_ in range(300, SMALL.vocab_size))


def test_sizes_have_the_weights_of_their_names(tmp_path: Path) -> None:
    assert SIZES["125m"].num_weights == pytest.approx(125e6, rel=0.02)
    assert SIZES["1.1b"].num_weights == pytest.approx(1.035e9, rel=0.01)  # an output head of its own: 1.1 billion
    small = Size(64, 2, 4, 96, 500, 128, 8, kv_heads=1)
    weights = load_file(random_llama(tmp_path / "few", small) / "model.safetensors")
    assert weights["model.layers.0.self_attn.k_proj.weight"].shape == (16, 64)
    assert sum(w.numel() for w in weights.values() if w.dim() > 1) == small.num_weights


def test_a_folder_with_a_checkpoint_is_refused_in_one_line(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--size", "15m", str(folder)]) == 2
    said = capsys.readouterr()
    assert (said.out, said.err) == ("", f"spaceserve bench make-model: {folder} exists already; name a new folder.\n")
