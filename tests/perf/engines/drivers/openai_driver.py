"""Any OpenAI-compatible server that takes token ids and returns them: a stream for each prompt, all at once."""

from __future__ import annotations

import json
import multiprocessing
import time
import urllib.request
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from typing import Any

ARM = "over HTTP"
PLAIN, DRAFTS = "over HTTP, plain", "over HTTP, drafts"


class OpenAIServer:
    """A server that is already running, asked through /v1/completions.

    The setting `clients` is the number of processes that share the prompts [1]: a single one that reads hundreds of
    streams may be slower than the server.
    """

    def __init__(self, settings: dict[str, Any]) -> None:
        self._url = settings["url"].rstrip("/").removesuffix("/v1") + "/v1"
        self._open = urllib.request.build_opener(urllib.request.ProxyHandler({})).open
        with self._open(f"{self._url}/models", timeout=60) as response:
            self._model = json.load(response)["data"][0]["id"]
        self._clients: int = settings.get("clients", 1)
        self._arms: dict[str, dict[str, Any]] = {ARM: {}}
        if self._can_choose_drafts():
            self._arms = {PLAIN: {"speculation": "off"}, DRAFTS: {"speculation": "auto"}}

    def _can_choose_drafts(self) -> bool:
        """Whether the server is spaceserve, which takes `speculation` in a request."""
        try:
            with self._open(f"{self._url.removesuffix('/v1')}/info", timeout=60) as response:
                return "speculation" in json.load(response)
        except (OSError, ValueError):
            return False

    def facts(self) -> dict[str, Any]:
        return {
            "version": self._model, "arms": list(self._arms), "settings": f"as {self._url} was started",
            "lacks": "nothing; HTTP and text are in its figures", "is_remote": True,
        }  # fmt: skip

    def prepare(self, arm: str, prompts: Sequence[Sequence[int]], max_tokens: int) -> None:
        self.run(arm, [prompt[:16] for prompt in prompts], 4)

    def run(self, arm: str, prompts: Sequence[Sequence[int]], max_tokens: int) -> Any:
        clients = min(self._clients, len(prompts))
        if clients == 1:
            return self._streams(arm, prompts, max_tokens, time.perf_counter())
        shares = [list(prompts[number::clients]) for number in range(clients)]
        with ProcessPoolExecutor(clients, multiprocessing.get_context("fork")) as pool:
            list(pool.map(abs, range(clients)))  # its processes are started before the clock, which all of them share
            begun = time.perf_counter()
            parts = list(pool.map(self._streams, [arm] * clients, shares, [max_tokens] * clients, [begun] * clients))
        outputs: list[list[int]] = [[] for _ in prompts]
        seconds: list[list[float]] = [[] for _ in prompts]
        for number, (ids, times) in enumerate(parts):
            outputs[number::clients], seconds[number::clients] = ids, times
        return outputs, seconds

    def _streams(
        self, arm: str, prompts: Sequence[Sequence[int]], max_tokens: int, begun: float
    ) -> tuple[list[list[int]], list[list[float]]]:
        """A thread for each prompt: all ids, and when each was there."""
        with ThreadPoolExecutor(len(prompts)) as pool:
            streams = list(pool.map(lambda prompt: self._stream(arm, prompt, max_tokens, begun), prompts))
        return [ids for ids, _ in streams], [seconds for _, seconds in streams]

    def _stream(self, arm: str, prompt: Sequence[int], max_tokens: int, begun: float) -> tuple[list[int], list[float]]:
        body = {"model": self._model, "prompt": list(prompt), "max_tokens": max_tokens, "temperature": 0}
        body |= {"ignore_eos": True, "stream": True, "return_token_ids": True, **self._arms[arm]}
        request = urllib.request.Request(
            f"{self._url}/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
        )
        ids: list[int] = []
        seconds: list[float] = []
        with self._open(request, timeout=600) as response:
            for line in response:
                if not line.startswith(b"data: {"):
                    continue
                event = json.loads(line.removeprefix(b"data: "))
                if "error" in event:
                    raise RuntimeError(str(event["error"]))
                for choice in event["choices"]:
                    new = choice.get("token_ids")
                    if new is None and choice.get("text"):
                        raise ValueError("The server does not return token ids: it ignores `return_token_ids`.")
                    ids += new or []
                    seconds += [time.perf_counter() - begun] * len(new or [])
        return ids, seconds


def open_engine(settings: dict[str, Any]) -> OpenAIServer:
    return OpenAIServer(settings)
