"""From the start of a worker process to its first answer, at the shapes of a 1B and an 8B Llama."""

from __future__ import annotations

import gc
import shutil
import sys
import tempfile
import time
from pathlib import Path

import pytest
import torch
from space_common.process import WorkerProcess
from space_common.worker_client import ClientSequence, GrpcWorker, SequenceRequest, WorkerClient
from space_proto import worker_pb2 as pb
from space_server.machine.memory import free_bytes

from gpu.llama import DRY, FIRST_MASK, NUM_MASKS, SHAPES, draft_head, random_llama, write_checkpoint
from gpu.report import Notes
from gpu.ties import decode

pytestmark = pytest.mark.gpu

READ_LINE = "weights read"
"""Logged by a worker that has read its weights."""
FIRST_ANSWER_IDS = 32
"""Of the prompt whose first token is waited for."""


def test_start_1b(notes: Notes) -> None:
    _start(notes, "1b")


def test_start_8b(notes: Notes) -> None:
    _start(notes, "8b")


def _start(notes: Notes, name: str) -> None:
    """Twice: with nothing compiled or measured on this machine before, and as at any later start."""
    shape, device = (DRY if notes.dry else SHAPES[name]), notes.device
    with tempfile.TemporaryDirectory(prefix="space-check") as place:
        free = shutil.disk_usage(place).free
        if free < 1.2 * shape.num_bytes or free_bytes(device) < 1.5 * shape.num_bytes:
            pytest.skip(f"{shape.num_bytes / 1024**3:.0f} GiB of weights do not fit on disk and device")
        folder = Path(place) / "model"
        made = random_llama(shape, device)
        write_checkpoint(folder, made, draft_head(shape, device))
        del made
        gc.collect()
        torch.cuda.empty_cache()
        flags = ["--model", str(folder), "--device", device.type, "--dtype", "bfloat16"]
        flags += ["--num-blocks", "64", "--calibration-seconds", "0.2", "--max-sequences", "2"] if notes.dry else []
        rows = []
        for number, which in enumerate(("first", "second")):
            if notes.dry and number:
                break
            read_at: list[float] = []

            def look(line: str, read_at: list[float] = read_at) -> None:
                sys.stderr.write(line)
                if READ_LINE in line and not read_at:
                    read_at.append(time.perf_counter())

            started = time.perf_counter()
            with WorkerProcess(flags, environment=_caches_in(Path(place)), on_line=look) as process:
                ready = time.perf_counter() - started
                with GrpcWorker(process.address) as worker:
                    client = WorkerClient(worker, automatic=True)
                    answered = _first_answer(client)
                    rate = _plain_rate(client, 16 if notes.dry else 200)
                status = process.stop(grace=30.0)
            rows.append([which, f"{ready:.1f}", f"{answered - started:.1f}"])
            rows[-1].append(f"{answered - read_at[0]:.1f}" if read_at else "–")
            head = ["start", "s to ready", "s to the first answer", "s from the weights read to the first answer"]
            notes.table(f"{name}: process start", head, rows)
            assert status == 0, f"after SIGTERM the worker ended with status {status}"
            prefix = f"{name} " if number == 0 else f"{name}, second start: "
            notes.figure(f"{prefix}first answer after the process starts", answered - started, "s")
            notes.figure(f"{prefix}plain decoding over gRPC at batch 1", rate, "tokens/s")
            target = f"{prefix}first answer after the weights are read"
            if read_at:
                notes.figure(target, answered - read_at[0], "s")
            else:
                notes.missing(target, "the log does not say when they were read")


def _caches_in(folder: Path) -> dict[str, str]:
    """Environment of a process that finds only what others have compiled and measured in this folder."""
    return {"XDG_CACHE_HOME": str(folder / "cache"), "TRITON_CACHE_DIR": str(folder / "triton")}


def _first_answer(client: WorkerClient) -> float:
    """The moment at which the first token is here."""
    first = FIRST_MASK + NUM_MASKS
    request = SequenceRequest(tuple(range(first, first + FIRST_ANSWER_IDS)), pb.Sampling(), pb.Limits(max_tokens=8))
    record = ClientSequence(request)
    client.submit(record)
    client.run(lambda: bool(record.tokens))
    answered = time.perf_counter()
    client.run()
    return answered


def _plain_rate(client: WorkerClient, num_tokens: int) -> float:
    """Tokens per second of one stream, the second of its kind."""
    prompt = tuple(range(FIRST_MASK + NUM_MASKS, FIRST_MASK + NUM_MASKS + FIRST_ANSWER_IDS))
    request = SequenceRequest(
        prompt, pb.Sampling(), pb.Limits(max_tokens=num_tokens), max_draft_length=0, slots_ahead=num_tokens
    )
    decode(client, [request])
    return decode(client, [request])[1]
