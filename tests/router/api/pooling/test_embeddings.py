"""`/v1/embeddings` and `/embed`, by an encoder and by the served model; the texts, their order, counts and errors."""

from __future__ import annotations

import asyncio
import base64
import math
from array import array
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
from doubles.router.encoder import TEXT, WINDOW, Begin
from doubles.router.script import made_up_vector
from doubles.router.whole_router import TOKENIZER, Start
from space_proto import worker_pb2
from space_router.api_keys import plain_keys
from space_router.config import ServeConfig


def unit(values: Sequence[float]) -> list[float]:
    length = math.hypot(*values)
    return [value / length for value in values]


def encoded(text: str) -> list[float]:
    """What the made-up encoder makes of a text, with length 1."""
    return unit(array("f", made_up_vector(TEXT.inner.encode(text).ids)))


def pooled(ids: Sequence[int], mode: int = worker_pb2.POOLING_LAST) -> list[float]:
    """What the made-up model makes of ids, with length 1."""
    return unit(array("f", made_up_vector([mode, *ids])))


async def vectors(router: Any, **body: Any) -> list[Any]:
    answer = await router.post("/v1/embeddings", **body)
    assert answer.status_code == 200, answer.text
    body = answer.json()
    assert [one["index"] for one in body["data"]] == list(range(len(body["data"])))
    return [one["embedding"] for one in body["data"]]


def close(found: Sequence[Sequence[float]], wanted: Sequence[Sequence[float]]) -> bool:
    return all(a == pytest.approx(b, abs=1e-6) for a, b in zip(found, wanted, strict=True))


async def test_texts_become_vectors_in_their_order_and_are_counted(begin: Begin) -> None:
    texts = ["the cat", "a dog sat on the mat", "cat", "a"]
    async with begin() as router:
        answer = await router.post("/v1/embeddings", input=texts, model="mini")
        body = answer.json()
        assert (body["object"], body["model"]) == ("list", "mini")
        assert close([one["embedding"] for one in body["data"]], [encoded(text) for text in texts])
        num_tokens = sum(len(TEXT.inner.encode(text).ids) for text in texts)
        assert body["usage"] == {"prompt_tokens": num_tokens, "total_tokens": num_tokens}
        assert answer.headers["x-request-id"] == body["id"]
        assert router.value("spaceserve_requests_total", outcome="embedded") == 1
        assert router.service.engine.load().num_running == 0


async def test_one_text_several_ids_and_lists_of_ids_are_taken(begin: Begin) -> None:
    async with begin() as router:
        assert close(await vectors(router, input="cat"), [encoded("cat")])
        ids = TEXT.inner.encode("cat").ids
        assert close(await vectors(router, input=ids), [encoded("cat")])
        assert close((await vectors(router, input=[ids, [7, 8]]))[:1], [encoded("cat")])
        plain = TEXT.inner.encode("cat", add_special_tokens=False).ids
        assert await vectors(router, input="cat", add_special_tokens=False) == await vectors(router, input=plain)


async def test_base64_holds_the_same_numbers_as_float32(begin: Begin) -> None:
    async with begin() as router:
        [written] = await vectors(router, input="the mat", encoding_format="base64")
        [numbers] = await vectors(router, input="the mat", encoding_format="float")
        assert list(array("f", base64.b64decode(written))) == list(array("f", numbers))


async def test_dimensions_are_the_leading_values_normalised_anew(begin: Begin) -> None:
    async with begin() as router:
        [short] = await vectors(router, input="cat", dimensions=3)
        assert short == pytest.approx(unit(encoded("cat")[:3]))
        raw = await vectors(router, input="cat", normalize=False)
        assert unit(raw[0]) == pytest.approx(encoded("cat"))
        assert math.hypot(*raw[0]) != pytest.approx(1)
        await router.refuses("/v1/embeddings", "dimensions", "vectors of this model have 8", input="cat", dimensions=9)


async def test_a_prompt_of_the_encoder_is_put_before_each_text(begin: Begin) -> None:
    async with begin() as router:
        assert close(await vectors(router, input="cat", prompt_name="query"), [encoded("query: cat")])
        await router.refuses("/v1/embeddings", "prompt_name", "query, document", input="cat", prompt_name="passage")
    always = replace(TEXT, default_prompt="text: ")
    async with begin(encoder_text=always) as router:
        assert close(await vectors(router, input="cat"), [encoded("text: cat")])


async def test_a_text_that_is_too_long_is_refused_in_the_usual_words_or_cut(begin: Begin) -> None:
    long = "a cat " * 40
    async with begin() as router:
        words = f"maximum context length is {WINDOW} tokens. `input` has 82 tokens"
        await router.refuses("/v1/embeddings", "input", words, input=["a", long])
        wanted = encoded(" ".join(["a cat"] * 11))
        assert close(await vectors(router, input=long, truncate_prompt_tokens=-1), [wanted])
        assert close(await vectors(router, input=long, truncate_prompt_tokens=4), [encoded("a cat")])
        ids = [7] * 30
        await router.refuses("/v1/embeddings", "input", "has 30 tokens", input=ids)
        assert len(await vectors(router, input=ids, truncate_prompt_tokens=-1)) == 1


@pytest.mark.parametrize(
    ("value", "words"),
    [
        ("", "an empty text"),
        ([], "must be a string, a list"),
        (["a", 3], "must be a string, a list"),
        ([[]], "must be a string, a list"),
        ([[1, "a"]], "must be a string, a list"),
        ({"text": "a"}, "must be a string, a list"),
        (["a"] * 2049, "at most 2048"),
        ([5, 200], "a token id outside 0 to 199"),
        (["a\udc00"], "surrogate"),
    ],
)
async def test_what_is_no_text_is_refused(begin: Begin, value: Any, words: str) -> None:
    async with begin() as router:
        if words == "surrogate":
            answer = await router.client.post(
                "/v1/embeddings", content=b'{"input": ["a\\udc00"]}', headers={"content-type": "application/json"}
            )
            assert answer.status_code == 400
            return
        await router.refuses("/v1/embeddings", "input", words, input=value)


async def test_a_cross_encoder_makes_no_embeddings_and_an_encoder_no_text(begin: Begin) -> None:
    async with begin(scores=True) as router:
        await router.refuses("/v1/embeddings", "model", "scores pairs of texts", input="a", model="mini")
        await router.refuses("/v1/completions", "model", "`mini` makes no text", prompt="a", model="mini")
        answer = await router.post("/v1/embeddings", input="a", model="other")
        assert (answer.status_code, answer.json()["error"]["code"]) == (404, "model_not_found")
        assert "`tiny` and `mini` are" in answer.json()["error"]["message"]


async def test_the_models_list_names_the_encoder(begin: Begin) -> None:
    async with begin() as router:
        listed = {one["id"]: one for one in (await router.client.get("/v1/models")).json()["data"]}
        assert listed["mini"]["max_model_len"] == WINDOW
        assert listed["mini"]["root"] == "folder/mini"
        assert (await router.client.get("/v1/models/mini")).json()["id"] == "mini"


@pytest.mark.parametrize("mode", ["last", "mean"])
async def test_the_served_model_makes_vectors_of_its_own_prompts(start: Start, mode: str) -> None:
    pooling = {"last": worker_pb2.POOLING_LAST, "mean": worker_pb2.POOLING_MEAN}[mode]
    texts = ["hello", "the cat", "hello", "x" * 40]
    async with start() as router:
        for _ in range(2):  # the second time from the prefix cache, where the last state needs no more
            found = await vectors(router, input=texts, pooling=mode, model="tiny")
            assert close(found, [pooled(TOKENIZER.encode(text), pooling) for text in texts])
        assert (router.value("spaceserve_prefix_cache_hit_tokens_total") or 0) > 0 if mode == "last" else True
        assert router.value("spaceserve_generated_tokens_total") == 0
        ids = TOKENIZER.encode("hello")
        assert close(await vectors(router, input=[ids], pooling=mode), [pooled(ids, pooling)])
        answer = await router.post("/v1/embeddings", input=texts)
        assert answer.json()["usage"]["prompt_tokens"] == sum(len(TOKENIZER.encode(text)) for text in texts)


async def test_more_texts_than_the_queue_takes_are_read_one_after_the_other(start: Start) -> None:
    async with start(config=ServeConfig(max_queue=4), max_sequences=2) as router:
        texts = [f"text {number}" for number in range(60)]
        found = await vectors(router, input=texts)
        assert close(found, [pooled(TOKENIZER.encode(text)) for text in texts])


async def test_the_served_models_window_counts(start: Start) -> None:
    async with start(window=32) as router:
        await router.refuses("/v1/embeddings", "input", "maximum context length is 31 tokens", input="y" * 32)
        assert len(await vectors(router, input="y" * 31)) == 1
        cut = await vectors(router, input="z" + "y" * 40, truncate_prompt_tokens=-1)
        assert close(cut, [pooled(TOKENIZER.encode("y" * 31))])
        await router.refuses("/v1/embeddings", "prompt_name", "no prompts", input="a", prompt_name="query")


async def test_with_both_the_name_chooses(begin: Begin) -> None:
    async with begin() as router:
        own = [pooled(TOKENIZER.encode("cat"))]
        assert close(await vectors(router, input="cat", model="tiny"), own)
        assert close(await vectors(router, input="cat"), [encoded("cat")])
        await router.refuses("/v1/embeddings", "pooling", "for the served model", input="cat", pooling="mean")


async def test_tei_gets_a_list_of_vectors(begin: Begin) -> None:
    async with begin() as router:
        answer = await router.post("/embed", inputs=["cat", "dog"])
        assert close(answer.json(), [encoded("cat"), encoded("dog")])
        long = "a cat " * 40
        assert (await router.post("/embed", inputs=long)).status_code == 400
        assert (await router.post("/embed", inputs=long, truncate=True, normalize=False)).status_code == 200


async def test_keys_are_asked_for_charged_and_limited(begin: Begin) -> None:
    config = ServeConfig(api_keys=plain_keys("one"), key_requests_per_minute=3, key_tokens_per_minute=1000)
    async with begin(config=config) as router:
        assert (await router.post("/v1/embeddings", input="cat")).status_code == 401
        headers = {"authorization": "Bearer one"}
        body = {"input": ["cat"] * 10}
        answers = [await router.client.post("/v1/embeddings", json=body, headers=headers) for _ in range(4)]
        assert [answer.status_code for answer in answers] == [200, 200, 200, 429]
        assert "x-ratelimit-remaining-requests" in answers[0].headers
        [name] = [one for one in router.service.rate_limits if one]
        num_tokens = answers[0].json()["usage"]["prompt_tokens"]
        assert router.value("spaceserve_key_tokens_total", key=name, kind="prompt") == 3 * num_tokens


async def test_a_text_that_fails_is_answered_500_and_logged(begin: Begin, caplog: pytest.LogCaptureFixture) -> None:
    failing = TEXT.inner.token_to_id("dog")
    async with begin(failing_id=failing) as router:
        bad, good = await asyncio.gather(
            router.post("/v1/embeddings", input=["cat", "dog"], request_id="mine"),
            router.post("/v1/embeddings", input=["cat", "mat"]),
        )
        assert (bad.status_code, good.status_code) == (500, 200)
        assert "the script says this one fails" in bad.json()["error"]["message"]
        assert "the script says this one fails" in caplog.text
        assert router.value("spaceserve_requests_total", outcome="error") == 1


async def test_a_request_goes_on_where_its_worker_dies(begin: Begin) -> None:
    texts = [f"cat {number}" for number in range(90)]
    async with begin(encoder_texts=1, step_seconds=0.001) as router:
        asking = asyncio.create_task(vectors(router, input=texts))
        await router.until(lambda load: router.worker.figures.num_texts > 20)
        router.worker.kill()
        assert close(await asking, [encoded(text) for text in texts])
        assert router.worker.num_lives == 2


async def test_a_text_that_kills_workers_is_answered_503_and_others_go_on(
    begin: Begin, caplog: pytest.LogCaptureFixture
) -> None:
    deadly = TEXT.inner.token_to_id("dog")
    async with begin(deadly_id=deadly) as router:
        answer = await router.post("/v1/embeddings", input=["dog"])
        assert answer.status_code == 503
        assert "workers were lost" in answer.json()["error"]["message"]
        assert answer.headers["retry-after"]
        assert "503" in caplog.text
        assert close(await vectors(router, input="cat"), [encoded("cat")])


async def test_a_client_that_leaves_frees_the_encoder_and_pages(begin: Begin) -> None:
    async with begin(encoder_texts=1, step_seconds=0.002) as router:
        for model in ("mini", "tiny"):
            body = {"input": ["cat"] * 200, "model": model}
            asking = asyncio.create_task(router.client.post("/v1/embeddings", json=body))
            await router.until(lambda load: load.num_running)
            asking.cancel()
            await router.until(lambda load: not (load.num_running or load.num_queued or load.blocks_held))
        assert router.worker.figures.num_texts < 100
        assert router.value("spaceserve_requests_total", outcome="cancelled") == 2


async def test_a_full_queue_is_answered_429(begin: Begin) -> None:
    async with begin(config=ServeConfig(max_queue=0), encoder_texts=1, step_seconds=0.002) as router:
        first = asyncio.create_task(vectors(router, input=["cat"] * 100))
        await router.until(lambda load: load.num_running)
        answer = await router.post("/v1/embeddings", input="a")
        assert answer.status_code == 429
        assert "embedding requests" in answer.json()["error"]["message"]
        assert len(await first) == 100


async def test_texts_whose_turn_does_not_come_in_time_are_answered_429(begin: Begin) -> None:
    config = ServeConfig(max_queue_seconds=0.1)
    async with begin(config=config, encoder_texts=1, step_seconds=0.02) as router:
        first = asyncio.create_task(vectors(router, input=["cat"] * 100))
        await router.until(lambda load: load.num_running)
        late = await router.post("/v1/embeddings", input="a")
        assert (late.status_code, late.json()["error"]["code"]) == (429, "queue_timeout"), late.text
        assert router.value("spaceserve_requests_total", outcome="queue_timeout") == 1
        first.cancel()
        await router.until(lambda load: not (load.num_running or load.num_queued))
