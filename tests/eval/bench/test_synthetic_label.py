"""No figure of a benchmark with synthetic acceptance is without its label."""

from __future__ import annotations

from typing import Any

import pytest
from space_common.worker_settings import NAMED_CHANCES
from space_eval.bench.report import markdown, synthetic_acceptance_label
from space_server.speculation.synthetic_acceptance import label

LABEL = label(NAMED_CHANCES[0.78])


def info(*chances: float) -> dict[str, Any]:
    return {"model_id": "m", "synthetic_acceptance": list(chances) or None}


@pytest.mark.parametrize(
    ("infos", "said"),
    [
        ({"server": info()}, ""),
        ({"server": {"model_id": "somebody else's server"}}, ""),
        ({"server": info(*NAMED_CHANCES[0.78])}, LABEL),
        ({"a": info(), "b": info(*NAMED_CHANCES[0.78])}, f"b: {LABEL}"),
    ],
)
def test_what_servers_say_of_their_drafts_becomes_a_label(infos: dict[str, dict[str, Any]], said: str) -> None:
    assert synthetic_acceptance_label(infos) == said


@pytest.mark.parametrize(("said", "title"), [("", "# Load\n"), (LABEL, f"# Load, {LABEL}\n")])
def test_the_label_is_in_the_title_of_the_page(said: str, title: str) -> None:
    assert markdown({"facts": {"synthetic_acceptance": said}, "load": {}}, []).startswith(title)
