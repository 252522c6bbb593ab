"""Finds the request that crashes workers by running suspects alone."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from space_router.engine.errors import WorkerFailed
from space_router.engine.queueing.admission import Admitted, QueueAdmission, Rejected, too_large
from space_router.engine.queueing.queue import RequestQueue
from space_router.engine.request.request_state import RequestState
from space_router.engine.scheduler import Scheduler
from space_router.engine.workers.supervisor import ExitCause

SUSPECT_WAIT = 10.0  # seconds that suspects wait for a missing worker before the only present one is emptied
MAX_HOLD = 1.0  # seconds that other requests wait for their worker's suspects before they go to another worker
TRIAL_GROWTH = 16  # probation lasts 1 token, then 16, then 256: a request that crashes seldom is alone when it does


class CrashQuarantine:
    """When a worker crashes, all requests that it ran become suspects.

    A suspect runs alone on the quarantine worker until it has generated some more tokens (probation). If that worker
    crashes, the suspect is the culprit and fails; otherwise it is cleared. Cleared requests, and those that the
    quarantine worker ran before, are held for a moment: once the last probation is over they continue there, where
    their prefixes are cached.

    If the cause of a loss is unknown, the worker was most likely killed, or its machine switched off or disconnected.
    Then its requests continue at once where another worker is up. If one of them is the culprit, it crashes a second
    worker, most likely in the same step, before any token. Only requests that were on both, and had few tokens from the
    second, become suspects; so do those with few tokens from a worker that was the only one. So a culprit fails after
    two crashes, or after three in this case.
    """

    def __init__(self, queue: RequestQueue, admission: QueueAdmission) -> None:
        self._queue, self._admission = queue, admission
        self._suspects: list[RequestState] = []  # oldest first
        self._held: dict[RequestState, float] = {}  # cleared or displaced -> held since, on the engine's clock
        self._last_worker: Scheduler | None = None
        self._since: float | None = None  # seconds on the engine's clock since which suspects wait for a worker

    def worker_lost(
        self, live: RequestState, cause: ExitCause, *, num_given: int, is_another_up: bool
    ) -> WorkerFailed | None:
        """Make a lost worker's request a suspect if it may have caused the loss.

        Return the error to fail it with if it ran alone as a suspect, so that it is the culprit; else None.
        `num_given`: tokens that it had from that worker; `is_another_up`: whether it can continue at once.
        """
        if cause is ExitCause.EXTERNAL:
            return None
        is_culprit = live.is_suspect
        self.forget(live)
        live.num_suspicions += 1
        if is_culprit:
            return WorkerFailed(
                f"{live.num_suspicions} workers ended while they ran this request, the last one while it ran nothing "
                "else. It is not tried again. Change the request; the log has the workers' last words."
            )
        num_tokens = int(TRIAL_GROWTH ** (live.num_suspicions - 1))
        is_first = live.num_suspicions == 1 and is_another_up
        if cause is ExitCause.UNKNOWN and (is_first or num_given >= max(TRIAL_GROWTH, num_tokens)):
            return None
        live.probation_until = live.num_generated + num_tokens
        self._suspects.append(live)
        return None

    def is_holding(self, live: RequestState) -> bool:
        """Whether the request is a suspect or held, and so must stay out of the queue's order."""
        return live.is_suspect or live in self._held

    def admit(self, schedulers: Sequence[Scheduler], now: float, *, complete: bool) -> Iterator[Admitted | Rejected]:
        """Yield all admissions and rejections that are possible now.

        The next suspect goes to the quarantine worker, other requests to the other workers. `complete`: no worker is
        missing; otherwise suspects wait up to `SUSPECT_WAIT` for an empty one to come.
        """
        self._unpark_held(schedulers, now)
        self._admission.oversized.review(schedulers, complete=complete)
        yield from self._reject_unplaceable(schedulers, now, complete=complete)
        worker = self._quarantine_worker(schedulers, now, complete=complete)
        if worker is not self._last_worker:  # a request that fits only the quarantine worker is set aside meanwhile
            self._last_worker = worker
            self._admission.oversized.return_all()
        if worker is None:
            yield from self._admission.admit(schedulers, now, complete=complete)
            return
        while not worker.sequences and (waiting := [live for live in self._waiting() if worker.fits(live)]):
            decision = self._admission.place(waiting[0], [worker], now, complete=complete)
            if decision is None:
                break
            yield decision
        others = [scheduler for scheduler in schedulers if scheduler is not worker]
        yield from self._admission.admit(others, now, complete=False)
        if self._waiting() or self._queue.head(now) is not None:
            worker.preempt_stalled()  # a suspect whose reader lags resumes once it reads

    def update(self, live: RequestState, scheduler: Scheduler, now: float) -> None:
        """Clear a suspect that has passed its probation; recall it if another suspect waits."""
        if live.probation_until is None or live.num_generated < live.probation_until:
            return
        self.forget(live)
        if self._waiting() and scheduler.recall(live):
            self._held[live] = now

    def forget(self, live: RequestState) -> None:
        """Clear a request: it is neither suspect nor held."""
        live.probation_until = None
        self._held.pop(live, None)
        if live in self._suspects:
            self._suspects.remove(live)

    def _waiting(self) -> list[RequestState]:
        """Return the suspects that could run now: their readers do not lag, and they fit a worker."""
        oversized = self._admission.oversized
        return [live for live in self._suspects if live in self._queue and not live.lagging and live not in oversized]

    def _reject_unplaceable(self, schedulers: Sequence[Scheduler], now: float, *, complete: bool) -> Iterator[Rejected]:
        """Set aside suspects that fit no worker; yield rejections of requests that have waited too long for one."""
        oversized = self._admission.oversized
        for live in self._waiting():
            if oversized.set_aside(live, schedulers, now) and complete and not any(s.fits(live) for s in schedulers):
                yield Rejected(live, too_large())
        for live in oversized.overdue(schedulers, now):
            yield Rejected(live, too_large())

    def _quarantine_worker(self, schedulers: Sequence[Scheduler], now: float, *, complete: bool) -> Scheduler | None:
        """Return the worker that runs suspects alone, or None.

        It is the one that runs a suspect already, else the least busy worker that the first suspect fits; the latter's
        requests are recalled and held.
        """
        waiting = self._waiting()
        testing = [scheduler for scheduler in schedulers if scheduler.runs_suspect]
        if testing or not waiting or not schedulers:
            self._since = None
            return testing[0] if testing else None
        self._since = now if self._since is None else self._since
        fit = [scheduler for scheduler in schedulers if scheduler.fits(waiting[0]) and not scheduler.closing]
        if not fit:
            return None
        worker = min(fit, key=lambda scheduler: scheduler.num_running)
        is_only = all(scheduler is worker or scheduler.closing for scheduler in schedulers)
        if worker.num_running and is_only and not complete and now - self._since < SUSPECT_WAIT:
            return None
        self._held |= {sequence.live: now for sequence in worker.running if worker.recall(sequence.live)}
        return worker

    def _unpark_held(self, schedulers: Sequence[Scheduler], now: float) -> None:
        """Unpark held requests once no suspect runs or waits, or after `MAX_HOLD`."""
        if not self._held:
            return
        is_over = not self._waiting() and not any(scheduler.runs_suspect for scheduler in schedulers)
        for live in [live for live, since in self._held.items() if is_over or now - since >= MAX_HOLD]:
            del self._held[live]
            if live in self._queue and not live.lagging:
                self._queue.unpark(live)
