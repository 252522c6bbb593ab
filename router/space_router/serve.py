"""The server process: engine, HTTP and gRPC servers, signals."""

import asyncio
import json
import logging
import os
import signal
import socket
import ssl
import sys
from collections.abc import Callable
from contextlib import AsyncExitStack
from types import FrameType

import uvicorn
from space_common.certificate import CertificateFiles
from space_common.default_model import FALLBACK
from space_common.event_loop import loop_factory
from space_common.process import collect_seldom, drop_unwritable_output, log_to_stderr, say
from space_common.tracing import exporting
from starlette.types import Receive, Scope, Send

from space_router.api.service import Service
from space_router.api_keys import warn_of_plain_keys
from space_router.app import create_app
from space_router.config import ServeConfig, unknown_variables
from space_router.engine.engine import Engine
from space_router.engine.errors import EngineError, RestartRefused
from space_router.engine.loras import LoraNotFound
from space_router.engine.request.worker_messages import WorkerModelFacts
from space_router.errors import ConfigError
from space_router.grpc_api.server import GrpcServer
from space_router.http_server.http_connection import FLUSH_SECONDS, uvicorn_config
from space_router.http_server.listening import GUARD, curl, is_open_to_others, listening, room_for, url
from space_router.metrics import Metrics
from space_router.text.encoder_text import EncoderText
from space_router.text.model_text import ModelText, with_default_model

log = logging.getLogger(__name__)


class WebServer(uvicorn.Server):
    """A uvicorn server that calls `on_signal` at a signal and serves until `should_exit` is set."""

    def __init__(self, config: uvicorn.Config, on_signal: Callable[[], None]) -> None:
        super().__init__(config)
        self._on_signal = on_signal
        self._loop = asyncio.get_running_loop()

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        log.info("%s received", signal.Signals(sig).name)
        self._loop.call_soon_threadsafe(self._on_signal)


def run(config: ServeConfig) -> int:
    """Serve until SIGTERM or SIGINT and return the exit code. Raises ConfigError before anything is started."""
    log_to_stderr(config.log_level, config.log_format)
    logging.getLogger("uvicorn").setLevel(logging.DEBUG if config.log_level == "debug" else logging.WARNING)
    for line in unknown_variables(os.environ):
        log.warning("%s", line)
    for line in config.notices:
        log.info("%s", line)
    config = with_default_model(config)
    text, encoder = ModelText.load(config), EncoderText.load(config)
    if (room := room_for(config.max_connections)) < config.max_connections:
        log.warning("only %d connections fit into this process's open files: raise `ulimit -n`", room)
    if config.grpc_port is not None:
        with listening(config.host, config.grpc_port, flag="--grpc-port"):  # gRPC itself does not report the cause
            pass
    here = listening(config.host, config.port, buffer=config.client_buffer)
    with here as bound, asyncio.Runner(loop_factory=loop_factory()) as runner:
        warn_of_plain_keys(config.api_keys, config.api_key_file)
        if is_open_to_others(bound) and not config.api_keys:
            log.warning("any client that reaches %s may use this server: it asks for no key. %s", config.host, GUARD)
        code = runner.run(serve(config, text, bound, _say, encoder))
    drop_unwritable_output()
    return code


async def serve(
    config: ServeConfig,
    text: ModelText,
    bound: socket.socket,
    say: Callable[[str], None],
    encoder: EncoderText | None = None,
) -> int:
    """Start the workers and serve on the socket; return the exit code. `say` gets one line per stage."""
    metrics = Metrics()
    async with AsyncExitStack() as face_scope, AsyncExitStack() as engine_scope:
        try:
            engine = Engine(
                config,
                metrics,
                tokenizer_hash=text.tokenizer.content_hash,
                encoder_hash=None if encoder is None else encoder.content_hash,
            )
        except LoraNotFound as missing:
            raise ConfigError(f"{missing}.") from None
        tracer = None
        if config.tracing == "on":
            tracer = face_scope.enter_context(exporting("spaceserve", os.environ))
        service = Service(config, text, engine, metrics, tracer=tracer, encoder=encoder)
        face = None if config.grpc_port is None else GrpcServer(service, config.host, config.grpc_port)
        stopping: list[asyncio.Task[None]] = []

        async def stop() -> None:
            service.restart.cancel()
            if not await engine.drain(config.drain_timeout):
                log.warning("requests were still running after %g s: they end with an error", config.drain_timeout)
            await engine_scope.aclose()
            server.should_exit = True
            if face is not None:
                await face.stop(FLUSH_SECONDS)

        def signalled() -> None:
            if stopping:
                server.should_exit = server.force_exit = True
                if face is not None:
                    stopping.append(asyncio.create_task(face.stop(0.0)))
                return
            service.draining = True
            load = engine.load()
            if unfinished := load.num_running + load.num_queued:
                requests = "1 request has" if unfinished == 1 else f"{unfinished} requests have"
                say(
                    f"stopping: {requests} {config.drain_timeout:g} s to finish (--drain-timeout); a second signal "
                    "ends them at once"
                )
            else:
                say("stopping: no request is running")
            stopping.append(asyncio.create_task(stop()))

        def restart() -> None:
            try:
                service.restart.begin()
            except RestartRefused as refused:
                log.warning("%s: %s", signal.SIGUSR1.name, refused)
            else:
                say(f"restarting {service.restart.num_wanted} workers, one after the other")

        terminal = next((stream.fileno() for stream in (sys.stdin, sys.stderr) if stream and stream.isatty()), None)

        def hung_up() -> None:
            if terminal is not None and not os.isatty(terminal):  # it was closed
                log.info("SIGHUP received, and the terminal is gone")
                signalled()
            else:
                service.keys.refresh(is_forced=True)

        async def answer(scope: Scope, receive: Receive, send: Send) -> None:
            await app(scope, receive, send)

        certificate = config.certificate()
        server = WebServer(
            uvicorn_config(
                answer,
                config,
                metrics,
                access_log=False,
                server_header=False,
                ssl_context_factory=None if certificate is None else lambda *_: _https(certificate),
                timeout_graceful_shutdown=round(FLUSH_SECONDS),
            ),
            signalled,
        )
        where = ", ".join(config.worker_address)
        with server.capture_signals():  # before the first worker starts, so that a signal always ends the workers
            say(f"connecting to workers at {where}" if where else f"starting {_workers(config)}")
            await engine_scope.enter_async_context(engine)
            app = await asyncio.to_thread(create_app, service)  # takes a while, in which the workers start
            bound.listen(server.config.backlog)  # a worker may be ready before uvicorn listens
            address = url(bound, encrypted=config.tls_cert is not None)
            say(f"listening on {address} (/health says 503 until the model is ready)")
            if face is not None:
                await face_scope.enter_async_context(face)
                say(f"gRPC on {face.address}")
            asyncio.get_running_loop().add_signal_handler(signal.SIGUSR1, restart)
            asyncio.get_running_loop().add_signal_handler(signal.SIGHUP, hung_up)
            collect_seldom()
            watching = asyncio.create_task(_watch(service, address, say))
            serving = asyncio.create_task(server.serve(sockets=[bound]))
            try:
                await asyncio.wait((watching, serving), return_when=asyncio.FIRST_COMPLETED)
                if watching.done() and not stopping and (error := watching.exception()) is not None:
                    if not isinstance(error, EngineError):
                        raise error
                    say(f"error: {error}")
                    server.should_exit = True
                    await serving
                    return 1
                await serving
            finally:
                watching.cancel()
                await asyncio.gather(watching, *stopping, return_exceptions=True)
    return 0


async def _watch(service: Service, address: str, say: Callable[[str], None]) -> None:
    """Report when the model is ready, then wait. Raises WorkerStartFailed once no worker can be started any more."""
    facts = await service.engine.wait_ready()
    service.started = True
    if (num_ids := service.text.tokenizer.num_ids) > facts.vocab_size:
        log.warning(
            "the tokenizer has %d ids, the model %d: texts with one of the others are refused",
            num_ids,
            facts.vocab_size,
        )
    say(f"ready: {service.text.name}, {_description(facts)}")
    say("try it:")
    path, body = _first_request(service)
    key = " -H 'Authorization: Bearer KEY'" if service.config.api_keys else ""
    say(f"  {curl(address, path)}{key} -H 'Content-Type: application/json' \\")
    say(f"    -d '{json.dumps(body)}'")
    await service.engine.failed()


def _first_request(service: Service) -> tuple[str, dict[str, object]]:
    """Return path and body of an example request: a chat message if the model has a chat template, else code."""
    if service.text.chat_template is None or service.config.model == FALLBACK:
        return "/v1/completions", {"prompt": "def fibonacci(n):", "max_tokens": 64, "temperature": 0}
    messages = [{"role": "user", "content": "Why is the sky blue?"}]
    return "/v1/chat/completions", {"messages": messages, "max_tokens": 128}


_DRAFTERS = {"model": "the draft model", "mtp": "its MTP layer", "eagle": "the EAGLE head"}


def _description(facts: WorkerModelFacts) -> str:
    drafts = f"up to {facts.max_draft_length} drafts per step" if facts.max_draft_length else "plain decoding"
    if facts.max_draft_length and (drafter := _DRAFTERS.get(facts.head_kind)):
        drafts += f", also by {drafter}"
    cache = f"{facts.num_blocks} blocks of {facts.block_size}"
    synthetic_accept = ", SYNTHETIC ACCEPTANCE " + " ".join(map(str, facts.synthetic_acceptance))
    description = f"{facts.dtype} on {facts.device}, window {facts.window} tokens, {cache}, {drafts}"
    return description + synthetic_accept if facts.synthetic_acceptance else description


def _workers(config: ServeConfig) -> str:
    where = ""
    if config.gpus:
        num_gpus = min(config.workers * config.tensor_parallel, len(config.gpus))
        where = f" on {num_gpus} GPU{'s' if num_gpus > 1 else ''}"
    return ("a worker" if config.workers == 1 else f"{config.workers} workers") + f"{where} for {config.model}"


def _https(files: CertificateFiles) -> ssl.SSLContext:
    """Return an SSL context that uses the files' current content at each handshake."""

    def choose(connection: ssl.SSLObject | ssl.SSLSocket, name: str | None, context: ssl.SSLContext) -> None:
        connection.context = files.latest().context

    listening = files.last.context
    listening.sni_callback = choose  # also called for clients that send no server name
    return listening


def _say(line: str) -> None:
    say(line if line.startswith(" ") else f"spaceserve: {line}")
