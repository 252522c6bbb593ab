"""Which request kills workers: found by running those that may alone."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from space_router.engine.admission import Admission, Admitted, TurnedAway
from space_router.engine.errors import WorkerFailed
from space_router.engine.live_request import LiveRequest
from space_router.engine.queue import RequestQueue
from space_router.engine.scheduler import Scheduler

PATIENCE = 10.0  # seconds that suspects wait for a worker that is missing, before one that runs others is emptied
GROWTH = 16  # a trial lasts 1 token, then 16, then 256: whoever kills now and then is alone some time when he does


class Trials:
    """A worker that ends by itself leaves everybody it ran under suspicion.

    A suspect runs alone on a worker until it has some tokens more. Whose worker ends by itself meanwhile has killed
    two, and is refused; everybody else is cleared, and is held until no other suspect is left to be tried, so that
    each is alone. What has been computed of him is in the prefix cache when he comes back.
    """

    def __init__(self, queue: RequestQueue, admission: Admission) -> None:
        self._queue, self._admission = queue, admission
        self._suspects: list[LiveRequest] = []  # oldest first
        self._held: list[LiveRequest] = []  # cleared, or in the way
        self._since: float | None = None  # seconds on the engine's clock: suspects wait, and no worker tries them

    def suspect(self, live: LiveRequest) -> WorkerFailed | None:
        """The worker that ran this request has ended by itself; what to tell it if it was the one, alone on trial."""
        is_guilty = live.is_suspect
        self.forget(live)
        live.num_suspicions += 1
        if is_guilty:
            return WorkerFailed(
                f"{live.num_suspicions} workers ended while they ran this request, the last one while it ran nothing "
                "else. It is not tried again. Change the request; the log has the workers' last words."
            )
        live.cleared_at = live.num_generated + int(GROWTH ** (live.num_suspicions - 1))
        self._suspects.append(live)
        return None

    def holds(self, live: LiveRequest) -> bool:
        """It waits for its trial, or for those of others, and has no place in the queue's order."""
        return live.is_suspect or live in self._held

    def admit(self, schedulers: Sequence[Scheduler], now: float, *, complete: bool) -> Iterator[Admitted | TurnedAway]:
        """All that can go now: the next suspect to a worker of its own, and others to the other workers.

        `complete`: no worker is missing; else one may be about to come that is empty, and suspects wait for it a while.
        """
        self._let_go(schedulers)
        court = self._court(schedulers, now, complete=complete)
        if court is None:
            yield from self._admission.admit(schedulers, now, complete=complete)
            return
        while not court.sequences and (waiting := self._waiting()):
            gone = self._admission.place(waiting[0], [court], now, complete=complete)
            if gone is None:
                break
            yield gone
        others = [scheduler for scheduler in schedulers if scheduler is not court]
        yield from self._admission.admit(others, now, complete=False)

    def advanced(self, live: LiveRequest, scheduler: Scheduler) -> None:
        """A suspect has been given tokens: it may be cleared, and makes way if another waits."""
        if live.cleared_at is None or live.num_generated < live.cleared_at:
            return
        self.forget(live)
        if self._waiting() and scheduler.recall(live):
            self._held.append(live)

    def forget(self, live: LiveRequest) -> None:
        """It is no suspect, and stands in nobody's way."""
        live.cleared_at = None
        for those in (self._suspects, self._held):
            if live in those:
                those.remove(live)

    def _waiting(self) -> list[LiveRequest]:
        """Suspects that could be tried now; one whose reader is too far behind could not go on."""
        return [live for live in self._suspects if live in self._queue and not live.lagging]

    def _court(self, schedulers: Sequence[Scheduler], now: float, *, complete: bool) -> Scheduler | None:
        """The worker that tries suspects: one that does, else the least busy one, from which all are taken off."""
        waiting = self._waiting()
        trying = [scheduler for scheduler in schedulers if scheduler.tries]
        if trying or not waiting or not schedulers:
            self._since = None
            return trying[0] if trying else None
        fit = [scheduler for scheduler in schedulers if scheduler.fits(waiting[0]) and not scheduler.closing]
        court = min(fit or schedulers, key=lambda scheduler: scheduler.num_running)
        self._since = now if self._since is None else self._since
        if court.num_running and not complete and now - self._since < PATIENCE:
            return None
        self._held += [sequence.live for sequence in court.running if court.recall(sequence.live)]
        return court

    def _let_go(self, schedulers: Sequence[Scheduler]) -> None:
        """Those that are held go on once nobody is on trial or waits for it."""
        if not self._held or self._waiting() or any(scheduler.tries for scheduler in schedulers):
            return
        held, self._held = self._held, []
        for live in held:
            if live in self._queue and not live.lagging:
                self._queue.unpark(live)
