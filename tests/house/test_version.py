"""The version is known in a source tree too."""

import importlib.metadata
import os
import subprocess
import sys
import tomllib
from pathlib import Path

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
