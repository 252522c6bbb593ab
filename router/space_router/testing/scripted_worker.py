"""The scripted worker as a gRPC server: one conversation at a time, steps of its own, reports as the contract says."""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import AsyncIterator
from pathlib import Path
from types import TracebackType

import grpc
import grpc.aio
from space_proto import worker_pb2, worker_pb2_grpc

from space_router.testing.page_ledger import PageLedger, Violation
from space_router.testing.script import Script
from space_router.testing.scripted_sequence import ScriptedSequence


class ScriptedWorker(worker_pb2_grpc.WorkerServicer):
    """A worker that follows a `Script` and holds the router to the contract.

    async with ScriptedWorker(Script(accepts=always)) as worker:
        ... connect to worker.address ...
        worker.check()   # raises what the router did wrong
    """

    def __init__(self, script: Script | None = None, *, listen: str | None = None) -> None:
        """`listen`: unix:PATH or HOST:PORT; None: a socket in a folder of its own."""
        self.script = script or Script()
        self.address = listen or ""
        self.violations: list[str] = []
        self.num_steps = 0  # over all lives
        self.num_lives = 1  # incarnations so far
        self.num_admits = 0
        self.num_extends = 0
        self.num_cached_ids = 0  # over all admits
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

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
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

    def check(self) -> None:
        """Raise Violation if the router ever broke the contract."""
        if self.violations:
            raise Violation("; ".join(self.violations))

    def hello(self) -> worker_pb2.Hello:
        """Who the worker is in this life."""
        script = self.script
        return worker_pb2.Hello(
            protocol_major=script.protocol_major,
            incarnation=f"life {self.num_lives}",
            model_hash=script.model_hash,
            tokenizer_hash=script.tokenizer_hash,
            vocab_size=script.vocab_size,
            block_size=script.block_size,
            num_blocks=script.num_blocks,
            window=script.window,
            max_draft_length=script.draft_length,
            num_masks=script.draft_length,
            mask_ids=script.mask_ids,
            dtype="float32",
            device="cpu",
            model_name=script.model_name,
            max_sequences=script.max_sequences,
            attention="none",
            eos_ids=script.eos_ids,
        )

    async def Serve(
        self,
        request_iterator: AsyncIterator[worker_pb2.RouterMessage],
        context: grpc.aio.ServicerContext[worker_pb2.RouterMessage, worker_pb2.WorkerMessage],
    ) -> AsyncIterator[worker_pb2.WorkerMessage]:
        """The conversation: hello, then reports until somebody dies."""
        conversation = _Conversation(self)
        self._conversations.add(conversation)
        reader = asyncio.create_task(conversation.read(request_iterator))
        try:
            yield worker_pb2.WorkerMessage(hello=self.hello())
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
        self._ledger = PageLedger(self._script.num_blocks, self._script.block_size)
        self._sequences: dict[int, ScriptedSequence] = {}
        self._seen: set[int] = set()
        self._start: worker_pb2.Start | None = None
        self._inbox: list[worker_pb2.Command] = []
        self._news = asyncio.Event()
        self._released: list[int] = []
        self._failed: list[worker_pb2.SequenceReport] = []
        self._report_no = 0
        self._draining = False
        self._closed = False

    def die(self) -> None:
        self.dead = True
        self._news.set()

    async def read(self, messages: AsyncIterator[worker_pb2.RouterMessage]) -> None:
        """Commands into the inbox until the router hangs up."""
        try:
            async for message in messages:
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
                self._apply(command)
            self._inbox.clear()
            if script.refuse is not None:
                yield worker_pb2.WorkerMessage(refusal=worker_pb2.Refusal(reason=script.refuse))
                return
            if script.hang_after_steps is not None and self._worker.num_steps >= script.hang_after_steps:
                while not self.dead and not self._closed:
                    self._news.clear()
                    await self._news.wait()
                return
            if script.die_after_steps is not None and self._worker.num_steps >= script.die_after_steps:
                script.die_after_steps = None
                self._worker.kill()
                return
            if self._has_work():
                await asyncio.sleep(script.step_seconds)
                yield self._step()
            elif self._released or self._failed:
                yield self._step()
            elif self._draining and not self._sequences:
                self._worker.drained.set()
                return
            else:
                try:
                    await asyncio.wait_for(self._news.wait(), script.heartbeat_seconds)
                except TimeoutError:
                    yield self._step()

    def _has_work(self) -> bool:
        return any(
            sequence.releasing is not None or not (sequence.ended or sequence.paused)
            for sequence in self._sequences.values()
        )

    def _apply(self, command: worker_pb2.Command) -> None:
        kind = command.WhichOneof("command")
        if (self._start is None) != (kind == "start"):
            raise Violation(f"{kind} came {'before' if self._start is None else 'after'} Start")
        match kind:
            case "start":
                self._start = command.start
            case "admit":
                self._admit(command.admit)
            case "extend":
                if sequence := self._sequences.get(command.extend.seq_id):
                    sequence.extend(list(command.extend.pages))
                    self._worker.num_extends += 1
            case "release":
                if sequence := self._sequences.get(command.release.seq_id):
                    sequence.releasing = self._script.release_steps
                else:
                    self._released.append(command.release.seq_id)
            case "drain":
                self._draining = True

    def _admit(self, admit: worker_pb2.Admit) -> None:
        assert self._start is not None
        if admit.seq_id in self._seen:
            raise Violation(f"seq_id {admit.seq_id} is used again")
        self._seen.add(admit.seq_id)
        if self._draining:
            report = worker_pb2.SequenceReport(seq_id=admit.seq_id, finish=worker_pb2.FINISH_ERROR, error="draining")
            self._failed.append(report)
            return
        if len(self._sequences) >= self._script.max_sequences:
            raise Violation(f"{len(self._sequences) + 1} sequences; the worker runs {self._script.max_sequences}")
        bound = self._start.max_draft_length
        self._sequences[admit.seq_id] = ScriptedSequence(admit, self._script, self._ledger, bound)
        self._worker.num_admits += 1
        self._worker.num_cached_ids += admit.num_cached

    def _step(self) -> worker_pb2.WorkerMessage:
        assert self._start is not None
        stats = worker_pb2.StepStats(plain_step_seconds=self._script.plain_step_seconds)
        reports, self._failed = self._failed, []
        rows_left = self._start.max_prefill_rows
        lengths = [0] * (self._script.draft_length + 1)
        stepped = False
        for sequence in list(self._sequences.values()):
            if sequence.releasing is not None:
                self._step_released(sequence)
                continue
            report, num_rows = sequence.step(rows_left)
            rows_left -= num_rows
            if report is None:
                continue
            reports.append(report)
            stepped = stepped or not report.paused
            stats.num_sequences += 1
            stats.prefill_rows += num_rows
            if report.decoded:
                stats.chain_rows += 1 + report.num_drafted
                stats.mask_rows += report.num_drafted
                lengths[report.num_drafted] += 1
        self._report_no += 1
        self._worker.num_steps += stepped
        result = worker_pb2.StepReport(
            report_no=self._report_no, stepped=stepped, sequences=reports, released=self._released
        )
        self._released = []
        if stepped:
            stats.draft_length_counts.extend(lengths)
            stats.forward_seconds, stats.sample_seconds, stats.draft_seconds = 0.001, 0.0001, 0.0001
            stats.host_seconds = 0.0002
            result.stats.CopyFrom(stats)
        self._spoil(result)
        return worker_pb2.WorkerMessage(report=result)

    def _step_released(self, sequence: ScriptedSequence) -> None:
        assert sequence.releasing is not None
        if sequence.releasing == 0:
            del self._sequences[sequence.seq_id]
            self._ledger.release(sequence.seq_id)
            self._released.append(sequence.seq_id)
        else:
            sequence.releasing -= 1
            sequence.write_stale()

    def _spoil(self, report: worker_pb2.StepReport) -> None:
        """Contradict the contract once, if the script says so and there is something to contradict with."""
        emitting = next((sequence for sequence in report.sequences if sequence.tokens), None)
        if self._script.garbage is None or emitting is None:
            return
        match self._script.garbage:
            case "report_no":
                report.report_no += 1
            case "unknown_sequence":
                emitting.seq_id = 1 << 40
            case "too_many_tokens":
                emitting.tokens.extend([4] * 10_000)
            case "computed":
                emitting.num_computed = 1 << 30
            case "vocabulary":
                emitting.tokens[0] = self._script.vocab_size
        self._script.garbage = None
