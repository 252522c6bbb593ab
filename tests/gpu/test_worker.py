"""Workers on a device: over gRPC, with device-resident steps, and from their start."""

from __future__ import annotations

import gc
import shutil
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from exactness_matrix import Subject
from space_common.process import WorkerProcess
from space_common.worker.client import ClientSequence, GrpcWorker, SequenceRequest, WorkerClient
from space_model.loading.load import load_model
from space_proto import worker_pb2 as pb
from space_server.device_runner.device_batch import why_on_host
from space_server.machine.memory import free_bytes
from space_server.speculation.controller import FixedLayout
from space_server.worker import Worker

from gpu.llama import DRY, FIRST_MASK, NUM_MASKS, SHAPES, draft_head, random_llama, write_checkpoint
from gpu.pace import DEVICE, HOST
from gpu.report import Notes
from gpu.ties import Comparison, checkpoint_of, compare, decode, demo_rule, outcome_name, request_of, settle

pytestmark = pytest.mark.gpu


def test_worker(notes: Notes) -> None:
    """The embedded model behind gRPC: concurrent streams, with drafts and without, and a clean end."""
    device = str(notes.device)
    num_tokens, largest = (24, 2) if notes.dry else (192, 16)
    flags = ["--model", "demo", "--device", device, "--dtype", "float32", "--log-level", "info"]
    flags += ["--num-blocks", "512", "--calibration-seconds", "0.2" if notes.dry else "3"]
    subject = Subject("demo", load_model("demo", dtype="float32", device="cpu"), seed=3)
    rule = demo_rule(subject)
    found = Comparison()
    with WorkerProcess(flags, on_line=sys.stderr.write) as process:
        with GrpcWorker(process.address) as worker:
            notes.note(f"{worker.hello.device}, attention {worker.hello.attention}, {worker.hello.dtype}")
            client = WorkerClient(worker, automatic=True)
            plain = [
                decode(client, [request_of(subject, connection, num_tokens, drafts=0)])[0][0] for connection in range(4)
            ]
            for batch in (1, largest):
                rates = {}
                for drafts in (0, NUM_MASKS):
                    asked = [request_of(subject, number % 4, num_tokens, drafts=drafts) for number in range(batch)]
                    records, rates[drafts] = decode(client, asked)
                    for number, record in enumerate(records):
                        where = f"{batch} streams, {drafts} drafts, stream {number}"
                        compare(found, where, record, plain[number % 4], client, rule)
                for drafts, rate in rates.items():
                    how = "with drafts" if drafts else "plain"
                    notes.figure(f"demo over gRPC, {batch} streams, {how}", rate, "tokens/s")
            client.check_all_free()
        status = process.stop(grace=30.0)
    settle(notes, found, "texts over gRPC that drafts changed")
    assert status == 0, f"after SIGTERM the worker ended with status {status}"


def test_device_steps(notes: Notes) -> None:
    """Device-resident steps against steps that wait for the host, on the embedded model in float32: with the usual
    products up to ties, with exact ones to the last bit.
    """
    model = load_model("demo", dtype="float32", device=str(notes.device))
    if reason := why_on_host(model.facts):
        pytest.skip(reason)
    with tempfile.TemporaryDirectory() as folder:
        with_head = checkpoint_of(Path(folder), "llama", "float32", head_drafts=NUM_MASKS)
        for path, layout in (("demo", FixedLayout.full), (with_head, FixedLayout.by_head)):
            _exact_texts(notes, path, layout)
    subject = Subject("demo", model, seed=5)
    rule = demo_rule(subject)
    num_tokens, batch_sizes = (16, (2,)) if notes.dry else (192, (1, 4, 16))
    found, rows = Comparison(), []
    for k in (NUM_MASKS,) if notes.dry else (0, 3, NUM_MASKS, None):
        for batch in batch_sizes:
            rates, texts = {}, {}
            for how in (HOST, DEVICE):
                controller = None if k is None else FixedLayout.full(k)
                worker = Worker(model, num_blocks=600, controller=controller, device_steps=how == DEVICE)
                client = WorkerClient(worker, automatic=True)
                asked = [
                    replace(
                        request_of(subject, connection % 4, num_tokens, drafts=NUM_MASKS if k is None else k),
                        slots_ahead=num_tokens,
                    )
                    for connection in range(batch)
                ]
                decode(client, asked)  # compiles and captures
                texts[how], rates[how] = decode(client, asked)
                client.check_all_free()
                if how == DEVICE:
                    _check_replays(notes, worker)
            for connection, (ours, theirs) in enumerate(zip(texts["device"], texts["host"], strict=True)):
                compare(found, f"k={k}, batch {batch}, sequence {connection}", ours, theirs, client, rule)
            name = "auto" if k is None else f"k={k}"
            rows.append(
                [name, batch, *(f"{rates[how]:.0f}" for how in rates), f"{rates['device'] / rates['host']:.2f}"]
            )
            head = ["layout", "batch", "host, tokens/s", "device, tokens/s", "device/host"]
            notes.table("demo: steps on the host and on the device", head, rows)
    settle(notes, found, "texts that device-resident steps changed")


def _exact_texts(notes: Notes, path: str | Path, layout: Callable[[int], FixedLayout]) -> None:
    """Ids and log-probabilities of each text, whatever else is in the batch: those of plain
    decoding alone, with steps of the host.
    """
    model = load_model(path, dtype="float32", device=str(notes.device), exact=True)
    name = "demo" if path == "demo" else "with a recurrent head"
    subject = Subject(name, model, seed=5)
    num_tokens, batch_sizes = (16, (2,)) if notes.dry else (192, (1, 4, 16))
    asked = [
        replace(request_of(subject, connection, num_tokens, drafts=0), slots_ahead=num_tokens)
        for connection in range(4)
    ]
    asked = [replace(one, want_logprobs=connection > 1, num_logprobs=4) for connection, one in enumerate(asked)]
    plainly = WorkerClient(Worker(model, num_blocks=600, controller=FixedLayout.full(0)), automatic=True)
    plain = [decode(plainly, [one])[0][0] for one in asked]
    changed, num_texts, accepted = [], 0, Counter[str]()
    for k in (NUM_MASKS,) if notes.dry else (0, 3, NUM_MASKS, None):
        for batch in batch_sizes:
            controller = None if k is None else layout(k)
            worker = Worker(model, num_blocks=600, controller=controller, device_steps=True)
            client = WorkerClient(worker, automatic=True)
            for _ in range(2):  # the first of them compiles and captures
                records = decode(client, [replace(asked[n % 4], max_draft_length=NUM_MASKS) for n in range(batch)])[0]
                for number, record in enumerate(records):
                    known = plain[number % 4]
                    num_texts += 1
                    if (record.tokens, record.logprobs) != (known.tokens, known.logprobs):
                        changed.append(f"{name}, k={k}, batch {batch}, sequence {number}")
                    accepted.update(outcome_name(*verdict) for verdict in record.verifications if verdict[0])
            _check_replays(notes, worker)
    figure = "exact" if path == "demo" else f"exact, {name}"
    notes.figure(f"{figure}: texts of device-resident steps that are bitwise equal", num_texts - len(changed))
    notes.figure(f"{figure}: texts that device-resident steps changed", len(changed))
    notes.note(f"{figure}, chains: " + ", ".join(f"{count} {name}" for name, count in sorted(accepted.items())))
    assert not changed, f"{len(changed)} of {num_texts} exact texts are not plain decoding's; the first: {changed[0]}"
    assert notes.dry or len(accepted) == 3, f"of no, some and all drafts accepted: only {', '.join(accepted)}"


def _check_replays(notes: Notes, worker: Worker) -> None:
    """Steps that launch kernel after kernel give the same texts, so graphs must be looked for."""
    assert notes.dry or worker.num_replays, (
        f"of {worker.num_forwards} steps none replayed a graph; the log says why none was captured"
    )


READ_LINE = "weights read"  # logged by a worker that has read its weights
FIRST_ANSWER_IDS = 32  # of the prompt whose first token is waited for


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
            if number and (notes.dry or notes.is_late(f"{name}, {which} start")):
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
