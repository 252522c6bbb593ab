"""A whole router in front of scripted workers, and certificates for both."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import httpx
import pytest
from space_router.engine.engine import Engine
from space_router.engine.request.request import ValidRequest
from space_router.text.chat_template import BUILT_IN, ChatTemplate
from space_router.text.model_text import ModelText
from space_router.text.tokenizer import Tokenizer

from doubles.router.script import FixedReply, HashLanguage, Script
from doubles.tokenizers import EOS_ID, FIRST_BYTE_ID, MASK_ID, VOCAB_SIZE, tiny_tokenizer


class Certificate(NamedTuple):
    """Files in PEM."""

    cert: Path
    key: Path


def authority(folder: Path, name: str = "authority") -> Certificate:
    """One that signs others, and itself."""
    made = _place(folder, name)
    _openssl("req", "-x509", *_fresh(name), "-days", "1", "-keyout", made.key, "-out", made.cert)
    return made


def signed(folder: Path, name: str, by: Certificate) -> Certificate:
    """One for localhost."""
    made, asked, names = _place(folder, name), folder / f"{name}.csr", folder / f"{name}.ext"
    names.write_text("subjectAltName=DNS:localhost,IP:127.0.0.1\n")
    _openssl("req", "-new", *_fresh(name), "-keyout", made.key, "-out", asked)
    _openssl(
        "x509", "-req", "-in", asked, "-CA", by.cert, "-CAkey", by.key, "-CAcreateserial", "-days", "1",
        "-extfile", names, "-out", made.cert,
    )  # fmt: skip
    return made


def _place(folder: Path, name: str) -> Certificate:
    return Certificate(folder / f"{name}.crt", folder / f"{name}.key")


def _fresh(name: str) -> list[str]:
    return ["-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-subj", f"/CN={name}"]


def _openssl(*words: str | Path) -> None:
    subprocess.run(["openssl", *map(str, words)], check=True, capture_output=True)


TOKENIZER = tiny_tokenizer()
USER = [{"role": "user", "content": "Hi"}]

Start = Callable[..., AbstractAsyncContextManager[Any]]
"""Of the fixture `start`: `async with start("the reply", config=..., chat=...) as router`."""


def script(reply: str | None = None, **changes: Any) -> Script:
    """A worker that always answers `reply`, or speaks a made-up language of printable bytes that ends with EOS."""
    if reply is None:
        language: Any = HashLanguage(range(FIRST_BYTE_ID + 32, FIRST_BYTE_ID + 127), eos_id=EOS_ID, eos_period=50)
    else:
        language = FixedReply(TOKENIZER.encode(reply))
    known = Script(language=language, vocab_size=VOCAB_SIZE, mask_ids=(MASK_ID,), eos_ids=(EOS_ID,), num_blocks=256)
    return replace(known, **changes)


def model_text(chat: str | None, tokenizer: Tokenizer = TOKENIZER) -> ModelText:
    """The text side of the model `tiny`. `chat`: a built-in template's name, or a template."""
    template = None if chat is None else ChatTemplate(BUILT_IN.get(chat, chat), {})
    return ModelText("tiny", tokenizer, template, MappingProxyType({}))


def events_of(answer: httpx.Response) -> list[Any]:
    """The events of one of OpenAI's streams; [DONE] must be the last."""
    assert answer.status_code == 200, answer.text
    assert answer.headers["content-type"].startswith("text/event-stream")
    lines = answer.text.split("\n\n")
    assert lines[-2:] == ["data: [DONE]", ""]
    return [json.loads(line.removeprefix("data: ")) for line in lines[:-2]]


class Seen(list[ValidRequest]):
    """Every request that has reached an engine."""

    @classmethod
    def by_engines(cls, monkeypatch: pytest.MonkeyPatch) -> Seen:
        requests = cls()
        submit = Engine.submit

        def noted(self: Engine, request: ValidRequest, **others: Any) -> Any:
            requests.append(request)
            return submit(self, request, **others)

        monkeypatch.setattr(Engine, "submit", noted)
        return requests

    def take(self, field: str = "") -> list[ValidRequest]:
        """Those since the last time, without what is drawn anew for each unless `field` is about that."""
        taken = [
            replace(
                request,
                request_id=request.request_id if field == "request_id" else "",
                sampling=request.sampling if field == "seed" else replace(request.sampling, seed=0),
            )
            for request in self
        ]
        self.clear()
        return taken
