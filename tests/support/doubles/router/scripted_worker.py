"""The scripted worker as a gRPC server: one conversation at a time, steps of its own, reports as the contract says."""

from __future__ import annotations

import asyncio
import tempfile
import uuid
from collections.abc import AsyncIterator
from pathlib import Path
from types import TracebackType

import grpc
import grpc.aio
from space_proto import worker_pb2, worker_pb2_grpc

from doubles.router.page_ledger import Violation
from doubles.router.script import Script
from doubles.router.scripted_batch import Figures, ScriptedBatch


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

    def leave(self) -> None:
        """End as a process does that is told to: what runs is finished; a new incarnation listens at once."""
        self.num_lives += 1
        for conversation in list(self._conversations):
            conversation.drain()

    def check(self) -> None:
        """Raise Violation if the router ever broke the contract."""
        if self.violations:
            raise Violation("; ".join(self.violations))

    def hello(self) -> worker_pb2.Hello:
        """Who the worker is in this life."""
        script = self.script
        return worker_pb2.Hello(
            protocol_major=script.protocol_major,
            incarnation=f"life {self.num_lives} of {self._name}",
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
            takes_grammars=script.takes_grammars,
            step_cost_source=script.step_cost_source,
            step_cost_reason=script.step_cost_reason,
            adapters=[worker_pb2.Adapter(name=name, num_masks=script.draft_length) for name in script.adapters],
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
