"""Any OpenAI-compatible server that takes token ids and returns them: a stream for each prompt, all at once."""

from __future__ import annotations

import json
import time
import urllib.request
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

ARM = "over HTTP"
PLAIN, DRAFTS = "over HTTP, plain", "over HTTP, drafts"


class OpenAIServer:
    """A server that is already running, asked through /v1/completions."""

    def __init__(self, settings: dict[str, Any]) -> None:
        self._url = settings["url"].rstrip("/").removesuffix("/v1") + "/v1"
        self._open = urllib.request.build_opener(urllib.request.ProxyHandler({})).open
        with self._open(f"{self._url}/models", timeout=60) as response:
            self._model = json.load(response)["data"][0]["id"]
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
        begun = time.perf_counter()
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
