"""Two adapters behind one server: the same text for each, by its name in `model`, also beside each other."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import httpx
from space_eval.bench.server_process import ServerProcess
from space_model.testing import tiny_adapter

Serve = Callable[..., AbstractContextManager[ServerProcess]]


def test_requests_choose_an_adapter_and_all_get_the_base_s_text(serve: Serve, checkpoint: Path, tmp_path: Path) -> None:
    code = tiny_adapter(tmp_path / "code", checkpoint, num_masks=3, rank=8)
    prose = tiny_adapter(tmp_path / "prose", checkpoint, num_masks=5, seed=2, draft_head=False)
    flags = ["--served-model-name", "base", "--speculation", "3", "--adapter", f"code={code}"]
    with (
        serve(*flags, "--adapter", f"prose={prose}") as server,
        httpx.Client(base_url=server.url, timeout=60.0) as http,
        ThreadPoolExecutor(6) as pool,
    ):
        assert [card["id"] for card in http.get("/v1/models").json()["data"]] == ["base", "code", "prose"]

        def complete(name: str, **sampling_params: Any) -> dict[str, Any]:
            body = {"model": name, "prompt": "def f(x):", "max_tokens": 40, "ignore_eos": True, **sampling_params}
            answer = http.post("/v1/completions", json=body)
            assert answer.status_code == 200, answer.text
            assert answer.json()["model"] == name
            return dict(answer.json())

        for sampling_params in ({"temperature": 0}, {"temperature": 0.9, "seed": 7}):
            plain = complete("base", **sampling_params, speculation="off")["choices"][0]["text"]
            names = ["base", "code", "prose"] * 2
            answers = list(
                pool.map(lambda name, sampling_params=sampling_params: complete(name, **sampling_params), names)
            )
            assert {answer["choices"][0]["text"] for answer in answers} == {plain}
            assert all(answer["spaceserve"]["drafted"] > 0 for answer in answers)
        assert http.post("/v1/completions", json={"model": "verse", "prompt": "x"}).status_code == 404


def test_an_adapter_folder_is_served_as_a_model_on_its_base(serve: Serve, checkpoint: Path, tmp_path: Path) -> None:
    folder = tiny_adapter(tmp_path / "gated", checkpoint, num_masks=4)
    with (
        serve("--model", str(folder), "--speculation", "4") as server,
        httpx.Client(base_url=server.url, timeout=60.0) as http,
    ):
        info = http.get("/info").json()
        assert (info["model_id"], info["speculation"]["num_masks"], info["adapters"]) == ("gated", 4, [])
        body = {"prompt": "def f(x):", "max_tokens": 30, "temperature": 0, "ignore_eos": True}
        texts = {
            speculation: http.post("/v1/completions", json=body | {"speculation": speculation}).json()
            for speculation in ("off", 4)
        }
        assert texts["off"]["choices"][0]["text"] == texts[4]["choices"][0]["text"]
        assert texts[4]["spaceserve"]["drafted"] > 0
