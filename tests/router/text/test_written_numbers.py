"""Integers of any size in JSON are written again as they were read."""

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st
from space_router.text.written_numbers import (
    MAX_CONTAINERS,
    TooManyContainers,
    WrittenNumber,
    as_bytes,
    dumps,
    loads,
)


@given(st.integers(-(10**40), 10**40))
def test_an_integer_is_written_as_it_was_read(number: int) -> None:
    text = f'{{"a":[{number},"{number}"]}}'
    for content in (text, text.encode()):
        read = loads(content)
        assert as_bytes(read).decode() == dumps(read, separators=(",", ":")) == text
        assert type(read["a"][0]) is (int if -(2**63) <= number < 2**64 else WrittenNumber)


@pytest.mark.parametrize("text", ['{"a": 1e400}', "[" * 3, '{"a": NaN, "b": 12345678901234567890123}', '"\ud83d"'])
def test_what_is_no_json_is_refused(text: str) -> None:
    with pytest.raises(orjson.JSONDecodeError):
        loads(text)


@pytest.mark.parametrize("container", ["[]", "{}", '[{"a":[["\\\\"]]}]'])
def test_more_lists_and_objects_than_allowed_are_refused_unread(container: str) -> None:
    number = MAX_CONTAINERS // (container.count("[") + container.count("{"))
    allowed = "[" + ",".join([container] * (number - 1)) + "]"
    assert len(loads(allowed)) == number - 1
    with pytest.raises(TooManyContainers):
        loads("[" + ",".join([container] * (number + 1)) + "]")


@pytest.mark.parametrize("text", ["[" * 2 * MAX_CONTAINERS, '"[{' * MAX_CONTAINERS, "\\[" * 2 * MAX_CONTAINERS])
def test_brackets_in_strings_are_no_lists(text: str) -> None:
    assert loads(orjson.dumps([text, "]", text])) == [text, "]", text]


def test_deep_json_is_read() -> None:
    deep = "[" * 900 + "1" * 30 + "]" * 900
    read = loads(deep)
    for _ in range(900):
        (read,) = read
    assert read == float("1" * 30)
