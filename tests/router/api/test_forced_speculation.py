"""A number as `speculation` commands so many mask drafts; where it cannot be obeyed it is refused with the reason."""

import pytest
from doubles.router.whole_router import Start
from space_router.config import ServeConfig


async def test_it_reaches_the_worker_as_a_command(start: Start) -> None:
    async with start(adapters=("code",)) as router:
        admits = router.worker.figures.num_admits_by_forced
        for speculation in (2, "auto", "off", 0, None, 3):
            await router.complete(prompt="x", max_tokens=9, speculation=speculation)
        await router.complete(prompt="x", max_tokens=9, speculation=1, model="code")
        await router.post("/generate", inputs="x", parameters={"max_new_tokens": 9, "speculation": 1})
        assert admits == {2: 1, 0: 4, 3: 1, 1: 2}


@pytest.mark.parametrize(
    ("settings", "worker", "speculation", "message"),
    [
        ({}, {}, 4, "at most 3 drafts per step can be asked for here"),
        ({"speculation": "off"}, {}, 1, "decodes plainly (`--speculation off`)"),
        ({"speculation": "2"}, {}, 3, "at most 2 drafts"),
        ({}, {"lays_out_masks": False}, 1, "the workers lay out no masks (`--lookup only`)"),
        ({"speculation": "0"}, {}, 1, "decodes plainly (`--speculation off`)"),
        ({}, {"draft_length": 0, "num_masks": 3}, 1, "the workers decode plainly (`--speculation off`)"),
        ({"max_request_speculation": 1}, {}, 2, "at most 1 draft per step"),
        ({"max_request_speculation": 0}, {}, 1, "--max-request-speculation 0"),
        ({}, {"num_masks": 0}, 1, "`tiny` has no masks to draft from"),
    ],
)
async def test_what_cannot_be_obeyed_is_refused(
    settings: dict[str, object], worker: dict[str, object], speculation: int, message: str, start: Start
) -> None:
    async with start(config=ServeConfig(**settings), **worker) as router:  # type: ignore[arg-type]
        refused = await router.post("/v1/completions", prompt="x", speculation=speculation)
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, "speculation")
        assert message in refused.json()["error"]["message"]
        for allowed in ("off", 0, "auto"):
            assert (await router.post("/v1/completions", prompt="x", speculation=allowed)).status_code == 200
        most = (await router.client.get("/info")).json()["speculation"]["max_request"]
        assert most < speculation
        if most:
            assert (await router.post("/v1/completions", prompt="x", speculation=most)).status_code == 200


async def test_the_log_probabilities_of_a_prompt_that_fills_the_window_need_no_drafts(start: Start) -> None:
    async with start(window=16) as router:
        answer = await router.complete(prompt=[5] * 16, max_tokens=0, echo=True, logprobs=1, speculation=2)
        assert len(answer["choices"][0]["logprobs"]["tokens"]) == 16
        assert router.worker.figures.num_admits_by_forced == {0: 1}
