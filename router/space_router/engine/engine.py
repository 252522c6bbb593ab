"""All requests of this router, from the door to the last token."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from types import TracebackType

from space_proto import worker_pb2

from space_router.config import ServeConfig
from space_router.engine.engine_metrics import EngineMetrics
from space_router.engine.errors import (
    DeadlineExceeded,
    Draining,
    EngineError,
    NotReady,
    RequestCancelled,
    RequestFailed,
    WorkerFailed,
    WorkerStartFailed,
)
from space_router.engine.model_facts import WorkerModelFacts
from space_router.engine.queueing.admission import Admitted, QueueAdmission
from space_router.engine.queueing.admission_limits import LoadFigures, allowed_tokens, worth_waiting
from space_router.engine.queueing.queue import RequestQueue
from space_router.engine.queueing.throughput_estimator import ThroughputEstimator
from space_router.engine.request.report_result import SequenceUpdate
from space_router.engine.request.request import ValidRequest
from space_router.engine.request.request_state import Phase, RequestState
from space_router.engine.request.stream import Stream
from space_router.engine.scheduling.scheduler import Scheduler
from space_router.engine.timer import CallLater, on_the_loop
from space_router.engine.workers.crash_quarantine import CrashQuarantine
from space_router.engine.workers.exit_cause import ExitCause
from space_router.engine.workers.worker_command import worker_command
from space_router.engine.workers.worker_connection import WorkerConnection, WorkerSource
from space_router.engine.workers.worker_link import WorkerMismatch
from space_router.engine.workers.worker_pool import WorkerPool
from space_router.engine.workers.worker_sources import worker_sources
from space_router.metrics import Metrics

MAX_LAG = 128  # tokens a reader may be behind before its request gets no more pages
NEAR = 2.0  # a deadline is near once no more is left than so many times what the request will take


class Engine:
    """Queue, pages, workers and streams.

        async with Engine(config, metrics) as engine:
            async with engine.submit(request) as stream:
                async for delta in stream: ...

    Entering starts the workers and does not wait for them: see `ready` and `wait_ready`. `submit` is synchronous and
    either queues the request or raises `errors.Refused`.
    """

    def __init__(
        self,
        config: ServeConfig,
        metrics: Metrics,
        *,
        tokenizer_hash: str | None = None,
        worker_argv: Callable[[ServeConfig, str], Sequence[str]] = worker_command,
        sources: Sequence[WorkerSource] | None = None,
        max_lag: int = MAX_LAG,
        clock: Callable[[], float] = time.monotonic,
        call_later: CallLater | None = None,
    ) -> None:
        """`tokenizer_hash`: what a worker's Hello must say (sha256 of tokenizer.json), None to take any;
        `worker_argv`: how a worker is started on an address; `sources`: of workers, None for those that the config
        names, none at all for those that `worker_pool.follow` will; `max_lag`: tokens a reader may be behind; `clock`:
        seconds; `call_later`: does something so many seconds later on that clock, None for the running loop's.
        """
        self.facts: WorkerModelFacts | None = None  # what the workers said about the model; None until the first Hello
        self.config = config
        self._clock = clock
        self._call_later = call_later or on_the_loop
        self._max_lag = max_lag
        self._observer = EngineMetrics(metrics)
        self._queue = RequestQueue(config.max_queue, ageing=config.priority_ageing, max_tokens=config.max_queue_tokens)
        self.full = self._queue.refusal
        self._pace = ThroughputEstimator(config.max_prefill_rows)
        self._admission = QueueAdmission(self._queue, self._pace)
        self._trials = CrashQuarantine(self._queue, self._admission)
        self._open: dict[Stream, RequestState] = {}  # not ended yet
        self._by_name: dict[str, set[RequestState]] = {}  # of these
        self._num_submitted = 0
        self._draining = False
        self._idle = asyncio.Event()
        self._idle.set()
        self._up = asyncio.Event()
        self._given_up = asyncio.Event()
        self._start_failure: WorkerStartFailed | None = None
        self._tokenizer_hash = tokenizer_hash
        self.worker_pool = WorkerPool(
            worker_sources(config, worker_argv) if sources is None else sources,
            connection_for=self._new_connection,
            engaged=self,
            on_start_failed=self._give_up,
        )
        self.connections = self.worker_pool.connections

    def new_scheduler(self, facts: WorkerModelFacts) -> Scheduler:
        """For a worker that has come."""
        return Scheduler(
            facts, max_prefill_rows=self.config.max_prefill_rows, max_draft_length=self.config.max_draft_length
        )

    def _new_connection(self, source: WorkerSource, number: int) -> WorkerConnection:
        return WorkerConnection(
            source,
            schedule=self.new_scheduler,
            tokenizer_hash=self._tokenizer_hash,
            worker_timeout=self.config.worker_timeout,
            max_prefill_rows=self.config.max_prefill_rows,
            number=number,
        )

    async def __aenter__(self) -> Engine:
        await self.worker_pool.__aenter__()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._draining = True
        for live in list(self._open.values()):
            self._break_off(live, RequestFailed("The server has stopped before this request was done."))
        await self.worker_pool.__aexit__(kind, error, traceback)

    # What the HTTP face asks.

    @property
    def ready(self) -> bool:
        """At least one worker is up, none of those that crash again and again, and the engine is not draining."""
        return not self._draining and any(connection.steady for connection in self.connections)

    async def wait_ready(self) -> WorkerModelFacts:
        """Wait for the first worker. Raises WorkerStartFailed with the worker's own last words."""
        await self._up.wait()
        if self.facts is None:
            raise self._start_failure or WorkerStartFailed("No worker came up.")
        return self.facts

    async def failed(self) -> None:
        """Return never, or raise WorkerStartFailed once no worker can be started any more."""
        await self._given_up.wait()
        raise self._start_failure or WorkerStartFailed("No worker is left.")

    def submit(self, request: ValidRequest, *, leader: Stream | None = None) -> Stream:
        """Queue a request, or raise PromptTooLong, CacheTooSmall, QueueFull, NotReady, Draining, or DeadlineExceeded
        where its time is too short for it even if it began now.

        `leader`: a stream with the same prompt (choice 0); this request waits until the leader's prompt is computed,
        and shares its blocks.
        """
        if self._draining:
            raise Draining("The server is stopping and takes no new requests.")
        if self.facts is None:
            raise NotReady("No worker is up yet. Try again when /health says so.")
        max_tokens = allowed_tokens(request, self.facts)
        live = RequestState(request, max_tokens, self._num_submitted, self._clock())
        if unmeetable_deadline := self._admission.unmeetable_deadline(
            live, 1, live.submitted
        ):  # all but one prompt id may be cached
            raise unmeetable_deadline
        live.near_at = live.deadline_at - NEAR * self._pace.seconds(live.num_prompt, self._queue.expected_answer(live))
        self._num_submitted += 1
        stream = live.stream = Stream(
            request,
            live.statistics,
            max_lag=self._max_lag,
            on_leave=lambda: self._leave(live),
            on_caught_up=lambda: self._caught_up(live),
        )
        first = self._open.get(leader) if leader is not None else None
        parked = first is not None and worth_waiting(first, live, self.facts.block_size)
        self._open[stream] = live
        self._by_name.setdefault(request.request_id, set()).add(live)
        self._idle.clear()
        self._queue.push(live, parked=parked)
        if first is not None and parked:
            live.awaited_ids = live.num_prompt
            first.followers.append(live)
        self._schedule()
        if leader is None and self._queue.overfull and live in self._queue:  # choices of one prompt wait as one
            self._queue.remove(live)
            self._forget(live)
            raise self._queue.full()
        if request.deadline is not None and stream in self._open:
            too_late = DeadlineExceeded(request.deadline)
            live.deadline = self._call_later(request.deadline, lambda: self._end(live, too_late))
        self._settle()
        return stream

    def cancel(self, request_id: str, key: str | None = None) -> bool:
        """End requests of this name (and key, None: of any) with RequestCancelled; False where there is none."""
        found = [live for live in self._by_name.get(request_id, ()) if key in (None, live.request.key)]
        for live in sorted(found, key=lambda live: live.age):
            self._end(live, RequestCancelled(f"Request {request_id} was cancelled."))
        return bool(found)

    def load(self) -> LoadFigures:
        """How busy the engine is now."""
        pools = [scheduler.pool for scheduler in self._schedulers()]
        return LoadFigures.of(pools, num_queued=len(self._queue), num_open=len(self._open), draining=self._draining)

    async def drain(self, seconds: float) -> bool:
        """Take no new work; wait until every stream has ended, at most so many seconds; True if all did."""
        self._draining = True
        try:
            await asyncio.wait_for(self._idle.wait(), seconds)
        except TimeoutError:
            return False
        return True

    def check(self) -> None:
        """Raise ValueError unless free + held + cached == all pages, everywhere: for tests."""
        for scheduler in self._schedulers():
            scheduler.check()

    # What the seats say.

    def _give_up(self, error: WorkerStartFailed) -> None:
        """No worker can be had any more: the waiting requests end with it."""
        self._start_failure = error
        self._given_up.set()
        self._up.set()
        for live in list(self._open.values()):
            self._break_off(live, WorkerFailed("No worker can be started any more."))
        self._settle()

    def expect(self, facts: WorkerModelFacts) -> None:
        """Every worker may have to go on where another has stopped."""
        if self.facts is not None and (difference := facts.difference(self.facts)):
            raise WorkerMismatch(difference)

    def worker_up(self, connection: WorkerConnection) -> None:
        """A worker has said hello, and is empty."""
        present = sorted(self._schedulers(), key=lambda one: (one.facts.num_slots, one is connection.scheduler))
        if present:  # the largest one's, and the last one's of equals: what fits it is taken
            self.facts = present[-1].facts
        if connection.was_lost:
            self._observer.worker_restarted()
        self._observer.workers(len(self._schedulers()))
        self._up.set()
        self._schedule()
        self._settle()

    def worker_report(self, connection: WorkerConnection, report: worker_pb2.StepReport) -> None:
        """A worker has done something."""
        if connection.scheduler is None:
            return
        num_preemptions = connection.scheduler.num_preemptions
        outcome = connection.scheduler.report(report)
        now = self._clock()
        for advance in outcome.advances:
            self._deliver(advance, now)
            self._trials.advanced(advance.live, connection.scheduler, now)
        for live in outcome.readmit:
            self._wait_again(live)
        self._pace.learn(report, outcome.decoded, now)
        self._observer.step(report, outcome, connection)
        self._schedule()
        if connection.scheduler.num_preemptions > num_preemptions:
            self._observer.preempted(connection.scheduler.num_preemptions - num_preemptions)
        self._settle()

    def worker_away(self, connection: WorkerConnection) -> None:
        """A worker is lost; why is yet to be found out."""
        self._observer.workers(len(self._schedulers()))

    def worker_lost(self, connection: WorkerConnection, lost: Scheduler, cause: ExitCause) -> None:
        """A worker is gone with all its pages; its requests start again elsewhere with what they have emitted."""
        for live in lost.unfinished():
            live.statistics.num_worker_losses += 1
            if guilty := self._trials.lost(live, cause, num_given=lost.num_given(live)):
                self._break_off(live, guilty)
            else:
                self._wait_again(live)
        self._observer.worker_lost(connection, len(self._schedulers()))
        self._schedule()
        self._settle()

    # What follows.

    def _schedulers(self) -> list[Scheduler]:
        return [connection.scheduler for connection in self.connections if connection.scheduler is not None]

    def _schedule(self) -> None:
        """Admit whom there is room for, in the queue's order."""
        now, schedulers = self._clock(), self._schedulers()
        for gone in self._trials.admit(schedulers, now, complete=len(schedulers) == len(self.connections)):
            live = gone.live
            if not isinstance(gone, Admitted):
                self._break_off(live, gone.error)
            elif live.statistics.queue_seconds is None:
                live.statistics.queue_seconds = now - live.submitted
                live.statistics.num_cached = gone.num_cached
                self._observer.admitted(live)

    def _settle(self) -> None:
        """The end of every moment: pages to those that want them, commands sent, gauges set."""
        for connection in self.connections:
            if connection.scheduler is not None:
                connection.scheduler.feed()
                connection.flush()
        pools = (scheduler.pool for scheduler in self._schedulers())
        self._observer.state(pools, len(self._queue), len(self._open) - len(self._queue))

    def _deliver(self, advance: SequenceUpdate, now: float) -> None:
        """Hand a reader what a report says, unless its request has ended."""
        live, delta, part = advance
        stream = live.stream
        if stream is None or stream not in self._open:
            return
        if part.finish == worker_pb2.FINISH_ERROR:
            self._break_off(live, RequestFailed(part.error or "The worker could not go on with this request."))
            return
        if delta.tokens:
            self._observer.tokens(live, len(delta.tokens), now)
            live.last_token = now
        live.statistics.add(delta, now - live.submitted)
        if delta.tokens or delta.prompt_logprobs or delta.finish:
            stream.push(delta)
        if live.followers:
            self._release_followers(live, None if delta.tokens else part.num_computed)
        if delta.finish is not None:
            self._forget(live)

    def _release_followers(self, live: RequestState, num_computed: int | None = None) -> None:
        """Let those go on that wait for no more than `num_computed` ids of this request; None: all of them."""
        followers, live.followers = live.followers, []
        for follower in followers:
            if num_computed is not None and follower.awaited_ids > num_computed:
                live.followers.append(follower)
            elif follower in self._queue:
                self._queue.unpark(follower)

    def _wait_again(self, live: RequestState) -> None:
        """Back into the queue, with what it has emitted."""
        self._queue.push(live, parked=live.lagging or self._trials.holds(live))
        self._release_followers(live)

    def _caught_up(self, live: RequestState) -> None:
        """A reader that lagged reads again."""
        if live in self._queue and not self._trials.holds(live):
            self._queue.unpark(live)
        for scheduler in self._schedulers():
            scheduler.caught_up(live)
        self._schedule()
        self._settle()

    def _leave(self, live: RequestState) -> None:
        """The reader has left its block."""
        self._end(live, RequestCancelled(f"Request {live.request.request_id} was left by its reader."))

    def _end(self, live: RequestState, error: EngineError) -> None:
        """End a request that is not done, wherever it is, and let others take its place."""
        if self._break_off(live, error):
            self._schedule()
            self._settle()

    def _break_off(self, live: RequestState, error: EngineError) -> bool:
        """The same, without what follows for others; False, and nothing happens, if the request is done."""
        if live.stream is None or live.stream not in self._open:
            return False
        live.stream.fail(error)
        self._queue.remove(live)
        live.phase = Phase.ENDED
        self._forget(live)
        for scheduler in self._schedulers():
            scheduler.release(live)
        return True

    def _forget(self, live: RequestState) -> None:
        """A request has ended, one way or the other."""
        if live.stream is not None:
            del self._open[live.stream]
            named = self._by_name[live.request.request_id]
            named.remove(live)
            if not named:
                del self._by_name[live.request.request_id]
        self._queue.ended(live)
        self._trials.forget(live)
        if live.deadline is not None:
            live.deadline.cancel()
        self._release_followers(live)
        if not self._open:
            self._idle.set()
