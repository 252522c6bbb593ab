"""Hostile values: JSON that is almost right, messages with any field, bytes that were right once."""

from __future__ import annotations

import json
from collections.abc import Sequence
from random import Random
from typing import Any

from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message

WORDS = (
    "", "a", "x y z", "é😀", "\x00", "\ud83d", "user", "assistant", "json_object", "auto", "off", "function", "{{", "%",
)  # fmt: skip
NUMBERS: tuple[Any, ...] = (
    0, 1, -1, 2, 3, 0.0, 0.5, -0.5, 1.0, 2.0, 1e-30, 1e308, 255, 256, 65536, 2**31 - 1, 2**31, 2**32, 2**53, 2**63,
    2**64 - 1, 2**64, 10**30, -(2**63), float("nan"), float("inf"),
)  # fmt: skip


def any_text(dice: Random) -> str:
    """Mostly short, now and then long."""
    if dice.random() < 0.03:
        return dice.choice(("x", "é", "\\", '"', "[", "a b ")) * dice.choice((100, 5000, 70_000))
    return "".join(dice.choice(WORDS) for _ in range(dice.randint(0, 4)))


def any_json(dice: Random, depth: int = 3) -> Any:
    """Any value at all."""
    kind = dice.random()
    if depth and kind < 0.15:
        return [any_json(dice, depth - 1) for _ in range(dice.choice((0, 1, 2, 3, 40)))]
    if depth and kind < 0.3:
        return {any_text(dice)[:60]: any_json(dice, depth - 1) for _ in range(dice.randint(0, 4))}
    if kind < 0.35:
        nested: Any = 1
        for _ in range(dice.choice((10, 70, 200))):
            nested = [nested] if dice.random() < 0.5 else {"a": nested}
        return nested
    if kind < 0.65:
        return dice.choice(NUMBERS)
    return any_text(dice) if kind < 0.85 else dice.choice((True, False, None))


def changed(dice: Random, value: Any, names: Sequence[str] = ()) -> Any:
    """The value with something in it that is not as it was: replaced, missing, twice, or of another name."""
    if isinstance(value, dict) and value and dice.random() < 0.85:
        name = dice.choice([*value, *names]) if names and dice.random() < 0.5 else dice.choice(list(value))
        inner = changed(dice, value[name]) if name in value and dice.random() < 0.7 else any_json(dice)
        kept = {key: one for key, one in value.items() if key != name}
        return kept if dice.random() < 0.1 else kept | {name: inner}
    if isinstance(value, list) and value and dice.random() < 0.8:
        place = dice.randrange(len(value))
        return [*value[:place], changed(dice, value[place]), *value[place + dice.randint(0, 1) :]]
    return any_json(dice)


def as_json(value: Any) -> bytes:
    """With NaN, infinities and halves of surrogate pairs, as careless clients write them."""
    return json.dumps(value).encode()


def spoiled(dice: Random, content: bytes) -> bytes:
    """Bytes that were right once: some changed, missing, doubled, or cut off."""
    found = bytearray(content)
    for _ in range(dice.randint(1, 4)):
        place, size = dice.randrange(len(found) + 1), dice.choice((1, 1, 2, 8, 64))
        match dice.randrange(5):
            case 0:
                found[place : place + size] = dice.randbytes(size)
            case 1:
                del found[place : place + size]
            case 2:
                found[place:place] = found[place : place + size] * dice.choice((1, 2, 30))
            case 3:
                found[place : place + 1] = dice.choice((b'"', b"[", b"{", b"}", b"\\", b",", b"\xff", b"\x00", b"\r\n"))
            case _:
                del found[place:]
    return bytes(found)


_WHOLE = (0, 1, 2, 3, 7, 8, 15, 16, 17, 63, 64, 255, 256, 2**31 - 1, 2**31, 2**32 - 1)
_REAL = (0.0, -0.0, 1.0, -1.0, 0.5, 2.0, 1e-30, 1e30, float("nan"), float("inf"), -float("inf"))


def fill(dice: Random, message: Message, share: float, depth: int = 4) -> None:
    """Set a share of a message's fields to anything that their types can hold."""
    for field in message.DESCRIPTOR.fields:
        if dice.random() > share:
            continue
        if field.message_type is not None and field.message_type.GetOptions().map_entry:
            key, value = (field.message_type.fields_by_name[name] for name in ("key", "value"))
            for _ in range(dice.randint(0, 3)):
                getattr(message, field.name)[_scalar(dice, key)] = _scalar(dice, value)
        elif field.message_type is not None:
            if not depth:
                continue
            if field.is_repeated:
                for _ in range(dice.randint(0, 3)):
                    fill(dice, getattr(message, field.name).add(), share, depth - 1)
            else:
                inner = getattr(message, field.name)
                inner.SetInParent()
                fill(dice, inner, share, depth - 1)
        elif field.is_repeated:
            values = [_scalar(dice, field) for _ in range(dice.choice((0, 1, 2, 5, 40)))]
            message.ClearField(field.name)
            getattr(message, field.name).extend(values)
        else:
            setattr(message, field.name, _scalar(dice, field))


def _scalar(dice: Random, field: Any) -> Any:
    """A value of a field, by its descriptor: of one of protobuf's two kinds."""
    kinds = FieldDescriptor
    match field.cpp_type:
        case kinds.CPPTYPE_BOOL:
            return dice.random() < 0.5
        case kinds.CPPTYPE_STRING:
            text = any_text(dice)
            return text.encode(errors="replace") if field.type == kinds.TYPE_BYTES else text.replace("\ud83d", "?")
        case kinds.CPPTYPE_FLOAT | kinds.CPPTYPE_DOUBLE:
            return dice.choice(_REAL)
        case kinds.CPPTYPE_ENUM:
            return dice.randint(0, 9)
        case kinds.CPPTYPE_INT32 | kinds.CPPTYPE_INT64:
            return dice.choice([*_WHOLE[:-2], -1, -(2**31)])
        case kinds.CPPTYPE_UINT64:
            return dice.choice([*_WHOLE, 2**63, 2**64 - 1])
        case _:
            return dice.choice(_WHOLE)
