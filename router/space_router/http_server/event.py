"""JSON of a server-sent event."""

from typing import Any

import orjson

_LINE_ENDS = {end.encode(): f"\\u{ord(end):04x}".encode() for end in "\x85\u2028\u2029"}


def event_json(value: Any) -> bytes:
    """JSON in one line for every client: some, such as Hugging Face's, take Unicode's line ends for ends of theirs."""
    data = orjson.dumps(value)
    if data.isascii():
        return data
    for end, escaped in _LINE_ENDS.items():
        if end in data:  # only inside a JSON string
            data = data.replace(end, escaped)
    return data
