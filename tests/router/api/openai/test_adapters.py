"""A request chooses an adapter by its `model`, as for LoRA in vLLM; the text is the same."""

from __future__ import annotations

import asyncio

from doubles.router.whole_router import Start

ADAPTERS = ("code", "prose")


async def test_the_model_field_chooses_the_adapter_and_comes_back(start: Start) -> None:
    async with start(adapters=ADAPTERS) as router:
        texts = set()
        for name in ("tiny", "code", "prose", None):
            answer = await router.complete(prompt="hello", max_tokens=20, seed=1, **({"model": name} if name else {}))
            assert answer["model"] == (name or "tiny")
            texts.add(answer["choices"][0]["text"])
        assert len(texts) == 1
        assert router.worker.figures.num_admits_by_adapter == {"": 2, "code": 1, "prose": 1}


async def test_chat_streams_and_several_choices_carry_the_adapter(start: Start) -> None:
    async with start(adapters=ADAPTERS) as router:
        chat = {"messages": [{"role": "user", "content": "hello"}], "model": "prose", "max_tokens": 8}
        answer = (await router.post("/v1/chat/completions", **chat, n=3)).json()
        assert (answer["model"], len(answer["choices"])) == ("prose", 3)
        streamed = await router.post("/v1/chat/completions", **chat, stream=True)
        assert streamed.text.count('"model":"prose"') == streamed.text.count("data: {")
        assert router.worker.figures.num_admits_by_adapter == {"prose": 4}


async def test_tgi_chooses_by_adapter_id(start: Start) -> None:
    async with start(adapters=ADAPTERS) as router:
        for name in ("code", None):
            asked = {"adapter_id": name, "max_new_tokens": 4}
            assert (await router.post("/generate", inputs="hello", parameters=asked)).status_code == 200
        assert router.worker.figures.num_admits_by_adapter == {"code": 1, "": 1}
        wrong = await router.post("/generate", inputs="hello", parameters={"adapter_id": "verse"})
        assert (wrong.status_code, "`tiny`, `code` and `prose` are" in wrong.text) == (404, True)


async def test_an_unknown_name_is_the_model_error_with_the_names_there_are(start: Start) -> None:
    async with start(adapters=ADAPTERS) as router:
        answer = await router.post("/v1/completions", prompt="hello", model="verse")
        error = answer.json()["error"]
        assert (answer.status_code, error["code"], error["param"]) == (404, "model_not_found", "model")
        assert error["message"] == "The model 'verse' is not served here; `tiny`, `code` and `prose` are."


async def test_adapters_share_the_prefix_cache(start: Start) -> None:
    async with start(adapters=ADAPTERS) as router:
        prompt = "a prompt of several blocks, which is computed once"
        await router.complete(prompt=prompt, max_tokens=4, model="code")
        before = router.worker.figures.num_cached_ids
        await router.complete(prompt=prompt, max_tokens=4, model="prose")
        assert router.worker.figures.num_cached_ids > before


async def test_a_request_goes_on_with_its_adapter_after_a_lost_worker(start: Start) -> None:
    async with start(adapters=ADAPTERS, step_seconds=0.005) as router:
        asked = {"prompt": "hello", "max_tokens": 60, "seed": 1, "ignore_eos": True}
        plain = await router.complete(**asked)
        running = asyncio.create_task(router.complete(**asked, model="code"))
        for _ in range(2000):
            if router.worker.figures.num_admits_by_adapter["code"]:
                break
            await asyncio.sleep(0.005)
        router.worker.kill()
        assert (await running)["choices"][0]["text"] == plain["choices"][0]["text"]
        assert router.worker.figures.num_admits_by_adapter["code"] == 2


async def test_a_worker_that_comes_back_with_other_adapters_is_not_taken(start: Start) -> None:
    async with start(adapters=ADAPTERS) as router:
        router.worker.script.adapters = ("code",)
        router.worker.kill()
        for _ in range(2000):
            if not router.service.engine.ready:
                break
            await asyncio.sleep(0.005)
        answer = await router.post("/v1/completions", prompt="hello", model="prose", max_tokens=2, timeout=0.3)
        assert answer.status_code >= 400
        assert router.worker.figures.num_admits_by_adapter["prose"] == 0
        router.worker.script.adapters = ADAPTERS
        router.worker.kill()
