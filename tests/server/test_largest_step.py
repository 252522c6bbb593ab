"""The largest step is taken before pages are given out, and what it needs is missed in time."""

import pytest
import torch
from space_model.forward_batch import ForwardBatch
from space_model.paged_kv import PagedKV
from space_server.largest_step import take_largest_step
from space_server.memory import NotEnoughMemory, is_out_of_memory
from space_server.testing import ScriptedModel
from torch import Tensor


class Watched(ScriptedModel):
    """Notes the rows of each forward pass; has memory for `most` of them."""

    most = 10**9

    def forward(self, batch: ForwardBatch, kv: PagedKV) -> Tensor:
        self.rows = [*getattr(self, "rows", []), batch.num_rows]
        if batch.num_rows > self.most:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 9.00 GiB.\nMore of it.")
        return super().forward(batch, kv)


@pytest.mark.parametrize(("masks", "each"), [(0, 1), (1, 4), (3, 16), (5, 36)])
def test_everybody_decodes_in_full_while_a_prompt_is_read(masks: int, each: int) -> None:
    model = Watched(num_masks=masks)
    rows = take_largest_step(model, max_sequences=6, max_prefill_rows=100, block_size=16)
    assert rows == max(model.rows) == 5 * each + 100 + masks  # the prompt's end carries group 0


def test_a_short_window_and_a_single_sequence_are_no_obstacle() -> None:
    model = Watched(num_masks=3, window=40)
    assert take_largest_step(model, max_sequences=1, max_prefill_rows=512, block_size=256) == max(model.rows) <= 40


def test_what_does_not_fit_is_said_with_the_cure() -> None:
    model = Watched(num_masks=3)
    model.most = 15
    with pytest.raises(
        NotEnoughMemory, match=r"6 sequences with 3 drafts each and 100 rows .* --max-sequences or --spec"
    ):
        take_largest_step(model, max_sequences=6, max_prefill_rows=100, block_size=16)


def test_a_fault_that_is_not_memory_s_is_not_taken_for_it() -> None:
    assert is_out_of_memory(torch.OutOfMemoryError("CUDA out of memory"))
    assert is_out_of_memory(MemoryError())
    assert is_out_of_memory(RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried ..."))
    assert not is_out_of_memory(RuntimeError("CUDA error: an illegal memory access was encountered"))
