"""JSON for server-sent events."""

from typing import Any

import orjson

_LINE_ENDS = {end.encode(): f"\\u{ord(end):04x}".encode() for end in "\x85\u2028\u2029"}


def event_json(value: Any) -> bytes:
    """Return JSON on one line. Unicode line ends are escaped: clients such as Hugging Face's split lines at them."""
    data = orjson.dumps(value)
    if data.isascii():
        return data
    for end, escaped in _LINE_ENDS.items():
        if end in data:  # can occur only inside a JSON string
            data = data.replace(end, escaped)
    return data
