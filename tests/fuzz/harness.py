"""Runs one property over many hostile inputs, with limits on its memory and on the seconds of each input."""

from __future__ import annotations

import asyncio
import faulthandler
import json
from collections import Counter
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from datetime import timedelta
from operator import attrgetter, mul
from pathlib import Path
from typing import Any, TypeVar

from doubles.router import ScriptedWorker
from doubles.router.whole_router import model_text, script
from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from hypothesis.strategies import SearchStrategy
from space_router.api.service import Service
from space_router.config import ServeConfig
from space_router.engine.engine import Engine
from space_router.metrics import Metrics

Input = TypeVar("Input")

SECONDS = 30.0  # longest time that one input may take: three times the longest limit inside the server

SETTLE_EVERY = 1000


class Finding(AssertionError):
    """An input made the code do something that no input may."""


class Fuzzer:
    """Tries hostile inputs within one test. Made by the `fuzzer` fixture."""

    def __init__(self, times: int, input_file: Path) -> None:
        """`times`: factor on the number of inputs. `input_file`: holds the input being tried, for use after a crash."""
        self._times, self._input_file = times, input_file
        self._loop = asyncio.Runner()
        self.outcomes: Counter[str] = Counter()

    def close(self) -> None:
        self._loop.close()

    def wait(self, coroutine: Coroutine[object, object, Input]) -> Input:
        """Run a coroutine in the loop of this test. Raises TimeoutError after `SECONDS`."""

        async def bounded() -> Input:
            async with asyncio.timeout(SECONDS):
                return await coroutine

        return self._loop.run(bounded())

    def run(
        self,
        inputs: SearchStrategy[Input],
        attempt: Callable[[Input], str],
        *,
        few: int,
        settle: Callable[[], object] = lambda: None,
    ) -> None:
        """Try `few` inputs (times `--times`).

        `attempt` returns the outcome in one word and raises for a finding. `settle` raises where inputs have left
        something behind. A process that hangs ends with the stack of every thread on stderr.
        """

        @settings(
            max_examples=few * self._times,
            deadline=timedelta(seconds=SECONDS),
            database=None,
            derandomize=self._times == 1,
            phases=[Phase.generate, Phase.shrink],
            suppress_health_check=list(HealthCheck),
        )
        @given(inputs)
        def try_one(hostile: Input) -> None:
            written.seek(0)
            written.write(repr(hostile).encode("utf-8", "backslashreplace"))
            written.truncate()
            faulthandler.dump_traceback_later(2 * SECONDS, exit=True)
            self.outcomes[attempt(hostile)] += 1
            if self.outcomes.total() % SETTLE_EVERY == 0:
                settle()

        with self._input_file.open("wb", buffering=0) as written:
            try:
                try_one()
                settle()
            finally:
                faulthandler.cancel_dump_traceback_later()
        self._input_file.unlink()
        assert few < 10 or len(self.outcomes) > 1, f"every input ends alike, so they reach nothing: {self.outcomes}"


class Router:
    """Service, engine and worker."""

    def __init__(self, service: Service, engine: Engine, worker: ScriptedWorker) -> None:
        self.service, self._engine, self._worker = service, engine, worker

    async def settle(self) -> None:
        """Wait until all is idle. Raises where a request goes on, a page is lost, or the worker got a wrong command."""
        load = self._engine.load()
        try:
            async with asyncio.timeout(20):
                while load.num_running or load.num_queued or load.blocks_held:
                    await asyncio.sleep(0.01)
                    load = self._engine.load()
        except TimeoutError:
            raise Finding(f"left behind: {load}") from None
        self._engine.check()
        self._worker.check()
        assert load.num_workers_up == 1, "the worker was lost"


@asynccontextmanager
async def serving() -> AsyncIterator[Router]:
    metrics = Metrics()
    async with ScriptedWorker(script(num_blocks=32, window=48)) as worker:
        config = replace(ServeConfig(), worker_address=(worker.address,), max_queue=8)
        async with Engine(config, metrics) as engine:
            await engine.wait_ready()
            text = model_text("chatml")
            yield Router(Service(config, text, engine, metrics, started=True), engine, worker)


AnyMessage = TypeVar("AnyMessage", bound=Message)
Draw = Callable[[SearchStrategy[Any]], Any]

WORDS = (
    "", "a", "x y z", "é😀", "\x00", "\ud83d", "user", "assistant", "json_object", "auto", "off", "function", "{{", "%",
)  # fmt: skip
NUMBERS: tuple[Any, ...] = (
    0, 1, -1, 2, 3, 0.0, 0.5, -0.5, 1.0, 2.0, 1e-30, 1e308, 255, 256, 65536, 2**31 - 1, 2**31, 2**32, 2**53, 2**63,
    2**64 - 1, 2**64, 10**30, -(2**63), float("nan"), float("inf"),
)  # fmt: skip
PIECES = (b'"', b"[", b"{", b"}", b"\\", b",", b"\xff", b"\x00", b"\r\n")
UNSIGNED = (0, 1, 2, 3, 7, 8, 15, 16, 17, 63, 64, 255, 256, 2**31 - 1, 2**31, 2**32 - 1)
REALS = (0.0, -0.0, 1.0, -1.0, 0.5, 2.0, 1e-30, 1e30, float("nan"), float("inf"), -float("inf"))


def sometimes(one_in: int) -> SearchStrategy[bool]:
    """True once in `one_in` draws."""
    return st.integers(1, one_in).map(lambda number: number == one_in)


def rarely(rare: SearchStrategy[Any], usual: SearchStrategy[Any], one_in: int) -> SearchStrategy[Any]:
    """`usual`, but `rare` once in `one_in` draws."""
    return sometimes(one_in).flatmap(lambda is_rare: rare if is_rare else usual)


def _nested(depth: int, as_lists: bool) -> Any:
    value: Any = 1
    for _ in range(depth):
        value = [value] if as_lists else {"a": value}
    return value


_short_texts = st.lists(st.sampled_from(WORDS), max_size=4).map("".join)
_long_texts = st.builds(mul, st.sampled_from(("x", "é", "\\", '"', "[", "a b ")), st.sampled_from((100, 5000, 70_000)))
texts: SearchStrategy[str] = rarely(_long_texts, _short_texts, 30)

_leaves = st.sampled_from((*NUMBERS, True, False, None)) | texts


def _one_level(inner: SearchStrategy[Any]) -> SearchStrategy[Any]:
    return rarely(st.lists(inner, max_size=5) | st.dictionaries(_short_texts, inner, max_size=4), inner, 4)


json_values: SearchStrategy[Any] = rarely(
    st.builds(_nested, st.sampled_from((10, 70, 200)), st.booleans()), _one_level(_one_level(_leaves)), 20
)
"""Any JSON value, with NaN, infinities, halves of surrogate pairs and deep nesting."""


@st.composite
def mutated(draw: Draw, value: Any, names: Sequence[str] = (), *, most: int = 1) -> Any:
    """`value` with a part replaced, dropped or doubled, or one of `names` added, one to `most` times."""
    for _ in range(draw(st.integers(1, most))):
        value = draw(_mutated_once(value, names))
    return value


@st.composite
def _mutated_once(draw: Draw, value: Any, names: Sequence[str]) -> Any:
    if not value or not isinstance(value, dict | list) or draw(sometimes(6)):
        return draw(json_values)
    if isinstance(value, list):
        place = draw(st.integers(0, len(value) - 1))
        return [*value[:place], draw(_mutated_once(value[place], ())), *value[place + draw(st.integers(0, 1)) :]]
    name = draw(st.sampled_from([*value, *names]))
    if draw(sometimes(10)):
        return {key: one for key, one in value.items() if key != name}
    deeper = name in value and draw(st.booleans())
    return value | {name: draw(_mutated_once(value[name], ()) if deeper else json_values)}


def as_json(value: Any) -> bytes:
    """Encode with NaN, infinities and halves of surrogate pairs, as careless clients do."""
    return json.dumps(value).encode()


@st.composite
def spoiled(draw: Draw, content: bytes) -> bytes:
    """`content` with some bytes replaced, dropped, doubled or cut off."""
    found = bytearray(content)
    for _ in range(draw(st.integers(1, 4))):
        place, size = draw(st.integers(0, len(found))), draw(st.sampled_from((1, 2, 8, 64)))
        match draw(st.integers(0, 4)):
            case 0:
                found[place : place + size] = draw(st.binary(min_size=size, max_size=size))
            case 1:
                del found[place : place + size]
            case 2:
                found[place:place] = found[place : place + size] * draw(st.sampled_from((1, 2, 30)))
            case 3:
                found[place : place + 1] = draw(st.sampled_from(PIECES))
            case _:
                del found[place:]
    return bytes(found)


def spoiled_text(text: str) -> SearchStrategy[str]:
    """`text` spoiled as UTF-8."""
    return spoiled(text.encode("utf-8", "replace")).map(lambda content: content.decode("utf-8", "replace"))


_SCALARS: dict[int, SearchStrategy[Any]] = {
    FieldDescriptor.CPPTYPE_BOOL: st.booleans(),
    FieldDescriptor.CPPTYPE_STRING: texts.map(lambda text: text.replace("\ud83d", "?")),
    FieldDescriptor.CPPTYPE_FLOAT: st.sampled_from(REALS),
    FieldDescriptor.CPPTYPE_DOUBLE: st.sampled_from(REALS),
    FieldDescriptor.CPPTYPE_ENUM: st.integers(0, 9),
    FieldDescriptor.CPPTYPE_INT32: st.sampled_from((*UNSIGNED[:-2], -1, -(2**31))),
    FieldDescriptor.CPPTYPE_INT64: st.sampled_from((*UNSIGNED[:-2], -1, -(2**31))),
    FieldDescriptor.CPPTYPE_UINT32: st.sampled_from(UNSIGNED),
    FieldDescriptor.CPPTYPE_UINT64: st.sampled_from((*UNSIGNED, 2**63, 2**64 - 1)),
}


def _scalars(field: FieldDescriptor) -> SearchStrategy[Any]:
    values = _SCALARS[field.cpp_type]
    return values.map(lambda text: text.encode()) if field.type == FieldDescriptor.TYPE_BYTES else values


@st.composite
def filled(draw: Draw, message: AnyMessage, most: int, depth: int = 4) -> AnyMessage:
    """A copy of `message` with up to `most` fields, at each level, set to anything that their types can hold."""
    made = type(message)()
    made.CopyFrom(message)
    fields = st.lists(st.sampled_from(list(made.DESCRIPTOR.fields)), max_size=most, unique_by=attrgetter("name"))
    for field in draw(fields) if made.DESCRIPTOR.fields else ():
        inner = getattr(made, field.name)
        if field.message_type is not None and field.message_type.GetOptions().map_entry:
            key, value = (field.message_type.fields_by_name[name] for name in ("key", "value"))
            inner.update(draw(st.dictionaries(_scalars(key), _scalars(value), max_size=3)))
        elif field.message_type is not None and field.is_repeated:
            for _ in range(draw(st.integers(0, 3)) if depth else 0):
                part = inner.add()
                part.CopyFrom(draw(filled(part, most, depth - 1)))
        elif field.message_type is not None:
            inner.SetInParent()
            if depth:
                inner.CopyFrom(draw(filled(inner, most, depth - 1)))
        elif field.is_repeated:
            made.ClearField(field.name)
            getattr(made, field.name).extend(draw(st.lists(_scalars(field), max_size=40)))
        else:
            setattr(made, field.name, draw(_scalars(field)))
    return made


def often(value: SearchStrategy[Any], change: Callable[[Any], SearchStrategy[Any]], one_in: int) -> SearchStrategy[Any]:
    """`value`, passed through `change` once in `one_in` draws."""
    return value.flatmap(lambda one: rarely(change(one), st.just(one), one_in))
