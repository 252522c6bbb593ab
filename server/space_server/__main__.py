"""`python -m space_server`: loads a model, listens and steps.

Prints `ready ADDRESS` on stdout when it listens. Exit status: 0 after SIGTERM, SIGINT or Drain, 2 for invalid settings,
3 for a checkpoint that cannot be served, 4 for too little memory, 5 if it cannot listen on the address, 6 when the
parent process has ended, 7 when one of several ranks has.
"""

from __future__ import annotations

import atexit
import os
import signal
import sys

if __name__ == "__main__":
    exit_status = 1  # of an uncaught exception
    # Registered first, it is called last. Python's own shutdown would stop daemon threads in the middle of C++ (the one
    # that loads the model when a signal comes, a grammar's compilation), and C++ then ends the process with SIGABRT.
    atexit.register(lambda: os._exit(exit_status))
    for _number in (signal.SIGTERM, signal.SIGINT):  # until torch and transformers are imported: no traceback
        signal.signal(_number, lambda number, frame: os._exit(0))

from space_common.process import drop_unwritable_output, sleep_soon
from space_common.worker.settings import WorkerSettings

if __name__ == "__main__":
    try:  # torch is not imported for --help, nor for flags that are refused
        WorkerSettings.parse(sys.argv[1:])
    except SystemExit as end:
        exit_status = int(end.code or 0)
        drop_unwritable_output()
        raise
    sleep_soon(os.environ)  # before torch loads OpenMP

from space_model.unsharded import do_without_sharding

if __name__ == "__main__":
    do_without_sharding()  # before anything imports transformers' models

from space_common.process import quieten_grpc

if __name__ == "__main__":
    quieten_grpc(logs_json="json" in sys.argv or os.environ.get("SPACESERVE_LOG_FORMAT") == "json")  # before gRPC

import asyncio
import contextlib
import functools
import logging
import threading
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from types import FrameType
from typing import TYPE_CHECKING

import torch
from space_common import default_model
from space_common.event_loop import loop_factory
from space_common.grpc_calls import stop_server
from space_common.hub import Hub
from space_common.nvml import Nvml
from space_common.process import collect_seldom, log_to_stderr, report_error
from space_common.tracing import exporting
from space_common.worker.settings import Steps, StepsHere, WorkerSettings
from space_kernels.build import cpu_library
from space_kernels.build.cache_folder import cache_folder
from space_model import uncompiled  # noqa: F401  # before anything else imports transformers
from space_model.checkpoint.checkpoint import Checkpoint
from space_model.checkpoint.weight_files import give_back
from space_model.draft_networks import mtp
from space_model.draft_networks.draft_model import load_draft_model
from space_model.draft_networks.eagle import load_eagle
from space_model.encoder.text_encoder import load_encoder
from space_model.free_memory import FreeMemory
from space_model.loading.load import load_model
from space_model.malloc import keep_freed_memory, use_one_heap
from space_model.model_error import InvalidSetting, ModelError
from space_model.model_facts import ModelFacts, Ranks
from space_model.networks.network import PagedKV
from space_model.networks.tensor_parallel import check_ranks
from space_model.space_model import SpaceModel

from space_server.config import ModelSource, on_first_gpu, parse, say
from space_server.device_runner.device_batch import why_on_host
from space_server.drafts import DraftSources
from space_server.grammar import Grammars
from space_server.grpc_server import WorkerService, start_server
from space_server.kv_offload import choose_host_blocks
from space_server.machine.memory import (
    NotEnoughMemory,
    check_num_blocks,
    choose_max_sequences,
    choose_num_blocks,
    choose_num_kept,
    choose_num_sequences,
    free_bytes,
    give_back_unused,
)
from space_server.machine.sensors import GpuLoad, LoadWatch, Meter, find_sensors
from space_server.machine.threads import keep_off_last, num_cores, num_threads, run_in_thread
from space_server.model_runner import StepModel
from space_server.pooling.encodings import Encodings
from space_server.speculation.controller import FixedLayout
from space_server.speculation.synthetic_acceptance import SyntheticAcceptance, label
from space_server.startup.attention_choice import choose_ops
from space_server.startup.calibration import CostFile, calibrate, starting_costs, time_plain_step
from space_server.startup.doctor import TorchBuild, check_cpu_kernels, check_gpu, check_shared_memory
from space_server.startup.model_need import ModelNeed, bytes_of_graphs, fit_largest_step, num_blocks_of
from space_server.step_cost import StepCost, StepShape
from space_server.tensor_parallel import RankPlace, TensorParallelLeader, following, leading
from space_server.worker import MAX_PREFILL_ROWS, Worker, fewer_drafts_warning, room_for

if TYPE_CHECKING:
    from opentelemetry.trace import Tracer

OPEN_PORT, BAD_CHECKPOINT, NO_MEMORY, NO_ADDRESS, ORPHANED, NO_DEVICE = 2, 3, 4, 5, 6, 7

SMALL_WEIGHTS = 64 * 1024**2
"""Bytes of weights below which threads of one matmul wait for each other longer than they compute.

Measured on 2 cores with the embedded model (11 MB): alone, a step of one sequence takes .74 of the time on two threads,
but behind a router, which needs a core too, two threads gave .92 (one stream), 1.02 (4), .87 (16) and .98 (64) of the
tokens per second of one. The text does not depend on it.
"""

AHEAD_SECONDS = 1.0
"""Seconds of the start for graphs that the first requests need; the others are captured while there is no request."""

_log = logging.getLogger("space_server")


def main(arguments: Sequence[str]) -> int:
    """Run the worker until it is stopped; return the exit status."""
    config = parse(arguments)
    log_to_stderr(config.log_level, config.log_format)
    if (why := config.why_open()) is not None:
        return _fail(OPEN_PORT, InvalidSetting(why))
    use_one_heap()
    if isinstance(config.cores, set):
        os.sched_setaffinity(0, config.cores)
    if config.parent_pid is not None:
        threading.Thread(target=_outlive, args=(config.parent_pid,), name="parent watch", daemon=True).start()
    try:
        with ExitStack() as stack:
            # Until the event loop handles signals: no sequence runs yet, so exit at once.
            for number in (signal.SIGTERM, signal.SIGINT):
                stack.callback(signal.signal, number, signal.signal(number, _leave))
            config = _with_default_model(config)
            place = RankPlace.of(config.tensor_parallel, os.environ) if config.tensor_parallel > 1 else None
            config, place = on_first_gpu(config, place, os.environ)
            _check_machine(config)
            watch = LoadWatch(_gpu_load(config))
            source = ModelSource(config)
            lead = None
            if place is not None:
                check_ranks(source.checkpoint(), place.size)
                load = functools.partial(_load, config, source)
                if place.rank:
                    following(config, place, load)
                    return 0
                lead = stack.enter_context(leading(config, arguments, place, load))
            worker = run_in_thread(lambda: build_worker(config, lead, source, watch))
            tracer = stack.enter_context(exporting("spaceserve-worker", os.environ)) if config.tracing else None
            with asyncio.Runner(loop_factory=loop_factory()) as runner:
                has_device = runner.run(_serve(worker, config, _meter(config, worker), tracer))
    except ModelError as error:
        return _fail(BAD_CHECKPOINT, error)
    except (NotEnoughMemory, MemoryError) as error:
        return _fail(NO_MEMORY, error)
    except _NoAddress as error:
        return _fail(NO_ADDRESS, error)
    return 0 if has_device else NO_DEVICE


def _check_machine(config: WorkerSettings) -> None:
    """Log what slows or endangers this worker. Raises InvalidSetting if there is a GPU that cannot be used."""
    gpu = check_gpu(config.device, TorchBuild.here())
    if gpu.state == "fail":
        raise InvalidSetting(gpu.sentence)
    on_gpu = torch.cuda.is_available() and config.device != "cpu"
    for finding in (gpu, check_shared_memory(config.tensor_parallel, on_gpu)):
        if finding is not None and finding.state == "note":
            _log.warning("%s", finding.sentence)


def _with_default_model(config: WorkerSettings) -> WorkerSettings:
    """Fall back to `demo` if no model was named and the default one cannot be fetched."""
    if config.model_is_named:
        return config
    hub = Hub(folder=config.download_folder, offline=config.offline, say=say)
    model, fallback = default_model.choose(config.model, is_named=False, hub=hub)
    if fallback is not None:
        _log.warning("%s", fallback)
    return replace(config, model=model)


class _NoAddress(Exception):
    """The worker cannot listen on the address."""


def _load(
    config: WorkerSettings, source: ModelSource, ranks: Ranks | None = None, device: str | None = None
) -> SpaceModel:
    """Load the model, or this rank's shard of it. Raises ModelError."""
    os.environ[cpu_library.SWITCH] = config.cpu_kernels
    checkpoint = source.checkpoint()
    own = replace(config, device=device or config.device)
    draft, head = source.draft_checkpoint(), source.draft_head()
    need = ModelNeed.asked(own, checkpoint, draft, head)
    check_cpu_kernels(config, need.device, need.dtype)
    num_ranks = 1 if ranks is None else ranks.size  # ranks share the machine's cores, and on CPUs its memory
    num_blocks_of(own, need, FreeMemory.on(need.device).among(num_ranks if need.device.type == "cpu" else 1))
    threads = config.num_threads or choose_threads(checkpoint) or max(1, _threads(config) // num_ranks)
    if config.cores == "auto" and threads * num_ranks == 1 and need.device.type == "cpu":
        left = keep_off_last(config.num_workers)
        _log.info("matmuls use one thread; processor %s is left to the router", "none" if left is None else left)
    model = load_model(
        checkpoint,
        dtype=config.dtype,
        weights=config.weights,
        kv_dtype=config.kv_dtype,
        device=device or config.device,
        mask_ids=config.space_mask_ids,
        num_masks=config.space_num_masks,
        choose_ops=functools.partial(
            choose_ops, asked=config.attention, block_size=config.block_size, exact=config.exact
        ),
        max_model_len=config.max_model_len,
        num_threads=threads,
        adapters=source.adapters(),
        loras=dict(config.lora),
        ranks=ranks,
    )
    if config.draft_model == mtp.NAME:
        model = model.drafted_by(mtp.load_mtp(checkpoint, model.facts, dtype=config.dtype))
    elif draft is not None:
        model = model.drafted_by(load_draft_model(draft, checkpoint, model.facts, dtype=config.dtype))
    elif head is not None:
        model = model.drafted_by(load_eagle(head, model))
    if model.facts.device.type == "cpu":
        give_back()  # of adapters, too
    return model


def build_worker(
    config: WorkerSettings,
    lead: TensorParallelLeader | None = None,
    source: ModelSource | None = None,
    watch: LoadWatch | None = None,
) -> Worker:
    """Load the model and allocate the KV cache. `lead`: the model, where ranks share it; `source`: of the model's
    files; `watch`: observes the machine's load since before this process used a GPU.

    Raises ModelError or NotEnoughMemory.
    """
    started = time.perf_counter()
    watch = watch or LoadWatch(_gpu_load(config))
    source = source or ModelSource(config)
    model: StepModel = _load(config, source) if lead is None else lead
    encoder = source.encoder_checkpoint()
    encodings = None if encoder is None else Encodings(load_encoder(encoder, model.facts.device))
    keep_freed_memory()
    facts = model.facts
    size = config.block_size

    def available_now() -> int:
        return free_bytes(facts.device) if lead is None else lead.free_bytes()

    def most() -> int:
        return choose_max_sequences(
            facts,
            asked=config.max_sequences,
            amount=config.kv_memory,
            available=available_now(),
            num_blocks=config.num_blocks,
            block_size=size,
        )

    if facts.device.type != "cuda":
        num_sequences = most()
    else:
        give_back_unused()  # used by measuring the attention backends
        num_sequences, rows = fit_largest_step(
            model,
            most,
            may_lower=config.max_sequences is None,
            max_prefill_rows=MAX_PREFILL_ROWS,
            block_size=size,
        )
        _log.info(
            "the largest step of %d sequences has %d rows; %d bytes are free after it",
            num_sequences,
            rows,
            free_bytes(facts.device),
        )
    steps = choose_steps(config.steps, facts)
    available = available_now()  # after loading the weights
    if facts.device.type == "cuda" and steps == "device":
        taken = bytes_of_graphs(
            model,
            max_sequences=num_sequences,
            block_size=size,
            available=functools.partial(free_bytes, facts.device),
        )
        available -= taken
        _log.info("steps on the device take %d bytes", taken)
    room = room_for(facts, num_sequences, config.max_draft_length)
    state_bytes = facts.state_bytes(room.most_drafts)
    fitting = choose_num_sequences(facts, asked=room.num_sequences, state_bytes=state_bytes, available=available)
    if fitting < room.num_sequences:
        _log.warning(
            "at most %d sequences run at once, not %d: recurrent layers remember %d bytes of each",
            fitting,
            room.num_sequences,
            state_bytes,
        )
        room = room._replace(num_sequences=fitting)
    available -= fitting * state_bytes
    num_kept = choose_num_kept(
        config.state_cache,
        num_sequences=fitting,
        kept_bytes=facts.kept_state_bytes,
        available=available - facts.window * facts.kv_bytes_per_token,
    )
    available -= num_kept * facts.kept_state_bytes
    room = room._replace(num_kept=num_kept)
    if config.num_blocks is None:
        num_blocks = choose_num_blocks(facts, block_size=size, amount=config.kv_memory, available=available)
    else:
        num_blocks = check_num_blocks(facts, num_blocks=config.num_blocks, block_size=size, available=available)
    kv = model.allocate_kv(num_blocks, size, room)
    if config.kv_offload is not None and lead is not None:
        raise InvalidSetting("--kv-offload does not go with --tensor-parallel: ranks keep no blocks in host memory.")
    if config.kv_offload is not None and facts.is_recurrent:
        raise InvalidSetting("--kv-offload does not go with recurrent layers: host memory keeps no states.")
    host_blocks = choose_host_blocks(
        config.kv_offload,
        block_bytes=facts.kv_bytes_per_token * size,
        available=free_bytes(torch.device("cpu")),
    )
    if host_blocks and facts.device.type == "cpu":
        _log.warning(
            "--kv-offload on a CPU: keys and values are in host memory anyway; a larger --kv-memory does the same "
            "without copies"
        )
    cost = measured_cost(config, model, kv, watch, steps, max_sequences=fitting)
    fixed = config.speculation if isinstance(config.speculation, int) else 0
    synthetic = None
    if config.synthetic_acceptance is not None:
        synthetic = SyntheticAcceptance(
            config.synthetic_acceptance, vocab_size=facts.vocab_size, mask_ids=facts.mask_ids
        )
        _log.warning(
            "%s: drafts of a repeated request are replaced to reach this acceptance. The text is exact; its speed is "
            "no measurement of this checkpoint's masks.",
            label(synthetic.chances),
        )
    # Synthetic acceptance applies to masks only, so other sources are off.
    looks_up = steps == "host" if config.lookup == "auto" else config.lookup != "off"
    if looks_up and steps != "host":
        _log.warning("--lookup %s: while lookup reads texts, device steps are not launched ahead", config.lookup)
    method = config.speculation_method
    sources = DraftSources(
        lookup=looks_up and synthetic is None,
        masks=method != "head" and (config.lookup != "only" or synthetic is not None),
        head=method != "masks",
    )
    if fixed and (warning := fewer_drafts_warning(fixed, facts, sources)):
        _log.warning("%s", warning)
    by_head = bool(facts.most_head_drafts) and not (facts.most_masks and sources.masks)
    worker = Worker(
        model,
        synthetic=synthetic,
        sources=sources,
        num_blocks=num_blocks,
        block_size=config.block_size,
        max_sequences=fitting,
        max_draft_length=config.max_draft_length,
        prefill_seconds=config.prefill_budget,
        kv=kv,
        cost=cost,
        controller=(FixedLayout.by_head if by_head else FixedLayout.full)(fixed) if fixed else None,
        device_steps=steps != "host",
        eager=steps == "eager",
        grammars=_grammars(source.checkpoint(), facts),
        loras=model.loras if isinstance(model, SpaceModel) else None,
        num_host_blocks=host_blocks,
        encodings=encodings,
    )
    worker.plan_ahead()
    if worker.may_prepare:
        worker.prepare(AHEAD_SECONDS)
    _log.info(
        "model=%s dtype=%s (%s) device=%s ranks=%d attention=%s window=%d masks=%d draft_head=%s head=%s "
        "head_drafts=%d adapters=%s loras=%s "
        "sequences=%d blocks=%d block_size=%d kv_bytes=%d state_bytes=%d kept_states=%d host_blocks=%d seconds=%.2f",
        facts.name,
        facts.number_format,
        facts.dtype_reason,
        facts.device,
        facts.num_ranks,
        facts.attention,
        facts.window,
        facts.num_masks,
        facts.has_draft_head,
        facts.head.kind if facts.most_head_drafts else "none",
        facts.most_head_drafts,
        ",".join(adapter.name for adapter in facts.adapters if adapter.name) or "none",
        ",".join(name for name, _ in config.lora) or "none",
        fitting,
        num_blocks,
        config.block_size,
        num_blocks * config.block_size * facts.kv_bytes_per_token,
        fitting * state_bytes,
        num_kept,
        host_blocks,
        time.perf_counter() - started,
    )
    return worker


def _grammars(checkpoint: Checkpoint, facts: ModelFacts) -> Grammars:
    """Build the grammar compiler for the checkpoint's tokenizer."""
    grammars = Grammars.of(checkpoint.folder, facts.vocab_size, {*facts.mask_ids, *facts.eos_ids})
    if grammars.why_none is not None:
        _log.warning("requests with a grammar are refused: %s", grammars.why_none)
    return grammars


def measured_cost(
    config: WorkerSettings,
    model: StepModel,
    kv: PagedKV,
    watch: LoadWatch,
    steps: StepsHere = "host",
    *,
    max_sequences: int,
) -> StepCost | None:
    """Return the step costs, measured now or at an earlier start. None: they are learnt while serving."""
    if not config.calibration_seconds:
        return None
    facts = model.facts
    begun = time.perf_counter()
    found = starting_costs(
        CostFile.of(
            cache_folder(),
            facts,
            block_size=config.block_size,
            max_sequences=max_sequences,
            exact=config.exact,
            steps=steps,
            draft_model=config.draft_model or config.draft_head,
        ),
        measure=lambda look: calibrate(
            model, kv, max_sequences=max_sequences, seconds=config.calibration_seconds, steps=steps, between=look
        ),
        time_plain_step=lambda: time_plain_step(model, kv, steps=steps),
        watch=watch,
    )
    give_back_unused()  # memory of graphs captured while measuring
    if found is None:
        return None
    cost = found.cost()
    _log.info(
        "step costs (%s steps): %d points, %s, in %.2f s; a plain step of 1, 8, 64 sequences takes %s ms",
        steps,
        len(found.points),
        found.origin.source,
        time.perf_counter() - begun,
        ", ".join(f"{1000 * cost.seconds(StepShape.plain(n, 64 * n)):.2f}" for n in (1, 8, 64)),
    )
    return cost


def choose_steps(asked: Steps, facts: ModelFacts) -> StepsHere:
    """Return where sequence state is kept: as asked for, or on the host where the device cannot."""
    if asked == "host" or (asked == "auto" and facts.device.type == "cpu"):
        return "host"
    reason = why_on_host(facts)
    if reason is not None:
        _log.warning("sequence state is kept on the host: %s", reason)
        return "host"
    return "device" if asked == "auto" else asked


def _threads(config: WorkerSettings) -> int:
    """Threads of one matmul for large weights."""
    beside_router = config.parent_pid is not None and not isinstance(config.cores, set)  # else it keeps off one already
    return num_threads(num_cores(), beside_router=beside_router, num_workers=config.num_workers, environment=os.environ)


def choose_threads(model: str | Checkpoint) -> int | None:
    """Return one thread for small weights; None, as many as cores allow, for others."""
    checkpoint = Checkpoint.open(model)
    if checkpoint.gguf is None:
        size = sum(file.stat().st_size for file in checkpoint.weights)
    else:
        size = 2 * sum(checkpoint.gguf.kinds.values())  # in memory, not in the file
    return 1 if size < SMALL_WEIGHTS else None


def _meter(config: WorkerSettings, worker: Worker) -> Meter:
    """Return the energy meter of this machine's processors and of the GPUs used here."""
    device = worker.facts.device
    uuids = _gpu_uuids(config, device.index or 0) if device.type == "cuda" else []
    meter = Meter(find_sensors(uuids, powercap=config.powercap))
    _log.info("energy is measured for: %s", ", ".join(meter.devices) or "nothing, because no sensor is readable")
    return meter


def _gpu_load(config: WorkerSettings) -> GpuLoad | None:
    """Observe the load of this worker's GPUs before it uses them; None on a CPU."""
    if config.device == "cpu" or not torch.cuda.is_available():
        return None
    number = torch.device("cuda" if config.device == "auto" else config.device).index
    return GpuLoad.of(_gpu_uuids(config, number or 0), Nvml.open())


def _gpu_uuids(config: WorkerSettings, number: int) -> list[str]:
    """Return the UUIDs of the GPUs used on this machine: those of all ranks, or the one with this number."""
    numbers = range(config.tensor_parallel) if config.tensor_parallel > 1 else [number]
    here = [one for one in numbers if one < torch.cuda.device_count()]  # other ranks' GPUs are on other machines
    return [str(torch.cuda.get_device_properties(one).uuid) for one in here]


async def _serve(worker: Worker, config: WorkerSettings, meter: Meter, tracer: Tracer | None) -> bool:
    """Serve until stopped. False if the device was lost."""
    service = WorkerService(worker, meter=meter, tracer=tracer, secret=config.secret())
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, service.drain)
    try:
        server, address = await start_server(service, config.listen, config.certificate())
    except OSError as error:
        raise _NoAddress(str(error)) from error
    collect_seldom()
    with contextlib.suppress(OSError):  # a full disk, or a closed pipe
        sys.stdout.write(f"ready {address}\n")
        sys.stdout.flush()
    await service.finished.wait()
    await stop_server(server, grace=1.0)
    return not service.has_lost_device


def _outlive(parent_pid: int, period: float = 0.5) -> None:
    """Exit once the parent process has ended, whatever else runs."""
    was_child = os.getppid() == parent_pid
    while True:
        if was_child and os.getppid() != parent_pid:
            break
        try:
            os.kill(parent_pid, 0)
        except ProcessLookupError:
            break
        except PermissionError:
            pass  # alive, owned by another user
        time.sleep(period)
    _log.error("the parent process %d is gone", parent_pid)
    os._exit(ORPHANED)


def _leave(number: int, frame: FrameType | None) -> None:
    """Exit while the model is loading."""
    raise SystemExit(0)


def _fail(status: int, error: Exception) -> int:
    report_error("error", str(error) or type(error).__name__)
    return status


if __name__ == "__main__":
    try:
        exit_status = main(sys.argv[1:])
    except SystemExit as end:  # invalid flags, or a signal while the model was loading
        exit_status = int(end.code or 0)
    drop_unwritable_output()
    sys.exit(exit_status)
