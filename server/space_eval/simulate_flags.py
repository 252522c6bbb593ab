"""What the words behind a flag of the simulator mean. Each reader raises argparse.ArgumentTypeError with the form."""

from __future__ import annotations

import argparse
from collections.abc import Callable

from space_server.synthetic import NAMED

from space_eval.bench_limits import seconds_of
from space_eval.flag_values import whole
from space_eval.load_lengths import LengthError, Lengths
from space_eval.simulate_load import LoadFlagError, Shares, Streams
from space_eval.simulate_machine import Ridge
from space_eval.simulate_router import RouterCost
from space_eval.simulate_worker import Speculation


def arms(text: str) -> tuple[Speculation, ...]:
    made: list[Speculation] = []
    for word in text.split(","):
        if word == "auto":
            made.append("auto")
        elif word == "off":
            made.append("off")
        else:
            made.append(whole(word))
    if len(set(made)) < len(made):
        raise argparse.ArgumentTypeError(f"names a way twice: {text!r}")
    return tuple(made)


def ridge(text: str) -> Ridge:
    try:
        base, per_row, *ridge = (float(word) for word in text.split(","))
        made = Ridge(base / 1000, per_row / 1000, int(*ridge))
    except (ValueError, TypeError):
        made = Ridge(0.0, 0.0)
    if made.base <= 0 or made.per_row < 0 or made.ridge < 0:
        raise argparse.ArgumentTypeError(f"must be milliseconds BASE,PER_ROW[,RIDGE], such as 5,0.05,64; got {text!r}")
    return made


def chances(text: str) -> tuple[float, ...]:
    try:
        chances = tuple(float(word) for word in text.split(","))
    except ValueError:
        chances = ()
    if len(chances) == 1:
        chances = NAMED.get(chances[0], chances)
    if not chances or not all(0.0 <= chance <= 1.0 for chance in chances):
        raise argparse.ArgumentTypeError(f"must be .78, .57, or chances p_1,p_2,… from 0 to 1; got {text!r}")
    return chances


def error(text: str) -> float | None:
    return None if text == "exact" else share(text)


def share(text: str) -> float:
    value = number(text)
    if not 0.0 <= value < 1.0:
        raise argparse.ArgumentTypeError(f"must be a share from 0 to below 1; got {text!r}")
    return value


def spread(text: str) -> float:
    value = number(text)
    if not 0.0 <= value <= 4.0:
        raise argparse.ArgumentTypeError(f"must be from 0 to 4; got {text!r}")
    return value


def temperature(text: str) -> float:
    value = number(text)
    if not 0.0 <= value <= 2.0:
        raise argparse.ArgumentTypeError(f"must be from 0 to 2; got {text!r}")
    return value


def above_zero(text: str) -> float:
    value = number(text)
    if not 0.0 < value < 1e6:
        raise argparse.ArgumentTypeError(f"must be above 0 and below a million; got {text!r}")
    return value


def number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        return -1.0


def duration(text: str) -> float:
    try:
        return seconds_of(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def link(text: str) -> float:
    return 0.0 if text == "0" else duration(text)


def router_cost(text: str) -> RouterCost:
    try:
        return RouterCost.parse(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def swing(text: str) -> Streams:
    parts = text.split(":")
    if len(parts) != 3 or not (parts[0].isdecimal() and parts[1].isdecimal()) or not 0 < int(parts[0]) < int(parts[1]):
        raise argparse.ArgumentTypeError(f"must be LOW:HIGH:PERIOD, such as 1:64:5s; got {text!r}")
    return Streams(int(parts[1]), int(parts[0]), duration(parts[2]))


def on_off(text: str) -> tuple[float, float]:
    on, _, off = text.partition(":")
    return duration(on), duration(off)


def lengths(text: str) -> Lengths:
    try:
        return Lengths.parse(text)
    except LengthError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def of(read: Callable[[str], object]) -> Callable[[str], object]:
    def parsed(text: str) -> object:
        if not text:
            return Shares(("",), (1.0,))
        try:
            return read(text)
        except (LoadFlagError, ValueError) as error:
            raise argparse.ArgumentTypeError(str(error)) from None

    return parsed


def numbers(text: str) -> Shares:
    made = of(Shares.parse)(text)
    assert isinstance(made, Shares)
    if not all(value.lstrip("-").isdecimal() for value in made.values):
        raise argparse.ArgumentTypeError(f"must be whole numbers, such as 0=3,1=1; got {text!r}")
    return made


def counts(text: str) -> Shares:
    made = numbers(text)
    if not all(1 <= int(value) <= 64 for value in made.values):
        raise argparse.ArgumentTypeError(f"must be from 1 to 64; got {text!r}")
    return made
