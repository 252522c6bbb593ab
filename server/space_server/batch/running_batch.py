"""The sequences of one router stream: running, ended, and what is still to be reported of them."""

from __future__ import annotations

from collections.abc import Iterator

from space_proto import worker_pb2 as pb

from space_server.batch.sequence import RunningSequence


class RunningBatch:
    """Sequences by seq_id, oldest first."""

    def __init__(self) -> None:
        self._running: dict[int, RunningSequence] = {}
        self._ended: set[int] = set()  # reported as ended, not released yet
        self._released: list[int] = []  # to be acknowledged
        self._failed: list[pb.SequenceReport] = []  # to be reported

    def __len__(self) -> int:
        return len(self._running)

    def __iter__(self) -> Iterator[RunningSequence]:
        return iter(self._running.values())

    def __contains__(self, seq_id: int) -> bool:
        return seq_id in self._running or seq_id in self._ended

    def add(self, sequence: RunningSequence) -> None:
        """Add a sequence as the youngest."""
        self._running[sequence.seq_id] = sequence

    def get(self, seq_id: int) -> RunningSequence | None:
        """Return the running sequence, or None."""
        return self._running.get(seq_id)

    def end(self, seq_id: int) -> None:
        """Stop running this sequence. The router keeps its pages until it releases it."""
        self._running.pop(seq_id, None)
        self._ended.add(seq_id)

    def hand_back(self, seq_id: int) -> None:
        """Return a sequence that was never admitted, for the router to run elsewhere."""
        self.end(seq_id)
        self._failed.append(pb.SequenceReport(seq_id=seq_id, finish=pb.FINISH_RETURNED))

    def fail(self, seq_id: int, error: str) -> None:
        """End this sequence, running or never admitted, with an error."""
        sequence = self._running.get(seq_id)
        self.end(seq_id)
        self._failed.append(
            pb.SequenceReport(
                seq_id=seq_id,
                finish=pb.FINISH_ERROR,
                error=error,
                num_computed=sequence.num_computed if sequence is not None else 0,
            )
        )

    def release(self, seq_id: int) -> None:
        """Drop this sequence, running, ended or unknown, and acknowledge the release."""
        self.forget(seq_id)
        self.acknowledge(seq_id)

    def forget(self, seq_id: int) -> None:
        """Drop this sequence without acknowledging: a step in flight may still use its pages."""
        self._running.pop(seq_id, None)
        self._ended.discard(seq_id)
        self._failed = [report for report in self._failed if report.seq_id != seq_id]

    def acknowledge(self, seq_id: int) -> None:
        """Acknowledge the release of a forgotten sequence whose pages are no longer used."""
        self._released.append(seq_id)

    @property
    def has_news(self) -> bool:
        """Whether something is to be reported without a step."""
        return bool(self._released or self._failed)

    def take_news(self) -> tuple[list[int], list[pb.SequenceReport]]:
        """Return the releases to acknowledge and the failures to report; each is returned once."""
        released, self._released = self._released, []
        failed, self._failed = self._failed, []
        return released, failed
