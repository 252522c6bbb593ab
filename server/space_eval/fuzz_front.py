"""A whole router in this process, a scripted worker behind it, for hostile requests."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack
from dataclasses import replace
from types import MappingProxyType

from space_router.api.service import Service
from space_router.config import ServeConfig
from space_router.engine.engine import Engine
from space_router.metrics import Metrics
from space_router.testing import HashLanguage, Script, ScriptedWorker
from space_router.text.chat_template import BUILT_IN, ChatTemplate
from space_router.text.model_text import ModelText
from space_router.text.testing import EOS_ID, FIRST_BYTE_ID, MASK_ID, VOCAB_SIZE, tiny_tokenizer

from space_eval.fuzz_target import Finding

SETTLE_SECONDS = 20.0


class Front:
    """Entered and left; at the end nothing may run, and every page must be free or cached."""

    service: Service

    def __init__(self) -> None:
        self._exit = AsyncExitStack()

    async def open(self) -> None:
        printable = range(FIRST_BYTE_ID + 32, FIRST_BYTE_ID + 127)
        script = Script(
            language=HashLanguage(printable, eos_id=EOS_ID, eos_period=50),
            vocab_size=VOCAB_SIZE, mask_ids=(MASK_ID,), eos_ids=(EOS_ID,), num_blocks=32, window=48,
        )  # fmt: skip
        self._worker = await self._exit.enter_async_context(ScriptedWorker(script))
        config = replace(ServeConfig(), worker_address=(self._worker.address,), max_queue=8)
        metrics = Metrics()
        self._engine = await self._exit.enter_async_context(Engine(config, metrics))
        await self._engine.wait_ready()
        text = ModelText("tiny", tiny_tokenizer(), ChatTemplate(BUILT_IN["chatml"], {}), MappingProxyType({}))
        self.service = Service(config, text, self._engine, metrics, started=True)

    async def close(self) -> None:
        await self._exit.aclose()

    async def settle(self) -> None:
        """Raises Finding where a request runs on, a page is lost, or the worker was told nonsense."""
        try:
            async with asyncio.timeout(SETTLE_SECONDS):
                while (load := self._engine.load()).num_running or load.num_queued or load.blocks_held:  # noqa: ASYNC110
                    await asyncio.sleep(0.01)
        except TimeoutError:
            raise Finding(f"left behind: {load}") from None
        self._engine.check()
        self._worker.check()
        if load.num_workers_up != 1:
            raise Finding("the worker was lost")
