"""Log-probabilities of a prompt are the same whatever the prefix cache holds, whole or streamed, to the last bit."""

from typing import Any

PROMPT = "def first_word(text):\n    return text.split()[0]\n\n\ndef last_word(text):\n    " * 3


def asked(**fields: Any) -> dict[str, Any]:
    return {"prompt": PROMPT, "max_tokens": 8, "temperature": 0.7, "seed": 4, "logprobs": 3, "echo": True, **fields}


def completion(live: Any, **fields: Any) -> tuple[int, dict[str, Any]]:
    """How many tokens came from the cache, and the first choice."""
    answer = live.http.post("/v1/completions", json=asked(**fields)).json()
    return answer["usage"]["prompt_tokens_details"]["cached_tokens"], answer["choices"][0]


def test_the_same_request_has_the_same_values_before_and_after_its_prompt_is_cached(live: Any) -> None:
    num_cached, first = completion(live)
    assert num_cached == 0
    num_cached, plain = completion(live, echo=False)
    assert num_cached > 0  # what was computed for the log-probabilities serves others
    assert plain["text"] == first["text"].removeprefix(PROMPT)
    num_prompt = len(first["logprobs"]["tokens"]) - len(plain["logprobs"]["tokens"])
    assert plain["logprobs"]["token_logprobs"] == first["logprobs"]["token_logprobs"][num_prompt:]
    assert completion(live) == (0, first)
    num_cached, again = completion(live, prompt_logprobs=3)
    assert (num_cached, again["logprobs"]) == (0, first["logprobs"])
    for entries, value in zip(again["prompt_logprobs"][1:], first["logprobs"]["token_logprobs"][1:], strict=False):
        assert value in [entry["logprob"] for entry in entries.values()]


def test_a_stream_joins_to_the_whole_answer(live: Any) -> None:
    _, whole = completion(live, n=2, prompt_logprobs=1)
    events = live.stream(**asked(n=2, prompt_logprobs=1, ignore_eos=False))
    pieces = [event["choices"][0] for event in events if event["choices"]]
    mine = [piece for piece in pieces if piece["index"] == 0]
    assert "".join(piece["text"] for piece in mine) == whole["text"]
    assert [one for piece in mine for one in piece.get("prompt_logprobs", [])] == whole["prompt_logprobs"]
    for name, values in whole["logprobs"].items():
        assert [one for piece in mine for one in piece["logprobs"][name]] == values


def test_the_last_token_of_a_prompt_that_fills_the_window_has_the_value_it_has_as_an_answer(live: Any) -> None:
    window = live.http.get("/v1/models").json()["data"][0]["max_model_len"]
    ids = (live.http.post("/tokenize", json={"prompt": PROMPT * 40}).json()["tokens"] * window)[: window - 1]
    greedy = asked(prompt=ids, max_tokens=1, temperature=0, return_token_ids=True, ignore_eos=True)
    answered = live.http.post("/v1/completions", json=greedy).json()["choices"][0]
    full = asked(prompt=ids + answered["token_ids"], max_tokens=0)
    scored = live.http.post("/v1/completions", json=full).json()["choices"][0]
    assert len(scored["logprobs"]["token_logprobs"]) == window
    assert scored["logprobs"]["token_logprobs"] == answered["logprobs"]["token_logprobs"]
    assert scored["logprobs"]["top_logprobs"] == answered["logprobs"]["top_logprobs"]
