"""Stages with a worker process: how soon it answers, and what it says; and steps on the device against the host's."""

from __future__ import annotations

import gc
import shutil
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch
from space_model.loading.load import load_model
from space_proto import worker_pb2 as pb
from space_server.device_runner.device_scheduler import why_on_host
from space_server.machine.memory import free_bytes
from space_server.speculation.controller import FixedLayout
from space_server.worker import Worker

from space_eval.desk import Desk, Record, Request
from space_eval.equivalence import Subject
from space_eval.gpu_exact import device_of
from space_eval.gpu_llama import DRY, FIRST_MASK, NUM_MASKS, SHAPES, draft_head, random_llama, write_checkpoint
from space_eval.gpu_pace import DEVICE, HOST
from space_eval.gpu_process import WorkerLine, WorkerProcess, caches_in
from space_eval.gpu_record import Notebook, StageFailed, StageNotRun
from space_eval.gpu_ties import Judge, Verdicts, partings
from space_eval.greedy_oracle import GreedyOracle

FIRST_ANSWER_IDS = 32
"""Of the prompt whose first token is waited for."""


def start_1b(notes: Notebook, until: float) -> None:
    """Process to first answer."""
    _start(notes, "1b")


def start_8b(notes: Notebook, until: float) -> None:
    """Process to first answer."""
    _start(notes, "8b")


def _start(notes: Notebook, name: str) -> None:
    """Twice: with nothing compiled or measured on this machine before, and as at any later start."""
    shape, device = (DRY if notes.dry else SHAPES[name]), torch.device(device_of(notes))
    with tempfile.TemporaryDirectory(prefix="space-check") as place:
        free = shutil.disk_usage(place).free
        if free < 1.2 * shape.num_bytes or free_bytes(device) < 1.5 * shape.num_bytes:
            raise StageNotRun(f"{shape.num_bytes / 1024**3:.0f} GiB of weights do not fit on disk and device")
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
            with WorkerProcess(flags, environment=caches_in(Path(place))) as process:
                address = process.address()
                with WorkerLine(address) as line:
                    desk = Desk(line)
                    answered = _first_answer(desk)
                    rate = _plain_rate(desk, 16 if notes.dry else 200)
                status = process.stop()
            ready = (process.ready_at or answered) - process.started
            rows.append([which, f"{ready:.1f}", f"{answered - process.started:.1f}"])
            rows[-1].append("–" if process.read_at is None else f"{answered - process.read_at:.1f}")
            head = ["start", "s to ready", "s to the first answer", "s from the weights read to the first answer"]
            notes.table(f"{name}: process start", head, rows)
            if status:
                raise StageFailed(f"after SIGTERM the worker ended with status {status}")
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
    _decode(desk, [request])
    return _decode(desk, [request])[1]


# ------------------------------------------------------------------------------------------- the embedded model


def worker(notes: Notebook, until: float) -> None:
    """The embedded model behind gRPC: streams beside each other, with drafts and without, and a clean end."""
    device = device_of(notes)
    num_tokens, crowd = (24, 2) if notes.dry else (192, 16)
    flags = ["--model", "demo", "--device", device, "--dtype", "float32", "--log-level", "info"]
    flags += ["--num-blocks", "512", "--calibration-seconds", "0.2" if notes.dry else "3"]
    subject = Subject("demo", load_model("demo", dtype="float32", device="cpu"), seed=3)
    verify_sequences = _judge(subject)
    verifications = Verdicts()
    with WorkerProcess(flags) as process, WorkerLine(process.address()) as line:
        notes.note(f"{line.hello.device}, attention {line.hello.attention}, {line.hello.dtype}")
        desk = Desk(line)
        plain = [_decode(desk, [_request(subject, connection, num_tokens, drafts=0)])[0][0] for connection in range(4)]
        for batch in (1, crowd):
            rates = {}
            for drafts in (0, NUM_MASKS):
                asked = [_request(subject, number % 4, num_tokens, drafts=drafts) for number in range(batch)]
                records, rates[drafts] = _decode(desk, asked)
                for number, record in enumerate(records):
                    where = f"{batch} streams, {drafts} drafts, stream {number}"
                    _compare(verifications, where, record, plain[number % 4], desk, verify_sequences)
            for drafts, rate in rates.items():
                how = "with drafts" if drafts else "plain"
                notes.figure(f"demo over gRPC, {batch} streams, {how}", rate, "tokens/s")
        desk.check_all_free()
        status = process.stop()
    _settle(notes, verifications, "texts over gRPC that drafts changed")
    if status:
        raise StageFailed(f"after SIGTERM the worker ended with status {status}")


def device_steps(notes: Notebook, until: float) -> None:
    """Device-resident steps against steps that wait for the host, on the embedded model in float32: with the usual
    products up to ties, with exact ones to the last bit.
    """
    model = load_model("demo", dtype="float32", device=device_of(notes))
    if reason := why_on_host(model.facts):
        raise StageNotRun(reason)
    _exact_texts(notes)
    subject = Subject("demo", model, seed=5)
    verify_sequences = _judge(subject)
    num_tokens, crowds = (16, (2,)) if notes.dry else (192, (1, 4, 16))
    verifications, rows = Verdicts(), []
    for k in (NUM_MASKS,) if notes.dry else (0, 3, NUM_MASKS, None):
        for batch in crowds:
            rates, texts = {}, {}
            for how in (HOST, DEVICE):
                controller = None if k is None else FixedLayout.full(k)
                worker = Worker(model, num_blocks=600, controller=controller, device_steps=how == DEVICE)
                desk = Desk(worker)
                asked = [
                    replace(
                        _request(subject, connection % 4, num_tokens, drafts=NUM_MASKS if k is None else k),
                        slots_ahead=num_tokens,
                    )
                    for connection in range(batch)
                ]
                _decode(desk, asked)  # compiles and captures
                texts[how], rates[how] = _decode(desk, asked)
                desk.check_all_free()
                if how == DEVICE:
                    _check_replays(notes, worker)
            for connection, (ours, theirs) in enumerate(zip(texts["device"], texts["host"], strict=True)):
                _compare(
                    verifications, f"k={k}, batch {batch}, sequence {connection}", ours, theirs, desk, verify_sequences
                )
            name = "auto" if k is None else f"k={k}"
            rows.append(
                [name, batch, *(f"{rates[how]:.0f}" for how in rates), f"{rates['device'] / rates['host']:.2f}"]
            )
            head = ["layout", "batch", "host, tokens/s", "device, tokens/s", "device/host"]
            notes.table("demo: steps on the host and on the device", head, rows)
    _settle(notes, verifications, "texts that device-resident steps changed")


def _exact_texts(notes: Notebook) -> None:
    """Ids and log-probabilities of each text, whatever the device drafts beside whom: plain decoding's, alone and
    stepped by the host.
    """
    model = load_model("demo", dtype="float32", device=device_of(notes), exact=True)
    subject = Subject("demo", model, seed=5)
    num_tokens, crowds = (16, (2,)) if notes.dry else (192, (1, 4, 16))
    asked = [
        replace(_request(subject, connection, num_tokens, drafts=0), slots_ahead=num_tokens) for connection in range(4)
    ]
    asked = [replace(one, want_logprobs=connection > 1, num_logprobs=4) for connection, one in enumerate(asked)]
    plainly = Desk(Worker(model, num_blocks=600, controller=FixedLayout.full(0)))
    plain = [_decode(plainly, [one])[0][0] for one in asked]
    changed, num_texts, accepted = [], 0, Counter[str]()
    for k in (NUM_MASKS,) if notes.dry else (0, 3, NUM_MASKS, None):
        for batch in crowds:
            controller = None if k is None else FixedLayout.full(k)
            worker = Worker(model, num_blocks=600, controller=controller, device_steps=True)
            desk = Desk(worker)
            for _ in range(2):  # the first of them compiles and captures
                records = _decode(desk, [replace(asked[n % 4], max_draft_length=NUM_MASKS) for n in range(batch)])[0]
                for number, record in enumerate(records):
                    known = plain[number % 4]
                    num_texts += 1
                    if (record.tokens, record.logprobs) != (known.tokens, known.logprobs):
                        changed.append(f"k={k}, batch {batch}, sequence {number}")
                    accepted.update(_outcome(*verification) for verification in record.verifications if verification[0])
            _check_replays(notes, worker)
    notes.figure("exact: texts of device-resident steps that are bitwise equal", num_texts - len(changed))
    notes.figure("exact: texts that device-resident steps changed", len(changed))
    notes.note("exact, verdicts: " + ", ".join(f"{count} {name}" for name, count in sorted(accepted.items())))
    if changed:
        raise StageFailed(
            f"{len(changed)} of {num_texts} exact texts are not plain decoding's; the first: {changed[0]}"
        )
    if not notes.dry and len(accepted) < 3:
        raise StageFailed(f"of no, some and all drafts accepted there was only: {', '.join(accepted)}")


def _outcome(drafted: int, accepted: int) -> str:
    return "a = 0" if not accepted else "a = k" if accepted == drafted else "0 < a < k"


def _check_replays(notes: Notebook, worker: Worker) -> None:
    """A GPU that is given kernel after kernel gives the same texts; that it was given graphs must be looked at."""
    if not notes.dry and not worker.num_replays:
        raise StageFailed(f"of {worker.num_forwards} steps none replayed a graph; the log says why none was captured")


def _judge(subject: Subject) -> Judge:
    import importlib.resources

    with importlib.resources.as_file(importlib.resources.files("space_demo")) as folder:
        return Judge(GreedyOracle(folder, banned_ids=subject.model.facts.mask_ids), torch.float32)


def _request(subject: Subject, connection: int, num_tokens: int, *, drafts: int) -> Request:
    """Seats 1 and 3 sample."""
    sampling = pb.Sampling(seed=connection, temperature=0.8 if connection % 2 else 0.0)
    prompt = subject.prompt(connection, long=False)
    limits = pb.Limits(max_tokens=num_tokens)
    return Request(prompt, sampling, limits, max_draft_length=drafts, slots_ahead=num_tokens)


def _decode(desk: Desk, requests: Sequence[Request]) -> tuple[list[Record], float]:
    """All beside each other; tokens per second from the first to the last."""
    records = [Record(request) for request in requests]
    for record in records:
        desk.admit(record)
    desk.run(lambda: all(record.tokens for record in records))
    begun, before = time.perf_counter(), sum(len(record.tokens) for record in records)
    desk.run(lambda: not desk.records)
    made = sum(len(record.tokens) for record in records) - before
    return records, made / (time.perf_counter() - begun)


def _compare(
    verifications: Verdicts, where: str, ours: Record, theirs: Record, desk: Desk, verify_sequences: Judge
) -> None:
    def behind(known: Sequence[int]) -> list[int]:
        if not known:
            return theirs.tokens
        again = Record(replace(theirs.request, max_draft_length=0), tokens=list(known))
        desk.admit(again)
        desk.run(lambda: not desk.records)
        return again.tokens[len(known) :]

    found = partings(where, ours.request.prompt, ours.tokens, behind, verify_sequences, ours.request.sampling)
    verifications.add(found, len(ours.tokens))


def _settle(notes: Notebook, verifications: Verdicts, name: str) -> None:
    notes.figure("texts compared", verifications.num_texts)
    notes.figure("ties", len(verifications.ties))
    for tie in verifications.ties[:8]:
        notes.note(f"tie: {tie}")
    notes.figure(name, len({fault.where for fault in verifications.faults}))
    if verifications.faults:
        raise StageFailed(f"texts part where it is no tie; the first: {verifications.faults[0]}")
