"""A server with little memory and a short queue: slower, and the same text; full, and polite."""

import json
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from typing import Any


def wanted(number: int) -> dict[str, Any]:
    """Needs 15 of the 24 blocks before it is done."""
    sampling_params = {"temperature": 0} if number == 0 else {"temperature": 0.9, "seed": number}
    return {"prompt": f"{number}: ", "max_tokens": 110, **sampling_params}


def test_preempted_streams_give_the_text_they_give_alone(small: Any) -> None:
    alone = [small.complete(**wanted(number))["choices"][0]["text"] for number in range(3)]
    before = small.wait_idle()["spaceserve_preemptions_total"]

    def read(number: int) -> str:
        return "".join(event["choices"][0]["text"] for event in small.stream(**wanted(number)))

    with ThreadPoolExecutor(3) as pool:
        together = list(pool.map(read, range(3)))
    assert together == alone
    assert small.wait_idle()["spaceserve_preemptions_total"] > before


def test_a_full_queue_answers_429_with_retry_after_and_harms_nobody(small: Any) -> None:
    alone = small.complete(**wanted(0))["choices"][0]["text"]
    before = small.wait_idle()["spaceserve_rejected_total{reason=queue_full}"]
    body = {"ignore_eos": True, "stream": True, **wanted(0)}
    connections = [small.connect(body) for _ in range(8)]  # three run, two wait
    texts, refused = [], 0
    for connection in connections:
        with closing(connection), connection.makefile("rb") as answer:
            head, _, content = answer.read().partition(b"\r\n\r\n")
        if head.startswith(b"HTTP/1.1 429"):
            refused += 1
            error = json.loads(content)["error"]
            assert (error["type"], error["code"]) == ("rate_limit_error", "queue_full")
            assert b"\r\nretry-after: " in head.lower()
        else:
            assert head.startswith(b"HTTP/1.1 200")
            events = [line for line in content.split(b"\n") if line.startswith(b"data: {")]
            texts.append("".join(json.loads(event[6:])["choices"][0]["text"] for event in events))
    assert refused >= 1
    assert len(texts) >= 3
    assert set(texts) == {alone}
    assert small.wait_idle()["spaceserve_rejected_total{reason=queue_full}"] - before == refused


def test_what_can_never_fit_is_refused_at_once(small: Any) -> None:
    answer = small.http.post("/v1/completions", json={"prompt": "x", "max_tokens": 192})
    assert answer.status_code == 400
    error = answer.json()["error"]
    assert (error["code"], error["n_prompt_tokens"], error["n_ctx"]) == ("context_length_exceeded", 1, 192)
