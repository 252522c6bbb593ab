"""A client of one worker: the least that a router does, for training, evaluation and tests.

    with WorkerProcess(["--model", "demo"]) as process, GrpcWorker(process.address) as worker:
        WorkerClient(worker, automatic=True).generate([70, 71], max_tokens=8).tokens

The worker is one behind gRPC, or one in this process (`space_server.worker.Worker`).
"""

from __future__ import annotations

import queue
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import grpc
from space_proto import worker_pb2 as pb

from space_common.process import WorkerLost
from space_common.worker.secret import RouterProof, SecretFile

PROTOCOL_MAJOR = 1
MAX_PREFILL_ROWS = 4096
SERVE = "/spaceserve.v1.Worker/Serve"
OPTIONS = (
    ("grpc.max_receive_message_length", -1),
    ("grpc.max_send_message_length", -1),  # long prompts are admitted many at a time
    ("grpc.use_local_subchannel_pool", 1),  # a restarted worker does not inherit the old one's back-off
    ("grpc.enable_http_proxy", 0),
)


class SteppedWorker(Protocol):
    """What a client needs of a worker."""

    @property
    def block_size(self) -> int: ...

    @property
    def num_blocks(self) -> int: ...

    def apply(self, command: pb.Command) -> object: ...

    def step(self) -> pb.StepReport | None:
        """Return the report of the next step; None: there is nothing to do."""


class WorkerClientError(AssertionError):
    """The worker broke the contract, ended, or ran out of steps or pages."""


@dataclass(frozen=True)
class SequenceRequest:
    """What a client asks for."""

    prompt: tuple[int, ...]
    sampling: pb.Sampling
    limits: pb.Limits
    max_draft_length: int = 8
    num_forced_drafts: int = 0  # mask drafts of each decode step; 0: as many as pay
    want_logprobs: bool = False
    num_logprobs: int = 0
    num_prompt_logprobs: int | None = None
    adapter: str = ""  # that drafts
    lora: str = ""  # hash of the LoRA, which the worker has loaded; "": none
    prediction: tuple[int, ...] = ()  # what the output is expected to be
    pooling: pb.Pooling.ValueType = pb.POOLING_NONE  # of the prompt, in place of tokens
    traceparent: str = ""
    slots_ahead: int = 10  # an automatic client grants them behind the known ids; few shorten the chain


@dataclass
class ClientSequence:
    """A request and what has come of it, over all its admissions."""

    request: SequenceRequest
    tokens: list[int] = field(default_factory=list)
    reports: list[pb.SequenceReport] = field(default_factory=list)
    pages: list[int] = field(default_factory=list)  # of the present admission; none once it is released
    finish: pb.Finish.ValueType = pb.FINISH_NONE
    error: str = ""
    num_computed: int = 0  # of the present admission
    seq_id: int = 0  # of the last admission
    key: Any = None  # what the caller knows it by

    @property
    def ids(self) -> list[int]:
        """Prompt and output."""
        return [*self.request.prompt, *self.tokens]

    @property
    def num_ids(self) -> int:
        """Ids of prompt and output."""
        return len(self.request.prompt) + len(self.tokens)

    @property
    def logprobs(self) -> list[pb.TokenLogprobs]:
        """Of all tokens, if requested."""
        return [entry for report in self.reports for entry in report.logprobs]

    @property
    def decoded(self) -> list[pb.SequenceReport]:
        """The reports of decode steps."""
        return [report for report in self.reports if report.decoded]

    @property
    def verifications(self) -> list[tuple[int, int]]:
        """Drafted and accepted tokens of every decode step."""
        return [(report.num_drafted, report.num_accepted) for report in self.decoded]

    @property
    def accepted(self) -> list[int]:
        """Accepted drafts of each step that had drafts to verify."""
        return [report.num_accepted for report in self.reports if report.num_drafted]


class WorkerClient:
    """One worker's pages and sequences. Every page is free, or held by those it was given to and not yet released.

    An automatic client grants pages ahead, releases what finishes, and raises when a sequence fails; otherwise the
    caller does these, or leaves them to `run`.
    """

    def __init__(
        self,
        worker: SteppedWorker,
        *,
        automatic: bool = False,
        max_prefill_rows: int | None = None,
        max_draft_length: int = 99,
        keeps_reports: bool = True,
        readmits: bool = False,
    ) -> None:
        """`max_prefill_rows`, `max_draft_length`: bounds of a step, for all sequences. None: 4096 for an automatic
        client, else a worker in this process keeps its own bounds. `keeps_reports`: also keep what has been reported
        and released; False for a client that lives long. `readmits`: admit a sequence again whose rotary angles change
        (FINISH_READMIT), on pages of its own.
        """
        self.worker = worker
        self.free = list(range(worker.num_blocks))  # taken from the front, given back at the end
        self.holders: Counter[int] = Counter()  # by page
        self.sequences: dict[int, ClientSequence] = {}  # by seq_id, all there were
        self.running: dict[int, ClientSequence] = {}  # whose release is not acknowledged yet
        self.reports: list[pb.StepReport] = []
        self.num_steps = 0  # forward passes
        self.after_step: Callable[[pb.StepReport], None] | None = None
        self._automatic, self._keeps_reports, self._readmits = automatic, keeps_reports, readmits
        self._last_seq_id = 0
        rows = MAX_PREFILL_ROWS if automatic and max_prefill_rows is None else max_prefill_rows
        if rows is not None:
            start = pb.Start(
                protocol_major=PROTOCOL_MAJOR,
                max_prefill_rows=rows,
                max_draft_length=max_draft_length,
                readmits=readmits,
            )
            worker.apply(pb.Command(start=start))

    def admit(
        self,
        ids: Sequence[int],
        *,
        max_tokens: int = 16,
        num_prompt: int | None = None,
        num_pages: int | None = None,
        sampling: pb.Sampling | None = None,
        max_draft_length: int = 99,
        eos_ids: Sequence[int] = (),
        stop_ids: Sequence[int] = (),
        **fields: Any,
    ) -> int:
        """Run a sequence on `num_pages` pages (None: as many as it can need); return its number.

        `num_prompt`: ids of the prompt, the rest was generated before; `fields`: of SequenceRequest.
        """
        num_prompt = num_prompt or len(ids)
        limits = pb.Limits(max_tokens=max_tokens, eos_ids=eos_ids, stop_ids=stop_ids)
        request = SequenceRequest(
            tuple(ids[:num_prompt]), sampling or pb.Sampling(), limits, max_draft_length=max_draft_length, **fields
        )
        if num_pages is None:
            num_pages = -(-(len(ids) + max_tokens) // self.worker.block_size)
        return self.submit(ClientSequence(request, list(ids[num_prompt:])), num_pages=num_pages).seq_id

    def generate(self, ids: Sequence[int], **fields: Any) -> ClientSequence:
        """Run a sequence, and all others, to the end; return it. `fields`: as for `admit`."""
        sequence = self.sequences[self.admit(ids, **fields)]
        self.run()
        return sequence

    def submit(
        self,
        sequence: ClientSequence | SequenceRequest,
        *,
        num_pages: int | None = None,
        shared: Sequence[int] = (),
        load_state: int | None = None,
        keep_states: Mapping[int, int] | None = None,
    ) -> ClientSequence:
        """Run a sequence, with everything it has emitted so far.

        `num_pages`: at once, None: for its `slots_ahead`; `shared`: the first of these, computed before; `load_state`:
        slot of the recurrent state behind them; `keep_states`: number of leading ids -> slot where the state is kept.
        """
        if isinstance(sequence, SequenceRequest):
            sequence = ClientSequence(sequence)
        self._last_seq_id += 1
        seq_id = sequence.seq_id = self._last_seq_id
        sequence.num_computed = len(shared) * self.worker.block_size
        sequence.pages = list(shared)
        self.sequences[seq_id] = self.running[seq_id] = sequence
        self.keep(shared)
        self._take(sequence, self._num_wanted(sequence) if num_pages is None else num_pages)
        request = sequence.request
        admit = pb.Admit(
            seq_id=seq_id,
            ids=sequence.ids,
            num_prompt=len(request.prompt),
            num_cached=sequence.num_computed,
            pages=sequence.pages,
            sampling=request.sampling,
            limits=request.limits,
            max_draft_length=request.max_draft_length,
            num_forced_drafts=request.num_forced_drafts,
            want_logprobs=request.want_logprobs,
            num_logprobs=request.num_logprobs,
            num_prompt_logprobs=request.num_prompt_logprobs,
            adapter=request.adapter,
            lora=request.lora,
            prediction=request.prediction,
            pooling=request.pooling,
            traceparent=request.traceparent,
            load_state=load_state,
            keep_states=[pb.KeptState(position=at, slot=slot) for at, slot in (keep_states or {}).items()],
        )
        self.worker.apply(pb.Command(admit=admit))
        return sequence

    def extend(self, seq_id: int, num_pages: int = 1) -> None:
        """Grant more pages."""
        sequence = self.sequences[seq_id]
        new = self._take(sequence, len(sequence.pages) + num_pages)
        self.worker.apply(pb.Command(extend=pb.Extend(seq_id=seq_id, pages=new)))

    def release(self, seq_id: int) -> None:
        """Stop a sequence; its pages come back with the acknowledgement."""
        self.worker.apply(pb.Command(release=pb.Release(seq_id=seq_id)))

    def step(self) -> pb.StepReport | None:
        """Let the worker take one step, and take in its report. None: the worker has nothing to do."""
        if self._automatic:
            for seq_id, sequence in self.running.items():
                missing = self._num_wanted(sequence) - len(sequence.pages)
                if sequence.finish == pb.FINISH_NONE and missing > 0:
                    self.extend(seq_id, missing)
        report = self.worker.step()
        if report is None:
            return None
        self.num_steps += report.stepped
        if self._keeps_reports:
            self.reports.append(report)
        named = [part.seq_id for part in report.sequences]
        if len(set(named)) < len(named):
            raise WorkerClientError(f"A report names a sequence twice, for which a router ends the worker: {named}.")
        for part in report.sequences:
            self._take_in(part)
        for seq_id in report.released:
            if seq_id in self.running:
                sequence = self.running.pop(seq_id)
                self.drop(sequence.pages)
                num_pages, sequence.pages = len(sequence.pages), []
                if self._readmits and sequence.finish == pb.FINISH_READMIT:
                    sequence.finish = pb.FINISH_NONE
                    self.submit(sequence, num_pages=num_pages)
                elif not self._keeps_reports:
                    del self.sequences[seq_id]
            elif seq_id in self.sequences or self._automatic:
                raise WorkerClientError(f"The release of sequence {seq_id} is acknowledged, and it was not running.")
        if self.after_step is not None:
            self.after_step(report)
        return report

    def run(self, until: Callable[[], bool] | None = None, *, after_step: Callable[[], None] | None = None) -> None:
        """Step until `until()`, or until nothing runs; what ends is released, and what pauses gets a page more.

        Sequences that wait for a grammar are waited for. Raises WorkerClientError if nothing runs before `until()`.
        """
        while not (until is not None and until()):
            if until is None and self._automatic and not self.running:
                return
            report = self.step()
            if report is None:
                if any(sequence.waits for sequence in getattr(self.worker, "batch", ())):
                    time.sleep(0.001)
                    continue
                if until is None:
                    return
                raise WorkerClientError("The worker has nothing to do, and what is waited for has not come.")
            if after_step is not None:
                after_step()
            for part in report.sequences if not self._automatic else ():
                if part.finish != pb.FINISH_NONE:
                    self.release(part.seq_id)
                elif part.paused:
                    self.extend(part.seq_id)

    def run_in_turn(
        self,
        sequences: Iterable[ClientSequence],
        num_pages: Callable[[ClientSequence], int],
        *,
        at_once: int,
        one_by_one: bool = False,
    ) -> Iterator[tuple[pb.StepReport | None, float]]:
        """Run sequences in order, at most `at_once` of them, each from its start on all the pages that it can need, so
        that none pauses. Yield the report and the seconds of every step; the caller releases what has ended.

        `one_by_one`: at most one joins the batch per step.
        """
        waiting = iter(sequences)
        following = next(waiting, None)
        while following is not None or self.running:
            while following is not None and len(self.running) < at_once:
                if self.running and num_pages(following) > len(self.free):
                    break
                self.submit(following, num_pages=num_pages(following))
                following = next(waiting, None)
                if one_by_one:
                    break
            started = time.perf_counter()
            report = self.step()
            yield report, time.perf_counter() - started

    def release_and_wait(self, seq_id: int) -> ClientSequence:
        """Release, and step until it is acknowledged: every token reported until then counts."""
        self.release(seq_id)
        self.run(lambda: seq_id not in self.running)
        return self.sequences[seq_id]

    def keep(self, pages: Sequence[int]) -> None:
        """Hold pages beyond the sequence that computed them, as a prefix cache does."""
        self.holders.update(pages)

    def drop(self, pages: Sequence[int]) -> None:
        """Undo `keep`, or a sequence's hold."""
        for page in pages:
            self.holders[page] -= 1
            if self.holders[page] == 0:
                del self.holders[page]
                self.free.append(page)

    def check_all_free(self) -> None:
        """Raise WorkerClientError unless every page is free again, once."""
        if sorted(self.free) != list(range(self.worker.num_blocks)) or self.running:
            raise WorkerClientError(f"Sequences {sorted(self.running)} still hold pages: {dict(self.holders)}.")

    def held_slots(self, seq_id: int) -> list[tuple[int, int]]:
        """Return (block, offset) of every computed position of a sequence."""
        size, sequence = self.worker.block_size, self.sequences[seq_id]
        return [(sequence.pages[p // size], p % size) for p in range(sequence.num_computed)]

    def _num_wanted(self, sequence: ClientSequence) -> int:
        return -(-(sequence.num_ids + sequence.request.slots_ahead) // self.worker.block_size)

    def _take(self, sequence: ClientSequence, num_pages: int) -> list[int]:
        """Give a sequence pages up to `num_pages` in all; return the new ones."""
        missing = max(0, num_pages - len(sequence.pages))
        if missing > len(self.free):
            raise WorkerClientError(f"{missing} pages are missing, {len(self.free)} are free: give the worker more.")
        new, self.free = self.free[:missing], self.free[missing:]
        sequence.pages += new
        self.keep(new)
        return new

    def _take_in(self, part: pb.SequenceReport) -> None:
        sequence = self.running.get(part.seq_id)
        if sequence is None:
            raise WorkerClientError(f"A report about sequence {part.seq_id}, which does not run.")
        sequence.tokens += part.tokens
        if self._keeps_reports:
            sequence.reports.append(part)
        sequence.finish, sequence.error, sequence.num_computed = part.finish, part.error, part.num_computed
        if self._automatic:
            if part.finish == pb.FINISH_ERROR:
                raise WorkerClientError(f"Sequence {part.seq_id} failed: {part.error}")
            if part.finish != pb.FINISH_NONE:
                self.release(part.seq_id)
        if sequence.tokens and part.num_computed > sequence.num_ids - 1:
            raise WorkerClientError(f"{part.num_computed} ids computed, {sequence.num_ids} known: the last never is.")


class GrpcWorker:
    """The stream to a worker in another process. Leaving the block closes it, and the worker forgets its sequences.

    with GrpcWorker(address) as worker:
        WorkerClient(worker)
    """

    def __init__(self, address: str, *, silence: float = 120.0, secret: SecretFile | None = None) -> None:
        """`address`: unix:PATH or HOST:PORT. `silence`: seconds without a report after which a worker is
        considered dead; it reports every second, but compilation on a device may delay it. `secret`: of the worker's
        port, None: it has none.
        """
        self.hello = pb.Hello()
        self._silence = silence
        self._unsent: list[pb.Command] = []
        self._outgoing: queue.SimpleQueue[pb.RouterMessage | None] = queue.SimpleQueue()
        self._incoming: queue.SimpleQueue[pb.WorkerMessage | str] = queue.SimpleQueue()  # string: why the stream ended
        self._channel = grpc.insecure_channel(address, options=OPTIONS)
        self._serve = self._channel.stream_stream(
            SERVE,
            request_serializer=pb.RouterMessage.SerializeToString,
            response_deserializer=pb.WorkerMessage.FromString,
        )
        self._secret = secret
        self._proof: RouterProof | None = None
        self._call: Any = None
        self._reader = threading.Thread(target=self._read, name="worker stream", daemon=True)

    def __enter__(self) -> GrpcWorker:
        metadata = None
        try:
            if self._secret is not None:
                self._proof = self._answer(self._secret)
                metadata = self._proof.metadata
            self._call = self._serve(iter(self._outgoing.get, None), wait_for_ready=True, metadata=metadata)
            self._reader.start()
            self.hello = self._next().hello
            if self._proof is not None and not self._proof.is_answered_by(self.hello.proof):
                raise WorkerLost("The worker has not proven that it knows the secret of its port.")
            if self.hello.protocol_major != PROTOCOL_MAJOR:
                raise WorkerLost(
                    f"The worker speaks protocol {self.hello.protocol_major}.{self.hello.protocol_minor}, this client "
                    f"{PROTOCOL_MAJOR}.x. Install one version of spaceserve."
                )
        except BaseException:
            self._close()
            raise
        return self

    def __exit__(self, *error: object) -> None:
        self._close()

    @property
    def block_size(self) -> int:
        return self.hello.block_size

    @property
    def num_blocks(self) -> int:
        return self.hello.num_blocks

    def apply(self, command: pb.Command) -> None:
        """Send a command with the next `step`; those of one step go in one message, in order."""
        self._unsent.append(command)

    def step(self) -> pb.StepReport:
        """Return the next report that is no heartbeat. Raises WorkerLost once the stream has ended."""
        if self._unsent:
            self._outgoing.put(pb.RouterMessage(commands=self._unsent))
            self._unsent = []
        while True:
            report = self._next().report
            if report.stepped or report.sequences or report.released or report.loras:
                return report

    def _answer(self, secret: SecretFile) -> RouterProof:
        """Return the answer to a challenge of the worker. Raises WorkerLost if it gives none."""
        call = self._serve(iter(()), wait_for_ready=True, timeout=self._silence)
        try:
            message = next(iter(call), pb.WorkerMessage())
            return RouterProof.of(secret.latest(), message.refusal.challenge)
        except (grpc.RpcError, ValueError):
            raise WorkerLost("The worker has not asked for the secret of its port.") from None
        finally:
            call.cancel()

    def _next(self) -> pb.WorkerMessage:
        try:
            message = self._incoming.get(timeout=self._silence)
        except queue.Empty:
            raise WorkerLost(f"The worker said nothing for {self._silence:g} s") from None
        if isinstance(message, str):
            self._incoming.put(message)  # so that later calls also raise
            raise WorkerLost(message)
        if message.HasField("refusal"):
            raise WorkerLost(f"The worker refuses: {message.refusal.reason}")
        return message

    def _read(self) -> None:
        try:
            messages: Iterator[pb.WorkerMessage] = self._call
            for message in messages:
                self._incoming.put(message)
        except grpc.RpcError as error:
            details = error.details() if isinstance(error, grpc.Call) else str(error)
            self._incoming.put(f"The worker is gone ({details})")
        else:
            self._incoming.put("The worker ended the conversation")

    def _close(self) -> None:
        if self._call is not None:
            self._call.cancel()
        self._outgoing.put(None)
        self._channel.close()
        if self._reader.ident is not None:
            self._reader.join()
