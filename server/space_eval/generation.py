"""Generate straight from a worker object, without router or sockets: for measuring."""

import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field

from space_proto import worker_pb2 as pb
from space_server.worker import Worker


@dataclass(frozen=True)
class Step:
    """One decode step of one sequence."""

    tokens: tuple[int, ...]  # emitted: the accepted drafts, then the bonus
    num_drafted: int
    num_accepted: int


@dataclass
class Generation:
    """What one prompt yielded."""

    prompt_ids: list[int]
    first: list[int] = field(default_factory=list)  # the prefill's own token
    steps: list[Step] = field(default_factory=list)
    finish: pb.Finish.ValueType = pb.FINISH_NONE
    decode_seconds: float = 0.0  # steps after the prompt, while this sequence ran

    @property
    def tokens(self) -> list[int]:
        """All emitted ids."""
        return [*self.first, *(token for step in self.steps for token in step.tokens)]

    @property
    def num_decoded(self) -> int:
        """Emitted ids without the prefill's own."""
        return sum(len(step.tokens) for step in self.steps)


class GenerationFailed(RuntimeError):
    """The worker reported an error for a sequence."""


def generate(
    worker: Worker,
    prompts: Iterable[list[int]],
    *,
    sampling: pb.Sampling,
    max_tokens: int,
    max_draft_length: int,
    eos_ids: Iterable[int] = (),
    clock: Callable[[], float] = time.perf_counter,
) -> Iterator[Generation]:
    """Run the prompts one after the other, each alone in the batch, and yield what each gave.

    Every sequence gets all the pages it can need at once, so that nothing pauses.
    """
    eos = list(eos_ids)
    for seq_id, prompt in enumerate(prompts, start=1):
        num_pages = -(-(len(prompt) + max_tokens + max_draft_length + 1) // worker.block_size)
        worker.apply(
            pb.Command(
                admit=pb.Admit(
                    seq_id=seq_id,
                    ids=prompt,
                    num_prompt=len(prompt),
                    pages=range(min(num_pages, worker.num_blocks)),
                    sampling=sampling,
                    limits=pb.Limits(max_tokens=max_tokens, eos_ids=eos),
                    max_draft_length=max_draft_length,
                )
            )
        )
        yield _run(worker, seq_id, Generation(prompt), clock)
        worker.apply(pb.Command(release=pb.Release(seq_id=seq_id)))
        worker.step()


def _run(worker: Worker, seq_id: int, generation: Generation, clock: Callable[[], float]) -> Generation:
    while generation.finish == pb.FINISH_NONE:
        started = clock()
        report = worker.step()
        seconds = clock() - started
        for sequence in report.sequences if report is not None else ():
            if sequence.seq_id != seq_id:
                continue
            if sequence.finish == pb.FINISH_ERROR:
                raise GenerationFailed(sequence.error)
            if sequence.decoded:
                generation.decode_seconds += seconds
                generation.steps.append(Step(tuple(sequence.tokens), sequence.num_drafted, sequence.num_accepted))
            else:
                generation.first.extend(sequence.tokens)
            generation.finish = sequence.finish
    return generation
