"""An operator loads and unloads LoRAs while serving, from one folder, on every worker and after its restart."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Any

import pytest
from space_common.files import LORA_FILES, hash_lora
from space_router.api_keys import ApiKey
from space_router.config import ServeConfig, build
from space_router.errors import ConfigError

Start = Callable[..., AbstractAsyncContextManager[Any]]
KEYS = (ApiKey.of("ops-key", "ops", is_operator=True), ApiKey.of("plain-key", "plain"))
OPERATOR, PLAIN = ({"authorization": f"Bearer {key}"} for key in ("ops-key", "plain-key"))


def write(folder: Path, content: str) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    for name in LORA_FILES:
        (folder / name).write_text(content)
    return folder


@pytest.fixture
def config(tmp_path: Path) -> ServeConfig:
    write(tmp_path / "loras/sql", "sql")
    write(tmp_path / "elsewhere", "law")
    (tmp_path / "loras/link").symlink_to(tmp_path / "elsewhere")
    return ServeConfig(api_keys=KEYS, lora_folder=str(tmp_path / "loras"))


async def load(router: Any, headers: dict[str, str] = OPERATOR, **fields: Any) -> Any:
    body = {"lora_name": "sql", "lora_path": "sql", **fields}
    return await router.client.post("/v1/load_lora_adapter", json=body, headers=headers)


async def complete(router: Any, **fields: Any) -> Any:
    body = {"model": "sql", "prompt": "hello world, hello world", "max_tokens": 20, **fields}
    return await router.client.post("/v1/completions", json=body, headers=PLAIN)


async def test_a_loaded_lora_is_named_until_it_is_unloaded(start: Start, config: ServeConfig) -> None:
    async with start("yes", config=config) as router:
        assert (await complete(router)).status_code == 404
        loaded = await load(router)
        assert (loaded.status_code, loaded.text) == (200, "Success: LoRA adapter 'sql' added successfully.")
        models = (await router.client.get("/v1/models", headers=PLAIN)).json()["data"]
        assert [(card["id"], card["parent"]) for card in models[1:]] == [("sql", models[0]["id"])]
        answer = (await complete(router)).json()
        assert answer["model"] == "sql"
        unloaded = await router.client.post("/v1/unload_lora_adapter", json={"lora_name": "sql"}, headers=OPERATOR)
        assert unloaded.text == "Success: LoRA adapter 'sql' removed successfully."
        assert (await complete(router)).status_code == 404
        again = await router.client.post("/v1/unload_lora_adapter", json={"lora_name": "sql"}, headers=OPERATOR)
        assert (again.status_code, again.json()["error"]["code"]) == (404, "lora_not_found")
        assert not router.service.engine.connections[0].scheduler.loras


async def test_cached_prefixes_are_of_the_content_and_not_of_the_name(
    start: Start, config: ServeConfig, tmp_path: Path
) -> None:
    async def cached(**fields: Any) -> int:
        used = (await complete(router, **fields)).json()["usage"]
        return int(used["prompt_tokens_details"]["cached_tokens"])

    async with start("yes", config=config, block_size=8) as router:
        assert (await load(router)).status_code == 200
        assert await cached() == 0
        assert await cached() > 0
        assert await cached(model=router.service.text.name) == 0
        write(tmp_path / "loras/sql", "another")
        assert (await load(router)).status_code == 400
        assert (await load(router, load_inplace=True)).status_code == 200
        assert await cached() == 0, "of the LoRA that had the name"
        write(tmp_path / "loras/sql", "sql")
        assert (await load(router, load_inplace=True)).status_code == 200
        assert await cached() > 0, "the first content again"
        router.service.engine.check()


async def test_a_worker_that_is_lost_is_replaced_by_one_that_loads_what_requests_need(
    start: Start, config: ServeConfig
) -> None:
    async with start("yes", config=config) as router:
        await load(router)
        text = (await complete(router)).json()["choices"][0]["text"]
        connection = router.service.engine.connections[0]
        router.worker.kill()
        await connection.until(lambda: connection.num_incarnations == 2)
        assert not connection.scheduler.loras
        assert (await complete(router)).json()["choices"][0]["text"] == text
        assert connection.scheduler.loras == {router.service.engine.loras.named["sql"].digest}


async def test_what_a_worker_cannot_serve_is_refused_with_its_reason(start: Start, config: ServeConfig) -> None:
    async with start("yes", config=config, lora_error="it is a DoRA adapter") as router:
        answer = await load(router)
        assert answer.status_code == 400
        assert answer.json()["error"]["message"] == "it is a DoRA adapter"
        assert not router.service.engine.loras.named
        assert (await complete(router)).status_code == 404


@pytest.mark.parametrize(
    ("fields", "status", "word"),
    [
        ({"lora_path": "../elsewhere"}, 400, "not below --lora-folder"),
        ({"lora_path": "link"}, 400, "not below --lora-folder"),
        ({"lora_path": "/etc"}, 400, "not below --lora-folder"),
        ({"lora_path": "none"}, 400, "adapter_config.json"),
        ({"lora_name": ""}, 400, "lora_name"),
        ({"headers": PLAIN}, 403, "operator=yes"),
        ({"headers": {}}, 401, "API key"),
    ],
    ids=str,
)
async def test_only_an_operator_loads_and_only_from_below_the_folder(
    start: Start, config: ServeConfig, fields: dict[str, Any], status: int, word: str
) -> None:
    async with start("yes", config=config) as router:
        answer = await load(router, **fields)
        assert answer.status_code == status
        assert word in answer.json()["error"]["message"]
        assert not router.service.engine.loras.named


@pytest.mark.parametrize("name", LORA_FILES)
async def test_files_of_an_adapter_that_lead_out_of_its_folder_are_not_read(
    start: Start, config: ServeConfig, tmp_path: Path, name: str
) -> None:
    """Such as /dev/zero, which has no end, or the files of others."""
    file = tmp_path / "loras/sql" / name
    file.rename(tmp_path / "secret")
    file.symlink_to(tmp_path / "secret")
    async with start("yes", config=config) as router:
        answer = await load(router)
        assert answer.status_code == 400
        assert f"{name} is a link to {tmp_path / 'secret'}, outside its folder" in answer.json()["error"]["message"]
        file.unlink()
        file.symlink_to(Path("..") / "sql" / "own")
        (tmp_path / "secret").rename(file.with_name("own"))
        assert (await load(router)).status_code == 200, "a link within the folder"


async def test_without_the_folder_nothing_is_loaded_and_no_name_hides_the_model(
    start: Start, config: ServeConfig
) -> None:
    async with start("yes", config=ServeConfig(api_keys=KEYS)) as router:
        answer = await load(router)
        assert (answer.status_code, answer.json()["error"]["code"]) == (403, "no_lora_folder")
    async with start("yes", config=config, adapters=("code",)) as router:
        for name in (router.service.text.name, "code"):
            answer = await load(router, lora_name=name)
            assert (answer.status_code, answer.json()["error"]["param"]) == (400, "lora_name")


async def test_a_worker_elsewhere_says_which_loras_it_has(start: Start) -> None:
    loras = (("sql", "5" * 64), ("law", "7" * 64))
    async with start("yes", loras=loras) as router:
        assert (await router.client.get("/info")).json()["loras"] == dict(loras)
        answer = await router.client.post("/v1/completions", json={"model": "law", "prompt": "x", "max_tokens": 3})
        assert answer.json()["model"] == "law"


def test_flags_that_cannot_be_are_refused(tmp_path: Path) -> None:
    folder = write(tmp_path / "sql", "sql")
    assert len(hash_lora(folder)) == 64
    for flags, word in [
        ({"lora": f"demo={folder}", "served_model_name": "demo"}, "the model is called so"),
        ({"lora": f"x={folder}", "adapter": "x=y"}, "an adapter is called so"),
        ({"lora": f"x={folder}", "tensor_parallel": "2"}, "merge_and_unload"),
        ({"lora_folder": str(tmp_path), "worker_address": "unix:/x"}, "give the workers --lora"),
        ({"lora_folder": str(tmp_path / "none")}, "no such folder"),
    ]:
        with pytest.raises(ConfigError, match=word):
            build(flags, {})
