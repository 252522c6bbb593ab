"""Few cells that between them show every pair of values: most defects need two conditions at once, seldom three."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import combinations, product
from typing import Any

Case = Mapping[str, Any]  # one value per axis


def covering_cases(
    axes: Mapping[str, Sequence[Any]], *, strength: int = 2, possible: Callable[[Case], bool] = lambda case: True
) -> list[dict[str, Any]]:
    """Cases such that every combination of values of any `strength` axes stands together in at least one of them.

    Greedy and deterministic: each case starts from the first combination still missing and takes, axis after axis,
    the value that shows most of the missing ones. `possible` refuses whole cases; a combination found in no possible
    case is left out. Values must be hashable and distinct within their axis.
    """
    names = list(axes)
    missing = _combinations(axes, strength)
    cases: list[dict[str, Any]] = []
    while missing:
        seed = next(iter(missing))
        case = _completed(dict(seed), axes, names, missing, strength)
        if not possible(case):
            found = _possible_case(dict(seed), axes, names, possible)
            if found is None:
                del missing[seed]
                continue
            case = found
        for shown in _shown(case, names, strength):
            missing.pop(shown, None)
        cases.append({name: case[name] for name in names})
    return cases


Combination = tuple[tuple[str, Any], ...]


def _combinations(axes: Mapping[str, Sequence[Any]], strength: int) -> dict[Combination, None]:
    """Every combination of values of `strength` axes, in order (a dict keeps it, a set would not)."""
    return {
        tuple(zip(chosen, values, strict=True)): None
        for chosen in combinations(axes, strength)
        for values in product(*(axes[name] for name in chosen))
    }


def _shown(case: Case, names: Sequence[str], strength: int) -> list[Combination]:
    """The combinations a case shows; axes without a value yet show nothing."""
    present = [name for name in names if name in case]
    return [tuple((name, case[name]) for name in chosen) for chosen in combinations(present, strength)]


def _completed(
    case: dict[str, Any],
    axes: Mapping[str, Sequence[Any]],
    names: Sequence[str],
    missing: Mapping[Combination, None],
    strength: int,
) -> dict[str, Any]:
    """`case` with a value for every axis: each time the one that shows most of what is missing, the first of equals."""
    for name in names:
        if name in case:
            continue

        present = [other for other in names if other in case or other == name]
        shown = [chosen for chosen in combinations(present, strength) if name in chosen]  # the others are every value's

        def gain(value: Any, name: str = name, shown: list[tuple[str, ...]] = shown) -> int:
            values = {**case, name: value}
            return sum(tuple((other, values[other]) for other in chosen) in missing for chosen in shown)

        # Equals are taken in turn, not always the first: where all is shown, the cases should still differ.
        values = axes[name]
        turn = len(missing) % len(values)
        case[name] = max([*values[turn:], *values[:turn]], key=gain)
    return case


def _possible_case(
    fixed: dict[str, Any], axes: Mapping[str, Sequence[Any]], names: Sequence[str], possible: Callable[[Case], bool]
) -> dict[str, Any] | None:
    """The first possible case that has the fixed values, or None."""
    free = [name for name in names if name not in fixed]
    for values in product(*(axes[name] for name in free)):
        case = fixed | dict(zip(free, values, strict=True))
        if possible(case):
            return case
    return None
