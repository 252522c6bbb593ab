"""Complete many prompts through one worker, several at a time; each ends early where its text is whole."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

from space_proto import worker_pb2 as pb
from space_server.worker import Worker

from space_eval.generation import Generation, GenerationFailed, Step


@dataclass(frozen=True)
class Request:
    """One text to complete."""

    key: str  # whose: a record's name
    sample: int  # which of the record's texts
    ids: Sequence[int]
    sampling: pb.Sampling


@dataclass
class _Running:
    request: Request
    generation: Generation
    pages: range


def complete(
    worker: Worker,
    requests: Iterable[Request],
    *,
    max_tokens: int,
    max_draft_length: int,
    eos_ids: Iterable[int] = (),
    is_whole: Callable[[Sequence[int]], bool] = lambda ids: False,
) -> Iterator[tuple[Request, Generation]]:
    """Each request with what it gave, in the order in which they end.

    The worker's blocks are shared out evenly over as many sequences as it runs: each has all its pages at once, so
    that nothing pauses. `is_whole(ids)` hears the emitted ids after each step; true ends the text there.
    """
    each = worker.num_blocks // worker.max_sequences
    free = [range(n * each, (n + 1) * each) for n in range(worker.max_sequences)]
    limits = pb.Limits(max_tokens=max_tokens, eos_ids=list(eos_ids))
    waiting = enumerate(requests, start=1)
    running: dict[int, _Running] = {}
    leaving: dict[int, range] = {}
    while True:
        while free and (item := next(waiting, None)) is not None:
            seq_id, request = item
            pages = free.pop()
            running[seq_id] = _Running(request, Generation(list(request.ids)), pages)
            worker.apply(
                pb.Command(
                    admit=pb.Admit(
                        seq_id=seq_id,
                        ids=request.ids,
                        num_prompt=len(request.ids),
                        pages=pages,
                        sampling=request.sampling,
                        limits=limits,
                        max_draft_length=max_draft_length,
                    )
                )
            )
        if not running and not leaving:
            return
        report = worker.step()
        if report is None:
            raise GenerationFailed(f"{len(running)} sequences wait and the worker does nothing.")
        for seq_id in report.released:
            free.append(leaving.pop(seq_id))
        for sequence in report.sequences:
            one = running.get(sequence.seq_id)
            if one is None:
                continue  # it was released in this step
            _write_down(one.generation, sequence)
            if one.generation.finish != pb.FINISH_NONE or is_whole(one.generation.tokens):
                del running[sequence.seq_id]
                leaving[sequence.seq_id] = one.pages
                worker.apply(pb.Command(release=pb.Release(seq_id=sequence.seq_id)))
                yield one.request, one.generation


def _write_down(generation: Generation, sequence: pb.SequenceReport) -> None:
    if sequence.finish == pb.FINISH_ERROR:
        raise GenerationFailed(sequence.error)
    if sequence.paused:
        raise GenerationFailed("A sequence ran out of pages: give the worker more blocks.")
    if sequence.decoded:
        generation.steps.append(Step(tuple(sequence.tokens), sequence.num_drafted, sequence.num_accepted))
    else:
        generation.first.extend(sequence.tokens)
    generation.finish = sequence.finish
