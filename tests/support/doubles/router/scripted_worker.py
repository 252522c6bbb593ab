"""A worker whose sequences follow a script, behind real gRPC: strict about pages, without a model."""

from __future__ import annotations

import asyncio
import hashlib
import tempfile
import uuid
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
from space_common.worker.secret import NotProven, SecretFile, WorkerSide
from space_proto import worker_pb2, worker_pb2_grpc

from doubles.router.script import Script, made_up_vector


class Violation(AssertionError):
    """The router broke the contract."""


class PageLedger:
    """What stands in every slot, and who may write where.

    A slot's content is the hash of the ids up to and including its position, as real keys and values depend on all
    ids before them. A sequence's computed slots must always hold its own prefix, whoever wrote them.
    """

    def __init__(self, num_blocks: int, block_size: int, num_host_blocks: int = 0) -> None:
        self.block_size = block_size
        self._host: list[list[bytes | None]] = [[None] * block_size for _ in range(num_host_blocks)]
        self._contents: list[list[bytes | None]] = [[None] * block_size for _ in range(num_blocks)]
        self._writer: dict[int, int] = {}  # block -> the one sequence that may write to it
        self._readers: dict[int, set[int]] = {}  # block -> sequences that share it

    def grant(self, seq_id: int, blocks: Sequence[int]) -> None:
        for block in blocks:
            if not 0 <= block < len(self._contents):
                raise Violation(f"sequence {seq_id} got block {block}, outside 0..{len(self._contents) - 1}")
            users = self._readers.get(block, set()) | ({self._writer[block]} if block in self._writer else set())
            if users:
                raise Violation(f"sequence {seq_id} got block {block} to write, still in use by {sorted(users)}")
            self._writer[block] = seq_id

    def share(self, seq_id: int, blocks: Sequence[int]) -> None:
        for block in blocks:
            self._readers.setdefault(block, set()).add(seq_id)

    def write(self, seq_id: int, pages: Sequence[int], position: int, content: bytes | None) -> None:
        """Put a prefix's hash (None: something wrong, as a rejected draft leaves it) into the slot of `position`."""
        index = position // self.block_size
        if index >= len(pages):
            raise Violation(f"sequence {seq_id} has {len(pages)} pages and would write position {position}")
        block = pages[index]
        if self._writer.get(block) != seq_id:
            raise Violation(f"sequence {seq_id} would write block {block} of {self._writer.get(block)}")
        if readers := self._readers.get(block, set()) - {seq_id}:
            old = self._contents[block][position % self.block_size]
            if old != content:
                raise Violation(f"sequence {seq_id} would change block {block}, shared with {sorted(readers)}")
        self._contents[block][position % self.block_size] = content

    def attend(self, seq_id: int, pages: Sequence[int], prefix: Sequence[bytes]) -> None:
        """Read the slots of positions [0, len(prefix)) as attention does; each must hold its prefix."""
        for start in range(0, len(prefix), self.block_size):
            wanted = list(prefix[start : start + self.block_size])
            found = self._contents[pages[start // self.block_size]][: len(wanted)]
            if found != wanted:
                raise Violation(
                    f"sequence {seq_id} finds foreign content in its block {pages[start // self.block_size]}"
                )

    def offload(self, copy: worker_pb2.CopyBlocks) -> None:
        for block, host_block in zip(copy.blocks, copy.host_blocks, strict=True):
            if block in self._writer:
                raise Violation(f"block {block} is offloaded while sequence {self._writer[block]} may write to it")
            self._host[host_block] = list(self._contents[block])

    def restore(self, copy: worker_pb2.CopyBlocks) -> None:
        for block, host_block in zip(copy.blocks, copy.host_blocks, strict=True):
            if block in self._writer or self._readers.get(block):
                raise Violation(f"block {block} is restored into while it is in use")
            self._contents[block] = list(self._host[host_block])

    def release(self, seq_id: int) -> None:
        self._writer = {block: writer for block, writer in self._writer.items() if writer != seq_id}
        for readers in self._readers.values():
            readers.discard(seq_id)


def prefix_hashes(ids: Sequence[int], known: list[bytes], salt: str = "") -> list[bytes]:
    """`known` extended in place to one hash per id: each over all ids up to and including its own. `salt`: what else
    keys and values depend on."""
    for i in range(len(known), len(ids)):
        before = known[i - 1] if i else salt.encode()
        known.append(hashlib.blake2b(before + ids[i].to_bytes(4, "little"), digest_size=8).digest())
    return known


class ScriptedSequence:
    """Ids, pages and computed length; advances by chunks of prompt and then by steps of up to d+1 ids."""

    def __init__(
        self,
        admit: worker_pb2.Admit,
        script: Script,
        ledger: PageLedger,
        max_draft_length: int,
        states: dict[int, Any] | None = None,
    ) -> None:
        """`states`: what recurrent states are kept of, by slot."""
        self.seq_id = admit.seq_id
        self.lora = admit.lora
        self.ids = list(admit.ids)
        self.pages = list(admit.pages)
        self.computed = admit.num_cached
        self.ended = False
        self.paused = False
        self.releasing: int | None = None  # steps until the release is acknowledged
        self._admit = admit
        self._script = script
        self._ledger = ledger
        self._max_draft_length = min(max_draft_length, admit.max_draft_length, script.draft_length)
        self._num_steps = 0
        self._num_times = 0  # it was stepped in, in whatever way
        self._is_long = 0 < script.rope_switch < len(self.ids)
        self._hashes = prefix_hashes(self.ids, [], admit.lora + " long" * self._is_long)

        size = script.block_size
        if not self.ids or not 1 <= admit.num_prompt <= len(self.ids):
            raise Violation(f"sequence {self.seq_id}: num_prompt {admit.num_prompt} of {len(self.ids)} ids")
        if admit.num_cached % size or admit.num_cached > (len(self.ids) - 1) // size * size:
            raise Violation(f"sequence {self.seq_id}: num_cached {admit.num_cached} of {len(self.ids)} ids")
        if admit.HasField("num_prompt_logprobs") and admit.num_cached:
            raise Violation(f"sequence {self.seq_id}: prompt logprobs with cached ids")
        if admit.pooling == worker_pb2.POOLING_MEAN and admit.num_cached:
            raise Violation(f"sequence {self.seq_id}: the mean of a prompt with cached ids")
        num_shared = admit.num_cached // size
        if len(self.pages) < num_shared:
            raise Violation(f"sequence {self.seq_id}: {admit.num_cached} cached ids in {len(self.pages)} pages")
        ledger.share(self.seq_id, self.pages[:num_shared])
        ledger.grant(self.seq_id, self.pages[num_shared:])
        ledger.attend(self.seq_id, self.pages, self._hashes[: self.computed])
        self._states = {} if states is None else states
        self._to_keep = [(one.position, one.slot) for one in admit.keep_states]
        if script.state_bytes_per_sequence:
            self._begin()

    def _begin(self) -> None:
        """Check which recurrent state it begins with, and where others are to be kept."""
        admit = self._admit
        if admit.HasField("load_state") != bool(admit.num_cached):
            raise Violation(f"sequence {self.seq_id}: {admit.num_cached} cached ids, and another state than theirs")
        if admit.num_cached and self._states.get(admit.load_state) != self._hashes[admit.num_cached - 1]:
            raise Violation(f"sequence {self.seq_id} begins with the state of another text")
        positions = [position for position, _ in self._to_keep]
        if positions != sorted(set(positions)) or any(not admit.num_cached < p < len(self.ids) for p in positions):
            raise Violation(f"sequence {self.seq_id} is to keep states behind {positions}")
        if any(slot >= self._script.num_state_slots for _, slot in self._to_keep):
            raise Violation(f"sequence {self.seq_id} is to keep states in {self._to_keep}")

    @property
    def num_slots(self) -> int:
        return len(self.pages) * self._script.block_size

    def extend(self, pages: list[int]) -> None:
        self._ledger.grant(self.seq_id, pages)
        self.pages += pages
        self.paused = False

    def step(self, prefill_rows: int) -> tuple[worker_pb2.SequenceReport | None, int]:
        """One step with at most `prefill_rows` prompt rows: the report, if there is anything to say, and rows used."""
        if self.ended or self.paused or self.releasing is not None:
            return None, 0
        self._num_times += 1
        if self._script.failing_id is not None and self._script.failing_id in self.ids[: self._admit.num_prompt]:
            self.ended = True
            return self._report(finish=worker_pb2.FINISH_ERROR, error="the script says this one fails"), 0
        free = self.num_slots - self.computed
        if free <= 0:
            self.paused = True
            return self._report(paused=True), 0
        if len(self.ids) == len(self._admit.ids):
            return self._prefill(min(len(self.ids) - self.computed, prefill_rows, free))
        return self._decode(free), 0

    @property
    def is_deadly(self) -> bool:
        """The worker dies of the step that was just taken."""
        marked = self._script.deadly_id is not None and self._script.deadly_id in self.ids[: self._admit.num_prompt]
        return marked and self._num_times >= self._script.deadly_steps

    def write_stale(self) -> None:
        """What a launched step still does to a sequence that the router has released."""
        for position in range(self.computed, min(self.computed + self._max_draft_length + 1, self.num_slots)):
            self._ledger.write(self.seq_id, self.pages, position, None)

    def _prefill(self, num_rows: int) -> tuple[worker_pb2.SequenceReport | None, int]:
        if self._to_keep:
            num_rows = min(num_rows, self._to_keep[0][0] - self.computed)
        if num_rows == 0:
            return None, 0
        start, self.computed = self.computed, self.computed + num_rows
        if self._to_keep and self._to_keep[0][0] == self.computed:
            self._states[self._to_keep.pop(0)[1]] = self._hashes[self.computed - 1]
        self._write_and_attend(start)
        report = self._report(num_computed=self.computed)
        if self._admit.HasField("num_prompt_logprobs"):
            num_top = self._admit.num_prompt_logprobs
            # row i predicts id i+1
            foreseen = self.ids[start + 1 : min(self.computed + 1, self._admit.num_prompt)]
            report.prompt_logprobs.extend(self._logprobs(token, num_top) for token in foreseen)
        if self.computed == len(self.ids) and self._admit.pooling:
            self.computed, self.ended = self.computed - 1, True
            report.num_computed, report.finish = self.computed, worker_pb2.FINISH_LENGTH
            report.embedding.values = made_up_vector([self._admit.pooling, *self.ids])
        elif self.computed == len(self.ids):
            self._emit(report, num_ids=1)
        return report, num_rows

    def _decode(self, free: int) -> worker_pb2.SequenceReport:
        num_left = self._admit.limits.max_tokens - (len(self.ids) - self._admit.num_prompt)
        num_drafts = max(
            0, min(self._max_draft_length, free - 1, num_left - 1, self._script.window - len(self.ids) - 1)
        )
        accepted = self._script.accepts(self.seq_id, self._num_steps, num_drafts)
        self._num_steps += 1
        report = self._report(decoded=True, num_drafted=num_drafts)
        start = self.computed
        num_before = len(self.ids)
        self._emit(report, num_ids=accepted + 1)
        self.computed = min(num_before + accepted, len(self.ids) - 1)
        report.num_accepted = min(accepted, len(self.ids) - num_before)
        report.num_computed = self.computed
        self._write_and_attend(start)
        for position in range(self.computed, start + num_drafts + 1):  # rejected drafts leave stale slots
            self._ledger.write(self.seq_id, self.pages, position, None)
        return report

    def _emit(self, report: worker_pb2.SequenceReport, num_ids: int) -> None:
        """Up to `num_ids` ids, cut at the first EOS, stop id or limit."""
        limits, sampling = self._admit.limits, self._admit.sampling
        for _ in range(num_ids):
            token = self._script.language.next_id(self.ids, self._admit.num_prompt, sampling)
            place = len(self.ids) - self._admit.num_prompt
            if self._admit.prediction:
                report.num_predicted.append(int(self._admit.prediction[place : place + 1] == [token]))
            self.ids.append(token)
            report.tokens.append(token)
            if self._admit.want_logprobs:
                report.logprobs.append(self._logprobs(token, self._admit.num_logprobs))
            num_generated = len(self.ids) - self._admit.num_prompt
            if num_generated > sampling.min_tokens and token in limits.eos_ids:
                report.finish = worker_pb2.FINISH_EOS
            elif num_generated > sampling.min_tokens and token in limits.stop_ids:
                report.finish = worker_pb2.FINISH_STOP_ID
            elif num_generated >= limits.max_tokens or len(self.ids) >= self._script.window:
                report.finish = worker_pb2.FINISH_LENGTH
            elif not self._is_long and 0 < self._script.rope_switch < len(self.ids):
                report.finish = worker_pb2.FINISH_READMIT
            if report.finish != worker_pb2.FINISH_NONE:
                self.ended = True
                break
        prefix_hashes(self.ids, self._hashes)

    def _write_and_attend(self, start: int) -> None:
        for position in range(start, self.computed):
            self._ledger.write(self.seq_id, self.pages, position, self._hashes[position])
        self._ledger.attend(self.seq_id, self.pages, self._hashes[: self.computed])

    def _report(self, **fields: Any) -> worker_pb2.SequenceReport:
        return worker_pb2.SequenceReport(seq_id=self.seq_id, **{"num_computed": self.computed, **fields})

    def _logprobs(self, token: int, num_top: int) -> worker_pb2.TokenLogprobs:
        """A made-up law: log-probability -(1 + id mod 7), the next ids as alternatives."""
        top = [token + i for i in range(num_top)]
        return worker_pb2.TokenLogprobs(
            id=token,
            logprob=-(1.0 + token % 7),
            top_ids=[i % self._script.vocab_size for i in top],
            top_logprobs=[-(1.0 + token % 7 + i) for i in range(num_top)],
        )


def hello_of(script: Script, incarnation: str) -> worker_pb2.Hello:
    return worker_pb2.Hello(
        protocol_major=script.protocol_major, incarnation=incarnation,
        model_hash=script.model_hash, tokenizer_hash=script.tokenizer_hash, vocab_size=script.vocab_size,
        block_size=script.block_size, num_blocks=script.num_blocks, window=script.window,
        max_draft_length=script.draft_length,
        num_masks=script.draft_length if script.num_masks is None else script.num_masks,
        lays_out_masks=script.lays_out_masks, mask_ids=script.mask_ids,
        dtype="float32", device="cpu", model_name=script.model_name, max_sequences=script.max_sequences,
        rope_switch=script.rope_switch, attention="none", instruction_set=script.instruction_set,
        num_host_blocks=script.num_host_blocks,
        eos_ids=script.eos_ids, takes_grammars=script.takes_grammars,
        num_state_slots=script.num_state_slots, state_bytes_per_sequence=script.state_bytes_per_sequence,
        step_cost_source=script.step_cost_source, step_cost_reason=script.step_cost_reason,
        loras=[worker_pb2.Lora(name=name, hash=digest, rank=4) for name, digest in script.loras],
        encoder=script.encoder,
        adapters=[
            worker_pb2.Adapter(name=name, num_masks=script.draft_length, format="space") for name in script.adapters
        ],
    )  # fmt: skip


@dataclass
class Figures:
    """What a scripted worker has seen, over all its lives."""

    num_steps: int = 0
    num_messages: int = 0  # of commands
    num_admits: int = 0
    num_extends: int = 0
    num_releases: int = 0
    num_cached_ids: int = 0  # over all admits
    num_restored_blocks: int = 0  # from host memory
    num_computed_prompt_ids: int = 0  # rows of prefill
    num_texts: int = 0  # that were encoded
    num_admits_by_adapter: Counter[str] = field(default_factory=Counter)
    num_admits_by_forced: Counter[int] = field(default_factory=Counter)  # drafts that the request commands


class ScriptedBatch:
    """Sequences that step together; raises Violation where the router breaks the contract."""

    def __init__(self, script: Script, figures: Figures | None = None) -> None:
        self.script = script
        self.figures = figures or Figures()
        self.sequences: dict[int, ScriptedSequence] = {}
        self.draining = False
        self.is_dead = False  # a sequence has killed the worker
        self._ledger = PageLedger(script.num_blocks, script.block_size, script.num_host_blocks)
        self._seen: set[int] = set()
        self._start: worker_pb2.Start | None = None
        self._released: list[int] = []
        self._failed: list[worker_pb2.SequenceReport] = []
        self.loras = {digest for _, digest in script.loras}  # loaded, by hash
        self._lora_reports: list[worker_pb2.LoraReport] = []
        self._states: dict[int, Any] = {}
        self._texts: list[tuple[int, int, worker_pb2.EncoderInput]] = []  # by encode_id and number
        self._encoded: list[worker_pb2.Encoded] = []
        self._report_no = 0

    def hello(self) -> worker_pb2.Hello:
        return hello_of(self.script, uuid.uuid4().hex)

    @property
    def has_work(self) -> bool:
        return bool(self._texts) or any(
            sequence.releasing is not None or not (sequence.ended or sequence.paused)
            for sequence in self.sequences.values()
        )

    def apply(self, command: worker_pb2.Command) -> None:
        kind = command.WhichOneof("command")
        if (self._start is None) != (kind == "start"):
            raise Violation(f"{kind} came {'before' if self._start is None else 'after'} Start")
        match kind:
            case "start":
                self._start = command.start
            case "admit":
                self._admit(command.admit)
            case "extend":
                self.figures.num_extends += 1
                if sequence := self.sequences.get(command.extend.seq_id):
                    sequence.extend(list(command.extend.pages))
            case "release":
                self.figures.num_releases += 1
                if sequence := self.sequences.get(command.release.seq_id):
                    sequence.releasing = self.script.release_steps
                else:
                    self._released.append(command.release.seq_id)
            case "offload_blocks":
                self._ledger.offload(command.offload_blocks)
            case "restore_blocks":
                self.figures.num_restored_blocks += len(command.restore_blocks.blocks)
                self._ledger.restore(command.restore_blocks)
            case "load_lora":
                self._load_lora(command.load_lora)
            case "unload_lora":
                if any(
                    one.lora == command.unload_lora.hash for one in self.sequences.values() if one.releasing is None
                ):
                    raise Violation(f"the LoRA {command.unload_lora.hash} is unloaded, and used")
                self.loras.discard(command.unload_lora.hash)
            case "encode":
                self._encode(command.encode)
            case "stop_encoding":
                self._texts = [one for one in self._texts if one[0] != command.stop_encoding.encode_id]
            case "drain":
                self.draining = True

    def _encode(self, command: worker_pb2.Encode) -> None:
        if self.script.encoder is None or not command.inputs:
            raise Violation(f"{len(command.inputs)} texts are to be encoded, and there is no encoder or none of them")
        if self.draining:
            self._encoded.append(worker_pb2.Encoded(encode_id=command.encode_id, returned=True))
            return
        if any(not 1 <= len(one.ids) <= self.script.encoder.window for one in command.inputs):
            raise Violation("a text is to be encoded that is empty, or longer than the encoder's window")
        self._texts += [(command.encode_id, number, one) for number, one in enumerate(command.inputs)]

    def _encode_some(self) -> None:
        """Encode the next texts; one with `failing_id` fails with the others of its command, `deadly_id` kills."""
        size = 0 if self.script.encoder is None else self.script.encoder.num_values
        taken, self._texts = self._texts[: self.script.encoder_texts], self._texts[self.script.encoder_texts :]
        for encode_id, number, text in taken:
            self.is_dead = self.is_dead or self.script.deadly_id in text.ids
            if self.script.failing_id in text.ids:
                self._encoded.append(worker_pb2.Encoded(encode_id=encode_id, error="the script says this one fails"))
                self._texts = [one for one in self._texts if one[0] != encode_id]
                continue
            self.figures.num_texts += 1
            values = [worker_pb2.Values(values=made_up_vector([*text.ids, *text.type_ids], size))]
            self._encoded.append(worker_pb2.Encoded(encode_id=encode_id, numbers=[number], values=values))

    def _admit(self, admit: worker_pb2.Admit) -> None:
        assert self._start is not None
        if admit.seq_id in self._seen:
            raise Violation(f"seq_id {admit.seq_id} is used again")
        self._seen.add(admit.seq_id)
        if self.draining:
            report = worker_pb2.SequenceReport(seq_id=admit.seq_id, finish=worker_pb2.FINISH_RETURNED)
            self._failed.append(report)
            return
        if len(self.sequences) >= self.script.max_sequences:
            raise Violation(f"{len(self.sequences) + 1} sequences; the worker runs {self.script.max_sequences}")
        if admit.adapter and admit.adapter not in self.script.adapters:
            raise Violation(f"seq_id {admit.seq_id} asks for the adapter {admit.adapter}")
        if admit.lora and admit.lora not in self.loras:
            raise Violation(f"seq_id {admit.seq_id} asks for the LoRA {admit.lora}, which is not loaded")
        self.figures.num_admits_by_adapter[admit.adapter] += 1
        self.figures.num_admits_by_forced[admit.num_forced_drafts] += 1
        bound = self._start.max_draft_length
        self.sequences[admit.seq_id] = ScriptedSequence(admit, self.script, self._ledger, bound, self._states)
        self.figures.num_admits += 1
        self.figures.num_cached_ids += admit.num_cached

    def _load_lora(self, message: worker_pb2.LoadLora) -> None:
        report = worker_pb2.LoraReport(hash=message.hash, rank=4)
        if self.script.lora_error:
            report.error = self.script.lora_error
        else:
            self.loras.add(message.hash)
        self._lora_reports.append(report)

    @property
    def has_news(self) -> bool:
        """There is something to report even without a step."""
        return bool(self._released or self._failed or self._lora_reports or self._encoded)

    def step(self) -> worker_pb2.StepReport:
        """One step of everything that can go on, or a report without one."""
        assert self._start is not None
        stats = worker_pb2.StepStats(plain_step_seconds=self.script.plain_step_seconds)
        reports, self._failed = self._failed, []
        rows_left = self._start.max_prefill_rows
        lengths = [0] * (self.script.draft_length + 1)
        stepped = False
        for sequence in list(self.sequences.values()):
            if sequence.releasing is not None:
                self._step_released(sequence)
                continue
            report, num_rows = sequence.step(rows_left)
            self.is_dead = self.is_dead or sequence.is_deadly
            rows_left -= num_rows
            if report is None:
                continue
            reports.append(report)
            stepped = stepped or not report.paused
            stats.num_sequences += 1
            stats.prefill_rows += num_rows
            self.figures.num_computed_prompt_ids += num_rows
            if report.decoded:
                stats.chain_rows += 1 + report.num_drafted
                stats.mask_rows += report.num_drafted
                lengths[report.num_drafted] += 1
        self._encode_some()
        self._report_no += 1
        self.figures.num_steps += stepped
        result = worker_pb2.StepReport(
            report_no=self._report_no,
            stepped=stepped,
            sequences=reports,
            released=self._released,
            loras=self._lora_reports,
            encoded=self._encoded,
        )
        self._released, self._lora_reports, self._encoded = [], [], []
        if stepped:
            stats.draft_length_counts.extend(lengths)
            stats.forward_seconds, stats.sample_seconds, stats.draft_seconds = 0.001, 0.0001, 0.0001
            stats.host_seconds = 0.0002
            result.stats.CopyFrom(stats)
        self._spoil(result)
        return result

    def heartbeat(self) -> worker_pb2.StepReport:
        self._report_no += 1
        return worker_pb2.StepReport(report_no=self._report_no)

    def _step_released(self, sequence: ScriptedSequence) -> None:
        assert sequence.releasing is not None
        if sequence.releasing == 0:
            del self.sequences[sequence.seq_id]
            self._ledger.release(sequence.seq_id)
            self._released.append(sequence.seq_id)
        else:
            sequence.releasing -= 1
            sequence.write_stale()

    def _spoil(self, report: worker_pb2.StepReport) -> None:
        """Contradict the contract once, if the script says so and there is something to contradict with."""
        emitting = next((sequence for sequence in report.sequences if sequence.tokens), None)
        if self.script.garbage is None or emitting is None:
            return
        match self.script.garbage:
            case "report_no":
                report.report_no += 1
            case "unknown_sequence":
                emitting.seq_id = 1 << 40
            case "too_many_tokens":
                emitting.tokens.extend([4] * 10_000)
            case "computed":
                emitting.num_computed = 1 << 30
            case "vocabulary":
                emitting.tokens[0] = self.script.vocab_size
        self.script.garbage = None


class ScriptedWorker(worker_pb2_grpc.WorkerServicer):
    """A worker that follows a `Script` and holds the router to the contract.

    async with ScriptedWorker(Script(accepts=always)) as worker:
        ... connect to worker.address ...
        worker.check()   # raises what the router did wrong
    """

    def __init__(
        self, script: Script | None = None, *, listen: str | None = None, secret: SecretFile | None = None
    ) -> None:
        """`listen`: unix:PATH or HOST:PORT; None: a socket in a folder of its own. `secret`: what routers must know."""
        self._secret = None if secret is None else WorkerSide(secret)
        self.script = script or Script()
        self.address = listen or ""
        self.violations: list[str] = []
        self.figures = Figures()
        self.num_lives = 1  # incarnations so far
        self._name = uuid.uuid4().hex[:8]  # of this process
        self.drained = asyncio.Event()
        self._listen = listen
        self._folder: tempfile.TemporaryDirectory[str] | None = None
        self._server: grpc.aio.Server | None = None
        self._conversations: set[_Conversation] = set()

    async def __aenter__(self) -> ScriptedWorker:
        if self._listen is None:
            self._folder = tempfile.TemporaryDirectory(prefix="scripted-")
            self.address = f"unix:{Path(self._folder.name) / 'w.sock'}"
        self._server = grpc.aio.server()
        worker_pb2_grpc.add_WorkerServicer_to_server(self, self._server)  # type: ignore[no-untyped-call]
        port = self._server.add_insecure_port(self.address)
        if not self.address.startswith("unix:"):
            self.address = f"{self.address.rpartition(':')[0]}:{port}"
        await self._server.start()
        return self

    async def __aexit__(self, *error: object) -> None:
        for conversation in list(self._conversations):
            conversation.die()
        if self._server is not None:
            await self._server.stop(grace=0.2)
        if self._folder is not None:
            self._folder.cleanup()

    def kill(self) -> None:
        """Die as a process does: every stream ends, every page is lost; a new incarnation listens at once."""
        self.num_lives += 1
        for conversation in list(self._conversations):
            conversation.die()

    def leave(self) -> None:
        """End as on SIGTERM: running sequences finish; a new incarnation listens at once."""
        self.num_lives += 1
        for conversation in list(self._conversations):
            conversation.drain()

    def check(self) -> None:
        if self.violations:
            raise Violation("; ".join(self.violations))

    def hello(self) -> worker_pb2.Hello:
        return hello_of(self.script, f"life {self.num_lives} of {self._name}")

    async def Serve(
        self,
        request_iterator: AsyncIterator[worker_pb2.RouterMessage],
        context: grpc.aio.ServicerContext[worker_pb2.RouterMessage, worker_pb2.WorkerMessage],
    ) -> AsyncIterator[worker_pb2.WorkerMessage]:
        """The conversation: hello, then reports until somebody dies."""
        hello = self.hello()
        if self._secret is not None:
            try:
                hello.proof = self._secret.check(context.invocation_metadata() or (), context.peer())
            except NotProven as error:
                refusal = worker_pb2.Refusal(reason=error.reason, challenge=error.challenge)
                yield worker_pb2.WorkerMessage(refusal=refusal)
                return
        conversation = _Conversation(self)
        self._conversations.add(conversation)
        reader = asyncio.create_task(conversation.read(request_iterator))
        try:
            yield worker_pb2.WorkerMessage(hello=hello)
            async for message in conversation.messages():
                yield message
        except Violation as violation:
            self.violations.append(str(violation))
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, str(violation))
        finally:
            self._conversations.discard(conversation)
            reader.cancel()
        if conversation.dead:
            await context.abort(grpc.StatusCode.UNAVAILABLE, "the scripted worker died")


class _Conversation:
    """One router's stream: the running batch of a scripted worker."""

    def __init__(self, worker: ScriptedWorker) -> None:
        self.dead = False
        self._worker = worker
        self._script = worker.script
        self._batch = ScriptedBatch(worker.script, worker.figures)
        self._inbox: list[worker_pb2.Command] = []
        self._news = asyncio.Event()
        self._closed = False

    def die(self) -> None:
        self.dead = True
        self._news.set()

    def drain(self) -> None:
        self._inbox.append(worker_pb2.Command(drain=worker_pb2.Drain()))
        self._news.set()

    async def read(self, messages: AsyncIterator[worker_pb2.RouterMessage]) -> None:
        """Commands into the inbox until the router hangs up."""
        try:
            async for message in messages:
                self._worker.figures.num_messages += 1
                self._inbox += message.commands
                self._news.set()
        finally:
            self._closed = True
            self._news.set()

    async def messages(self) -> AsyncIterator[worker_pb2.WorkerMessage]:
        """Reports, one per step, or when there is something to acknowledge, or as a heartbeat."""
        script = self._script
        while not self.dead and not self._closed:
            self._news.clear()
            for command in self._inbox:
                self._batch.apply(command)
            self._inbox.clear()
            if script.refuse is not None:
                yield worker_pb2.WorkerMessage(refusal=worker_pb2.Refusal(reason=script.refuse))
                return
            if script.hang_after_steps is not None and self._worker.figures.num_steps >= script.hang_after_steps:
                while not self.dead and not self._closed:
                    self._news.clear()
                    await self._news.wait()
                return
            if script.die_after_steps is not None and self._worker.figures.num_steps >= script.die_after_steps:
                script.die_after_steps = None
                self._worker.kill()
                return
            if script.stall_after_steps is not None and self._worker.figures.num_steps >= script.stall_after_steps:
                await asyncio.sleep(script.heartbeat_seconds)
                yield worker_pb2.WorkerMessage(report=self._batch.heartbeat())
            elif self._batch.has_work:
                await asyncio.sleep(script.step_seconds)
                report = self._report()
                if self._batch.is_dead:
                    self._worker.kill()
                    return
                yield report
            elif self._batch.has_news:
                yield self._report()
            elif self._batch.draining and not self._batch.sequences:
                self._worker.drained.set()
                farewell = self._batch.heartbeat()
                farewell.leaving = True
                yield worker_pb2.WorkerMessage(report=farewell)
                while not self.dead and not self._closed:
                    self._news.clear()
                    await self._news.wait()
            else:
                try:
                    await asyncio.wait_for(self._news.wait(), script.heartbeat_seconds)
                except TimeoutError:
                    yield worker_pb2.WorkerMessage(report=self._batch.heartbeat())

    def _report(self) -> worker_pb2.WorkerMessage:
        return worker_pb2.WorkerMessage(report=self._batch.step())
