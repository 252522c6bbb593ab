"""Which request kills workers: found by running those that may alone."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from space_router.engine.errors import WorkerFailed
from space_router.engine.queueing.admission import Admitted, QueueAdmission, Rejected, too_large
from space_router.engine.queueing.queue import RequestQueue
from space_router.engine.request.request_state import RequestState
from space_router.engine.scheduling.scheduler import Scheduler
from space_router.engine.workers.exit_cause import ExitCause

PATIENCE = 10.0  # seconds that suspects wait for a worker that is missing, before the only one is emptied
HOLD = 1.0  # seconds that the others wait for their worker to be done with trials, before they go elsewhere
GROWTH = 16  # a trial lasts 1 token, then 16, then 256: whoever kills now and then is alone some time when he does


class CrashQuarantine:
    """A worker that ends by itself leaves everybody it ran under suspicion.

    A suspect runs alone on a worker until it has some tokens more. Whose worker ends by itself meanwhile is refused;
    everybody else is cleared. He is held a moment, as are those who ran where suspects are tried now: when the last
    trial is over they go on there, where what has been computed of them is in the prefix cache.

    Where nobody can tell why a worker was lost, its machine has most likely been switched off or cut from the network.
    So there only those are suspects whom it had given few tokens yet: most requests that kill do so at their
    beginning. The others go on at once, wherever is room. One of them that kills all the same ends a second worker in
    the step in which it ended the first, without a token from it, and is now tried alone: it has killed three when it
    is refused, others two.
    """

    def __init__(self, queue: RequestQueue, admission: QueueAdmission) -> None:
        self._queue, self._admission = queue, admission
        self._suspects: list[RequestState] = []  # oldest first
        self._held: dict[RequestState, float] = {}  # cleared, or in the way: since when, on the engine's clock
        self._last_court: Scheduler | None = None
        self._since: float | None = None  # seconds on the engine's clock: suspects wait, and no worker tries them

    def lost(self, live: RequestState, cause: ExitCause, *, num_given: int) -> WorkerFailed | None:
        """The worker that ran this request is lost; what to tell it if it was the one, alone on trial.

        `num_given`: tokens it had from that worker.
        """
        if cause is ExitCause.OUTSIDE:
            return None
        is_guilty = live.is_suspect
        self.forget(live)
        live.num_suspicions += 1
        if is_guilty:
            return WorkerFailed(
                f"{live.num_suspicions} workers ended while they ran this request, the last one while it ran nothing "
                "else. It is not tried again. Change the request; the log has the workers' last words."
            )
        num_tokens = int(GROWTH ** (live.num_suspicions - 1))
        if cause is ExitCause.UNKNOWN and num_given >= max(GROWTH, num_tokens):
            return None
        live.cleared_at = live.num_generated + num_tokens
        self._suspects.append(live)
        return None

    def holds(self, live: RequestState) -> bool:
        """It waits for its trial, or for those of others, and has no place in the queue's order."""
        return live.is_suspect or live in self._held

    def admit(self, schedulers: Sequence[Scheduler], now: float, *, complete: bool) -> Iterator[Admitted | Rejected]:
        """All that can go now: the next suspect to a worker of its own, and others to the other workers.

        `complete`: no worker is missing; else one may be about to come that is empty, and suspects wait for it a while.
        """
        self._let_go(schedulers, now)
        self._admission.oversized.review(schedulers, complete=complete)
        yield from self._turned_away(schedulers, now, complete=complete)
        court = self._court(schedulers, now, complete=complete)
        if court is not self._last_court:  # who fits no other worker stands aside while it tries suspects
            self._last_court = court
            self._admission.oversized.let_back()
        if court is None:
            yield from self._admission.admit(schedulers, now, complete=complete)
            return
        while not court.sequences and (waiting := [live for live in self._waiting() if court.fits(live)]):
            gone = self._admission.place(waiting[0], [court], now, complete=complete)
            if gone is None:
                break
            yield gone
        others = [scheduler for scheduler in schedulers if scheduler is not court]
        yield from self._admission.admit(others, now, complete=False)
        if self._waiting() or self._queue.head(now) is not None:
            court.preempt_stalled()  # a suspect whose reader does not read is tried when it does

    def advanced(self, live: RequestState, scheduler: Scheduler, now: float) -> None:
        """A suspect has been given tokens: it may be cleared, and makes way if another waits."""
        if live.cleared_at is None or live.num_generated < live.cleared_at:
            return
        self.forget(live)
        if self._waiting() and scheduler.recall(live):
            self._held[live] = now

    def forget(self, live: RequestState) -> None:
        """It is no suspect, and stands in nobody's way."""
        live.cleared_at = None
        self._held.pop(live, None)
        if live in self._suspects:
            self._suspects.remove(live)

    def _waiting(self) -> list[RequestState]:
        """Suspects that could be tried now; one whose reader is too far behind could not go on, and some fit nobody."""
        oversized = self._admission.oversized
        return [live for live in self._suspects if live in self._queue and not live.lagging and live not in oversized]

    def _turned_away(self, schedulers: Sequence[Scheduler], now: float, *, complete: bool) -> Iterator[Rejected]:
        """Suspects that fit no worker stand aside, too; who waits for one in vain is turned away."""
        oversized = self._admission.oversized
        for live in self._waiting():
            if oversized.takes(live, schedulers, now) and complete and not any(s.fits(live) for s in schedulers):
                yield Rejected(live, too_large())
        for live in oversized.overdue(schedulers, now):
            yield Rejected(live, too_large())

    def _court(self, schedulers: Sequence[Scheduler], now: float, *, complete: bool) -> Scheduler | None:
        """The worker that tries suspects: one that does, else the least busy one where the first of them fits, from
        which all are taken off.
        """
        waiting = self._waiting()
        trying = [scheduler for scheduler in schedulers if scheduler.tries]
        if trying or not waiting or not schedulers:
            self._since = None
            return trying[0] if trying else None
        self._since = now if self._since is None else self._since
        fit = [scheduler for scheduler in schedulers if scheduler.fits(waiting[0]) and not scheduler.closing]
        if not fit:
            return None
        court = min(fit, key=lambda scheduler: scheduler.num_running)
        is_only = all(scheduler is court or scheduler.closing for scheduler in schedulers)
        if court.num_running and is_only and not complete and now - self._since < PATIENCE:
            return None
        self._held |= {sequence.live: now for sequence in court.running if court.recall(sequence.live)}
        return court

    def _let_go(self, schedulers: Sequence[Scheduler], now: float) -> None:
        """Those that are held go on once nobody is on trial or waits for it, or they have waited long enough."""
        if not self._held:
            return
        is_over = not self._waiting() and not any(scheduler.tries for scheduler in schedulers)
        for live in [live for live, since in self._held.items() if is_over or now - since >= HOLD]:
            del self._held[live]
            if live in self._queue and not live.lagging:
                self._queue.unpark(live)
