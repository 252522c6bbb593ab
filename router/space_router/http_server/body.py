"""Parse a request body into a checked pydantic model, or raise an error of bounded size."""

import asyncio
import re
import reprlib
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, NamedTuple, TypeAlias, TypeVar

import orjson
from pydantic import BaseModel, ConfigDict, ValidationError, model_validator
from starlette.requests import ClientDisconnect, Request

from space_router.config import ServeConfig
from space_router.errors import BodyTooLarge, ClientGone, InvalidRequest, SlowRequest, UnsupportedMedia
from space_router.http_server.warnings import warn
from space_router.text import written_numbers

BOOKKEEPING = frozenset(
    {
        "user",
        "metadata",
        "store",
        "service_tier",
        "safety_identifier",
        "prompt_cache_key",
        "prompt_cache_retention",
    }
)
"""Fields that are accepted and have no effect: the client keeps them for its own bookkeeping."""

_ignores_unknown: ContextVar[bool] = ContextVar("ignores_unknown", default=False)


@contextmanager
def ignoring_unknown_fields(ignored: bool = True) -> Iterator[None]:
    """In the block, unknown fields of bodies are left out and named in a warning if `ignored`, instead of refused."""
    token = _ignores_unknown.set(ignored or _ignores_unknown.get())
    try:
        yield
    finally:
        _ignores_unknown.reset(token)


MAX_UNKNOWN_FIELDS = 16  # with more unknown fields than this, the error gives their number instead of their names


class Body(BaseModel):
    """A request body, or an object in one: null means absent, no unknown fields, no silent conversions, finite numbers
    only.
    """

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)

    @model_validator(mode="before")
    @classmethod
    def _without_nulls(cls, value: Any) -> Any:
        """Drop null fields and limit the number of unknown ones.

        pydantic reports about one kilobyte for each unknown field, and a body can hold half a million.
        """
        if not isinstance(value, dict):
            return value
        if None in value.values():
            value = {key: one for key, one in value.items() if one is not None}
        if _ignores_unknown.get():
            return cls._known_fields(value)
        if len(value) > len(cls.model_fields):
            num_unknown = len(value.keys() - cls.model_fields.keys())
            if num_unknown > MAX_UNKNOWN_FIELDS:
                raise ValueError(f"must have known fields only, and has {num_unknown} others")
        return value

    @classmethod
    def _known_fields(cls, value: dict[str, Any]) -> dict[str, Any]:
        """Return the fields that the model has; a warning names the others."""
        names = {field.alias or name for name, field in cls.model_fields.items()}
        unknown = [name for name in value if name not in names]
        for name in unknown[: MAX_UNKNOWN_FIELDS + 1]:
            warn(f"{short_repr(name)} is not a known field, and has no effect.")
        return {name: one for name, one in value.items() if name in names} if unknown else value


BodyT = TypeVar("BodyT", bound=Body)
Neutral: TypeAlias = Mapping[str, Collection[Any]]
"""Known but unsupported fields, with the values that are accepted because they equal the default."""

_short = reprlib.Repr()
_short.maxstring = _short.maxother = 60
_short.maxlist = _short.maxdict = 4
_short.maxlevel = 2


def short_repr(value: object) -> str:
    """Return a short representation of a value for an error message, at most 120 characters."""
    text = _short.repr(value)
    return text if len(text) <= 120 else text[:117] + "..."


class Received(NamedTuple):
    """A parsed body and its size on the wire."""

    values: dict[str, Any]
    size: int  # bytes


LONG_JSON = 256 * 1024
"""Body size in bytes from which a thread parses it."""


async def read_object(request: Request, config: ServeConfig) -> Received:
    """Return the JSON object in the body; later calls return the same object.

    Raises UnsupportedMedia, BodyTooLarge, SlowRequest, InvalidRequest, ClientGone.
    """
    known: Received | None = request.scope.get("spaceserve.body")
    if known is not None:
        return known
    media = request.headers.get("content-type", "application/json").partition(";")[0].strip().lower()
    if media != "application/json" and not media.endswith("+json"):
        raise UnsupportedMedia(f"The body is announced as {short_repr(media)}; send `Content-Type: application/json`.")
    encoding = request.headers.get("content-encoding", "identity").strip().lower()
    if encoding != "identity":
        raise UnsupportedMedia(f"The body is announced as compressed ({short_repr(encoding)}); send it as it is.")
    try:
        async with asyncio.timeout(config.receive_timeout):
            content = await _content(request, config.max_body)
    except TimeoutError:
        raise SlowRequest(
            f"The body did not come within {config.receive_timeout:g} s. Send it faster, or raise `--receive-timeout`."
        ) from None
    long = len(content) >= LONG_JSON  # its depth alone takes the event loop tens of milliseconds
    most = config.max_json_depth
    value = await asyncio.to_thread(parse_json, content, most) if long else parse_json(content, most)
    if not isinstance(value, dict):
        raise InvalidRequest(f"The body must be a JSON object; got {short_repr(value)}.")
    received = request.scope["spaceserve.body"] = Received(value, len(content))
    return received


async def _content(request: Request, max_body: int) -> bytes:
    too_large = f"The body exceeds {max_body} bytes. Send less, or raise `--max-body`."
    length = request.headers.get("content-length", "0")
    if length.isdecimal() and int(length[:18]) > max_body:
        raise BodyTooLarge(too_large)
    pieces: list[bytes] = []
    size = 0
    try:
        async for piece in request.stream():
            size += len(piece)
            if size > max_body:
                raise BodyTooLarge(too_large)
            pieces.append(piece)
    except ClientDisconnect:
        raise ClientGone("The client went away while sending its request.") from None
    return b"".join(pieces)


def parse_json(content: bytes, max_depth: int) -> Any:
    """Parse JSON, see `written_numbers.loads`. Raises InvalidRequest if it is malformed or nested deeper than
    `max_depth`."""
    try:
        value = written_numbers.loads(content)
    except written_numbers.TooManyContainers as error:
        raise InvalidRequest(f"The body cannot be parsed: {error.msg}. Send fewer.", code="too_large") from None
    except orjson.JSONDecodeError as error:
        if "infinity" in error.msg:
            message = f"The JSON body has a number too large for a double, such as 1e400 (at character {error.pos})."
            raise InvalidRequest(message) from None
        raise InvalidRequest(f"The body is not valid JSON: {error.msg[:100]} (at character {error.pos}).") from None
    if content.count(b"[") + content.count(b"{") > max_depth and _deeper(value, max_depth):
        raise InvalidRequest(
            f"The body is nested more than {max_depth} deep (`--max-json-depth`). Flatten it.", code="too_deep"
        )
    return value


def _deeper(value: Any, max_depth: int) -> bool:
    """Return whether a value is nested deeper than `max_depth`. Iterates by level, because recursion could overflow."""
    level = [value]
    for _ in range(max_depth):
        level = [
            inner
            for outer in level
            for inner in (outer.values() if type(outer) is dict else outer)
            if type(inner) is dict or type(inner) is list
        ]
        if not level:
            return False
    return True


def validate(model: type[BodyT], values: Mapping[str, Any], neutral: Neutral | None = None) -> BodyT:
    """Check an object against a model; null means absent."""
    neutral = neutral or {}
    given = {key: value for key, value in values.items() if value is not None and key not in BOOKKEEPING}
    for key in neutral.keys() & given.keys():
        value = given.pop(key)
        if not any(type(value) is type(allowed) and value == allowed for allowed in neutral[key]):
            raise InvalidRequest(
                f"`{key}` is not supported by this server; got {short_repr(value)}. Leave it out.",
                param=key,
                code="unsupported_parameter",
            )
    try:
        return model.model_validate(given)
    except ValidationError as error:
        raise _invalid(error, given) from None


def read_query(request: Request, model: type[BodyT]) -> BodyT:
    """Return the query of an address, as `validate` does; a list's name is repeated, with `[]` behind it or not.

    Other parameters, such as the `api-version` that some clients send with everything, get a warning. Raises
    InvalidRequest.
    """
    values: dict[str, Any] = {}
    for written, value in request.query_params.multi_items():
        name = written.removesuffix("[]")
        field = model.model_fields.get(name)
        if field is None:
            warn(f"{name!r} is no parameter of this query, and has no effect.")
        elif "list[" in str(field.annotation):
            values.setdefault(name, []).append(value)
        else:
            values[name] = _query_value(value, str(field.annotation))
    return validate(model, values)


def _query_value(value: str, kind: str) -> Any:
    """Return a number or a boolean, where a field is one; all values of a query are texts."""
    if "bool" in kind and value.lower() in ("true", "false"):
        return value.lower() == "true"
    if "int" in kind and re.fullmatch(r"-?[0-9]{1,18}", value):
        return int(value)
    return value


class _Complaint(NamedTuple):
    """One validation error and the place in the body that it is about."""

    place: tuple[str | int, ...]  # keys and indexes from the top of the body
    kind: str  # pydantic's error type
    message: str
    value: Any  # the value at that place

    @classmethod
    def of(cls, error: Mapping[str, Any], value: Any) -> "_Complaint":
        kind, message, there = error["type"], error["msg"], error["input"]
        steps = error["loc"][:-1] if kind == "missing" else error["loc"]
        place, _ = max(_places(steps, value), key=lambda found: (found[1] is there, len(found[0])))
        if kind == "missing":
            return cls((*place, error["loc"][-1]), kind, "", there)
        if kind == "union_tag_not_found":
            return cls((*place, "type"), "missing", "", there)
        if kind == "union_tag_invalid":
            names = " or".join(error["ctx"]["expected_tags"].rsplit(",", 1))
            media = " (no images, documents, audio or video are served)" if _MEDIA.match(str(there["type"])) else ""
            return cls((*place, "type"), kind, f"must be {names}{media}", there["type"])
        if kind == "int_type" and isinstance(there, float) and abs(there) >= 2.0**63:  # as the parser rounded it
            return cls(place, kind, "must be an integer of 64 bits", there)
        if kind in ("model_type", "model_attributes_type", "dict_type"):
            return cls(place, kind, "must be an object", there)
        if kind == "list_type" and steps[-1:] == ("parts",):  # of a union of both
            return cls(place, kind, "must be a string or a list", there)
        words = _SHOULD.sub("must", message.removeprefix("Value error, ")).replace(" after validation", "")
        return cls(place, kind, words[:200], there)


_SHOULD = re.compile(r"^\w+ should")
_MEDIA = re.compile(r"(input_)?(image|audio|video|document|file)(_url)?$")


def _places(steps: tuple[str | int, ...], value: Any) -> Iterator[tuple[tuple[str | int, ...], Any]]:
    """Yield each (place, value) that a pydantic error location may refer to.

    pydantic's locations also name union branches. A step that is not a key is a branch; a step that is a key may still
    be one, for example `text`.
    """
    if not steps:
        yield (), value
        return
    step, *rest = steps
    keys = value if isinstance(value, dict) else range(len(value)) if isinstance(value, list) else ()
    is_key = step in keys
    if is_key:
        for place, there in _places(tuple(rest), value[step]):
            yield (step, *place), there
    if isinstance(step, str) or not is_key:
        yield from _places(tuple(rest), value)


def _invalid(error: ValidationError, value: Any) -> InvalidRequest:
    """Build the error for one complaint, with the number of others.

    Of the complaints about the first field, the deepest is reported: the others only say that a value does not match
    the other branches of a union.
    """
    found = error.errors(include_url=False)
    about = [_Complaint.of(one, value) for one in found if one["loc"][:1] == found[0]["loc"][:1]]
    first = max(about, key=lambda one: len(one.place))
    place = [str(part)[:60] for part in first.place]
    name = ".".join(place) or "body"
    param = place[0] if place else None
    others = f" ({len(found) - 1} more)" if len(found) > 1 else ""
    if first.kind == "missing":
        return InvalidRequest(f"`{name}` is required.{others}", param=param, code="missing_parameter")
    if first.kind == "extra_forbidden":
        return InvalidRequest(
            f"`{name}` is not a field of this request. Nothing is accepted and ignored.{others}",
            param=param,
            code="unknown_parameter",
        )
    return InvalidRequest(
        f"`{name}` {first.message}; got {short_repr(first.value)}.{others}", param=param, code="invalid_value"
    )
