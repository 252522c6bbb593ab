"""Real models: SmolLM2-135M-Instruct with the adapter that ships, and Gemma 3 270M. `make real` fetches them."""

import json
import shutil
import zipfile
from importlib import resources
from pathlib import Path
from typing import Any

import pytest
from real_models import SHA256, folder
from space_model.loading.load import load_model
from space_model.space_model import SpaceModel
from space_router.config import ServeConfig
from space_router.text.model_text import ModelText

SMOLLM2, GEMMA, MINILM = SHA256


def pytest_itemcollected(item: pytest.Item) -> None:
    item.add_marker(pytest.mark.real)


def gguf(name: str) -> Path:
    """The file of a real model; without it the test is skipped."""
    file = folder() / name
    if not file.is_file():
        pytest.skip(f"{file} is not there; `make real` fetches it")
    return file


@pytest.fixture(scope="session")
def prompts() -> list[str]:
    """Forty questions: chat and code in turn."""
    found: list[str] = json.loads(Path(__file__).with_name("prompts.json").read_text(encoding="utf-8"))
    return found


@pytest.fixture(scope="session")
def smollm2_file() -> Path:
    return gguf(SMOLLM2)


@pytest.fixture(scope="session")
def gemma_file() -> Path:
    return gguf(GEMMA)


@pytest.fixture(scope="session")
def minilm_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """all-MiniLM-L6-v2, as sentence-transformers saves it."""
    home = tmp_path_factory.mktemp("minilm")
    with zipfile.ZipFile(gguf(MINILM)) as archive:
        archive.extractall(home)
    return home


@pytest.fixture(scope="session")
def smollm2_folder(smollm2_file: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A gated checkpoint: the adapter and draft head that ship, on the GGUF file as base."""
    home = tmp_path_factory.mktemp("smollm2")
    shipped = Path(str(resources.files("space_smollm2")))
    config: dict[str, Any] = json.loads((shipped / "config.json").read_text(encoding="utf-8"))
    config["space"]["base"] = str(smollm2_file)
    (home / "config.json").write_text(json.dumps(config), encoding="utf-8")
    for file in shipped.glob("*.safetensors"):
        shutil.copy(file, home)
    return home


@pytest.fixture(scope="session")
def smollm2(smollm2_folder: Path) -> SpaceModel:
    return load_model(smollm2_folder)


@pytest.fixture(scope="session")
def gemma(gemma_file: Path) -> SpaceModel:
    return load_model(gemma_file)


def text_of(model: Path) -> ModelText:
    """Tokenizer and chat template, as the router has them."""
    return ModelText.load(ServeConfig(model=str(model)))


@pytest.fixture(scope="session")
def smollm2_text(smollm2_folder: Path) -> ModelText:
    return text_of(smollm2_folder)


@pytest.fixture(scope="session")
def gemma_text(gemma_file: Path) -> ModelText:
    return text_of(gemma_file)
