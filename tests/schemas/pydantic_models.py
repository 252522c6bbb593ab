"""Models whose schemas pydantic writes."""

from __future__ import annotations

import datetime
import decimal
import enum
import ipaddress
import uuid
from typing import Annotated, Any, Literal

from pydantic import AnyUrl, BaseModel, ConfigDict, Field, create_model


class Colour(enum.Enum):
    RED = "red"
    GREEN = "green"


class Level(enum.IntEnum):
    LOW = 1
    HIGH = 2


class Person(BaseModel):
    name: str
    age: Annotated[int, Field(ge=0, le=150)]
    email: str | None = None


class Strict(BaseModel):
    model_config = ConfigDict(extra="forbid")
    a: str
    b: int = 3


class Loose(BaseModel):
    model_config = ConfigDict(extra="allow")
    a: str


class Circle(BaseModel):
    kind: Literal["circle"]
    radius: float


class Square(BaseModel):
    kind: Literal["square"]
    side: Annotated[float, Field(gt=0)]


class Shapes(BaseModel):
    shapes: Annotated[list[Annotated[Circle | Square, Field(discriminator="kind")]], Field(max_length=3)]


class Tree(BaseModel):
    value: int
    children: list[Tree] = []


class Linked(BaseModel):
    value: str
    next: Linked | None


class Step(BaseModel):
    explanation: str
    output: str


class Reasoning(BaseModel):
    steps: Annotated[list[Step], Field(min_length=1, max_length=3)]
    answer: str


class Edit(BaseModel):
    """Replace a text in a file."""

    path: Annotated[str, Field(description="of the file", pattern=r"^[a-z/]+\.py$")]
    old: str
    new: str
    count: Annotated[int, Field(default=1, multiple_of=1)]


class Event(BaseModel):
    name: str
    date: datetime.date
    people: list[Person]
    place: dict[str, str] | None = None


class Order(BaseModel):
    """A model of models, with defaults, aliases and amounts."""

    model_config = ConfigDict(extra="forbid", populate_by_name=True)
    number: Annotated[int, Field(alias="orderNumber", ge=1, le=10**9)]
    status: Literal["open", "paid", "sent"] = "open"
    amounts: Annotated[dict[str, Annotated[float, Field(multiple_of=0.5, ge=0)]], Field(max_length=3)]
    buyer: Person | None = None
    paid_by: Circle | Square | None = None


_TYPES: dict[str, Any] = {
    "text": str, "short": Annotated[str, Field(min_length=1, max_length=12)], "integer": int, "real": float,
    "range": Annotated[float, Field(ge=-5, lt=5)], "even": Annotated[int, Field(multiple_of=2, ge=0, le=50)],
    "flag": bool, "nothing": None, "anything": Any, "choice": Literal["a", 1, True], "colour": Colour, "level": Level,
    "maybe": str | None, "either": int | str, "texts": list[str], "few": Annotated[list[int], Field(max_length=2)],
    "unique": set[int], "pair": tuple[str, int], "many": tuple[int, ...], "named": dict[str, int],
    "by_colour": dict[Colour, int], "by_number": dict[int, str], "moment": datetime.datetime, "day": datetime.date,
    "clock": datetime.time, "span": datetime.timedelta, "id": uuid.UUID, "id4": Annotated[uuid.UUID, Field()],
    "address": ipaddress.IPv4Address, "url": AnyUrl, "money": decimal.Decimal, "raw": bytes, "person": Person,
    "people": list[Person], "deep": dict[str, list[dict[str, int]]], "pattern": Annotated[str, Field(pattern="^a+b?$")],
    "defaulted": Annotated[int, Field(default=3)], "aliased": Annotated[str, Field(alias="theAlias")],
}  # fmt: skip


def schemas() -> dict[str, dict[str, Any]]:
    """Return the schemas by name."""
    models: list[type[BaseModel]] = [Person, Strict, Loose, Shapes, Tree, Linked, Reasoning, Edit, Event, Order]
    models += [create_model(name, **{name: (kind, ...)}) for name, kind in _TYPES.items()]  # type: ignore[call-overload]
    models.append(
        create_model("all_optional", **{name: (kind | None, None) for name, kind in (("a", str), ("b", int))})
    )  # type: ignore[call-overload]
    return {f"pydantic {model.__name__}": model.model_json_schema() for model in models}
