"""Texts under what zod and pydantic write: none breaks what is enforced, and none fails."""

from __future__ import annotations

import argparse
import json

import pytest

from schemas import __main__ as command
from schemas.__main__ import collections, written
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


def test_only_the_collection_that_is_asked_for_is_fetched(monkeypatch: pytest.MonkeyPatch) -> None:
    def asked(only: str) -> dict[str, int]:
        options = argparse.Namespace(only=only, suite=None, store=None)
        return {title: len(schemas) for title, schemas in collections(options, "")}

    monkeypatch.setattr(command, "suite", lambda path: pytest.fail(f"{path} is not asked for"))
    monkeypatch.setattr(command, "_fetched", lambda *arguments: None)
    monkeypatch.setattr(command, "store", lambda path: {"a": {}, "b": {}})
    assert asked("schemastore") == {"schemastore": 2}
    assert asked("zod") == {"zod and pydantic": len(written())}
    monkeypatch.setattr(command, "suite", lambda path: {"c": json.loads("{}")})
    assert asked("b") == asked("B") != {}
