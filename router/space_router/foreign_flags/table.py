"""The one table of other engines' flags: arguments are parsed, documents written and tests made from it."""

from __future__ import annotations

from collections.abc import Mapping

from space_router.foreign_flags import llama_cpp, shared, tgi, vllm
from space_router.foreign_flags.flag import ForeignFlag, OtherEngine

TABLE: tuple[ForeignFlag, ...] = (*shared.FLAGS, *tgi.FLAGS, *vllm.FLAGS, *llama_cpp.FLAGS)

MODEL = "MODEL"  # name of the row for the positional word

BY_NAME: Mapping[str, ForeignFlag] = {name: row for row in TABLE for name in row.names}


def of(engine: OtherEngine) -> list[ForeignFlag]:
    """Return an engine's rows, in the table's order."""
    return [row for row in TABLE if engine in row.engines]


def variables(engine: OtherEngine) -> list[tuple[str, ForeignFlag]]:
    """Return the variables that an engine reads, each with its row."""
    return [(name, row) for row in TABLE for owner, name in row.variables if owner is engine]
