"""Conversion between the engine's types and the worker protocol's messages."""

from __future__ import annotations

import hashlib
import sys
from array import array
from collections.abc import Sequence
from dataclasses import dataclass

from space_proto import worker_pb2

from space_router.engine.errors import ProtocolViolation
from space_router.engine.request.encoding import Chunk
from space_router.engine.request.request import (
    Delta,
    Finish,
    Grammar,
    SamplingOptions,
    ServedLora,
    TokenLogprobs,
)
from space_router.engine.request.request_state import RequestState
from space_router.engine.state_cache import HeldState


@dataclass(frozen=True)
class ServedEncoder:
    """The encoder beside a worker's model."""

    hash: str
    tokenizer_hash: str
    window: int  # most ids of a text or a pair
    vocab_size: int
    num_types: int
    num_values: int  # of a text or a pair
    scores_pairs: bool  # a cross-encoder; else it makes vectors
    is_normalised: bool

    @classmethod
    def from_hello(cls, hello: worker_pb2.Hello) -> ServedEncoder | None:
        """Return what a Hello says of its encoder; None: there is none."""
        if not hello.HasField("encoder"):
            return None
        return cls(**{name: getattr(hello.encoder, name) for name in cls.__dataclass_fields__})


@dataclass(frozen=True)
class WorkerModelFacts:
    """The fields of a worker's Hello that the router uses."""

    model_name: str
    model_hash: str
    tokenizer_hash: str  # "" if the worker has no tokenizer.json
    incarnation: str  # unique to each start of the process
    vocab_size: int
    window: int  # maximum positions of one sequence, prompt and output
    block_size: int  # slots per block
    num_blocks: int
    max_sequences: int  # maximum concurrent sequences
    max_draft_length: int
    num_masks: int  # 0: a plain checkpoint
    mask_ids: tuple[int, ...]
    eos_ids: tuple[int, ...]
    has_draft_head: bool
    dtype: str
    device: str
    attention: str
    instruction_set: str = ""  # of the products, such as amx_bf16 or sm_90; "": the worker does not say
    adapters: tuple[str, ...] = ()  # names of gated adapters that requests can ask for
    adapter_masks: tuple[int, ...] = ()  # masks of each
    adapter_head_drafts: tuple[int, ...] = ()  # most drafts of the recurrent head of each
    adapter_formats: tuple[str, ...] = ()  # of each: space, uno or i-dlm; "": the worker does not say
    loras: tuple[tuple[str, str], ...] = ()  # name and hash of each ordinary LoRA that it loaded at start
    mask_format: str = ""  # of the checkpoint's own adapter
    lays_out_masks: bool = False
    num_head_drafts: int = 0  # most drafts of its recurrent head, or of the network in its place; 0: it has none
    head_kind: str = ""  # what makes them: recurrent, model, mtp or eagle; "": nothing, or the worker does not say
    num_host_blocks: int = 0  # blocks of host memory that keep what is evicted from the KV cache
    takes_grammars: bool = False  # the worker knows the bytes of its token ids
    synthetic_acceptance: tuple[float, ...] = ()  # acceptance probabilities that are simulated for measurements
    num_state_slots: int = 0  # recurrent states that it keeps for sequences to come
    state_bytes_per_sequence: int = 0  # of recurrent layers, beside pages; 0: there are none
    step_cost_source: str = ""  # file, measured or learned; "": the worker does not say
    step_cost_reason: str = ""  # why they are learned
    encoder: ServedEncoder | None = None  # the encoder beside the model; None: there is none
    rope_switch: int = 0  # ids beyond which a sequence has other rotary angles; 0: all have the same

    @property
    def num_slots(self) -> int:
        return self.block_size * self.num_blocks

    @property
    def longest(self) -> tuple[int, int]:
        """Ids of the longest sequence, prompt and output; and slots, which decide among workers of one window."""
        return min(self.window, self.num_slots), self.num_slots

    @property
    def shares_prefixes(self) -> bool:
        """Return whether prefixes can be shared: pages say all of them, or states of recurrent layers are kept."""
        return not self.is_recurrent or self.num_state_slots > 0

    @property
    def is_recurrent(self) -> bool:
        """Return whether layers have states beside the pages of a prefix."""
        return self.state_bytes_per_sequence > 0

    def max_forced_drafts(self, adapter: str) -> int:
        """Return the most drafts per step that a request can ask for with an adapter; "": with the checkpoint's own
        masks. They come from masks where these are laid out, else from the recurrent head or the draft model."""
        by_masks = self.num_masks_of(adapter) if self.lays_out_masks else 0
        return min(by_masks or self.num_head_drafts_of(adapter), self.max_draft_length)

    def num_head_drafts_of(self, adapter: str) -> int:
        """Return the drafts that an adapter's recurrent head makes; "": the checkpoint's own. A draft model drafts for
        all."""
        return self.adapter_head_drafts[self.adapters.index(adapter)] if adapter else self.num_head_drafts

    def num_masks_of(self, adapter: str) -> int:
        """Return the masks of an adapter; "": the checkpoint's own."""
        return self.adapter_masks[self.adapters.index(adapter)] if adapter else self.num_masks

    @property
    def text_depends_on(self) -> tuple[str, ...]:
        """Properties that two workers must share to give the same text; see also `instruction_set`."""
        return (self.model_hash, self.dtype, self.device.partition(":")[0])

    @property
    def fingerprint(self) -> str:
        """The `system_fingerprint` of responses: a short hash of all that its text depends on."""
        parts = (*self.text_depends_on, self.instruction_set)
        return "fp_" + hashlib.sha256("\n".join(parts).encode()).hexdigest()[:12]

    def difference(self, before: WorkerModelFacts) -> str | None:
        """Return why this worker cannot continue the requests of `before`, or None if it can."""
        if self.text_depends_on != before.text_depends_on:
            theirs, ours = (" ".join(one.text_depends_on) for one in (self, before))
            return (
                f"A worker has {theirs}, the one before it {ours}. Give all the same model and dtype, and where rotary "
                "positions depend on the window (dynamic NTK, LongRoPE) the same --max-model-len."
            )
        if self.encoder != before.encoder:
            theirs, ours = ("none" if one.encoder is None else one.encoder.hash[:12] for one in (self, before))
            return f"A worker has the encoder {theirs}, the one before it {ours}. Give all the same --embedding-model."
        if set(self.adapters) != set(before.adapters):
            theirs, ours = (", ".join(one.adapters) or "none" for one in (self, before))
            return f"A worker has the adapters {theirs}, the one before it {ours}. Give all the same."
        if set(self.loras) != set(before.loras):
            theirs, ours = (
                ", ".join(f"{name} ({sha[:12]})" for name, sha in one.loras) or "none" for one in (self, before)
            )
            return f"A worker has the LoRAs {theirs}, the one before it {ours}. Give all the same."
        return None

    def computes_like(self, instruction_set: str) -> bool:
        """Return whether this worker may continue a text begun with `instruction_set`; "" is unknown and may be any."""
        return "" in (instruction_set, self.instruction_set) or instruction_set == self.instruction_set

    @classmethod
    def from_hello(cls, hello: worker_pb2.Hello) -> WorkerModelFacts:
        of_each = {
            "adapter_masks": tuple(adapter.num_masks for adapter in hello.adapters),
            "adapter_head_drafts": tuple(adapter.num_head_drafts for adapter in hello.adapters),
            "adapter_formats": tuple(adapter.format for adapter in hello.adapters),
            "loras": tuple((lora.name, lora.hash) for lora in hello.loras),
            "encoder": ServedEncoder.from_hello(hello),
        }
        values = of_each | {name: getattr(hello, name) for name in cls.__dataclass_fields__ if name not in of_each}
        lists = {name: tuple(values[name]) for name in ("mask_ids", "eos_ids", "synthetic_acceptance")}
        return cls(**{**values, **lists, "adapters": tuple(adapter.name for adapter in hello.adapters)})


FINISH = {worker_pb2.Finish.Value(f"FINISH_{finish.name}"): finish for finish in Finish}


POOLING = {
    None: worker_pb2.POOLING_NONE,
    "last": worker_pb2.POOLING_LAST,
    "mean": worker_pb2.POOLING_MEAN,
}


def admit(
    live: RequestState,
    seq_id: int,
    pages: Sequence[int],
    num_cached: int,
    *,
    max_draft_length: int,
    num_forced_drafts: int,
    load_state: int | None = None,
    keep_states: Sequence[HeldState] = (),
) -> worker_pb2.Command:
    """Return the Admit command of a request; ids emitted in earlier admissions follow its prompt. `load_state`: slot of
    the recurrent state behind its cached ids; `keep_states`: those to keep."""
    request = live.request
    return worker_pb2.Command(
        admit=worker_pb2.Admit(
            seq_id=seq_id,
            ids=live.ids,
            num_prompt=live.num_prompt,
            num_cached=num_cached,
            pages=pages,
            sampling=sampling(request.sampling),
            limits=worker_pb2.Limits(max_tokens=live.max_tokens, eos_ids=request.eos_ids, stop_ids=request.stop_ids),
            max_draft_length=max_draft_length,
            num_forced_drafts=num_forced_drafts,
            num_logprobs=request.num_logprobs,
            want_logprobs=request.want_logprobs,
            num_prompt_logprobs=request.num_prompt_logprobs if live.wants_prompt_logprobs else None,
            adapter=request.adapter,
            lora="" if request.lora is None else request.lora.digest,
            prediction=request.prediction or (),
            pooling=POOLING[request.pooling],
            load_state=load_state,
            keep_states=[worker_pb2.KeptState(position=one.position, slot=one.slot) for one in keep_states],
            traceparent="" if request.trace is None else request.trace.admitted(),
        )
    )


def load_lora(lora: ServedLora) -> worker_pb2.Command:
    return worker_pb2.Command(load_lora=worker_pb2.LoadLora(hash=lora.digest, folder=lora.folder))


def unload_lora(digest: str) -> worker_pb2.Command:
    return worker_pb2.Command(unload_lora=worker_pb2.UnloadLora(hash=digest))


def encode(encode_id: int, chunk: Chunk) -> worker_pb2.Command:
    texts = (chunk.encoding.texts[number] for number in chunk.numbers)
    inputs = [worker_pb2.EncoderInput(ids=text.ids, type_ids=text.type_ids) for text in texts]
    return worker_pb2.Command(encode=worker_pb2.Encode(encode_id=encode_id, inputs=inputs))


def stop_encoding(encode_id: int) -> worker_pb2.Command:
    return worker_pb2.Command(stop_encoding=worker_pb2.StopEncoding(encode_id=encode_id))


def extend(seq_id: int, pages: Sequence[int]) -> worker_pb2.Command:
    return worker_pb2.Command(extend=worker_pb2.Extend(seq_id=seq_id, pages=pages))


def release(seq_id: int) -> worker_pb2.Command:
    return worker_pb2.Command(release=worker_pb2.Release(seq_id=seq_id))


def delta(part: worker_pb2.SequenceReport) -> Delta:
    """Return the delta of one sequence's report. Raises ProtocolViolation.

    Reading a message's fields is slow, so each is read once, here.
    """
    logprobs, prompt_logprobs, predicted = part.logprobs, part.prompt_logprobs, part.num_predicted
    return Delta(
        tuple(part.tokens),
        _logprobs(part, logprobs) if logprobs else (),
        _logprobs(part, prompt_logprobs) if prompt_logprobs else (),
        FINISH.get(part.finish),
        part.num_drafted,
        part.num_accepted,
        part.decoded,
        tuple(predicted) if predicted else (),
        vector(part.embedding) if part.HasField("embedding") else None,
    )


def vector(message: worker_pb2.Values) -> Sequence[float]:
    """Return the numbers of a vector. Raises ProtocolViolation if bytes are missing."""
    values = array("f")
    try:
        values.frombytes(message.values)
    except ValueError as error:
        raise ProtocolViolation(f"a vector has {len(message.values)} bytes, no multiple of 4") from error
    if sys.byteorder == "big":
        values.byteswap()
    return values


def _logprobs(
    part: worker_pb2.SequenceReport, messages: Sequence[worker_pb2.TokenLogprobs]
) -> tuple[TokenLogprobs, ...]:
    if any(len(m.top_ids) != len(m.top_logprobs) for m in messages):
        raise ProtocolViolation(f"sequence {part.seq_id} has alternatives without logprobs")
    return tuple(
        TokenLogprobs(id=m.id, logprob=m.logprob, top=tuple(zip(m.top_ids, m.top_logprobs, strict=True)))
        for m in messages
    )


def sampling(options: SamplingOptions) -> worker_pb2.Sampling:
    values = {name: getattr(options, name) for name in options.__dataclass_fields__}
    values["grammar"] = None if options.grammar is None else grammar(options.grammar)
    values["bad_words"] = [worker_pb2.IdRun(ids=run) for run in options.bad_words]
    return worker_pb2.Sampling(**{**values, "logit_bias": dict(options.logit_bias)})


def grammar(wanted: Grammar) -> worker_pb2.Grammar:
    kind = worker_pb2.GrammarKind.Value(f"GRAMMAR_KIND_{wanted.kind.upper()}")
    places = "" if wanted.json_places is None else wanted.json_places.to_json()
    return worker_pb2.Grammar(kind=kind, source=wanted.source, json_places=places)
