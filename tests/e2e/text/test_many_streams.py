"""Many streams at once, each as if it were alone."""

from concurrent.futures import ThreadPoolExecutor
from typing import Any

NUM_STREAMS = 64


def request(number: int) -> dict[str, Any]:
    """Unequal prompts, lengths and laws."""
    sampling_params = {"temperature": 0} if number % 2 else {"temperature": 0.9, "seed": number, "top_p": 0.9}
    bound = ("auto", "off", 1, 3)[number // 2 % 4]
    return {
        "prompt": f"{number} " * (1 + number % 7),
        "max_tokens": 20 + number % 13,
        "speculation": bound,
        **sampling_params,
    }


def test_64_streams_equal_their_solo_runs_and_leave_every_block_free_or_cached(live: Any) -> None:
    def read(number: int) -> str:
        return "".join(event["choices"][0]["text"] for event in live.stream(**request(number), cache_salt="together"))

    with ThreadPoolExecutor(NUM_STREAMS) as pool:
        together = list(pool.map(read, range(NUM_STREAMS)))
    live.wait_idle()
    alone = [live.complete(**request(i), cache_salt="alone")["choices"][0]["text"] for i in range(NUM_STREAMS)]
    assert together == alone
    assert len(set(together)) > NUM_STREAMS // 2
    live.wait_idle()


def test_choices_of_one_request_share_its_prompt_and_differ(live: Any) -> None:
    before = live.wait_idle()["spaceserve_prefix_cache_hit_tokens_total"]
    prompt = "def the_same_prompt_for_all(of, the, choices):\n    '''It is longer than a block.'''\n"
    answer = live.complete(prompt, n=4, temperature=1.0, seed=5, cache_salt="choices")
    texts = [choice["text"] for choice in answer["choices"]]
    assert len(set(texts)) == 4
    assert texts[0] == live.complete(prompt, temperature=1.0, seed=5, cache_salt="choices")["choices"][0]["text"]
    assert live.wait_idle()["spaceserve_prefix_cache_hit_tokens_total"] > before
