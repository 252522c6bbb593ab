"""Completions of many prompts by one worker in this process, with what each decode step drafted and took."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from space_proto import worker_pb2 as pb

from space_common.worker.client import ClientSequence, SequenceRequest, SteppedWorker, WorkerClient


class BatchWorker(SteppedWorker, Protocol):
    """A worker that says how many sequences it runs at once."""

    @property
    def max_sequences(self) -> int: ...


@dataclass(frozen=True)
class DecodeStep:
    """One decode step of one sequence."""

    tokens: tuple[int, ...]  # emitted: accepted drafts, then the bonus token
    num_drafted: int
    num_accepted: int


@dataclass
class CompletionOutput:
    """The generation of one prompt."""

    prompt_ids: list[int]
    first: list[int] = field(default_factory=list)  # the prefill's token
    steps: list[DecodeStep] = field(default_factory=list)
    logprobs: list[pb.TokenLogprobs] = field(default_factory=list)  # of all emitted ids, if requested
    finish: pb.Finish.ValueType = pb.FINISH_NONE
    seconds: float = 0.0  # of all steps while this sequence ran
    decode_seconds: float = 0.0  # of the steps after the prefill
    num_rows: int = 0  # chain and mask rows of the decode steps, of the whole batch

    @property
    def tokens(self) -> list[int]:
        """All emitted ids."""
        return [*self.first, *(token for step in self.steps for token in step.tokens)]

    @property
    def num_decoded(self) -> int:
        """Number of emitted ids without the prefill's token."""
        return sum(len(step.tokens) for step in self.steps)


class CompletionFailed(RuntimeError):
    """The worker reported an error for a sequence, or stopped before it was finished."""


@dataclass(frozen=True)
class CompletionRequest:
    """One text to complete."""

    key: str  # name of its record
    sample: int  # index of the text among those of the record
    ids: Sequence[int]
    sampling: pb.Sampling
    num_logprobs: int | None = None  # most probable ids to report at each position; None: no log-probabilities


def generate(
    worker: BatchWorker, prompts: Iterable[Sequence[int]], *, sampling: pb.Sampling, **limits: Any
) -> Iterator[CompletionOutput]:
    """Yield the completion of each prompt in turn, each alone in the batch; `limits` as for `complete`."""
    for number, prompt in enumerate(prompts):
        request = CompletionRequest("", number, prompt, sampling)
        yield from (made for _, made in complete(worker, [request], max_sequences=1, **limits))


def complete(
    worker: BatchWorker,
    requests: Iterable[CompletionRequest],
    *,
    max_tokens: int,
    max_draft_length: int,
    eos_ids: Iterable[int] = (),
    is_whole: Callable[[Sequence[int]], bool] = lambda ids: False,
    max_sequences: int | None = None,
    one_by_one: bool = False,
) -> Iterator[tuple[CompletionRequest, CompletionOutput]]:
    """Yield each request with its generation, running several at a time, in order of completion.

    At most `max_sequences` (default: the worker's limit) run at once, each with all its pages from the start, so that
    none pauses. `is_whole(ids)` gets the emitted ids after each step; if true, the text ends. `one_by_one`: at most one
    request joins the batch per step. Sequence ids are 1, 2, 3, …
    """
    client, at_once = WorkerClient(worker, keeps_reports=False), max_sequences or worker.max_sequences
    limits, ended = pb.Limits(max_tokens=max_tokens, eos_ids=list(eos_ids)), set[int]()

    def asked() -> Iterator[ClientSequence]:
        for request in requests:
            how: dict[str, Any] = {
                "want_logprobs": request.num_logprobs is not None,
                "num_logprobs": request.num_logprobs or 0,
            }
            wanted = SequenceRequest(tuple(request.ids), request.sampling, limits, max_draft_length, **how)
            yield ClientSequence(wanted, key=(request, CompletionOutput(list(request.ids))))

    def num_pages(sequence: ClientSequence) -> int:
        needed = -(-(sequence.num_ids + max_tokens + max_draft_length + 1) // worker.block_size)
        return min(needed, worker.num_blocks // at_once)

    for report, seconds in client.run_in_turn(asked(), num_pages, at_once=at_once, one_by_one=one_by_one):
        running = {seq_id: one.key for seq_id, one in client.running.items() if seq_id not in ended}
        if report is None:
            raise CompletionFailed(f"{len(running)} sequences wait and the worker does nothing.")
        if report.stepped:
            for _, output in running.values():
                output.seconds += seconds
        for part in report.sequences:
            if part.seq_id not in running:
                continue  # it was released in this step
            request, output = running[part.seq_id]
            _add(output, part, report.stats, seconds)
            if output.finish != pb.FINISH_NONE or is_whole(output.tokens):
                ended.add(part.seq_id)
                client.release(part.seq_id)
                yield request, output


def _add(generation: CompletionOutput, sequence: pb.SequenceReport, stats: pb.StepStats, seconds: float) -> None:
    """Add a step's report on the sequence; the step took `seconds`."""
    if sequence.finish == pb.FINISH_ERROR:
        raise CompletionFailed(sequence.error)
    if sequence.paused:
        raise CompletionFailed("A sequence ran out of pages: give the worker more blocks.")
    if sequence.decoded:
        generation.decode_seconds += seconds
        generation.num_rows += stats.chain_rows + stats.mask_rows
        generation.steps.append(DecodeStep(tuple(sequence.tokens), sequence.num_drafted, sequence.num_accepted))
    else:
        generation.first.extend(sequence.tokens)
    generation.logprobs.extend(sequence.logprobs)
    generation.finish = sequence.finish
