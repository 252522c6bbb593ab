"""The version is known in a source tree too."""

import importlib.metadata
import os
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest
from space_common.version import version


def test_an_installed_distribution_says_its_version() -> None:
    assert version() == importlib.metadata.version("spaceserve")


def test_a_source_tree_that_is_not_installed_starts_and_says_so(root: Path, tmp_path: Path) -> None:
    """The packages of this environment without what says that spaceserve is among them."""
    places = [Path(place) for place in sys.path if place.endswith("site-packages")]
    for place in places:
        for entry in place.iterdir():
            if not entry.name.startswith("spaceserve-") and entry.suffix != ".pth":
                (tmp_path / entry.name).symlink_to(entry)
    folders = [str(root / folder) for folder in ("proto", "kernels", "router", "server")]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([*folders, str(tmp_path)])}
    code = "from space_router.api.ops.operating import VERSION; import space_router.commands.doctor; print(VERSION)"
    command = [sys.executable, "-S", "-P", "-c", code]
    ran = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    expected = tomllib.loads((root / "pyproject.toml").read_text())["project"]["version"]
    assert (ran.stdout, ran.stderr) == (f"{expected}+source\n", "")


def test_no_program_asks_for_the_distribution_s_version_itself(root: Path, files: list[Path]) -> None:
    product = [path for path in files if path.parts[0] in ("proto", "kernels", "router", "server")]
    asking = [path for path in product if path.suffix == ".py" and '"spaceserve")' in (root / path).read_text()]
    assert [path for path in asking if "metadata.version(" in (root / path).read_text()] == []


@pytest.fixture(scope="module")
def wheel(root: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("wheel")
    subprocess.run(
        [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(out)],
        cwd=root, check=True, capture_output=True,
    )  # fmt: skip
    (wheel,) = out.glob("*.whl")
    return wheel


@pytest.fixture(scope="module")
def inside(wheel: Path) -> set[str]:
    """Names of the files in the wheel."""
    return set(zipfile.ZipFile(wheel).namelist())


def test_the_wheel_holds_every_file_of_every_room(files: list[Path], inside: set[str]) -> None:
    rooms = {"proto", "kernels", "router", "server"}
    of_packages = [path for path in files if path.parts[0] in rooms and path.parts[1].startswith("space_")]
    wanted = {"/".join(path.parts[1:]) for path in of_packages}
    assert wanted - inside == set()


def test_the_wheel_holds_the_licence_and_no_tests(inside: set[str]) -> None:
    assert any(name.endswith(".dist-info/licenses/LICENSE") for name in inside)
    assert not any("test_" in name.rsplit("/", 1)[-1] for name in inside)


def test_the_embedded_model_is_whole(inside: set[str]) -> None:
    assert {f"space_demo/{name}" for name in ("config.json", "model.safetensors", "tokenizer.json")} <= inside


def test_the_default_model_s_masks_open_from_the_wheel_and_name_their_base(wheel: Path, tmp_path: Path) -> None:
    """Through importlib.resources, out of the wheel and not of this folder."""
    zipfile.ZipFile(wheel).extractall(tmp_path)
    code = """
import json, sys
from importlib.resources import as_file, files
from safetensors import safe_open
from space_common.default_model import SMOLLM2, packaged
assert files("space_smollm2").is_relative_to(sys.argv[1]), files("space_smollm2")
section = json.loads((packaged("smollm2") / "config.json").read_text())["space"]
assert (section["base"], section["base_sha256"]) == (SMOLLM2.wheel, SMOLLM2.sha256)
assert SMOLLM2.requirements.is_file()
for name in (section["adapter"], section["draft_head"]["file"]):
    with as_file(files("space_smollm2") / name) as file, safe_open(file, "pt") as tensors:
        assert len(tensors.keys()) > 1
assert sum(path.stat().st_size for path in files("space_smollm2").iterdir() if path.is_file()) < 22e6
"""
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
    subprocess.run([sys.executable, "-c", code, str(tmp_path)], check=True, cwd=tmp_path, env=environment)


def test_the_wheel_holds_licence_and_notice_of_the_default_model(inside: set[str]) -> None:
    licences = {name.split(".dist-info/licenses/")[-1] for name in inside if ".dist-info/licenses/" in name}
    assert {"LICENSE", "server/space_smollm2/LICENSE", "server/space_smollm2/NOTICE"} <= licences
