"""Loading quantised weights adds hardly more to the process than its tensors, however they are held."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from doubles.gguf_files import write_gguf
from perf.loading import MOST_AT_ONCE, MOST_HELD, Loaded, loaded
from quantized_testing import write_mxfp4_experts, write_quantized
from tiny_checkpoints import tiny_checkpoint

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="Linux says how much a process had at most")

ONCE = 24 << 20
"""Bytes of what is made once in a process, whatever the model's size: code, buffers of the libraries."""


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A model of 80 million weights, of which the tied embedding has 25, and a small one."""
    folder = tmp_path_factory.mktemp("models")
    sizes = {"num_heads": 12, "kv_heads": 12, "head_dim": 64, "hidden_size": 768, "num_masks": 0, "words": True}
    sizes |= {"dtype": "bfloat16", "tie_word_embeddings": True}
    large = tiny_checkpoint(folder / "large", vocab_size=32768, num_layers=9, **sizes)  # type: ignore[arg-type]
    small = tiny_checkpoint(folder / "small", vocab_size=512, num_layers=1, **sizes)  # type: ignore[arg-type]
    return write_gguf(large, folder / "large.gguf", "Q8_0"), write_gguf(small, folder / "small.gguf", "Q8_0")


@pytest.mark.parametrize(
    "weights", ["gguf", *(pytest.param(one, marks=pytest.mark.slow) for one in ("int4", "plain", "int8"))]
)
def test_loading_holds_the_tensors_once(weights: str, files: tuple[Path, Path]) -> None:
    check(loaded(str(files[0]), weights, str(files[1])))


@pytest.mark.slow
@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss"])
def test_so_does_loading_experts_in_the_bits_of_their_file(family: str, tmp_path: Path) -> None:
    files = [_mixture(tmp_path, family, num_experts, layers) for num_experts, layers in ((64, 4), (8, 1))]
    check(loaded(str(files[0]), "gguf" if family == "qwen3_moe" else "packed", str(files[1])))


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["int8 in groups", "int8 per row", "gptq 8 bits, symmetric"])
def test_so_does_loading_experts_of_eight_bits(kind: str, tmp_path: Path) -> None:
    files = [_mixture(tmp_path, "qwen3_moe", num_experts, layers, kind) for num_experts, layers in ((64, 4), (8, 1))]
    check(loaded(str(files[0]), "packed", str(files[1])))


def _mixture(folder: Path, family: str, num_experts: int, num_layers: int, kind: str | None = None) -> Path:
    """A mixture with experts of 512 by 512: a GGUF in Q4_0, quantised as `kind` says, or a gpt-oss as published."""
    name = f"{family}-{num_layers}"
    sizes = {"num_heads": 8, "kv_heads": 8, "head_dim": 64, "hidden_size": 512, "num_masks": 0, "words": True}
    sizes |= {"dtype": "bfloat16", "num_layers": num_layers, "num_experts_per_tok": 4, "vocab_size": 1024}
    if family == "gpt_oss":
        source = tiny_checkpoint(
            folder / "source" / name, family, intermediate_size=512, num_local_experts=num_experts, **sizes
        )  # type: ignore[arg-type]
        write_mxfp4_experts(source, folder / name, folder / "plain" / name)
        return folder / name
    sizes |= {"moe_intermediate_size": 512, "num_experts": num_experts, "norm_topk_prob": True}
    source = tiny_checkpoint(folder / "source" / name, family, **sizes)  # type: ignore[arg-type]
    if kind is not None:
        write_quantized(source, folder / name, folder / "plain" / name, kind)
        return folder / name
    return write_gguf(source, folder / f"{name}.gguf", "Q4_0")


def check(found: Loaded) -> None:
    assert 0.9 * found.tensors < found.held < MOST_HELD * found.tensors + ONCE, found
    assert found.at_once < MOST_AT_ONCE * found.tensors + ONCE, found
