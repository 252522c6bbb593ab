"""Applies the router's commands, runs steps and builds reports. The sockets are in `grpc_server`."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from space_model.free_memory import is_out_of_memory
from space_model.lora import LoadedLora, LoadedLoras
from space_model.model_error import InvalidLora
from space_model.model_facts import ModelFacts
from space_model.networks.network import PagedKV, StateRoom
from space_proto import worker_pb2 as pb

from space_server.batch import AdmissionError, RunningBatch, RunningSequence, Waiting, admit, check_pages
from space_server.device_runner.device_runner import DeviceRunner
from space_server.drafts import (
    Acceptance,
    AcceptanceShape,
    DraftSource,
    DraftSources,
    head_shapes_by_adapter,
    shapes_by_adapter,
)
from space_server.engine import EngineCore
from space_server.grammar import Grammars
from space_server.host_runner import HostRunner
from space_server.kv_offload import HostBlocks
from space_server.machine.memory import give_back_unused, is_lost
from space_server.model_runner import SequenceOutput, StepModel, StepOutput
from space_server.pooling.encodings import Encodings
from space_server.scheduled_batch import PrefillBudget
from space_server.speculation.controller import Controller
from space_server.speculation.synthetic_acceptance import SyntheticAcceptance
from space_server.step_cost import StepCost
from space_server.worker_messages import (
    PROTOCOL_MAJOR,
    PROTOCOL_MINOR,
    commit,
    count_steps,
    encoder_message,
    failure_message,
    report_paused,
    says_something,
)

MAX_PREFILL_ROWS = 512  # prompt tokens per step (the prefill chunk) until a router's Start sets it
SOURCE_DRAFTS = 8  # default draft bound per step where other sources than masks propose drafts

_log = logging.getLogger(__name__)

Shapes = dict[int | None, AcceptanceShape]
"""By adapter."""


def most_drafts(facts: ModelFacts, asked: int | None, *, only_masks: bool = False) -> int:
    """Return the most drafts per sequence and step. `asked`: None: as many as usual; `only_masks`: there is no other
    source."""
    most = max(facts.most_drafts, 0 if only_masks else SOURCE_DRAFTS)
    found = most if asked is None else asked
    return min(found, facts.most_drafts) if only_masks else found


def fewer_drafts_warning(fixed: int, facts: ModelFacts, sources: DraftSources) -> str | None:
    """Return what to say of `--speculation K` with K = `fixed` where steps lay out fewer drafts; None: they do not."""
    by_masks, by_head = sources.masks and facts.most_masks, sources.head and facts.most_head_drafts
    most = by_masks or by_head
    if fixed <= most:
        return None
    if not most:
        found = f"nothing of the model drafts here, so drafts come from texts alone, at most {fixed} a step"
    elif by_masks:
        found = f"the model has {most} mask{'s' * (most > 1)}, so a step lays out at most {most} of its drafts"
    else:
        found = f"what drafts beside the model makes {most}, so a step lays out at most {most} of its drafts"
    return f"--speculation {fixed}: {found}. The text is the same"


def room_for(facts: ModelFacts, num_sequences: int, asked: int | None) -> StateRoom:
    """Return for what recurrent states are kept: the drafts of requests, and those of steps that are measured at the
    start, whatever requests may draft."""
    return StateRoom(num_sequences, max(most_drafts(facts, asked), facts.most_drafts))


class ProtocolError(Exception):
    """The router violated the worker protocol; its stream is closed."""


class Worker:
    """Runs the sequences that the router admits, on the KV-cache blocks that it grants.
    worker.apply(pb.Command(admit=...)); report = worker.step()"""

    def __init__(
        self,
        model: StepModel,
        *,
        num_blocks: int,
        block_size: int = 16,
        max_sequences: int = 64,
        max_draft_length: int | None = None,
        max_prefill_rows: int = MAX_PREFILL_ROWS,
        prefill_seconds: float | None = None,
        cost: StepCost | None = None,
        controller: Controller | None = None,
        draft_source: DraftSource | None = None,
        sources: DraftSources | None = None,
        synthetic: SyntheticAcceptance | None = None,
        kv: PagedKV | None = None,
        device_steps: bool = False,
        eager: bool = False,
        grammars: Grammars | None = None,
        loras: LoadedLoras | None = None,
        num_host_blocks: int = 0,
        num_state_slots: int = 0,
        encodings: Encodings | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        """`max_draft_length`: most drafts per sequence and step; None: the checkpoint's number of masks.

        `max_prefill_rows`: prompt tokens per step until a Start sets it. `prefill_seconds`: longest duration of a step
        that mixes prompt tokens with decoding sequences. `cost`: the measured step-cost model, which keeps learning.
        `kv`: KV cache to use; None: allocate one. `device_steps`: sequences past prefill keep their state on the
        device, and their next step is launched before the last one is read. `eager`: no CUDA graphs. `grammars`: the
        grammar compiler; None: requests with a grammar are refused. `loras`: of the model; None: it takes none.
        `num_host_blocks`: blocks of host memory that keep what leaves the KV cache. `num_state_slots`: recurrent states
        that an own KV cache can keep for sequences to come. `encodings`: of the encoder beside the model; None: there
        is none.
        """
        facts = model.facts
        self.facts = facts
        self.num_blocks, self.block_size = num_blocks, block_size
        self.max_sequences = max_sequences
        only_masks = draft_source is None and (sources is None or synthetic is not None)
        self.max_draft_length = most_drafts(facts, max_draft_length, only_masks=only_masks)
        self._sources = sources or DraftSources()
        room = StateRoom(max_sequences, self.max_draft_length, num_state_slots)
        self.kv = model.allocate_kv(num_blocks, block_size, room) if kv is None else kv
        if self.kv.states is not None and not self.kv.states.has_room(*room[:2]):
            raise ValueError(f"{max_sequences} sequences with {self.max_draft_length} drafts have no room for states.")
        self._host_blocks = HostBlocks(self.kv, num_host_blocks)
        self.synthetic = synthetic
        self.draining = False
        self.cost = cost or StepCost.typical(facts.device.type)
        self._prefill_seconds = prefill_seconds
        self._loras = loras
        self._encodings = encodings
        # By LoRA and by whether a grammar constrains the text, whose drafts are then accepted more often.
        self._shapes: dict[tuple[str, bool], tuple[Shapes, Shapes]] = {}
        self.waiting = Waiting(grammars)
        self._clock = clock
        self._ended: float | None = None  # end of the last step, if work remained after it
        self._default_prefill_rows = max_prefill_rows
        device = None
        if device_steps and draft_source is None and facts.num_ranks == 1 and not facts.is_recurrent:
            device = DeviceRunner(
                model,
                self.kv,
                max_sequences=max_sequences,
                controller=controller,
                cost=self.cost,
                max_drafts=self.max_draft_length,
                eager=eager,
                synthetic=synthetic,
                clock=clock,
            )
        host = HostRunner(
            model,
            self.kv,
            controller=controller,
            cost=self.cost,
            draft_source=draft_source,
            synthetic=synthetic,
            captured=lambda batch: None if device is None else device.forward_prompts(batch),
            seconds_beside=lambda: None if device is None else device.did_other_work(),
            clock=clock,
        )
        self.engine = EngineCore(host, device, self._sources)
        self.reset()

    def reset(self) -> None:
        """Drop every sequence. Called when a router disconnects or a new one connects."""
        for runner in self.engine.runners:
            runner.reset()
        self._leaving: list[int] = []  # released, but still used by a step in flight
        self.waiting.clear()
        self.batch = RunningBatch()
        if self._encodings is not None:
            self._encodings.clear()
        if self._loras is not None:
            self._loras.unload_unnamed()
        self._started = self._readmits = False
        self._max_prefill_rows = self._default_prefill_rows
        self._draft_bound = self.max_draft_length

    def hello(self, incarnation: str) -> pb.Hello:
        """Return the Hello message that describes this worker to the router."""
        facts = self.facts
        return pb.Hello(
            protocol_major=PROTOCOL_MAJOR,
            protocol_minor=PROTOCOL_MINOR,
            incarnation=incarnation,
            model_hash=facts.served_hash,
            tokenizer_hash=facts.tokenizer_hash,
            vocab_size=facts.vocab_size,
            block_size=self.block_size,
            num_blocks=self.num_blocks,
            num_host_blocks=self._host_blocks.num_blocks,
            window=facts.window,
            max_draft_length=self.max_draft_length,
            num_masks=facts.num_masks,
            num_head_drafts=facts.head.num_drafts if self._sources.head else 0,
            head_kind=facts.head.kind if facts.head.num_drafts and self._sources.head else "",
            lays_out_masks=self._sources.masks,
            mask_ids=sorted(set(facts.mask_ids)),
            dtype=facts.number_format,
            device=str(facts.device),
            instruction_set=facts.instruction_set,
            num_state_slots=0 if self.kv.states is None else self.kv.states.num_kept,
            state_bytes_per_sequence=0 if self.kv.states is None else facts.state_bytes(self.kv.states.most_drafts),
            has_draft_head=facts.has_draft_head,
            model_name=facts.name,
            rope_switch=facts.rope_switch or 0,
            max_sequences=self.max_sequences,
            attention=facts.attention,
            eos_ids=facts.eos_ids,
            takes_grammars=self.waiting.why_none is None,
            synthetic_acceptance=self.synthetic.chances if self.synthetic is not None else (),
            step_cost_source=self.cost.origin.source,
            step_cost_reason=self.cost.origin.reason,
            mask_format=next((adapter.format for adapter in facts.adapters if not adapter.name), ""),
            loras=[pb.Lora(name=one.name, hash=digest, rank=one.rank) for digest, one in self._loaded_loras.items()],
            encoder=None if self._encodings is None else encoder_message(self._encodings.facts),
            adapters=[
                pb.Adapter(
                    name=adapter.name,
                    num_masks=adapter.num_masks,
                    num_head_drafts=adapter.head.num_drafts if self._sources.head else 0,
                    has_draft_head=adapter.has_draft_head,
                    format=adapter.format,
                )
                for adapter in facts.adapters
                if adapter.name
            ],
        )

    # ------------------------------------------------------------------------------------------ commands

    def apply(self, command: pb.Command) -> None:
        """Apply one command. A failure ends only the sequence concerned, unless the device is lost.
        Raises ProtocolError if the router violates the protocol."""
        match command.WhichOneof("command"):
            case "start":
                self._start(command.start)
            case "admit":
                with self._failing_alone(command.admit.seq_id):
                    self._admit(command.admit)
            case "extend":
                with self._failing_alone(command.extend.seq_id):
                    self._extend(command.extend)
            case "release":
                self._release(command.release.seq_id)
            case "load_lora":
                self._load_lora(command.load_lora)
            case "unload_lora":
                self._unload_lora(command.unload_lora.hash)
            case "encode":
                self._encode(command.encode)
            case "stop_encoding":
                if self._encodings is not None:
                    self._encodings.stop(command.stop_encoding.encode_id)
            case "offload_blocks":
                self._check_copy(command.offload_blocks)
                self._host_blocks.offload(command.offload_blocks.blocks, command.offload_blocks.host_blocks)
            case "restore_blocks":
                self._check_copy(command.restore_blocks)
                self._host_blocks.restore(command.restore_blocks.blocks, command.restore_blocks.host_blocks)
            case "drain":
                self.draining = True
            case _:
                raise ProtocolError("The router sent a command this worker does not know.")

    def _start(self, start: pb.Start) -> None:
        if self._started:
            raise ProtocolError("The router sent Start twice.")
        if start.protocol_major != PROTOCOL_MAJOR:
            raise ProtocolError(
                f"The router speaks protocol {start.protocol_major}.{start.protocol_minor}, this worker "
                f"{PROTOCOL_MAJOR}.{PROTOCOL_MINOR}. Install the same version of spaceserve on both."
            )
        self._started, self._readmits = True, start.readmits
        self._max_prefill_rows = start.max_prefill_rows or self._default_prefill_rows
        self._draft_bound = min(self.max_draft_length, start.max_draft_length)

    def _check_copy(self, copy: pb.CopyBlocks) -> None:
        """Raise ProtocolError for a copy of blocks that do not exist."""
        for numbers, most, what in (
            (copy.blocks, self.num_blocks, "block"),
            (copy.host_blocks, self._host_blocks.num_blocks, "block of host memory"),
        ):
            if len(numbers) != len(copy.blocks) or max(numbers, default=-1) >= most:
                raise ProtocolError(f"The router copies a {what} that does not exist; there are {most}.")

    @contextmanager
    def _failing_alone(self, seq_id: int) -> Iterator[None]:
        """Turn an exception in the block into a failure of this sequence only."""
        try:
            yield
            return
        except ProtocolError:
            raise
        except AdmissionError as error:
            message, wants_memory = str(error), False
        except Exception as error:
            if not (wants_memory := is_out_of_memory(error)) and is_lost(self.facts.device):
                raise
            _log.exception("sequence %d failed before its step", seq_id)
            message = failure_message("The sequence could not be taken in", error)
        if wants_memory:
            give_back_unused()
        self.batch.fail(seq_id, message)

    def _admit(self, message: pb.Admit) -> None:
        if message.seq_id in self.batch:
            raise ProtocolError(f"The router used the sequence number {message.seq_id} twice.")
        if self.draining:
            self.batch.hand_back(message.seq_id)
        elif len(self.batch) >= self.max_sequences:
            self.batch.fail(message.seq_id, f"The worker runs {self.max_sequences} sequences already, its most.")
        else:
            sequence = admit(
                message,
                self.facts,
                num_blocks=self.num_blocks,
                block_size=self.block_size,
                max_drafts=self._draft_bound,
                sources=self._sources,
                loras=self._loaded_loras,
                readmits=self._readmits,
            )
            refused = self.waiting.why_refused(sequence) if sequence.waits else None
            if refused is not None:
                self.batch.fail(sequence.seq_id, refused)
                return
            if self.kv.draft is not None:
                self.kv.draft.forget(sequence.pages[sequence.num_computed // self.block_size :])
            kind = message.lora, sequence.waits
            if kind not in self._shapes:
                self._shapes[kind] = shapes_by_adapter(self.facts), head_shapes_by_adapter(self.facts)
            sequence.state = self.batch.free_state()
            self._load_state(sequence, message)
            of_masks, of_heads = self._shapes[kind]
            sequence.acceptance = Acceptance(of_masks[sequence.adapter])
            sequence.head_acceptance = Acceptance(of_heads[sequence.adapter])
            self.batch.add(sequence)
            if sequence.waits:
                ignores_eos = not message.limits.eos_ids
                self.waiting.add(sequence, message.sampling.grammar, ignores_eos=ignores_eos)

    def _load_state(self, sequence: RunningSequence, message: pb.Admit) -> None:
        """Let a sequence begin with the recurrent state of its cached ids. Raises AdmissionError."""
        states = self.kv.states
        if states is None:
            return
        loaded = [message.load_state] if message.HasField("load_state") else []
        for slot in [*loaded, *(slot for _, slot in sequence.keep_states)]:
            if slot >= states.num_kept:
                raise AdmissionError(f"There is no slot {slot} for states to keep; there are {states.num_kept}.")
        if loaded:
            states.load(message.load_state, sequence.state, message.num_cached - 1)

    @property
    def _loaded_loras(self) -> Mapping[str, LoadedLora]:
        return {} if self._loras is None else self._loras.loaded

    def _load_lora(self, message: pb.LoadLora) -> None:
        """Load a LoRA and report it. Its steps wait meanwhile."""
        report = pb.LoraReport(hash=message.hash)
        try:
            if self._loras is None:
                raise InvalidLora("This worker takes no LoRAs.")
            self._loras.load(Path(message.folder), digest=message.hash)
            report.rank = self._loaded_loras[message.hash].rank
        except InvalidLora as error:
            report.error = str(error)
        except Exception as error:
            if not is_out_of_memory(error) and is_lost(self.facts.device):
                raise
            _log.exception("the LoRA in %s could not be loaded", message.folder)
            report.error = failure_message("The LoRA could not be loaded", error)
        if report.error:
            _log.warning("LoRA %s is not loaded: %s", message.hash[:12], report.error)
        self.batch.lora_loaded(report)

    def _encode(self, command: pb.Encode) -> None:
        if self._encodings is None:
            raise ProtocolError("The router sent texts to encode, and this worker has no encoder.")
        self._encodings.add(command, draining=self.draining)

    def _unload_lora(self, digest: str) -> None:
        number = self._loaded_loras[digest].number if digest in self._loaded_loras else None
        if number is not None and any(sequence.lora == number for sequence in self.batch):
            raise ProtocolError(f"The router unloads the LoRA {digest[:12]}, with which a sequence runs.")
        if self._loras is not None:
            self._loras.unload(digest)
        self._shapes = {kind: shapes for kind, shapes in self._shapes.items() if kind[0] != digest}

    def _extend(self, extend: pb.Extend) -> None:
        if (sequence := self.batch.get(extend.seq_id)) is None:
            return
        check_pages(extend.pages, self.num_blocks, sequence.held_pages)
        if self.kv.draft is not None:
            self.kv.draft.forget(extend.pages)
        sequence.extend(extend.pages)
        sequence.paused = sequence.paused and not extend.pages

    def _release(self, seq_id: int) -> None:
        """Drop this sequence, and acknowledge the release once no step uses its pages."""
        self.batch.forget(seq_id)
        self._leaving.append(seq_id)
        self._acknowledge()

    def _acknowledge(self) -> None:
        """Acknowledge the releases that no step in flight holds back any more."""
        for seq_id in self._leaving[:]:
            if not any(runner.refers_to(seq_id) for runner in self.engine.runners):
                self._leaving.remove(seq_id)
                self.batch.acknowledge(seq_id)

    # ------------------------------------------------------------------------------------------ graphs ahead

    def plan_ahead(self) -> None:
        """List the CUDA graphs that usual requests need, for `prepare`; none where steps are not captured."""
        if self.engine.device is not None:
            self.engine.device.plan_ahead(self._usual_sequence())

    def _usual_sequence(self) -> RunningSequence:
        """Return a sequence as requests without settings of their own have it."""
        facts = self.facts
        message = pb.Admit(
            seq_id=1,
            ids=[min({*range(len(facts.mask_ids) + 1)} - {*facts.mask_ids})],
            num_prompt=1,
            pages=[0],
            limits=pb.Limits(max_tokens=facts.window),
            max_draft_length=self.max_draft_length,
        )
        usual = admit(
            message,
            facts,
            num_blocks=self.num_blocks,
            block_size=self.block_size,
            max_drafts=self.max_draft_length,
            sources=self._sources,
        )
        usual.acceptance = Acceptance(shapes_by_adapter(facts)[usual.adapter])
        usual.head_acceptance = Acceptance(head_shapes_by_adapter(facts)[usual.adapter])
        return usual

    @property
    def may_prepare(self) -> bool:
        """Whether there is nothing else to do than to capture graphs that requests will need."""
        device = self.engine.device
        if device is None or not (device.may_prepare and device.works):
            return False
        return not (len(self.batch) or self.draining or self.has_work)

    def prepare(self, seconds: float = 0.0) -> None:
        """Capture such graphs for so many seconds, but at least one, or compile it. Requires `may_prepare`."""
        begun = self._clock()
        while True:
            assert self.engine.device is not None
            self.engine.device.prepare()
            if self._clock() - begun >= seconds or not self.may_prepare:
                return

    # ------------------------------------------------------------------------------------------ steps

    @property
    def num_forwards(self) -> int:
        """Forward passes run in this process."""
        return sum(runner.num_forwards for runner in self.engine.runners)

    @property
    def num_replays(self) -> int:
        """Forward passes that replayed a CUDA graph."""
        return sum(runner.num_replays for runner in self.engine.runners)

    @property
    def _runs(self) -> bool:
        """Whether a sequence can run a step."""
        return any(not (sequence.paused or sequence.waits) for sequence in self.batch)

    @property
    def has_work(self) -> bool:
        """Whether `step` would run a step or report something."""
        if self._runs or self.batch.has_news or self.engine.is_under_way or self.waiting.is_over_for_some:
            return True
        return self._encodings is not None and self._encodings.has_work

    @property
    def drained(self) -> bool:
        """Whether the worker is draining, runs no sequence and has nothing left to report."""
        return self.draining and len(self.batch) == 0 and not self.has_work

    def step(self, report: pb.StepReport | None = None) -> pb.StepReport | None:
        """Run one step of every sequence that can run. Returns the report, or None if there is nothing to report.
        `report`: an empty message to fill. The caller numbers it."""
        started, engine = self._clock(), self.engine
        waited = engine.waited
        pause = None if self._ended is None else started - self._ended
        report = pb.StepReport() if report is None else report
        self.waiting.take(self.batch)
        budget = PrefillBudget(self._max_prefill_rows, self._prefill_seconds, self.cost)
        steps: list[StepOutput] = []
        has_stepped = False
        for step in engine.step(self.batch, budget, pause):
            steps.append(step)
            for output in step.outputs:
                has_stepped = True
                if self.batch.get(output.plan.sequence.seq_id) is output.plan.sequence:  # not released meanwhile
                    self._commit(output, report)
            if self._leaving:
                self._acknowledge()
        for runner in engine.runners[::-1]:
            for sequence in runner.out_of_slots:
                if not sequence.paused and self.batch.get(sequence.seq_id) is sequence:
                    report_paused(sequence, report)
        if self.batch.has_news:
            released, failed = self.batch.take_news()
            report.released.extend(released)
            report.sequences.extend(failed)
            report.loras.extend(self.batch.take_loras())
        if has_stepped:
            report.stepped, stats = True, report.stats
            count_steps(stats, steps, self.cost)
            stats.host_seconds = max(0.0, self._clock() - started - (engine.waited - waited))
        if self._encodings is not None and self._encodings.has_work:
            report.encoded.extend(self._encodings.step(beside=bool(steps) or self._runs))
        self._ended = self._clock() if steps and self.has_work else None
        return report if has_stepped or says_something(report) else None

    def interrupted(self) -> None:
        """Exclude the time until the next step from the measured pauses between steps."""
        self._ended = None

    def _commit(self, output: SequenceOutput, report: pb.StepReport) -> None:
        """Advance or end the sequence, and add its output to the report."""
        plan, sequence = output.plan, output.plan.sequence
        goes_on = output.end is None and output.error is None
        num_drafts = plan.layout.num_drafts
        if plan.closes and goes_on and sequence.origin.is_by_head and sequence.head_acceptance is not None:
            sequence.head_acceptance.step(1, num_drafts, output.num_accepted)
        elif plan.closes and goes_on and sequence.acceptance is not None:
            by_masks = min(num_drafts, sequence.num_mask_drafts) if num_drafts else 0
            sequence.acceptance.step(sequence.draft_depth, by_masks, output.num_accepted)
        commit(output, report)
        if sequence.keep_states and sequence.num_computed == sequence.keep_states[0][0]:
            position, slot = sequence.keep_states.popleft()
            if self.kv.states is not None:
                self.kv.states.keep(sequence.state, position - 1, slot)
        if not goes_on:
            self.batch.end(sequence.seq_id)
