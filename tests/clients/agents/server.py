"""A server whose model follows a script, for one coding agent: its window is 400,000 tokens, its calls are Hermes'.

    python tests/clients/agents/server.py PORT RECORD SCRIPT.json

SCRIPT.json: {"marker": TEXT, "replies": [TEXT, ...]}: a prompt that holds the marker N times gets reply N, at most the
last. `tests/support` must be on the path.
RECORD gets a JSON object a line for each request: method, path, body, status.
"""

import asyncio
import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import uvicorn
from doubles.router import ScriptedWorker
from doubles.router.whole_router import TOKENIZER, model_text, script
from space_proto import worker_pb2
from space_router.api.service import Service
from space_router.app import create_app
from space_router.config import ServeConfig
from space_router.engine.engine import Engine
from space_router.metrics import Metrics
from starlette.types import ASGIApp, Message, Receive, Scope, Send

WINDOW = 400_000


@dataclass
class ScriptedAgent:
    """Answers a prompt by how often it holds the marker."""

    marker: str
    replies: Sequence[Sequence[int]]
    _chosen: dict[int, int] = field(default_factory=dict)  # length of a prompt -> its reply

    def next_id(self, ids: Sequence[int], num_prompt: int, sampling: worker_pb2.Sampling) -> int:
        if num_prompt not in self._chosen:
            seen = TOKENIZER.decode(list(ids[:num_prompt])).count(self.marker)
            self._chosen[num_prompt] = min(seen, len(self.replies) - 1)
        reply = self.replies[self._chosen[num_prompt]]
        return reply[(len(ids) - num_prompt) % len(reply)]


def recorded(app: ASGIApp, record: Path) -> ASGIApp:
    async def run(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await app(scope, receive, send)
            return
        body, status = bytearray(), 0

        async def taken() -> Message:
            message = await receive()
            body.extend(message.get("body", b""))
            return message

        async def sent(message: Message) -> None:
            nonlocal status
            status = message.get("status", status)
            await send(message)

        try:
            await app(scope, taken, sent)
        finally:
            line = {"method": scope["method"], "path": scope["path"], "status": status, "body": body.decode()}
            with record.open("a") as file:
                file.write(json.dumps(line) + "\n")

    return run


async def main(port: int, record: Path, followed: Mapping[str, Any]) -> None:
    replies = [TOKENIZER.encode(reply + "<|endoftext|>") for reply in followed["replies"]]
    agent = ScriptedAgent(followed["marker"], replies)
    async with ScriptedWorker(replace(script("x", window=WINDOW, num_blocks=60_000), language=agent)) as worker:
        config = ServeConfig(
            worker_address=(worker.address,), served_model_name=("tiny", "*"), max_queue_tokens=10**9, compat="openai"
        )
        metrics = Metrics()
        async with Engine(config, metrics) as engine:
            service = Service(config, model_text("chatml"), engine, metrics)
            await engine.wait_ready()
            service.started = True
            app = recorded(create_app(service), record)
            await uvicorn.Server(uvicorn.Config(app, port=port, log_level="warning")).serve()


if __name__ == "__main__":
    asyncio.run(main(int(sys.argv[1]), Path(sys.argv[2]), json.loads(Path(sys.argv[3]).read_text())))
