"""Speculation changes how many tokens a step gives, and nothing else."""

from typing import Any

import pytest
from space_proto import worker_pb2 as pb

PROMPT = "def area(width, height):\n    return "
LAWS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0},
    "seeded": {"temperature": 0.9, "seed": 11, "top_p": 0.95},
    "penalised": {
        "temperature": 1.0,
        "seed": 2**63 + 5,
        "frequency_penalty": 0.7,
        "presence_penalty": 0.3,
        "top_k": 40,
    },
}


@pytest.mark.parametrize("sampling_params", LAWS)
def test_the_text_is_the_same_with_speculation_off_auto_and_each_k(drafting: Any, sampling_params: str) -> None:
    most = drafting.get("/info")["speculation"]["max_request"]
    answers = {
        bound: drafting.complete(
            PROMPT, max_tokens=48, speculation=bound, return_token_ids=True, **LAWS[sampling_params]
        )
        for bound in ("off", "auto", *range(most + 1))
    }
    assert most >= 1
    plain = answers["off"]["choices"][0]["token_ids"]
    assert [bound for bound, one in answers.items() if one["choices"][0]["token_ids"] != plain] == []
    assert {one["choices"][0]["text"] for one in answers.values()} == {answers["off"]["choices"][0]["text"]}
    for bound, one in answers.items():
        figures = one["spaceserve"]
        assert figures["steps"] + figures["accepted"] == 47, "the prefill gives the first token"
        assert figures["tokens_per_step"] == pytest.approx(47 / figures["steps"], abs=1e-4)
        assert figures["accepted"] <= figures["drafted"] <= figures["steps"] * most
        assert (figures["drafted"] == 0) == (bound in ("off", 0))
        if isinstance(bound, int):  # a command: only the last steps, near max_tokens, have fewer
            assert bound * (figures["steps"] - bound) <= figures["drafted"] <= bound * figures["steps"]


def test_drafts_that_are_right_give_several_tokens_per_step(drafting: Any) -> None:
    # With one id allowed every draft must be right, whatever the weights.
    allowed = drafting.http.post("/tokenize", json={"prompt": "a"}).json()["tokens"][-1:]
    before = drafting.metrics()
    figures = drafting.complete(PROMPT, max_tokens=61, allowed_token_ids=allowed, speculation=2)["spaceserve"]
    assert figures["accepted"] == figures["drafted"] > 0
    assert figures["tokens_per_step"] > 2.5
    after = drafting.metrics()
    for name, key in (("tokens_per_step_count", "steps"), ("drafted_tokens_total", "drafted"),
                      ("accepted_tokens_total", "accepted")):  # fmt: skip
        assert after[f"spaceserve_{name}"] - before[f"spaceserve_{name}"] == figures[key]
    assert after["spaceserve_accepted_by_position_total{position=2}"] > 0


def test_stop_strings_cut_at_the_character_whatever_the_drafts(live: Any) -> None:
    allowed = live.http.post("/tokenize", json={"prompt": "a"}).json()["tokens"][-1:]
    for bound in ("off", 1, "auto"):
        answer = live.complete(PROMPT, allowed_token_ids=allowed, stop="aaaaa", speculation=bound)
        (choice,) = answer["choices"]
        assert (choice["text"], choice["finish_reason"], choice["stop_reason"]) == ("", "stop", "aaaaa")


def test_a_prediction_is_taken_where_it_is_right_counted_and_changes_no_text(live: Any) -> None:
    plain = live.complete(PROMPT, max_tokens=48, speculation="off", return_token_ids=True)["choices"][0]
    before = live.metrics()
    for content, most in ((plain["text"], 48), ("nothing of the kind. " * 9, 4)):
        prediction = {"type": "content", "content": content}
        answer = live.complete(PROMPT, max_tokens=48, prediction=prediction, return_token_ids=True)
        assert answer["choices"][0]["token_ids"] == plain["token_ids"]
        counts = answer["usage"]["completion_tokens_details"]
        accepted, rejected = counts["accepted_prediction_tokens"], counts["rejected_prediction_tokens"]
        assert 0 <= accepted <= most
        assert accepted + rejected == len(live.http.post("/tokenize", json={"prompt": content}).json()["tokens"])
    after = live.metrics()
    for kind in ("drafted", "accepted"):
        by_source = [name for name in after if name.startswith(f"spaceserve_{kind}_tokens_by_source_total")]
        total = f"spaceserve_{kind}_tokens_total"
        assert len(by_source) == len(pb.DraftSource.values())
        assert sum(after[name] - before[name] for name in by_source) == after[total] - before[total]
