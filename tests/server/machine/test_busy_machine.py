"""On a machine that other programs keep busy, a worker loses what they take of it and no more, and no bit of a text."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from contextlib import ExitStack
from pathlib import Path
from statistics import median
from typing import Any

import pytest

pytestmark = pytest.mark.slow

NUM_THREADS, NUM_BUSY = 2, 4
FAIR = NUM_THREADS / (NUM_THREADS + NUM_BUSY)
"""What two of six runnable threads get of the machine, each of the two processors having three."""
LEAST = 0.8 * FAIR


@pytest.mark.parametrize("batch", [1, 16])
@pytest.mark.timeout(280)
def test_a_worker_among_four_busy_processes_keeps_its_fair_share(tmp_path: Path, batch: int) -> None:
    if not hasattr(os, "sched_getaffinity") or len(os.sched_getaffinity(0)) < NUM_THREADS:
        pytest.skip(f"needs {NUM_THREADS} processors whose load is known")
    command = [sys.executable, "-P", __file__, str(tmp_path / "model"), str(batch)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    found = json.loads(done.stdout.splitlines()[-1])
    if not found["compiled"]:
        pytest.skip("the compiled operations are not to be had here")
    assert found["texts"] == 1, "texts differ"
    assert median(found["busy"]) >= LEAST * median(found["quiet"]), found


def _measure(folder: Path, batch: int) -> dict[str, Any]:
    """Tokens per second, by turns quiet and busy, and how many different texts there were."""
    from space_kernels.build.cpu_library import cpu_library
    from space_model.loading.load import load_model
    from space_model.testing import tiny_checkpoint
    from space_server.machine.threads import run_in_thread

    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:NUM_THREADS])  # all that is started from here on
    tiny_checkpoint(
        folder, vocab_size=8192, hidden_size=576, num_layers=16, num_heads=9, kv_heads=3, head_dim=64, num_masks=0,
        dtype="bfloat16", words=True,
    )  # fmt: skip
    model = run_in_thread(lambda: load_model(folder, dtype="bfloat16", num_threads=NUM_THREADS))
    found: dict[str, list[float]] = {"quiet": [], "busy": []}
    texts = set()
    for _ in range(3):
        for name, num_busy in (("quiet", 0), ("busy", NUM_BUSY)):
            with ExitStack() as stack:
                for _ in range(num_busy):
                    stack.callback(_end, subprocess.Popen([sys.executable, "-c", "while True: pass"]))
                rate, text = _run(model, batch)
            found[name].append(rate)
            texts.add(text)
    return {**found, "texts": len(texts), "compiled": cpu_library() is not None}


def _end(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    process.wait()


def _run(model: Any, batch: int, num_steps: int = 120) -> tuple[float, str]:
    """Tokens per second of this many decode steps, and all ids."""
    from space_proto import worker_pb2 as pb
    from space_server.speculation.controller import FixedLayout
    from space_server.worker import Worker
    from space_server.worker_messages.hello import PROTOCOL_MAJOR

    length, pages = 32, 16
    worker = Worker(
        model, num_blocks=batch * pages, block_size=16, max_sequences=batch, max_prefill_rows=batch * length,
        controller=FixedLayout.full(0),
    )  # fmt: skip
    worker.apply(pb.Command(start=pb.Start(protocol_major=PROTOCOL_MAJOR)))
    for number in range(batch):
        ids = [(7 * number + 11 * place) % 8000 + 100 for place in range(length)]
        admit = pb.Admit(
            seq_id=number + 1, ids=ids, num_prompt=length, pages=range(number * pages, (number + 1) * pages),
            limits=pb.Limits(max_tokens=num_steps + 20),
        )  # fmt: skip
        worker.apply(pb.Command(admit=admit))
    told: list[list[int]] = []
    for step in range(num_steps + 10):
        if step == 10:
            begun = time.perf_counter()
        report = worker.step()
        assert report is not None
        told.append([token for sequence in report.sequences for token in sequence.tokens])
    return batch * num_steps / (time.perf_counter() - begun), json.dumps(told)


if __name__ == "__main__":
    sys.stdout.write(json.dumps(_measure(Path(sys.argv[1]), int(sys.argv[2]))) + "\n")
