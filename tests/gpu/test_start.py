"""From the start of a worker process to its first answer, at the shapes of a 1B and an 8B Llama."""

from __future__ import annotations

import gc
import shutil
import tempfile
import time
from pathlib import Path

import pytest
import torch
from desk import Desk, Record, Request
from space_proto import worker_pb2 as pb
from space_server.machine.memory import free_bytes

from gpu.demo_texts import decode
from gpu.llama import DRY, FIRST_MASK, NUM_MASKS, SHAPES, draft_head, random_llama, write_checkpoint
from gpu.record import Notes
from gpu.worker_process import caches_in, connected, started_worker

pytestmark = pytest.mark.gpu

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
            with started_worker(flags, caches_in(Path(place))) as process:
                with connected(process.address()) as connection:
                    desk = Desk(connection)
                    answered = _first_answer(desk)
                    rate = _plain_rate(desk, 16 if notes.dry else 200)
                status = process.stop()
            ready = (process.ready_at or answered) - process.started
            rows.append([which, f"{ready:.1f}", f"{answered - process.started:.1f}"])
            rows[-1].append("–" if process.read_at is None else f"{answered - process.read_at:.1f}")
            head = ["start", "s to ready", "s to the first answer", "s from the weights read to the first answer"]
            notes.table(f"{name}: process start", head, rows)
            assert status == 0, f"after SIGTERM the worker ended with status {status}"
            prefix = f"{name} " if number == 0 else f"{name}, second start: "
            notes.figure(f"{prefix}first answer after the process starts", answered - process.started, "s")
            notes.figure(f"{prefix}plain decoding over gRPC at batch 1", rate, "tokens/s")
            target = f"{prefix}first answer after the weights are read"
            if process.read_at is None:
                notes.missing(target, "the log does not say when they were read")
            else:
                notes.figure(target, answered - process.read_at, "s")


def _first_answer(desk: Desk) -> float:
    """The moment at which the first token is here."""
    first = FIRST_MASK + NUM_MASKS
    request = Request(tuple(range(first, first + FIRST_ANSWER_IDS)), pb.Sampling(), pb.Limits(max_tokens=8))
    record = Record(request)
    desk.admit(record)
    desk.run(lambda: bool(record.tokens))
    answered = time.perf_counter()
    desk.run(lambda: not desk.records)
    return answered


def _plain_rate(desk: Desk, num_tokens: int) -> float:
    """Tokens per second of one stream, the second of its kind."""
    prompt = tuple(range(FIRST_MASK + NUM_MASKS, FIRST_MASK + NUM_MASKS + FIRST_ANSWER_IDS))
    request = Request(
        prompt, pb.Sampling(), pb.Limits(max_tokens=num_tokens), max_draft_length=0, slots_ahead=num_tokens
    )
    decode(desk, [request])
    return decode(desk, [request])[1]
