"""A worker process with the embedded model, over gRPC."""

from __future__ import annotations

import pytest
from desk import Desk
from exactness_matrix import Subject
from space_model.loading.load import load_model

from gpu.demo_texts import compare, decode, demo_rule, request_of, settle
from gpu.llama import NUM_MASKS
from gpu.record import Notes
from gpu.ties import Comparison
from gpu.worker_process import connected, started_worker

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
    with started_worker(flags) as process, connected(process.address()) as connection:
        notes.note(f"{connection.hello.device}, attention {connection.hello.attention}, {connection.hello.dtype}")
        desk = Desk(connection)
        plain = [decode(desk, [request_of(subject, connection, num_tokens, drafts=0)])[0][0] for connection in range(4)]
        for batch in (1, largest):
            rates = {}
            for drafts in (0, NUM_MASKS):
                asked = [request_of(subject, number % 4, num_tokens, drafts=drafts) for number in range(batch)]
                records, rates[drafts] = decode(desk, asked)
                for number, record in enumerate(records):
                    where = f"{batch} streams, {drafts} drafts, stream {number}"
                    compare(found, where, record, plain[number % 4], desk, rule)
            for drafts, rate in rates.items():
                how = "with drafts" if drafts else "plain"
                notes.figure(f"demo over gRPC, {batch} streams, {how}", rate, "tokens/s")
        desk.check_all_free()
        status = process.stop()
    settle(notes, found, "texts over gRPC that drafts changed")
    assert status == 0, f"after SIGTERM the worker ended with status {status}"
