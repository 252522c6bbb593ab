"""Device-resident steps against steps that wait for the host."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest
from exactness_matrix import Subject
from space_common.worker_client import WorkerClient
from space_model.loading.load import load_model
from space_server.device_runner.device_batch import why_on_host
from space_server.speculation.controller import FixedLayout
from space_server.worker import Worker

from gpu.llama import NUM_MASKS
from gpu.pace import DEVICE, HOST
from gpu.report import Notes
from gpu.ties import Comparison, compare, decode, demo_rule, outcome_name, request_of, settle

pytestmark = pytest.mark.gpu


def test_device_steps(notes: Notes) -> None:
    """Device-resident steps against steps that wait for the host, on the embedded model in float32: with the usual
    products up to ties, with exact ones to the last bit.
    """
    model = load_model("demo", dtype="float32", device=str(notes.device))
    if reason := why_on_host(model.facts):
        pytest.skip(reason)
    _exact_texts(notes)
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


def _exact_texts(notes: Notes) -> None:
    """Ids and log-probabilities of each text, whatever else is in the batch: those of plain
    decoding alone, with steps of the host.
    """
    model = load_model("demo", dtype="float32", device=str(notes.device), exact=True)
    subject = Subject("demo", model, seed=5)
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
            controller = None if k is None else FixedLayout.full(k)
            worker = Worker(model, num_blocks=600, controller=controller, device_steps=True)
            client = WorkerClient(worker, automatic=True)
            for _ in range(2):  # the first of them compiles and captures
                records = decode(client, [replace(asked[n % 4], max_draft_length=NUM_MASKS) for n in range(batch)])[0]
                for number, record in enumerate(records):
                    known = plain[number % 4]
                    num_texts += 1
                    if (record.tokens, record.logprobs) != (known.tokens, known.logprobs):
                        changed.append(f"k={k}, batch {batch}, sequence {number}")
                    accepted.update(outcome_name(*verdict) for verdict in record.verifications if verdict[0])
            _check_replays(notes, worker)
    notes.figure("exact: texts of device-resident steps that are bitwise equal", num_texts - len(changed))
    notes.figure("exact: texts that device-resident steps changed", len(changed))
    notes.note("exact, chains: " + ", ".join(f"{count} {name}" for name, count in sorted(accepted.items())))
    assert not changed, f"{len(changed)} of {num_texts} exact texts are not plain decoding's; the first: {changed[0]}"
    assert notes.dry or len(accepted) == 3, f"of no, some and all drafts accepted: only {', '.join(accepted)}"


def _check_replays(notes: Notes, worker: Worker) -> None:
    """Steps that launch kernel after kernel give the same texts, so graphs must be looked for."""
    assert notes.dry or worker.num_replays, (
        f"of {worker.num_forwards} steps none replayed a graph; the log says why none was captured"
    )
