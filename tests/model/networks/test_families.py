"""Every served family, on our pages, says what transformers says."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from space_model.geometry.draft_layout import DraftLayout
from space_model.geometry.forward_batch import ForwardBatch, Segment
from space_model.loading.load import load_model
from space_model.testing import FAMILIES, tiny_checkpoint
from transformers import AutoModelForCausalLM


@pytest.mark.parametrize("family", FAMILIES)
@torch.inference_mode()
def test_a_step_over_unequal_sequences_equals_the_dense_model(family: str, tmp_path: Path) -> None:
    """Prefill in chunks, then SPACE rows of one sequence beside plain rows of another; chain and mask rows both."""
    path = tiny_checkpoint(tmp_path, family)
    dense = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, attn_implementation="eager")
    model = load_model(path, dtype="float32")
    generator = torch.Generator().manual_seed(1)
    long = torch.randint(16, 128, (60,), generator=generator).tolist()
    short = torch.randint(16, 128, (9,), generator=generator).tolist()
    pages_long, pages_short = [5, 2, 7, 0], [3]
    kv = model.allocate_kv(8, 16)

    def run(*segments: Segment) -> tuple[ForwardBatch, torch.Tensor]:
        batch = ForwardBatch.build(segments, block_size=16, mask_ids=model.facts.mask_ids)
        return batch, model.forward(batch, kv)

    run(Segment(long[:37], 0, pages_long), Segment(short[:8], 0, pages_short))
    batch, hidden = run(
        Segment(long[37:52], 37, pages_long, DraftLayout(3, (5, 0, 2, 4))), Segment(short[8:], 8, pages_short)
    )

    def expect(ids: list[int]) -> torch.Tensor:
        return dense(torch.tensor([ids]), use_cache=False).logits[0].float()

    found = model.logits(hidden[list(batch.chain_rows[0])])
    torch.testing.assert_close(found, expect(long[:52])[37:], atol=2e-4, rtol=0)
    found = model.logits(hidden[list(batch.chain_rows[1])])
    torch.testing.assert_close(found, expect(short)[8:], atol=2e-4, rtol=0)
    for g, rows in enumerate(batch.mask_rows[0]):
        found = model.logits(hidden[list(rows)])
        masks = list(model.facts.mask_ids[: len(rows)])
        torch.testing.assert_close(found, expect(long[: 49 + g] + masks)[49 + g :], atol=2e-4, rtol=0)
