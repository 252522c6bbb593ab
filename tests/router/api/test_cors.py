"""Pages of other origins may ask only where the operator says so."""

from doubles.router.whole_router import Start
from space_router.api_keys import plain_keys
from space_router.config import ServeConfig

PAGE = "https://page.example"
ASKS_FIRST = {
    "origin": PAGE,
    "access-control-request-method": "POST",
    "access-control-request-headers": "authorization, content-type",
}
BODY = {"prompt": "x", "max_tokens": 1}


async def test_by_default_no_origin_is_allowed(start: Start) -> None:
    async with start("yes") as router:
        answer = await router.client.post("/v1/completions", json=BODY, headers={"origin": PAGE})
        assert (answer.status_code, "access-control-allow-origin" in answer.headers) == (200, False)
        assert (await router.client.options("/v1/completions", headers=ASKS_FIRST)).status_code == 405


async def test_a_named_origin_may_ask_with_its_key_and_read_headers_and_errors(start: Start) -> None:
    config = ServeConfig(cors_origins=(PAGE, "http://localhost:3000"), api_keys=plain_keys("one"))
    async with start("yes", config=config) as router:
        asked = await router.client.options("/v1/completions", headers=ASKS_FIRST)  # browsers send no key with it
        assert (asked.status_code, asked.headers["access-control-allow-origin"]) == (200, PAGE)
        assert "authorization" in asked.headers["access-control-allow-headers"]
        for key, status in (("one", 200), ("two", 401)):
            headers = {"origin": PAGE, "authorization": f"Bearer {key}"}
            answer = await router.client.post("/v1/completions", json=BODY, headers=headers)
            assert (answer.status_code, answer.headers["access-control-allow-origin"]) == (status, PAGE)
        other = {"origin": "https://other.example", "authorization": "Bearer one"}
        answer = await router.client.post("/v1/completions", json=BODY, headers=other)
        assert "access-control-allow-origin" not in answer.headers
        refused = await router.client.options("/v1/completions", headers={**ASKS_FIRST, **other})
        assert refused.status_code == 400


async def test_a_star_allows_every_origin_streams_too(start: Start) -> None:
    async with start("yes", config=ServeConfig(cors_origins=("*",))) as router:
        answer = await router.client.post("/v1/completions", json={**BODY, "stream": True}, headers={"origin": PAGE})
        assert answer.headers["access-control-allow-origin"] == "*"
        assert answer.text.endswith("data: [DONE]\n\n")
