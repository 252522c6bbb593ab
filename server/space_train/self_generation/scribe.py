"""Generates many texts with one worker, whose batch is kept full."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from space_common.worker_client import ClientSequence, GrpcWorker, SequenceRequest, WorkerClient
from space_proto import worker_pb2 as pb

from space_train.self_generation.own_text_file import OwnText, OwnTextError

MAX_PREFILL_ROWS = 1024
"""Prompt rows per step: time to first token does not matter here, so prefill chunks are large."""


class TextFailed(OwnTextError):
    """The worker reported an error for this text."""


@dataclass
class UnfinishedText:
    """A text in generation; its tokens so far are kept if the worker dies."""

    prompt: tuple[int, ...]
    temperature: float
    seed: int
    output: list[int] = field(default_factory=list)

    @property
    def finished(self) -> OwnText:
        """Return the text as it is written to the file."""
        return OwnText(self.prompt, tuple(self.output), self.temperature, self.seed)


@dataclass
class ScribeCounts:
    """Steps, rows and tokens of the generation."""

    num_steps: int = 0  # forward passes
    num_rows: int = 0  # rows of all passes: chain, masks and prompts
    num_tokens: int = 0  # generated

    def count(self, report: pb.StepReport) -> None:
        """Add a step."""
        stats = report.stats
        rows = stats.chain_rows + stats.mask_rows + stats.prefill_rows
        self.num_steps += rows > 0
        self.num_rows += rows
        self.num_tokens += sum(len(part.tokens) for part in report.sequences)


@dataclass(frozen=True)
class Ends:
    """End conditions of texts, and banned ids."""

    max_tokens: int
    eos_ids: tuple[int, ...]
    banned_ids: tuple[int, ...] = ()

    def num_blocks(self, prompt: Sequence[int], hello: pb.Hello) -> int:
        """Return the blocks of a whole text; its last id has no KV cache entry."""
        return -(-min(len(prompt) + self.max_tokens - 1, hello.window) // hello.block_size)


def write_texts(
    worker: GrpcWorker, texts: Sequence[UnfinishedText], ends: Ends, counts: ScribeCounts
) -> Iterator[list[UnfinishedText]]:
    """Yield, after every step, the texts that it finished, in FIFO order of admission.

    Each text is admitted with all its pages, so that no running text waits for pages. Raises TextFailed or WorkerLost.
    """
    hello, waiting = worker.hello, deque(texts)
    client = WorkerClient(
        worker, max_prefill_rows=MAX_PREFILL_ROWS, max_draft_length=hello.max_draft_length, keeps_reports=False
    )
    running: dict[int, UnfinishedText] = {}
    while running or waiting:
        while waiting and len(running) < hello.max_sequences:
            num_blocks = ends.num_blocks(waiting[0].prompt, hello)
            if num_blocks > len(client.free):
                break
            text = waiting.popleft()
            sampling = pb.Sampling(
                seed=text.seed,
                temperature=text.temperature,
                bad_words=[pb.IdRun(ids=[banned]) for banned in ends.banned_ids],
            )
            limits = pb.Limits(max_tokens=ends.max_tokens, eos_ids=ends.eos_ids)
            request = SequenceRequest(text.prompt, sampling, limits, max_draft_length=hello.max_draft_length)
            running[client.submit(ClientSequence(request, text.output), num_pages=num_blocks).seq_id] = text
        if (report := client.step()) is None:
            continue
        counts.count(report)
        ended = []
        for part in report.sequences:
            if part.finish == pb.FINISH_ERROR:
                text = running[part.seq_id]
                raise TextFailed(f"The text of seed {text.seed} ({len(text.prompt)} prompt ids) failed: {part.error}")
            if part.finish != pb.FINISH_NONE:
                client.release(part.seq_id)
                ended.append(running.pop(part.seq_id))
        yield ended
