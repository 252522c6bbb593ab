"""What `pip install` would install: every room, whole, and the embedded model."""

import subprocess
import sys
import zipfile
from pathlib import Path

import pytest


@pytest.fixture(scope="module")
def inside(root: Path, tmp_path_factory: pytest.TempPathFactory) -> set[str]:
    """Names of the files in the wheel."""
    out = tmp_path_factory.mktemp("wheel")
    subprocess.run(
        [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(out)],
        cwd=root, check=True, capture_output=True,
    )  # fmt: skip
    (wheel,) = out.glob("*.whl")
    return set(zipfile.ZipFile(wheel).namelist())


def test_the_wheel_holds_every_file_of_every_room(files: list[Path], inside: set[str]) -> None:
    rooms = {"proto", "kernels", "router", "server"}
    of_packages = [path for path in files if path.parts[0] in rooms and len(path.parts) > 2]  # not a room's documents
    wanted = {"/".join(path.parts[1:]) for path in of_packages}
    assert wanted - inside == set()


def test_the_wheel_holds_the_licence_and_no_tests(inside: set[str]) -> None:
    assert any(name.endswith(".dist-info/licenses/LICENSE") for name in inside)
    assert not any("test_" in name.rsplit("/", 1)[-1] for name in inside)


def test_the_embedded_model_is_whole(inside: set[str]) -> None:
    assert {f"space_demo/{name}" for name in ("config.json", "model.safetensors", "tokenizer.json")} <= inside
