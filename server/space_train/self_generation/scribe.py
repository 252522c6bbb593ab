"""Keeps a worker's batch full: allocates pages, admits texts and collects their tokens."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from space_proto import worker_pb2 as pb

from space_train.self_generation.own_text_file import OwnText, OwnTextError
from space_train.self_generation.worker_link import WorkerLink

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


@dataclass(frozen=True)
class Ends:
    """End conditions of texts, and banned ids."""

    max_tokens: int
    eos_ids: tuple[int, ...]
    banned_ids: tuple[int, ...] = ()

    def num_blocks(self, prompt: Sequence[int], hello: pb.Hello) -> int:
        """Return the blocks of a whole text; its last id has no KV cache entry."""
        return -(-min(len(prompt) + self.max_tokens - 1, hello.window) // hello.block_size)


# each text is admitted with all its pages, so no running text waits for pages
# [prompt ............ | output ............ max_tokens)
class Scribe:
    """One worker's pages and its texts, in FIFO order."""

    def __init__(self, link: WorkerLink, texts: Sequence[UnfinishedText], ends: Ends, tally: ScribeCounts) -> None:
        self._link, self._ends, self._tally = link, ends, tally
        self._waiting = deque(texts)
        self._running: dict[int, UnfinishedText] = {}
        self._pages: dict[int, list[int]] = {}  # of running texts, and of finished texts not yet released
        self._free = deque(range(link.hello.num_blocks))
        self._last_seq_id = 0

    def write(self) -> Iterator[list[UnfinishedText]]:
        """Yield, after every report, the texts that it finished. Raises TextFailed or WorkerLost."""
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
        """Add the reported tokens to their text. Return whether the text is finished."""
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
        """Return commands to admit as many texts as fit."""
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
