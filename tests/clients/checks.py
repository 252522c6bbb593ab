"""What a client's script tells `run.py`: a line per check, in any environment; the exit code says whether all held."""

import contextlib
import json
import os
import sys
import time
import traceback
from collections.abc import Callable, Iterator

URL = os.environ["SPACESERVE_URL"]
NARROW_URL = os.environ["SPACESERVE_NARROW_URL"]  # A server that runs one request at a time and lets none wait
KEY = os.environ["SPACESERVE_KEY"]
MODEL = os.environ["SPACESERVE_MODEL"]

PROMPT = "def fibonacci(n):"
QUESTION = [{"role": "user", "content": "def add(a, b):"}]

ANSWER = {
    "type": "object",
    "properties": {"city": {"enum": ["Oslo", "Paris"]}, "days": {"type": "integer", "minimum": 1, "maximum": 9}},
    "required": ["city", "days"],
    "additionalProperties": False,
}
"""A JSON schema whose texts are short whatever the model thinks."""
FORMAT = {"type": "json_schema", "json_schema": {"name": "trip", "schema": ANSWER, "strict": True}}
TOOL = {"type": "function", "function": {"name": "forecast", "description": "The weather.", "parameters": ANSWER}}

_failed: list[str] = []


def say(kind: str, text: str) -> None:
    sys.stdout.write(f"{kind}\t{text}\n")
    sys.stdout.flush()


def version(text: str) -> None:
    """Of the client, as it says itself."""
    say("version", text)


@contextlib.contextmanager
def check(what: str) -> Iterator[None]:
    """A block that raises is a check that does not hold; the others go on."""
    try:
        yield
    except Exception:
        traceback.print_exc()
        _failed.append(what)
        say("failed", what)
    else:
        say("ok", what)


def raises(kind: type[BaseException], call: Callable[[], object]) -> BaseException:
    """The exception of exactly the client's own kind that a call must raise."""
    try:
        call()
    except kind as error:
        return error
    raise AssertionError(f"{kind.__name__} was not raised")


def is_answer(text: str) -> bool:
    """The text is JSON that ANSWER allows."""
    value = json.loads(text)
    return set(value) == {"city", "days"} and value["city"] in ("Oslo", "Paris") and value["days"] in range(1, 10)


def until(holds: Callable[[], bool], what: str, seconds: float = 60.0) -> None:
    limit = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < limit, f"{what}: not within {seconds:g} s"
        time.sleep(0.02)


def leave() -> None:
    sys.exit(1 if _failed else 0)
