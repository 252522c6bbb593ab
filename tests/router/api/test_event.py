"""Events that every client reads as one line."""

from typing import Any

import orjson
import pytest
from doubles.router.whole_router import Start
from space_router.http_server.responses import event_json

ENDS = "a\u2028b\u2029c\x85d"
USER = [{"role": "user", "content": "Say"}]


@pytest.mark.parametrize("value", [ENDS, [ENDS], {ENDS: 1}, "é😀", "\\u2028", "\r\n\v\f\x1c", ""])
def test_a_value_is_one_line_and_what_it_was(value: Any) -> None:
    written = event_json(value)
    assert len(written.decode().splitlines()) == 1
    assert orjson.loads(written) == value


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", {"prompt": "x", "echo": True}),
        ("/v1/chat/completions", {"messages": USER}),
        ("/v1/responses", {"input": "x"}),
        ("/generate_stream", {"inputs": "x"}),
    ],
)
async def test_line_ends_of_unicode_end_no_line_of_a_stream(start: Start, path: str, body: dict[str, Any]) -> None:
    """Hugging Face's client splits at them."""
    async with start(ENDS) as router:
        more = {} if path == "/generate_stream" else {"stream": True}
        answer = await router.post(path, **body, **more)
        assert answer.status_code == 200
        lines = answer.text.splitlines()
        assert all(line.partition(":")[0] in ("", "data", "event") for line in lines)
        for end in "\u2028\u2029\x85":
            assert end not in answer.text
            assert f"\\u{ord(end):04x}" in answer.text
