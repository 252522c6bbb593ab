"""The engine: all requests of this router, from submission to the last token."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import replace

from space_proto import worker_pb2

from space_router.config import ServeConfig
from space_router.engine.engine_metrics import EngineMetrics, LoraNames
from space_router.engine.errors import (
    DeadlineExceeded,
    Draining,
    EngineError,
    LoraRefused,
    NotReady,
    QueueFull,
    QueueTimeout,
    RequestCancelled,
    RequestFailed,
    WorkerFailed,
    WorkerStartFailed,
)
from space_router.engine.loras import LoraNotFound, LoraRegistry
from space_router.engine.queueing.admission import (
    Admitted,
    LoadFigures,
    QueueAdmission,
    ThroughputEstimator,
    resolve_max_tokens,
    should_follow,
)
from space_router.engine.queueing.encoding_queue import EncodingQueue
from space_router.engine.queueing.queue import RequestQueue
from space_router.engine.request.encoding import Encoding, EncodingText
from space_router.engine.request.request import ServedLora, Stream, ValidRequest
from space_router.engine.request.request_state import (
    CallLater,
    Phase,
    RequestState,
    SequenceUpdate,
    Timer,
    call_later_on_loop,
)
from space_router.engine.request.worker_messages import WorkerModelFacts
from space_router.engine.scheduler import Scheduler
from space_router.engine.workers.crash_quarantine import CrashQuarantine
from space_router.engine.workers.supervisor import ExitCause, RemoteWorker, Supervisor, worker_command, worker_sources
from space_router.engine.workers.worker_connection import WorkerConnection, WorkerMismatch
from space_router.engine.workers.worker_pool import WorkerPool
from space_router.metrics import Metrics

MAX_LAG = 128  # unread tokens after which a request gets no more pages
NEAR_DEADLINE_FACTOR = 2.0  # a deadline is near once the time left is below this multiple of the expected run time


class Engine:
    """Queues requests, schedules them on workers and streams their tokens.

        async with Engine(config, metrics) as engine:
            async with engine.submit(request) as stream:
                async for delta in stream: ...

    Entering starts the workers without waiting for them; see `ready` and `wait_ready`. `submit` is synchronous: it
    queues the request or raises `errors.Refused`.
    """

    def __init__(
        self,
        config: ServeConfig,
        metrics: Metrics,
        *,
        tokenizer_hash: str | None = None,
        encoder_hash: str | None = None,
        worker_argv: Callable[[ServeConfig, str], Sequence[str]] = worker_command,
        sources: Sequence[RemoteWorker | Supervisor] | None = None,
        max_lag: int = MAX_LAG,
        clock: Callable[[], float] = time.monotonic,
        call_later: CallLater | None = None,
    ) -> None:
        """Create an engine that is not started yet.

        `tokenizer_hash`: sha256 of tokenizer.json that a worker's Hello must have, None accepts any; `encoder_hash`:
        that of its encoder, None: it needs none. `worker_argv`:
        returns the argument list that starts a worker on an address. `sources`: of workers; None uses those of the
        config, an empty sequence waits for `worker_pool.follow`. `max_lag`: unread tokens after which a request gets no
        more pages. `clock`: returns seconds. `call_later`: schedules a call on that clock; None uses the running loop.
        Raises LoraNotFound for a folder of `config.lora`.
        """
        self.facts: WorkerModelFacts | None = None  # None until the first Hello
        self.config = config
        self._clock = clock
        self._call_later = call_later or call_later_on_loop
        self._max_lag = max_lag
        self._encoder_hash = encoder_hash
        self._metrics, self._engine_metrics = metrics, EngineMetrics(metrics)
        max_seconds = math.inf if config.max_queue_seconds is None else config.max_queue_seconds
        self._queue = RequestQueue(
            config.max_queue,
            ageing=config.priority_ageing,
            max_tokens=config.max_queue_tokens,
            max_seconds=max_seconds,
        )
        self._throughput = ThroughputEstimator(config.max_prefill_rows)
        self._admission = QueueAdmission(self._queue, self._throughput)
        self._quarantine = CrashQuarantine(self._queue, self._admission)
        self.encodings = EncodingQueue(config.max_queue, config.max_queue_tokens, clock=clock, max_seconds=max_seconds)
        self._open: dict[Stream, RequestState] = {}  # requests that have not ended
        self._by_name: dict[str, set[RequestState]] = {}  # the same, by request id
        self._num_submitted = 0
        self._draining = False
        self._loading_lora = asyncio.Lock()
        self._idle = asyncio.Event()
        self._idle.set()
        self._up = asyncio.Event()
        self._given_up = asyncio.Event()
        self._start_failure: WorkerStartFailed | None = None
        own_workers = sources is None and not config.worker_address
        self.loras = LoraRegistry(config.lora if own_workers else ())
        self._adopts_loras = not own_workers
        if sources is None:
            copies = tuple((lora.name, lora.folder) for lora in self.loras.named.values())
            sources = worker_sources(replace(config, lora=copies), worker_argv)
        self.worker_pool = WorkerPool(sources, self, config=config, tokenizer_hash=tokenizer_hash)
        self.connections = self.worker_pool.connections
        self._engine_metrics.read_state_from(self.load, self.lora_names)
        for name in self.loras.named:
            self._engine_metrics.lora_loaded(name)

    async def __aenter__(self) -> Engine:
        await self.worker_pool.__aenter__()
        return self

    async def __aexit__(self, *_: object) -> None:
        self._draining = True
        stopped = RequestFailed("The server has stopped before this request was done.")
        not_begun = Draining("The server has stopped before this request's turn came. Nothing of it was computed.")
        for live in list(self._open.values()):
            self._terminate(live, not_begun if live.statistics.queue_seconds is None else stopped)
        self.encodings.end_all(stopped, not_begun=not_begun)
        await self.worker_pool.__aexit__()
        self.loras.close()

    # For the HTTP and gRPC APIs.

    @property
    def ready(self) -> bool:
        """Whether the engine takes requests: it is not draining, and a worker is up that is not in a crash loop."""
        return not self._draining and any(connection.is_steady for connection in self.connections)

    async def wait_ready(self) -> WorkerModelFacts:
        """Wait for the first worker. Raises WorkerStartFailed with the end of the worker's stderr."""
        await self._up.wait()
        if self.facts is None:
            raise self._start_failure or WorkerStartFailed("No worker came up.")
        return self.facts

    async def failed(self) -> None:
        """Wait until no worker can be started any more, then raise WorkerStartFailed; never returns."""
        await self._given_up.wait()
        raise self._start_failure or WorkerStartFailed("No worker is left.")

    def submit(self, request: ValidRequest, *, leader: Stream | None = None) -> Stream:
        """Queue a request and return its stream.

        `leader`: a stream with the same prompt (choice 0). This request waits until the leader's prompt is computed,
        then shares its blocks.

        Raises PromptTooLong, CacheTooSmall, QueueFull, NotReady, Draining, LoraRefused, or DeadlineExceeded if the
        deadline could not be met even if the request began now.
        """
        if self._draining:
            raise Draining("The server is stopping and takes no new requests.")
        if self.facts is None:
            raise NotReady("No worker is up yet. Try again when /health says so.")
        if not self.loras.is_kept(request.lora):
            raise LoraRefused("The LoRA was unloaded before the request was queued. See GET /v1/models.")
        max_tokens = resolve_max_tokens(request, self.facts, self.config.max_prompt_tokens)
        live = RequestState(request, max_tokens, self._num_submitted, self._clock())
        # At best, all prompt ids but the last are cached.
        if unmeetable_deadline := self._admission.unmeetable_deadline(live, 1, live.submitted):
            raise unmeetable_deadline
        live.near_at = live.deadline_at - NEAR_DEADLINE_FACTOR * self._throughput.seconds(
            live.num_prompt, self._queue.expected_answer(live)
        )
        self._num_submitted += 1
        stream = live.stream = Stream(
            request,
            live.statistics,
            max_lag=self._max_lag,
            on_leave=lambda: self._end(live, RequestCancelled(f"Request {request.request_id} was left by its reader.")),
            on_caught_up=lambda: self._reader_caught_up(live),
        )
        first = self._open.get(leader) if leader is not None else None
        parked = first is not None and should_follow(first, live, self.facts)
        self._open[stream] = live
        self._by_name.setdefault(request.request_id, set()).add(live)
        self.loras.hold(request.lora)
        self._idle.clear()
        self._queue.push(live, parked=parked)
        if first is not None and parked:
            live.awaited_ids = live.num_prompt
            first.followers.append(live)
        self._schedule()
        is_bound = leader is None and live in self._queue  # the bound counts a prompt's choices once
        if is_bound and (full := self._queue.overfull(live, live.submitted)) is not None:
            self._queue.remove(live)
            self._forget(live)
            raise full
        if request.deadline is not None and stream in self._open:
            too_late = DeadlineExceeded(request.deadline)
            live.deadline = self._call_later(request.deadline, lambda: self._end(live, too_late))
        self._flush()
        return stream

    def bound_wait(self, streams: Sequence[Stream]) -> Timer | None:
        """End the streams of one client's request with QueueTimeout if `max_queue_seconds` from now none has begun, and
        those that were added to `streams` by then.

        None: nothing bounds their wait, or one has begun already. A request that has begun is never ended by this.
        """
        seconds = self.config.max_queue_seconds
        if seconds is None or any(stream.begun.is_set() for stream in streams):
            return None

        def end_late() -> None:
            if all(stream.statistics.queue_seconds is None for stream in streams):
                error = QueueTimeout(seconds, retry_after=self._queue.retry_after)
                for live in [self._open[stream] for stream in streams if stream in self._open]:
                    self._terminate(live, error)
                self._schedule()
                self._flush()

        return self._call_later(seconds, end_late)

    def full(self, key: str) -> QueueFull | None:
        """Return the error for a new request of `key` that would find no room in the queue; None if it may wait."""
        return self._queue.refusal(key, self._clock())

    async def encode(self, request_id: str, texts: Sequence[EncodingText], key: str = "") -> list[Sequence[float]]:
        """Return what the workers' encoder makes of texts, in their order; a cancellation stops it.

        Raises QueueFull, QueueTimeout, NotReady, Draining, RequestFailed, WorkerFailed.
        """
        if self._draining:
            raise Draining("The server is stopping and takes no new requests.")
        if self.facts is None:
            raise NotReady("No worker is up yet. Try again when /health says so.")
        encoding = Encoding(request_id, key, texts, asyncio.get_running_loop().create_future())
        self.encodings.push(encoding)
        self._flush()
        seconds = self.config.max_queue_seconds
        timer = None if seconds is None else self._call_later(seconds, lambda: self.encodings.end_late(encoding))
        try:
            await encoding.done
        finally:
            if timer is not None:
                timer.cancel()
            self.encodings.end(encoding, RequestCancelled(f"Request {request_id} was left by its client."))
            for scheduler in self._schedulers():
                scheduler.stop_encoding(encoding)
            self._flush()
        return [values for values in encoding.values if values is not None]

    def cancel(self, request_id: str, key: str | None = None) -> bool:
        """End the requests with this id with RequestCancelled; return False if there is none.

        `key`: name of the API key they must have; None matches any.
        """
        found = [live for live in self._by_name.get(request_id, ()) if key in (None, live.request.key)]
        for live in sorted(found, key=lambda live: live.age):
            self._end(live, RequestCancelled(f"Request {request_id} was cancelled."))
        return bool(found)

    async def load_lora(self, name: str, folder: str) -> ServedLora:
        """Load a LoRA on every worker, then let requests name it, in the place of one with this name.

        Requests that were submitted before end on the LoRA that they began with. Raises LoraRefused and NotReady.
        """
        async with self._loading_lora:
            try:
                lora = await asyncio.to_thread(self.loras.copied, name, folder)
            except LoraNotFound as error:
                raise LoraRefused(f"{error}.") from error
            self.loras.hold(lora)
            try:
                await self._load_everywhere(lora)
                before = self.loras.publish(lora)
                self._engine_metrics.lora_loaded(name)
            finally:
                if self.loras.release(lora):
                    self._unload(lora)
                self._flush()
        if before is not None:
            self._forget_lora(before)
        return lora

    async def _load_everywhere(self, lora: ServedLora) -> None:
        """Load a LoRA on all workers that are up; others load it when a request needs it. Raises LoraRefused with a
        worker's reason, and NotReady."""
        asked = [(one, one.scheduler) for one in self.connections if one.scheduler is not None]
        if not asked:
            raise NotReady("No worker is up yet. Try again when /health says so.")
        for _, scheduler in asked:
            scheduler.load_lora(lora)
        self._flush()
        for connection, scheduler in asked:
            await connection.until(
                lambda c=connection, s=scheduler: c.scheduler is not s or lora.digest in s.lora_answers  # type: ignore[misc]
            )
            if error := scheduler.lora_answers.get(lora.digest):
                raise LoraRefused(error)

    def unload_lora(self, name: str) -> bool:
        """Let no new request name a LoRA; those that use it end with it. False if there is none of this name."""
        lora = self.loras.withdraw(name)
        if lora is None:
            return False
        self._engine_metrics.lora_unloaded(name)
        self._forget_lora(lora)
        return True

    def _forget_lora(self, lora: ServedLora) -> None:
        """Have the workers forget a LoRA that lost its name, unless a request still uses it."""
        if self.loras.forget_unused(lora):
            self._unload(lora)
            self._flush()

    def load(self) -> LoadFigures:
        pools = [scheduler.pool for scheduler in self._schedulers()]
        offloads = [scheduler.offload for scheduler in self._schedulers()]
        return LoadFigures(
            num_queued=len(self._queue) + self.encodings.num_queued,
            num_running=len(self._open) - len(self._queue) + self.encodings.num_running,
            num_waiting_tokens=self._queue.num_tokens + self.encodings.num_waiting_tokens,
            block_size=0 if self.facts is None else self.facts.block_size,
            blocks_free=sum(pool.num_free for pool in pools),
            blocks_held=sum(pool.num_held for pool in pools),
            blocks_cached=sum(pool.num_cached for pool in pools),
            states_free=sum(scheduler.states.num_free for scheduler in self._schedulers()),
            states_held=sum(scheduler.states.num_held for scheduler in self._schedulers()),
            states_cached=sum(scheduler.states.num_cached for scheduler in self._schedulers()),
            host_blocks_free=sum(offload.num_free for offload in offloads),
            host_blocks_cached=sum(offload.num_cached for offload in offloads),
            num_workers_up=len(pools),
            draining=self._draining,
        )

    def lora_names(self) -> LoraNames:
        waiting = (live.request.lora for live in self._open.values() if live in self._queue)
        return LoraNames(sorted(self.loras.named), sorted({lora.name for lora in waiting if lora is not None}))

    async def drain(self, seconds: float) -> bool:
        """Refuse new requests and wait up to `seconds` for the streams to end; return whether all did."""
        self._draining = True
        try:
            async with asyncio.timeout(seconds):
                await self._idle.wait()
                await self.encodings.idle.wait()
        except TimeoutError:
            return False
        return True

    def check(self) -> None:
        """Raise ValueError unless free + held + cached pages add up on every worker. For tests."""
        for scheduler in self._schedulers():
            scheduler.check()
        self.encodings.check()

    # Events of the worker pool and of its connections (WorkerListener).

    def start_failed(self, error: WorkerStartFailed) -> None:
        """End all requests, because no worker can be started any more."""
        self._start_failure = error
        self._given_up.set()
        self._up.set()
        for live in list(self._open.values()):
            self._terminate(live, WorkerFailed("No worker can be started any more."))
        self.encodings.end_all(WorkerFailed("No worker can be started any more."))
        self._flush()

    def check_compatible(self, facts: WorkerModelFacts) -> None:
        """Raise WorkerMismatch unless this worker can continue the requests of the workers before it."""
        found = None if facts.encoder is None else facts.encoder.tokenizer_hash
        if self._encoder_hash is not None and found != self._encoder_hash:
            raise WorkerMismatch(
                f"A worker's encoder has tokenizer {found}, this router's {self._encoder_hash}. Give both the same "
                "--embedding-model."
            )
        if self.facts is not None and (difference := facts.difference(self.facts)):
            raise WorkerMismatch(difference)
        for other in (scheduler.facts for scheduler in self._schedulers()):
            if not facts.computes_like(other.instruction_set):
                raise WorkerMismatch(
                    f"A worker computes with {facts.instruction_set}, another with {other.instruction_set}: a text "
                    "that moves between them could change. Give all the same kind of processor or --cpu-kernels, "
                    "--attention, --tensor-parallel, and on GPUs --exact."
                )

    def worker_up(self, connection: WorkerConnection) -> None:
        """Use a worker that has connected; its cache is empty."""
        # Requests are accepted if they fit the worker that takes the longest; among equal ones the newest describes the
        # model.
        present = self._schedulers()
        if self._adopts_loras and connection.scheduler is not None:
            self.loras.adopt(connection.scheduler.facts.loras)
            for name in self.loras.named:
                self._engine_metrics.lora_loaded(name)
        if present:
            self.facts = max(present, key=lambda one: (one.facts.longest, one is connection.scheduler)).facts
        if connection.was_lost:
            self._metrics.worker_restarts_total.inc()
        self._metrics.worker_up.set(len(self._schedulers()))
        self._up.set()
        for live in [live for live in self._open.values() if live in self._queue]:
            if failure := self._cannot_continue(live):
                self._terminate(live, failure)
        self._schedule()
        self._flush()

    def worker_report(self, connection: WorkerConnection, report: worker_pb2.StepReport) -> None:
        """Apply one report of a worker, then schedule and send commands."""
        if connection.scheduler is None:
            return
        num_preemptions = connection.scheduler.num_preemptions
        outcome = connection.scheduler.report(report)
        now = self._clock()
        for part in outcome.encoded:
            self.encodings.encoded(part)
        for update in outcome.updates:
            self._deliver(update, now)
            self._quarantine.update(update.live, connection.scheduler, now)
        for live in outcome.readmit:
            self._requeue(live)
        self._throughput.learn(report, outcome.decoded, now)
        self._engine_metrics.step(report, outcome, connection)
        self._schedule()
        if more := connection.scheduler.num_preemptions - num_preemptions:
            self._metrics.preemptions_total.inc(more)
        self._flush()

    def worker_disconnected(self, connection: WorkerConnection) -> None:
        """Count out a worker whose connection ended; `worker_lost` follows once the cause is known."""
        self._metrics.worker_up.set(len(self._schedulers()))

    def worker_lost(self, connection: WorkerConnection, lost: Scheduler, cause: ExitCause) -> None:
        """Requeue a lost worker's requests with the tokens they have emitted; end the one that crashed it."""
        is_another_up = any(not scheduler.closing for scheduler in self._schedulers())
        for live in lost.unfinished():
            live.statistics.num_worker_losses += 1
            if failure := self._quarantine.worker_lost(
                live, cause, num_given=lost.num_given(live), is_another_up=is_another_up
            ):
                self._terminate(live, failure)
            else:
                self._requeue(live)
        for chunk in lost.encodings.values():
            self.encodings.requeue(chunk, has_crashed=cause is ExitCause.CRASHED)
        self._engine_metrics.worker_lost(connection, len(self._schedulers()))
        self._schedule()
        self._flush()

    # Scheduling and delivery.

    def _schedulers(self) -> list[Scheduler]:
        return [connection.scheduler for connection in self.connections if connection.scheduler is not None]

    def _schedule(self) -> None:
        """Admit waiting requests in the queue's order, as far as there is room."""
        now, schedulers = self._clock(), self._schedulers()
        for decision in self._quarantine.admit(schedulers, now, complete=len(schedulers) == len(self.connections)):
            live = decision.live
            if not isinstance(decision, Admitted):
                self._terminate(live, decision.error)
            elif live.statistics.queue_seconds is None:
                live.statistics.queue_seconds = now - live.submitted
                if live.stream is not None:
                    live.stream.begun.set()
                live.statistics.num_cached = decision.num_cached
                self._engine_metrics.admitted(live)

    def _flush(self) -> None:
        """Grant pages, give texts to encoders, and send the collected commands. Ends every change of state."""
        self.encodings.dispatch(self._schedulers())
        for connection in self.connections:
            if connection.scheduler is not None:
                connection.scheduler.grant_pages()
                if any(copied := connection.scheduler.offload.take_copied()):
                    self._engine_metrics.copied(*copied)
                connection.flush()

    def _deliver(self, update: SequenceUpdate, now: float) -> None:
        """Push a report's tokens to the request's stream, unless the request has ended."""
        live, delta, part = update
        stream = live.stream
        if stream is None or stream not in self._open:
            return
        if part.finish == worker_pb2.FINISH_ERROR:
            self._terminate(live, RequestFailed(part.error or "The worker could not go on with this request."))
            return
        if delta.tokens:
            self._engine_metrics.tokens(live, len(delta.tokens), now)
            live.last_token = now
        live.statistics.add(delta, now - live.submitted)
        if delta.tokens or delta.prompt_logprobs or delta.finish:
            stream.push(delta)
        if live.followers:
            self._release_followers(live, None if delta.tokens else part.num_computed)
        if delta.finish is not None:
            self._forget(live)

    def _release_followers(self, live: RequestState, num_computed: int | None = None) -> None:
        """Unpark the requests that wait for at most `num_computed` ids of this one; None unparks all."""
        followers, live.followers = live.followers, []
        for follower in followers:
            if num_computed is not None and follower.awaited_ids > num_computed:
                live.followers.append(follower)
            elif follower in self._queue:
                self._queue.unpark(follower)

    def _requeue(self, live: RequestState) -> None:
        if failure := self._cannot_continue(live):
            self._terminate(live, failure)
            return
        self._queue.push(live, parked=live.lagging or self._quarantine.is_holding(live))
        self._release_followers(live)

    def _cannot_continue(self, live: RequestState) -> RequestFailed | None:
        """Return an error if the request has emitted tokens and no connected worker has the instruction set that
        computed them, else None."""
        facts = [scheduler.facts for scheduler in self._schedulers()]
        if not live.num_generated or not facts or any(one.computes_like(live.instruction_set) for one in facts):
            return None
        return RequestFailed(
            f"The worker that computed this text with {live.instruction_set} is lost, and the one that is up computes "
            f"with {facts[0].instruction_set}, where the text could go on differently. Send the request again."
        )

    def _reader_caught_up(self, live: RequestState) -> None:
        if live in self._queue and not self._quarantine.is_holding(live):
            self._queue.unpark(live)
        for scheduler in self._schedulers():
            scheduler.caught_up(live)
        self._schedule()
        self._flush()

    def _end(self, live: RequestState, error: EngineError) -> None:
        """End an unfinished request with an error and schedule others in its place."""
        if self._terminate(live, error):
            self._schedule()
            self._flush()

    def _terminate(self, live: RequestState, error: EngineError) -> bool:
        """End a request with an error without rescheduling; return False if it has ended already."""
        if live.stream is None or live.stream not in self._open:
            return False
        live.stream.fail(error)
        self._queue.remove(live)
        live.phase = Phase.ENDED
        self._forget(live)
        for scheduler in self._schedulers():
            scheduler.release(live)
        return True

    def _unload(self, lora: ServedLora | None) -> None:
        """Have the workers forget a LoRA. Their releases of its requests are sent before."""
        if lora is not None:
            for scheduler in self._schedulers():
                scheduler.unload_lora(lora.digest)

    def _forget(self, live: RequestState) -> None:
        if live.stream is not None:
            del self._open[live.stream]
            if self.loras.release(live.request.lora):
                self._unload(live.request.lora)
            named = self._by_name[live.request.request_id]
            named.remove(live)
            if not named:
                del self._by_name[live.request.request_id]
        self._queue.ended(live)
        self._quarantine.forget(live)
        if live.deadline is not None:
            live.deadline.cancel()
        self._release_followers(live)
        if not self._open:
            self._idle.set()
