"""The sequences of one router's stream: those that run, those that have ended, and what is still to be said of them."""

from __future__ import annotations

from collections.abc import Iterator

from space_proto import worker_pb2 as pb

from space_server.batch.sequence import RunningSequence


class RunningBatch:
    """Sequences by number, oldest first."""

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
        """Run this sequence, as the youngest."""
        self._running[sequence.seq_id] = sequence

    def get(self, seq_id: int) -> RunningSequence | None:
        """A running sequence."""
        return self._running.get(seq_id)

    def end(self, seq_id: int) -> None:
        """This sequence runs no more; its pages stay the router's until it is released."""
        self._running.pop(seq_id, None)
        self._ended.add(seq_id)

    def hand_back(self, seq_id: int) -> None:
        """This sequence, which was never admitted, is to run elsewhere."""
        self.end(seq_id)
        self._failed.append(pb.SequenceReport(seq_id=seq_id, finish=pb.FINISH_RETURNED))

    def fail(self, seq_id: int, error: str) -> None:
        """This sequence, running or never admitted, ends with an error."""
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
        """Forget this sequence, whether it runs, has ended, or was never here, and say so."""
        self.forget(seq_id)
        self.acknowledge(seq_id)

    def forget(self, seq_id: int) -> None:
        """This sequence is nobody's any more, but its pages may still be in use: that is said by `acknowledge`."""
        self._running.pop(seq_id, None)
        self._ended.discard(seq_id)
        self._failed = [report for report in self._failed if report.seq_id != seq_id]

    def acknowledge(self, seq_id: int) -> None:
        """Nothing uses the pages of this forgotten sequence any more."""
        self._released.append(seq_id)

    @property
    def has_news(self) -> bool:
        """Something is to be said without a step."""
        return bool(self._released or self._failed)

    def take_news(self) -> tuple[list[int], list[pb.SequenceReport]]:
        """Releases to acknowledge and failures to report; each is given out once."""
        released, self._released = self._released, []
        failed, self._failed = self._failed, []
        return released, failed
