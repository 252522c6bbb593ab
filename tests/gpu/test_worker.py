"""A worker process with the embedded model, over gRPC."""

from __future__ import annotations

import sys

import pytest
from exactness_matrix import Subject
from space_common.process import WorkerProcess
from space_common.worker_client import GrpcWorker, WorkerClient
from space_model.loading.load import load_model

from gpu.llama import NUM_MASKS
from gpu.report import Notes
from gpu.ties import Comparison, compare, decode, demo_rule, request_of, settle

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
