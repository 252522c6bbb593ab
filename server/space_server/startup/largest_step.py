"""Runs the largest possible step once before the KV cache is allocated, to learn how much memory it needs.

The sequences are synthetic; their keys and values lie on a few temporary pages. torch keeps what it allocated for
activations, so the memory that is free afterwards stays free.
"""

from __future__ import annotations

import random
from collections.abc import Callable

from space_common.worker_client import WorkerClient
from space_model.geometry.draft_layout import DraftLayout
from space_proto import worker_pb2 as pb

from space_server.device_runner.device_runner import DeviceRunner
from space_server.machine.memory import NotEnoughMemory, give_back_unused, is_out_of_memory
from space_server.model_runner import StepModel
from space_server.speculation.controller import FixedLayout
from space_server.worker import Worker


def take_largest_step(model: StepModel, *, max_sequences: int, max_prefill_rows: int, block_size: int) -> int:
    """Decode every sequence with whole mask groups and sampling beside a prompt of `max_prefill_rows`; return the rows.
    Raises NotEnoughMemory if that does not fit beside the weights."""
    facts = model.facts
    k = facts.most_masks
    layout = DraftLayout.full(k, k) if k else DraftLayout.plain()
    prompt = max(1, min(max_prefill_rows, facts.window - 2 * k - 4))
    # A sequence: one id of prompt, the drafts of two steps, and what those may emit.
    own, large = -(-(2 * k + 4) // block_size), -(-(prompt + k + 3) // block_size)
    num_blocks = (max_sequences - 1) * own + large
    rng = random.Random(0)
    allowed = [id_ for id_ in range(min(facts.vocab_size, 4096)) if id_ not in set(facts.mask_ids)]
    try:
        worker = Worker(
            model, num_blocks=num_blocks, block_size=block_size, max_sequences=max_sequences,
            controller=FixedLayout(lambda room: layout),
        )  # fmt: skip
        client = WorkerClient(worker, max_prefill_rows=1 << 20, max_draft_length=k)

        def admit(num_ids: int, num_pages: int) -> None:
            client.admit(
                rng.choices(allowed, k=num_ids), max_tokens=2 * k + 3, num_pages=num_pages,
                sampling=pb.Sampling(seed=len(client.sequences) + 1, temperature=1.0, top_p=0.95), max_draft_length=k,
            )  # fmt: skip

        for _ in range(max_sequences - 1):
            admit(1, own)
        errors = _errors(client.step())
        admit(prompt, large)
        report = client.step()
        errors += _errors(report)
        if worker.num_forwards != 1 + (max_sequences > 1):
            errors.append("Its sequences had to be stepped one by one.")
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        errors, report = [str(error).partition("\n")[0]], None
    if errors:
        give_back_unused()
        raise NotEnoughMemory(
            f"The largest step, {max_sequences} sequences with {k} drafts each and {prompt} rows of prompts, cannot be "
            f"taken beside the weights on {facts.device}: {errors[0]} Lower --max-sequences or --speculation."
        )
    stats = pb.StepStats() if report is None else report.stats
    return stats.chain_rows + stats.mask_rows + stats.prefill_rows


def bytes_of_graphs(model: StepModel, *, max_sequences: int, block_size: int, available: Callable[[], int]) -> int:
    """Return the bytes that device steps need beside weights and pages: their state, and the largest CUDA graph's
    memory, which the others share. They must stay free when pages are allocated.

    `available`: returns the bytes that are free now.
    """
    before = available()
    kv = model.allocate_kv(1, block_size)
    runner = DeviceRunner(model, kv, max_sequences=max_sequences)
    try:
        runner.take_largest()
        taken = max(0, before - available())
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        taken = 0  # such steps run without a graph, or on the host
    del runner, kv
    give_back_unused()
    return taken


def _errors(report: pb.StepReport | None) -> list[str]:
    """Return failures, except non-finite logits, which arbitrary ids may cause."""
    sequences = report.sequences if report is not None else ()
    return [sequence.error for sequence in sequences if sequence.error.startswith(("The step failed", "There is not"))]
