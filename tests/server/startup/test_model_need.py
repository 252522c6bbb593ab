"""What a model takes is known before it is read, and what does not fit is refused with what does."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from doubles.worker import ScriptedModel
from space_model.free_memory import FreeMemory, is_out_of_memory
from space_model.geometry.draft_layout import DraftLayout
from space_model.geometry.forward_batch import ForwardBatch
from space_model.loading.load import load_model
from space_model.networks.network import PagedKV, StateRoom
from space_server.__main__ import main
from space_server.config import ModelSource, parse
from space_server.device_runner.device_forward import StepKind
from space_server.device_runner.device_runner import DeviceRunner
from space_server.machine.memory import NotEnoughMemory
from space_server.startup import model_need
from space_server.startup.model_need import (
    ModelNeed,
    bytes_of_graphs,
    check_fits,
    fit_largest_step,
    num_blocks_of,
    num_sequences_of,
    take_largest_step,
)
from tiny_checkpoints import tiny_checkpoint
from torch import Tensor

MIB = 1024**2
NEED = ModelNeed(
    weights=400 * MIB, head=60 * MIB, drafting=0, step=40 * MIB, kv_bytes_per_token=MIB, window=500,
    dtype=torch.float32, device=torch.device("cpu"),
)  # fmt: skip


def refusal(need: ModelNeed, mib: int) -> str:
    with pytest.raises(NotEnoughMemory) as refused:
        check_fits(need, FreeMemory(mib * MIB, "the machine's memory"), "m")
    return str(refused.value)


def test_what_fits_is_let_through() -> None:
    check_fits(NEED, FreeMemory(1000 * MIB, "the machine's memory"), "m")


def test_the_refusal_names_need_bound_and_both_cures() -> None:
    said = refusal(NEED, 900)
    assert said == (
        "m needs 1000 MiB on cpu (weights in float32 400 MiB, the output head's packed copy 60 MiB, keys and values "
        "of one window of 500 500 MiB, a step 40 MiB); the machine's memory leaves 900 MiB. It fits with "
        "--max-model-len 400 or --dtype bfloat16 (500 MiB)."
    )
    assert "\n" not in said


def test_a_dtype_and_a_length_are_named_together_where_only_both_help() -> None:
    assert refusal(NEED, 300).endswith("It fits with --dtype bfloat16 --max-model-len 96.")


def test_where_nothing_helps_it_says_so() -> None:
    assert "No dtype and no length fits: even in bfloat16" in refusal(NEED, 100)
    assert "--dtype" not in refusal(replace(NEED, dtype=torch.bfloat16), 450).partition("No dtype")[0]


def test_the_cures_that_are_named_do_fit() -> None:
    for mib in range(251, 1000, 7):
        said, free = refusal(NEED, mib), FreeMemory(mib * MIB, "")
        if "fits with" not in said:
            continue
        for words in said.partition("fits with ")[2].rstrip(".").split(" or "):
            cured = NEED.held_in(torch.bfloat16) if "bfloat16" in words else NEED
            if "--max-model-len" in words:
                cured = replace(cured, window=int(words.split("--max-model-len ")[1].split()[0]))
            check_fits(cured, free, "m")


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
def test_the_weights_are_counted_as_they_will_be_held(tmp_path: Path, dtype: str, tied: bool) -> None:
    folder = tiny_checkpoint(tmp_path, "llama", num_masks=3, tie_word_embeddings=tied)
    words = ["--listen", "h:1", "--model", str(folder), "--device", "cpu", "--dtype", dtype]
    need = ModelNeed.asked(parse(words), ModelSource(parse(words)).checkpoint())
    facts = load_model(folder, dtype=dtype).facts
    from transformers import AutoModelForCausalLM

    whole = AutoModelForCausalLM.from_pretrained(folder, dtype=facts.dtype)
    assert need.weights == sum(one.numel() for one in whole.parameters()) * facts.dtype.itemsize
    assert need.weights == model_need.num_weights(whole.config) * facts.dtype.itemsize
    assert need.kv_bytes_per_token == facts.kv_bytes_per_token
    assert need.window == facts.window
    assert need.drafting > 0


@pytest.mark.parametrize("family", ["deepseek_v2", "deepseek_v3", "mimo_v2_flash"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_pages_of_compressed_keys_and_unequal_values_are_counted_as_they_are(
    family: str, dtype: str, tmp_path: Path
) -> None:
    folder = tiny_checkpoint(tmp_path, family, num_masks=0)
    config = parse(["--listen", "h:1", "--model", str(folder), "--device", "cpu", "--dtype", dtype])
    need, model = ModelNeed.asked(config, ModelSource(config).checkpoint()), load_model(folder, dtype=dtype)
    kv = model.allocate_kv(3, 16)
    pages = {tensor.data_ptr(): tensor.nbytes for tensor in (*kv.keys, *kv.values)}
    assert need.kv_bytes_per_token == model.facts.kv_bytes_per_token == sum(pages.values()) // (3 * 16)


@pytest.mark.parametrize("family", ["qwen3_next", "lfm2", "falcon_h1", "mamba2"])
@pytest.mark.parametrize(("words", "most"), [([], 8), (["--speculation", "off"], 3), (["--speculation", "12"], 12)])
def test_recurrent_states_are_counted_as_they_are_allocated(
    family: str, words: list[str], most: int, tmp_path: Path
) -> None:
    folder = tiny_checkpoint(tmp_path, family, num_masks=3)
    config = parse(["--listen", "h:1", "--model", str(folder), "--device", "cpu", "--dtype", "float32", *words])
    need, facts = ModelNeed.asked(config, ModelSource(config).checkpoint()), load_model(folder, dtype="float32").facts
    assert need.states == facts.state_bytes(most)
    assert need.window == facts.window
    states = PagedKV.allocate(facts, 1, 16, room=StateRoom(3, most)).states
    assert states is not None
    assert states.num_bytes == 3 * need.states
    assert "recurrent states of a sequence" in need.parts()
    free = need.fixed + need.states + need.keys_and_values
    check_fits(need, FreeMemory(free, ""), "m")
    with pytest.raises(NotEnoughMemory, match="recurrent states of a sequence"):
        check_fits(need, FreeMemory(free - 1, ""), "m")


def test_a_recurrent_head_needs_its_weights_and_the_rows_of_its_vocabulary(tmp_path: Path) -> None:
    folder = tiny_checkpoint(tmp_path, num_masks=0, head_drafts=5, draft_vocab=60)
    config = parse(["--model", str(folder), "--listen", "h:1", "--dtype", "float32"])
    need = ModelNeed.asked(config, ModelSource(config).checkpoint())
    inner, hidden = 32, 64
    assert need is not None
    assert need.drafting == 4 * (3 * inner * hidden + 60 * hidden) + 60 * 8


def test_a_worker_refuses_before_it_reads_weights(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tiny_checkpoint(tmp_path, "llama")
    monkeypatch.setattr(FreeMemory, "on", lambda device: FreeMemory(1000, "the limit in /group/memory.max"))
    monkeypatch.setattr("space_server.__main__.load_model", lambda *_, **__: pytest.fail("it read weights"))
    assert main(["--listen", "unix:/w", "--model", str(folder), "--device", "cpu"]) == 4
    errors = [line for line in capsys.readouterr().err.splitlines() if line.startswith("error: ")]
    assert len(errors) == 1
    assert "the limit in /group/memory.max leaves 0 MiB" in errors[0]


def test_pages_asked_for_are_refused_before_weights_are_read_too(tmp_path: Path) -> None:
    folder = tiny_checkpoint(tmp_path, "llama")
    config = parse(["--listen", "h:1", "--model", str(folder), "--device", "cpu", "--num-blocks", "999999"])
    need = ModelNeed.asked(config, ModelSource(config).checkpoint())
    with pytest.raises(NotEnoughMemory, match="--num-blocks 999999 needs"):
        num_blocks_of(config, need, FreeMemory(need.least + MIB, "the machine's memory"))
    one_window = replace(config, num_blocks=None)
    fitting = FreeMemory(need.least, "the machine's memory")
    assert num_blocks_of(one_window, need, fitting) * config.block_size >= need.window


@pytest.mark.e2e
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_who_ends_a_worker_that_still_imports_torch_sees_no_traceback(number: signal.Signals, tmp_path: Path) -> None:
    words = [sys.executable, "-X", "importtime", "-m", "space_server", "--listen", f"unix:{tmp_path / 'w'}"]
    with subprocess.Popen(words, stderr=subprocess.PIPE, text=True, env={**os.environ}) as process:
        assert process.stderr is not None
        seen = []
        for line in process.stderr:
            seen.append(line)
            if "torch._C" in line or "ctypes" in line:
                break
        process.send_signal(number)
        rest = process.stderr.read()
        assert process.wait(60) == 0
        assert "Traceback" not in "".join(seen) + rest


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


def test_fewer_sequences_run_where_their_largest_step_does_not_fit_unless_the_number_was_asked_for() -> None:
    model = Watched(num_masks=3)
    model.most = 200  # rows: 15 × 16 do not fit, 7 × 16 and a prompt do
    asked = {"max_prefill_rows": 60, "block_size": 16}
    num_sequences, rows = fit_largest_step(model, lambda: 16, may_lower=True, **asked)
    assert (num_sequences, rows) == (8, 7 * 16 + 60 + 3)
    with pytest.raises(NotEnoughMemory, match="16 sequences with 3 drafts"):
        fit_largest_step(model, lambda: 16, may_lower=False, **asked)
    model.most = 10
    with pytest.raises(NotEnoughMemory, match="1 sequences with 3 drafts"):
        fit_largest_step(model, lambda: 16, may_lower=True, **asked)


def test_fewer_sequences_run_where_their_largest_step_leaves_pages_for_fewer() -> None:
    free = iter([16, 8, 8])  # before any step, behind that of 16, behind that of 8
    found = fit_largest_step(
        Watched(num_masks=0), lambda: next(free), may_lower=True, max_prefill_rows=60, block_size=16
    )
    assert found == (8, 7 + 60)


def test_a_gpu_with_room_runs_more_sequences_than_a_cpu() -> None:
    config = parse(["--listen", "h:1", "--max-model-len", "500"])
    need = replace(NEED, device=torch.device("cuda"))
    sizes = {gib: num_sequences_of(config, need, FreeMemory(gib * 1024 * MIB, "the GPU")) for gib in (40, 80, 140)}
    assert sizes == {40: 64, 80: 128, 140: 256}
    assert num_sequences_of(config, NEED, FreeMemory(140 * 1024 * MIB, "the machine")) == 64


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
