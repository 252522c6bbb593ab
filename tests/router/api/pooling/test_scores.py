"""`/v1/rerank` and `/v1/score`: a cross-encoder's own scores, else the cosine of embeddings; the shapes of clients."""

from __future__ import annotations

import math
from array import array
from typing import Any

import pytest
from doubles.router.encoder import SCORES, TEXT, Begin
from doubles.router.script import made_up_vector
from doubles.router.whole_router import TOKENIZER, Start
from space_proto import worker_pb2
from space_router.api.pooling import sources

QUERY, DOCUMENTS = "what sat", ["the cat", "a dog sat on the mat", "cat"]


def pair_score(first: str, second: str) -> float:
    """What the made-up cross-encoder says of a pair."""
    encoding = TEXT.inner.encode(first, second)
    return array("f", made_up_vector([*encoding.ids, *encoding.type_ids], 1))[0]


def cosine(first: str, second: str) -> float:
    """The cosine of what the made-up encoder makes of two texts."""
    one, other = (array("f", made_up_vector(TEXT.inner.encode(text).ids)) for text in (first, second))
    return sum(a * b for a, b in zip(one, other, strict=True)) / math.hypot(*one) / math.hypot(*other)


async def scores(router: Any, path: str = "/v1/score", **body: Any) -> list[float]:
    answer = await router.post(path, **body)
    assert answer.status_code == 200, answer.text
    return [one["score"] for one in answer.json()["data"]]


async def test_a_cross_encoder_scores_pairs_and_ranks_by_them(begin: Begin) -> None:
    async with begin(scores=True) as router:
        wanted = [pair_score(QUERY, text) for text in DOCUMENTS]
        assert await scores(router, text_1=QUERY, text_2=DOCUMENTS) == pytest.approx(wanted)
        answer = await router.post("/v1/rerank", query=QUERY, documents=DOCUMENTS, model="mini")
        body = answer.json()
        order = sorted(range(3), key=lambda number: -wanted[number])
        assert [one["index"] for one in body["results"]] == order
        assert [one["relevance_score"] for one in body["results"]] == pytest.approx([wanted[n] for n in order])
        assert [one["document"] for one in body["results"]] == [{"text": DOCUMENTS[n]} for n in order]
        num_tokens = sum(len(TEXT.inner.encode(QUERY, text).ids) for text in DOCUMENTS)
        assert body["usage"] == {"prompt_tokens": num_tokens, "total_tokens": num_tokens}
        assert router.value("spaceserve_requests_total", outcome="embedded") == 2


async def test_an_encoder_scores_by_the_cosine_and_ranks_with_its_prompts(begin: Begin) -> None:
    async with begin() as router:
        wanted = [cosine(QUERY, text) for text in DOCUMENTS]
        assert await scores(router, text_1=QUERY, text_2=DOCUMENTS) == pytest.approx(wanted, abs=1e-6)
        answer = await router.post("/v1/rerank", query=QUERY, documents=DOCUMENTS)
        found = {one["index"]: one["relevance_score"] for one in answer.json()["results"]}
        prompted = [cosine(f"query: {QUERY}", f"text: {text}") for text in DOCUMENTS]
        assert [found[number] for number in range(3)] == pytest.approx(prompted, abs=1e-6)


def test_no_rounding_takes_a_cosine_beyond_one() -> None:
    long = [math.sqrt(0.1) * (1 + 1e-12)] * 10
    assert [sources.cosine(long, long), sources.cosine(long, [-value for value in long])] == [1, -1]


async def test_the_served_model_scores_by_the_cosine_of_its_own_embeddings(start: Start) -> None:
    def vector(text: str) -> array[float]:
        return array("f", made_up_vector([worker_pb2.POOLING_LAST, *TOKENIZER.encode(text)]))

    async with start() as router:
        [found] = await scores(router, text_1="one", text_2="two", model="tiny")
        one, two = vector("one"), vector("two")
        dot = sum(a * b for a, b in zip(one, two, strict=True))
        assert found == pytest.approx(dot / math.hypot(*one) / math.hypot(*two), abs=1e-6)


async def test_texts_are_paired_one_with_each_or_each_with_its_own(begin: Begin) -> None:
    async with begin(scores=True) as router:
        firsts = ["a", "the", "cat"]
        wanted = [pair_score(one, two) for one, two in zip(firsts, DOCUMENTS, strict=True)]
        assert await scores(router, text_1=firsts, text_2=DOCUMENTS) == pytest.approx(wanted)
        assert await scores(router, "/score", queries=firsts, documents=DOCUMENTS) == pytest.approx(wanted)
        await router.refuses("/v1/score", "text_1", "2 texts cannot be paired with 3", text_1=["a", "b"],
                             text_2=DOCUMENTS)  # fmt: skip
        await router.refuses("/v1/score", "text_2", "`text_2` is required", text_1="a")


@pytest.mark.parametrize("path", ["/v1/rerank", "/rerank", "/v2/rerank"])
async def test_rerank_takes_what_clients_of_cohere_jina_and_vllm_send(begin: Begin, path: str) -> None:
    async with begin(scores=True) as router:
        documents: list[Any] = [{"text": DOCUMENTS[0]}, *DOCUMENTS[1:]]
        answer = await router.post(path, query=QUERY, documents=documents, top_n=2, return_documents=False)
        results = answer.json()["results"]
        assert len(results) == 2
        assert "document" not in results[0]
        assert results[0]["relevance_score"] >= results[1]["relevance_score"]
        everything = await router.post(path, query=QUERY, documents=documents, top_n=0)
        assert len(everything.json()["results"]) == 3


async def test_rerank_answers_tei_in_its_own_form(begin: Begin) -> None:
    async with begin(scores=True) as router:
        answer = await router.post("/rerank", query=QUERY, texts=DOCUMENTS, return_text=True)
        wanted = sorted((-pair_score(QUERY, text), n) for n, text in enumerate(DOCUMENTS))
        assert [(one["index"], one["text"]) for one in answer.json()] == [(n, DOCUMENTS[n]) for _, n in wanted]
        await router.refuses("/rerank", "raw_scores", "behind the activation", query="a", texts=["b"], raw_scores=True)


@pytest.mark.parametrize(
    ("body", "param", "words"),
    [
        ({"documents": []}, "documents", "must be texts that are not empty"),
        ({"documents": ["a", ""]}, "documents", "must be texts that are not empty"),
        ({"documents": [{"image": "x"}]}, "documents", "must be texts that are not empty"),
        ({"documents": ["a"], "texts": ["a"]}, "documents", "one of `documents` and `texts`"),
        ({}, "documents", "one of `documents` and `texts`"),
        ({"documents": ["a"] * 2049}, "documents", "at most 2048"),
        ({"documents": ["a cat " * 40]}, "documents", "maximum context length is 24 tokens"),
    ],
)
async def test_what_cannot_be_ranked_is_refused(begin: Begin, body: dict[str, Any], param: str, words: str) -> None:
    for has_pairs in (True, False):
        async with begin(scores=has_pairs) as router:
            await router.refuses("/v1/rerank", param, words, query="the cat", **body)


async def test_a_long_pair_is_cut_where_the_longer_text_ends(begin: Begin) -> None:
    async with begin(scores=True) as router:
        long = " ".join(["a cat"] * 40)
        kept = " ".join(["a cat"] * 9 + ["a"])  # 24 ids: three special ones, and two of the query
        for more in ({"truncate_prompt_tokens": -1}, {"max_tokens_per_doc": 24}):
            answer = await router.post("/v1/rerank", query="the cat", documents=[long], **more)
            assert answer.json()["results"][0]["relevance_score"] == pytest.approx(pair_score("the cat", kept))


async def test_a_classifier_of_several_classes_ranks_nothing(begin: Begin) -> None:
    several = worker_pb2.Encoder()
    several.CopyFrom(SCORES)
    several.num_values = 3
    async with begin(encoder=several) as router:
        await router.refuses("/v1/rerank", "model", "3 scores", query="a", documents=["b"])
