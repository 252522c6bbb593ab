"""Keeps a worker full: gives texts their pages, admits them, and takes down what the worker makes of them."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from space_proto import worker_pb2 as pb

from space_train.self_generation.own_text_file import OwnText, OwnTextError
from space_train.self_generation.worker_link import WorkerLink

MAX_PREFILL_ROWS = 1024
"""Prompt rows of one step: nobody waits for a first token, so prompts may come in large pieces."""


class TextFailed(OwnTextError):
    """The worker could not write this text."""


@dataclass
class UnfinishedText:
    """A text being written; what it has so far outlives the worker."""

    prompt: tuple[int, ...]
    temperature: float
    seed: int
    output: list[int] = field(default_factory=list)

    @property
    def finished(self) -> OwnText:
        """As it is kept."""
        return OwnText(self.prompt, tuple(self.output), self.temperature, self.seed)


@dataclass
class ScribeCounts:
    """What was spent."""

    num_steps: int = 0  # forward passes
    num_rows: int = 0  # of all of them: chain, masks and prompts
    num_tokens: int = 0  # written


@dataclass(frozen=True)
class Ends:
    """When a text ends, and what it may not hold."""

    max_tokens: int
    eos_ids: tuple[int, ...]
    banned_ids: tuple[int, ...] = ()

    def num_blocks(self, prompt: Sequence[int], hello: pb.Hello) -> int:
        """Blocks of a whole text; its last id is never computed."""
        return -(-min(len(prompt) + self.max_tokens - 1, hello.window) // hello.block_size)


# admitted at once with all its pages: no text ever waits for another one's
# [prompt ............ | output ............ max_tokens)
class Scribe:
    """One worker's pages and the texts on them, first come first served."""

    def __init__(self, link: WorkerLink, texts: Sequence[UnfinishedText], ends: Ends, tally: ScribeCounts) -> None:
        self._link, self._ends, self._tally = link, ends, tally
        self._waiting = deque(texts)
        self._running: dict[int, UnfinishedText] = {}
        self._pages: dict[int, list[int]] = {}  # of those that run, and of those that are not released yet
        self._free = deque(range(link.hello.num_blocks))
        self._last_seq_id = 0

    def write(self) -> Iterator[list[UnfinishedText]]:
        """After every report: the texts that have ended with it. Raises TextFailed or WorkerLost."""
        self._link.start(max_prefill_rows=MAX_PREFILL_ROWS)
        self._link.send(self._admissions())
        while self._running or self._waiting:
            report = self._link.report()
            self._count(report.stats)
            ended = {
                sequence.seq_id: self._running.pop(sequence.seq_id)
                for sequence in report.sequences
                if self._take_down(sequence)
            }
            for seq_id in report.released:
                self._free.extend(self._pages.pop(seq_id))
            releases = [pb.Command(release=pb.Release(seq_id=seq_id)) for seq_id in ended]
            self._link.send([*releases, *self._admissions()])
            yield list(ended.values())

    def _take_down(self, sequence: pb.SequenceReport) -> bool:
        """Whether this was the end of the text."""
        text = self._running[sequence.seq_id]
        if sequence.finish == pb.FINISH_ERROR:
            raise TextFailed(f"The text of seed {text.seed} ({len(text.prompt)} prompt ids) failed: {sequence.error}")
        text.output += sequence.tokens
        self._tally.num_tokens += len(sequence.tokens)
        return sequence.finish != pb.FINISH_NONE

    def _count(self, stats: pb.StepStats) -> None:
        rows = stats.chain_rows + stats.mask_rows + stats.prefill_rows
        self._tally.num_steps += rows > 0
        self._tally.num_rows += rows

    def _admissions(self) -> list[pb.Command]:
        """As many as there is room for."""
        commands = []
        hello = self._link.hello
        while self._waiting and len(self._running) < hello.max_sequences:
            text = self._waiting[0]
            num_blocks = self._ends.num_blocks(text.prompt, hello)
            if num_blocks > len(self._free):
                break
            self._waiting.popleft()
            self._last_seq_id += 1
            seq_id = self._last_seq_id
            self._running[seq_id] = text
            self._pages[seq_id] = [self._free.popleft() for _ in range(num_blocks)]
            commands.append(pb.Command(admit=self._admit(seq_id, text)))
        return commands

    def _admit(self, seq_id: int, text: UnfinishedText) -> pb.Admit:
        return pb.Admit(
            seq_id=seq_id,
            ids=[*text.prompt, *text.output],
            num_prompt=len(text.prompt),
            pages=self._pages[seq_id],
            sampling=pb.Sampling(
                seed=text.seed,
                temperature=text.temperature,
                bad_words=[pb.IdRun(ids=[banned]) for banned in self._ends.banned_ids],
            ),
            limits=pb.Limits(max_tokens=self._ends.max_tokens, eos_ids=self._ends.eos_ids),
            max_draft_length=self._link.hello.max_draft_length,
        )
