"""Generates directly with a worker object, without router or sockets, for measurements."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from space_proto import worker_pb2 as pb
from space_server.worker import Worker


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
    worker: Worker, prompts: Iterable[Sequence[int]], *, sampling: pb.Sampling, **limits: Any
) -> Iterator[CompletionOutput]:
    """Yield the completion of each prompt in turn, each alone in the batch; `limits` as for `complete`."""
    for number, prompt in enumerate(prompts):
        request = CompletionRequest("", number, prompt, sampling)
        yield from (made for _, made in complete(worker, [request], max_sequences=1, **limits))


def complete(
    worker: Worker,
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

    The worker's pages are divided evenly among `max_sequences` (default: the worker's limit), so that each sequence
    has all its pages from the start and none pauses. `is_whole(ids)` gets the emitted ids after each step; if true,
    the text ends. `one_by_one`: at most one request joins the batch per step. Sequence ids are 1, 2, 3, …
    """
    at_once = max_sequences or worker.max_sequences
    share = worker.num_blocks // at_once
    free = [range(n * share, (n + 1) * share) for n in range(at_once)]
    limits = pb.Limits(max_tokens=max_tokens, eos_ids=list(eos_ids))
    waiting = enumerate(requests, start=1)
    running: dict[int, tuple[CompletionRequest, CompletionOutput, range]] = {}
    released: dict[int, range] = {}
    while True:
        while free and (item := next(waiting, None)) is not None:
            seq_id, request = item
            pages = free.pop()
            num_pages = -(-(len(request.ids) + max_tokens + max_draft_length + 1) // worker.block_size)
            running[seq_id] = request, CompletionOutput(list(request.ids)), pages
            worker.apply(
                pb.Command(
                    admit=pb.Admit(
                        seq_id=seq_id,
                        ids=request.ids,
                        num_prompt=len(request.ids),
                        pages=pages[:num_pages],
                        sampling=request.sampling,
                        limits=limits,
                        max_draft_length=max_draft_length,
                        want_logprobs=request.num_logprobs is not None,
                        num_logprobs=request.num_logprobs or 0,
                    )
                )
            )
            if one_by_one:
                break
        if not running and not released:
            return
        started = time.perf_counter()
        report = worker.step()
        seconds = time.perf_counter() - started
        if report is None:
            raise CompletionFailed(f"{len(running)} sequences wait and the worker does nothing.")
        for seq_id in report.released:
            free.append(released.pop(seq_id))
        if report.stepped:
            for _, generation, _ in running.values():
                generation.seconds += seconds
        for sequence in report.sequences:
            if sequence.seq_id not in running:
                continue  # it was released in this step
            request, generation, pages = running[sequence.seq_id]
            _add(generation, sequence, report.stats, seconds)
            if generation.finish != pb.FINISH_NONE or is_whole(generation.tokens):
                del running[sequence.seq_id]
                released[sequence.seq_id] = pages
                worker.apply(pb.Command(release=pb.Release(seq_id=sequence.seq_id)))
                yield request, generation


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
