"""Requests choose an ordinary LoRA by `model`: exact with drafts, beside others, from cached pages, after a kill."""

import os
import shutil
import signal
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, closing
from pathlib import Path

import pytest
import torch
from e2e.conftest import Live
from safetensors.torch import load_file
from space_common.files import LORA_WEIGHTS, hash_lora
from space_common.process import ServerProcess
from space_model.random_checkpoint import FIRST_MASK
from tiny_checkpoints import tiny_lora
from transformers import AutoModelForCausalLM

Serve = Callable[..., AbstractContextManager[ServerProcess]]
PROMPT = "a prompt that fills more than one page of keys"
FLAGS = ("--dtype", "float32", "--speculation", "3", "--lookup", "off", "--block-size", "8")


@pytest.fixture(scope="module")
def loras(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("loras")
    return {name: tiny_lora(folder / name, checkpoint, seed=n) for n, name in enumerate(("sql", "law"), start=5)}


@pytest.fixture(scope="module")
def lora_folder(loras: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What the server loads LoRAs from: it has `sql`."""
    folder = tmp_path_factory.mktemp("loadable")
    shutil.copytree(loras["sql"], folder / "sql")
    return folder


@pytest.fixture(scope="module")
def served(
    checkpoint: Path, loras: dict[str, Path], lora_folder: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Live]:
    keys = tmp_path_factory.mktemp("keys") / "keys"
    keys.write_text("ops-key name=ops operator=yes\n")
    flags = [word for name, folder in loras.items() for word in ("--lora", f"{name}={folder}")]
    flags += ["--lora-folder", str(lora_folder), "--api-key-file", str(keys)]
    model = ["--model", str(checkpoint), "--served-model-name", "base", "--num-threads", "1", "--num-blocks", "512"]
    with ServerProcess([*model, *FLAGS, *flags]) as server, closing(Live(server, "ops-key")) as ready:
        yield ready


def merged_ids(checkpoint: Path, lora: Path, prompt_ids: list[int], count: int) -> list[int]:
    """The greedy ids of transformers with W + 2·B·A, without mask tokens."""
    model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)
    weights, tensors = model.state_dict(), load_file(lora / LORA_WEIGHTS)
    for name, a in tensors.items():
        if name.endswith("lora_A.weight"):
            path = name.removeprefix("base_model.model.").removesuffix(".lora_A.weight")
            weights[f"{path}.weight"] += 2.0 * tensors[name.replace("lora_A", "lora_B")] @ a
    ids = list(prompt_ids)
    with torch.no_grad():
        for _ in range(count):
            logits = model(torch.tensor([ids])).logits[0, -1]
            logits[FIRST_MASK : FIRST_MASK + 5] = -torch.inf
            ids.append(int(logits.argmax()))
    return ids[len(prompt_ids) :]


def test_the_text_is_that_of_the_merged_weights_with_drafts_and_without(
    served: Live, loras: dict[str, Path], checkpoint: Path
) -> None:
    prompt_ids = served.http.post("/tokenize", json={"prompt": PROMPT}).json()["tokens"]
    texts = {}
    for name, folder in loras.items():
        ids = served.ids(PROMPT, model=name)
        assert ids == merged_ids(checkpoint, folder, prompt_ids, 24)
        assert ids == served.ids(PROMPT, model=name, speculation="off")
        texts[name] = ids
    assert served.ids(PROMPT, model="base") not in texts.values()
    assert texts["sql"] != texts["law"]


def test_texts_beside_each_other_are_those_alone_whatever_prefix_is_cached(served: Live) -> None:
    wanted = [(name, seed) for seed in (1, 2) for name in ("base", "sql", "law")]

    def text(one: tuple[str, int]) -> tuple[str, bool]:
        made = served.complete(PROMPT, model=one[0], seed=one[1], temperature=0.9, max_tokens=60)
        assert made["model"] == one[0]
        return made["choices"][0]["text"], made["usage"]["prompt_tokens_details"]["cached_tokens"] > 0

    alone = [text(one)[0] for one in wanted]
    with ThreadPoolExecutor(len(wanted)) as pool:
        together = list(pool.map(text, wanted))
    assert [made for made, _ in together] == alone
    assert all(is_cached for _, is_cached in together), "each finds its own pages"
    assert len(set(alone)) == len(alone)
    now = served.wait_idle()
    for name in ("sql", "law"):
        drafted, accepted = (
            now[f"spaceserve_lora_{kind}_tokens_total{{lora={name}}}"] for kind in ("drafted", "accepted")
        )
        assert 0 < accepted < drafted


def test_a_killed_worker_s_request_ends_on_its_lora(served: Live) -> None:
    wanted = {"prompt": PROMPT, "model": "law", "max_tokens": 300, "temperature": 0.9, "seed": 9}
    text = served.complete(**wanted)["choices"][0]["text"]
    pieces = []
    for number, event in enumerate(served.stream(**wanted)):
        pieces.append(event["choices"][0]["text"])
        if number == 3:
            os.kill(served.wait_worker(), signal.SIGKILL)
    assert "".join(pieces) == text


def test_models_and_info_say_which_there_are(served: Live, loras: dict[str, Path]) -> None:
    cards = {card["id"]: card for card in served.get("/v1/models")["data"]}
    assert list(cards) == ["base", "sql", "law"]
    for name, folder in loras.items():
        assert (cards[name]["parent"], cards[name]["root"]) == ("base", str(folder))
    assert served.get("/info")["loras"] == {name: hash_lora(folder) for name, folder in loras.items()}
    answer = served.http.post("/v1/completions", json={"model": "tax", "prompt": "x"})
    assert (answer.status_code, answer.json()["error"]["code"]) == (404, "model_not_found")


def test_a_folder_that_is_none_is_said_before_anything_starts(serve: Serve, tmp_path: Path) -> None:
    with pytest.raises(Exception, match=r"adapter_config\.json"), serve("--lora", f"x={tmp_path}"):
        pass


def load(live: Live, **fields: object) -> None:
    answer = live.http.post("/v1/load_lora_adapter", json={"lora_name": "it", "lora_path": "sql", **fields})
    assert (answer.status_code, answer.text) == (200, "Success: LoRA adapter 'it' added successfully.")


def test_a_request_ends_on_the_weights_that_it_began_with_though_they_are_loaded_anew_and_its_worker_dies(
    served: Live, loras: dict[str, Path], lora_folder: Path
) -> None:
    wanted = {"prompt": PROMPT, "model": "it", "max_tokens": 300, "temperature": 0.9, "seed": 9}
    load(served)
    before = served.complete(**wanted)["choices"][0]["text"]
    pieces = []
    for number, event in enumerate(served.stream(**wanted)):
        pieces.append(event["choices"][0]["text"])
        if number == 3:
            shutil.copytree(loras["law"], lora_folder / "sql", dirs_exist_ok=True)
            load(served, load_inplace=True)
            os.kill(served.wait_worker(), signal.SIGKILL)
    assert "".join(pieces) == before
    after = served.complete(**wanted)
    assert after["choices"][0]["text"] != before
    assert served.get("/info")["loras"]["it"] == hash_lora(loras["law"])
    answer = served.http.post("/v1/unload_lora_adapter", json={"lora_name": "it"})
    assert answer.text == "Success: LoRA adapter 'it' removed successfully."
    assert served.http.post("/v1/completions", json={"model": "it", "prompt": "x"}).status_code == 404
    served.wait_idle()
