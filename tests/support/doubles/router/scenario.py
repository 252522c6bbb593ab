"""Random traffic from a seed, and the rules that every engine must keep whatever comes."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field, replace

from space_router.config import ServeConfig
from space_router.engine.errors import Broken, DeadlineExceeded, QueueFull, RequestCancelled, WorkerFailed
from space_router.engine.request.request import Finish, SamplingOptions, Stream, ValidRequest
from space_router.engine.request.request_state import MAX_BLOCKS_AHEAD
from space_router.engine.scheduler import PREFILL_STEPS_AHEAD, Scheduler
from space_router.engine.workers.supervisor import ExitCause
from space_router.metrics import Metrics

from doubles.router.script import HashLanguage, Script, always, half, never, sometimes
from doubles.router.scripted_worker import ScriptedBatch
from doubles.router.tabletop import Tabletop, TableWorker, answer

MAX_TICKS = 20_000
SECONDS_PER_TICK = 0.01


class RuleBroken(AssertionError):
    """What must hold did not; the message names the scenario's seed."""


@dataclass(eq=False)
class Visit:
    """One request of a scenario, and its reader."""

    request: ValidRequest
    arrives: int  # tick
    follows: Visit | None = None  # whose stream is its leader (n, best_of)
    leaves_after: int | None = None  # tokens read, then its reader leaves
    leaves_at: int | None = None  # tick at which its reader leaves, wherever it is
    cancelled_at: int | None = None  # tick at which it is cancelled by its name
    reads_every: int = 1  # ticks
    deaf: tuple[int, int] = (0, 0)  # ticks between which its reader reads nothing

    stream: Stream | None = None
    tokens: list[int] = field(default_factory=list)
    num_finishes: int = 0
    outcome: str | None = None  # set exactly once


@dataclass
class Scenario:
    """Who comes when, to which workers, and when these die."""

    seed: int
    visits: list[Visit]
    deaths: list[tuple[int, int, int, ExitCause]]  # tick, seat, ticks until it is back, why
    num_workers: int
    delay: int
    max_lag: int
    config: ServeConfig

    @classmethod
    def random(
        cls,
        seed: int,
        *,
        window: int,
        num_slots: int,
        vocabulary: range,
        eos_ids: tuple[int, ...],
        max_drafts: int,
        temperatures: tuple[float, ...] = (0.0, 1.0),
        num_visits: int = 14,
    ) -> Scenario:
        """`vocabulary`: ids of prompts; `num_slots`: of all pages of a worker; `eos_ids`: what ends an answer."""
        dice = random.Random(seed)
        families = [tuple(dice.choices(vocabulary, k=40)) for _ in range(3)]
        busy = dice.choice([4, 15, 60])  # ticks in which all arrive
        longest = dice.choice([8, 30, 60])
        visits: list[Visit] = []
        for number in range(dice.randint(2, num_visits)):
            shared = dice.choice(families)[: dice.randrange(0, 36)]
            own = tuple(dice.choices(vocabulary, k=dice.randrange(1, 8)))
            num_prompt_logprobs = dice.choice([None] * 9 + [1])
            request = ValidRequest(
                request_id=str(number), prompt_ids=shared + own if dice.random() < 0.8 else (shared or own),
                sampling=SamplingOptions(seed=dice.randrange(100), temperature=dice.choice(temperatures)),
                max_tokens=dice.randint(1, longest), eos_ids=eos_ids if dice.random() < 0.7 else (),
                max_draft_length=dice.choice([None, None, 0, 1, max_drafts]), want_logprobs=dice.random() < 0.1,
                num_prompt_logprobs=num_prompt_logprobs, priority=dice.choice([0, 0, 0, -1, 1, 5]),
                deadline=dice.choice([None] * 8 + [0.2, 1.5]), cache_salt=dice.choice(["", "", "", "pepper"]),
                share_prefix=num_prompt_logprobs is None and dice.random() < 0.9,
                key=dice.choice(["", "a", "a", "a", "b"]),
            )  # fmt: skip
            visit = _visit(dice, request, dice.randrange(0, 40), busy)
            room = min(window, num_slots - 1) - len(visit.request.prompt_ids)
            visit.request = replace(visit.request, max_tokens=min(visit.request.max_tokens or room, room))
            visits.append(visit)
            if dice.random() < 0.15:
                for choice in (1, 2):
                    sampling = replace(visit.request.sampling, choice=choice)
                    other = replace(visit.request, request_id=f"{number}/{choice}", sampling=sampling)
                    visits.append(Visit(other, visit.arrives, follows=visit))
        num_workers = dice.choice([1, 1, 2])
        deaths = [
            (dice.randrange(5, 80), dice.randrange(num_workers), dice.choice([0, 0, 3, 20]), dice.choice([*ExitCause]))
            for _ in range(dice.choice([0, 0, 0, 1, 2, 4]))
        ]
        config = ServeConfig(
            max_prefill_rows=dice.choice([1, 4, 16, 64]),
            max_queue=dice.choice([3, 100, 100]),
            priority_ageing=dice.choice([0.05, 30.0]),
        )
        return cls(
            seed, sorted(visits, key=lambda v: v.arrives), deaths, num_workers, dice.randrange(3), dice.choice([4, 64]),
            config,
        )  # fmt: skip


def _visit(dice: random.Random, request: ValidRequest, deaf_from: int, busy: int) -> Visit:
    arrives, reads_every = dice.randrange(busy), dice.choice([1, 1, 1, 2, 7])
    visit = Visit(request, arrives, reads_every=reads_every, deaf=(deaf_from, dice.choice([0, 0, 90])))
    match dice.choice(["stays"] * 7 + ["after", "at", "cancelled"]):
        case "after":
            visit.leaves_after = dice.randrange(1, 10)
        case "at":
            visit.leaves_at = visit.arrives + dice.randrange(0, 40)
        case "cancelled":
            visit.cancelled_at = visit.arrives + dice.randrange(0, 40)
    return visit


class Performance:
    """A scenario on a table: `run` ends when every request has ended and every page is back, or raises RuleBroken."""

    def __init__(
        self,
        scenario: Scenario,
        new_worker: Callable[[], TableWorker],
        solo_text: Callable[[ValidRequest], tuple[int, ...]],
        *,
        metrics: Metrics | None = None,
    ) -> None:
        """`solo_text`: what a request is answered when it is alone."""
        self.scenario = scenario
        self.table = Tabletop(
            new_worker, num_workers=scenario.num_workers, delay=scenario.delay, config=scenario.config,
            metrics=metrics, max_lag=scenario.max_lag,
        )  # fmt: skip
        self.outcomes: Counter[str] = Counter()
        self.num_preemptions = 0
        self.num_cached = 0
        self.num_restored = 0
        self._solo_text = solo_text
        self._returns: list[tuple[int, int]] = []  # tick, seat

    def run(self) -> Performance:
        try:
            self._run()
        except AssertionError as broken:
            raise RuleBroken(f"scenario {self.scenario.seed}: {broken}") from broken
        except Exception as error:
            raise RuleBroken(f"scenario {self.scenario.seed}: {type(error).__name__}: {error}") from error
        return self

    def _run(self) -> None:
        for tick in range(MAX_TICKS):
            for visit in self.scenario.visits:
                if visit.arrives == tick:
                    self._arrive(visit)
            self._fate(tick)
            self.table.tick(SECONDS_PER_TICK)
            for visit in self.scenario.visits:
                self._attend(visit, tick)
            for connection in self.table.connections:
                if connection.scheduler is not None:
                    check_budgets(connection.scheduler, self.scenario.config)
            if self._over():
                break
        else:
            raise RuleBroken(f"not over after {MAX_TICKS} ticks: {[v.outcome for v in self.scenario.visits]}")
        for visit in self.scenario.visits:
            self._judge(visit)

    def _arrive(self, visit: Visit) -> None:
        leader = None if visit.follows is None else visit.follows.stream
        try:
            visit.stream = self.table.engine.submit(visit.request, leader=leader)
        except QueueFull:
            self._end(visit, "refused")
        except DeadlineExceeded:
            self._end(visit, "deadline")

    def _fate(self, tick: int) -> None:
        """Workers that die and come back; requests that are cancelled."""
        for when, number, absence, cause in self.scenario.deaths:
            if when == tick and self.table.connections[number].scheduler is not None:
                self._note(self.table.connections[number].scheduler)
                self.table.connections[number].die(cause)
                self._returns.append((tick + absence, number))
        for when, number in list(self._returns):
            if when <= tick:
                self._returns.remove((when, number))
                self.table.connections[number].start()
        for visit in self.scenario.visits:
            if visit.cancelled_at == tick and visit.stream is not None:
                self.table.engine.cancel(visit.request.request_id)

    def _attend(self, visit: Visit, tick: int) -> None:
        """A reader reads what there is, if it listens."""
        stream, (begins, ticks) = visit.stream, visit.deaf
        if stream is None or visit.outcome is not None:
            return
        if visit.leaves_at is not None and tick >= visit.leaves_at:
            self._leave(visit)
            return
        if tick % visit.reads_every or begins <= tick - visit.arrives < begins + ticks:
            return
        while stream.num_ready:
            delta = stream.read()
            if visit.num_finishes:
                raise RuleBroken(f"request {visit.request.request_id} goes on after its end")
            visit.tokens += delta.tokens
            visit.num_finishes += delta.finish is not None
            if delta.finish is not None:
                self._end(visit, "finished")
                self._check_finish(visit, delta.finish)
            elif visit.leaves_after is not None and len(visit.tokens) >= visit.leaves_after:
                self._leave(visit)
                return
        if visit.outcome is None and stream.error is not None:
            self._end(visit, _kind(stream.error))

    def _leave(self, visit: Visit) -> None:
        assert visit.stream is not None
        visit.stream.leave()
        self._end(visit, "left")

    def _end(self, visit: Visit, outcome: str) -> None:
        if visit.outcome is not None:
            raise RuleBroken(f"request {visit.request.request_id} ended twice: {visit.outcome}, {outcome}")
        visit.outcome = outcome
        self.outcomes[outcome] += 1

    def _over(self) -> bool:
        """Every request has ended, every worker is back, and every page free or cached."""
        if any(visit.outcome is None for visit in self.scenario.visits) or self._returns:
            return False
        load = self.table.engine.load()
        if load.blocks_held:
            return False
        if load.num_queued or load.num_running:
            raise RuleBroken(f"{load.num_queued} requests wait and {load.num_running} run after the last has ended")
        for connection in self.table.connections:
            self._note(connection.scheduler)
        return True

    def _note(self, scheduler: Scheduler | None) -> None:
        if scheduler is not None:
            self.num_preemptions += scheduler.num_preemptions
            self.num_restored += scheduler.offload.num_restored

    def _check_finish(self, visit: Visit, finish: Finish) -> None:
        reason = Finish.EOS if visit.tokens[-1] in visit.request.eos_ids else Finish.LENGTH
        if finish is not reason:
            raise RuleBroken(f"request {visit.request.request_id} ended by {finish}, not by {reason}")

    def _judge(self, visit: Visit) -> None:
        """The text is that of the solo run, or the beginning of it where somebody broke it off."""
        name, text = visit.request.request_id, self._solo_text(visit.request)
        tokens, whole = tuple(visit.tokens), visit.outcome == "finished"
        if tokens != (text if whole else text[: len(tokens)]):
            raise RuleBroken(f"request {name} {visit.outcome} with {tokens}; alone it is {text}")
        if visit.stream is not None:
            if whole and visit.stream.statistics.num_generated != len(text):
                raise RuleBroken(f"request {name} counts {visit.stream.statistics.num_generated} of {len(text)} tokens")
            self.num_cached += visit.stream.statistics.num_cached
        expected = {
            "cancelled": visit.cancelled_at is not None,
            "deadline": visit.request.deadline is not None,
            "worker failed": sum(cause is not ExitCause.EXTERNAL for *_, cause in self.scenario.deaths) >= 2,
            "refused": self.scenario.config.max_queue < len(self.scenario.visits),
        }
        if not expected.get(visit.outcome or "", True):
            raise RuleBroken(f"request {name} ended without reason: {visit.outcome}")


def _kind(error: Exception) -> str:
    match error:
        case RequestCancelled():
            return "cancelled"
        case DeadlineExceeded():
            return "deadline"
        case WorkerFailed():
            return "worker failed"
        case Broken():
            raise RuleBroken(f"a request failed: {error}")
        case _:
            raise error


def check_budgets(scheduler: Scheduler, config: ServeConfig) -> None:
    """Pages are conserved; prompts, sequences and slots stay within what was set."""
    scheduler.check()
    size = scheduler.facts.block_size
    if scheduler.num_running > scheduler.facts.max_sequences:
        raise RuleBroken(f"{scheduler.num_running} sequences run; {scheduler.facts.max_sequences} may")
    shares = [min(s.num_prefill_left, config.max_prefill_rows) for s in scheduler.running]
    if sum(shares) > PREFILL_STEPS_AHEAD * config.max_prefill_rows:
        raise RuleBroken(f"{sum(shares)} prompt ids wait in the worker: more than {PREFILL_STEPS_AHEAD} steps' worth")
    for sequence in scheduler.running:
        most = min(sequence.live.final_slots, scheduler.facts.window)
        ahead = len(sequence.live.ids) + MAX_BLOCKS_AHEAD * size
        if sequence.num_slots >= min(most, ahead) + size:
            raise RuleBroken(f"{sequence.num_slots} slots for {len(sequence.live.ids)} ids, of {most} at most")


def scripted_performance(seed: int, metrics: Metrics | None = None) -> Performance:
    """A random scenario with a random scripted worker."""
    dice = random.Random(f"script {seed}")
    script = Script(
        language=HashLanguage(range(4, 250), eos_id=2, eos_period=25),
        accepts=dice.choice([never, always, half, sometimes]), draft_length=dice.randrange(6),
        block_size=dice.choice([2, 4, 8]), window=100, max_sequences=dice.choice([1, 4, 8]),
        release_steps=dice.randrange(3),
    )  # fmt: skip
    script.num_blocks = dice.choice([76, 80, 100, 130, 400]) // script.block_size + 1
    script.num_host_blocks = random.Random(f"host {seed}").choice([0, 3, 20, 200])
    scenario = Scenario.random(
        seed, window=script.window, num_slots=script.num_blocks * script.block_size, vocabulary=range(4, 250),
        eos_ids=(2,), max_drafts=script.draft_length,
    )  # fmt: skip
    return Performance(
        scenario, lambda: ScriptedBatch(script), lambda request: answer(request, script), metrics=metrics
    )
