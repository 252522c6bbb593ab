"""The largest step is taken before pages are given out, and what it needs is missed in time."""

import pytest
import torch
from doubles.worker import ScriptedModel
from space_model.geometry.draft_layout import DraftLayout
from space_model.geometry.forward_batch import ForwardBatch
from space_model.networks.network import PagedKV
from space_server.device_runner.device_forward import StepKind
from space_server.device_runner.device_runner import DeviceRunner
from space_server.machine.memory import NotEnoughMemory, is_out_of_memory
from space_server.startup.largest_step import bytes_of_graphs, take_largest_step
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


# ---------------------------------------------------------------------------------------------- on the device


@pytest.mark.parametrize(("masks", "layout"), [(0, DraftLayout.plain()), (3, DraftLayout.full(3, 3))])
def test_the_largest_step_on_the_device_has_every_line_and_whole_groups(masks: int, layout: DraftLayout) -> None:
    model = ScriptedModel(num_masks=masks)
    runner = DeviceRunner(model, model.allocate_kv(1, 16), max_sequences=6)
    taken: list[StepKind] = []
    take = runner._take

    def watched(kind: StepKind) -> Tensor:
        taken.append(kind)
        return take(kind)

    runner._take = watched
    runner.take_largest()
    assert [(kind.batch_size, kind.layout) for kind in taken] == [(6, layout)] * 3  # launched, watched, captured
    assert taken[0].num_pages * 16 >= model.facts.window
    assert runner.num_in_flight == 0


def test_pages_are_not_given_what_steps_on_the_device_take() -> None:
    free = iter([1000, 700])
    taken = bytes_of_graphs(ScriptedModel(), max_sequences=6, block_size=16, available=lambda: next(free))
    assert taken == 300


def test_a_largest_step_without_memory_for_it_takes_none_and_other_faults_are_not_hidden(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def failing(error: Exception) -> None:
        def take(self: DeviceRunner) -> None:
            raise error

        monkeypatch.setattr(DeviceRunner, "take_largest", take)

    failing(torch.OutOfMemoryError("CUDA out of memory."))
    assert bytes_of_graphs(ScriptedModel(), max_sequences=6, block_size=16, available=lambda: 1000) == 0
    failing(RuntimeError("CUDA error: an illegal memory access was encountered"))
    with pytest.raises(RuntimeError, match="illegal"):
        bytes_of_graphs(ScriptedModel(), max_sequences=6, block_size=16, available=lambda: 1000)
