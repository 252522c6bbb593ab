"""Real models against transformers, which reads the same GGUF file by its own means: logits, greedy text, templates."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from greedy_oracle import TIE_FACTOR
from space_model.geometry.forward_batch import ForwardBatch, Segment
from space_model.loading.load import load_model
from space_model.space_model import SpaceModel
from space_router.config import ServeConfig
from space_router.text.model_text import ModelText
from transformers import AutoModelForCausalLM, AutoTokenizer
from worker_answers import Drafting, answers, encoded, request

MESSAGES = [
    {"role": "user", "content": "Name two rivers.\n\n"},
    {"role": "assistant", "content": "The Nile and the Rhine."},
    {"role": "user", "content": "  Which is longer? 🌊"},
]
MODELS = ["smollm2_file", "gemma_file"]


@pytest.fixture(scope="module", params=MODELS)
def file(request: pytest.FixtureRequest) -> Path:
    found: Path = request.getfixturevalue(request.param)
    return found


@pytest.fixture(scope="module")
def theirs(file: Path) -> Any:
    model = AutoModelForCausalLM.from_pretrained(
        str(file.parent), gguf_file=file.name, dtype=torch.float32, attn_implementation="eager", local_files_only=True
    )
    return model.eval()


@pytest.fixture(scope="module")
def ours(file: Path) -> SpaceModel:
    return load_model(file, dtype="float32")


@pytest.fixture(scope="module")
def text(file: Path) -> ModelText:
    return ModelText.load(ServeConfig(model=str(file)))


@torch.inference_mode()
def logits_of(model: SpaceModel, ids: Sequence[int]) -> torch.Tensor:
    """[N, V] float32"""
    pages = -(-len(ids) // 16)
    kv = model.allocate_kv(pages, 16)
    batch = ForwardBatch.build([Segment(list(ids), 0, range(pages))], block_size=16, mask_ids=(), device="cpu")
    return model.logits(model.forward(batch, kv)[: batch.num_rows])


@pytest.mark.slow
@pytest.mark.timeout(1200)
@torch.inference_mode()
def test_logits_and_greedy_text_are_those_of_transformers(
    ours: SpaceModel, theirs: Any, text: ModelText, prompts: list[str], record_property: Any
) -> None:
    """128 greedy tokens on 40 prompts: each the first of transformers' logits behind the same ids, but at a tie."""
    requests = [request(ids, eos=(), max_tokens=128, temperature=0.0, seed=0) for ids in encoded(text, prompts)]
    num_ties, worst = 0, 0.0
    for record in answers(ours, requests, Drafting("off", k=0)):
        ids = record.ids
        expected = theirs(torch.tensor([ids]), use_cache=False).logits[0]
        found = logits_of(ours, ids)
        largest = float(expected.abs().max())
        bound = TIE_FACTOR * torch.finfo(torch.float32).eps * largest
        worst = max(worst, float((found - expected).abs().max()) / largest)
        assert worst < 1e-4, worst  # of the largest logit; rounding of 18 to 30 layers in another order gives 1e-6
        first = len(record.request.prompt)
        chosen = torch.tensor(ids[first:])
        behind = expected[first - 1 : -1]
        gaps = behind.amax(dim=-1) - behind.gather(1, chosen[:, None])[:, 0]
        assert float(gaps.max()) <= bound, f"not the first by {float(gaps.max()):.3g}; a tie is below {bound:.3g}"
        num_ties += int((gaps > 0).sum())
    record_property("ties", num_ties)
    record_property("largest difference of a logit, of the largest logit", worst)
    assert num_ties <= 1


def test_the_chat_template_renders_as_in_transformers(smollm2_file: Path, smollm2_text: ModelText) -> None:
    theirs = AutoTokenizer.from_pretrained(str(smollm2_file.parent), gguf_file=smollm2_file.name, local_files_only=True)
    assert smollm2_text.chat_template is not None
    for messages in (MESSAGES[:1], MESSAGES):
        wanted = theirs.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        assert smollm2_text.chat_template.render(messages) == wanted
