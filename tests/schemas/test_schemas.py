"""Texts under what zod and pydantic write: none breaks what is enforced, and none fails."""

from __future__ import annotations

from schemas.__main__ import written
from schemas.generate import tried


def test_texts_obey_what_zod_and_pydantic_ask_for() -> None:
    schemas = written()
    outcomes = {name: tried(schema, 3) for name, schema in schemas.items()}
    assert {name.partition(" ")[0] for name in schemas} >= {"zod", "pydantic"}
    assert len(schemas) >= 99
    assert {name: one.refusal for name, one in outcomes.items() if one.refusal} == {}
    assert {name: one for name, one in outcomes.items() if one.failures or one.broken} == {}
    ended = sum(one.num_texts - one.num_unfinished for one in outcomes.values())
    assert ended >= 0.9 * sum(one.num_texts for one in outcomes.values())
