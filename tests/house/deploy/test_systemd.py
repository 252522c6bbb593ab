"""The systemd unit and the bill of materials."""

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from space_router.config import ServeConfig

UNIT = "docker/systemd/spaceserve.service"
STATE = "/var/lib/spaceserve"


def options(root: Path) -> dict[str, list[str]]:
    lines = (root / UNIT).read_text(encoding="utf-8").splitlines()
    found: dict[str, list[str]] = {}
    for name, _, value in (line.partition("=") for line in lines if line and line[0] not in "#["):
        found.setdefault(name, []).append(value)
    return found


def test_the_unit_gives_requests_their_time_and_keeps_everything_in_its_state(root: Path) -> None:
    unit = options(root)
    assert float(unit["TimeoutStopSec"][0]) > ServeConfig().drain_timeout + 10
    assert unit["KillMode"] == ["mixed"], "workers are ended by their router, after the running requests"
    assert unit["ExecReload"] == ["/bin/kill -HUP $MAINPID"]
    assert unit["StateDirectory"] == [Path(STATE).name]
    variables = dict(one.split("=", 1) for line in unit["Environment"] for one in line.split())
    assert variables.pop("PYTHONSAFEPATH") == "1"
    assert {value == STATE or value.startswith(f"{STATE}/") for value in variables.values()} == {True}
    assert variables.keys() == {"HOME", "XDG_CACHE_HOME", "HF_HOME", "TRITON_CACHE_DIR"}
    for name, value in {"DynamicUser": "yes", "ProtectSystem": "strict", "NoNewPrivileges": "yes"}.items():
        assert unit[name] == [value]


def test_systemd_finds_nothing_wrong_and_little_exposed(root: Path, tmp_path: Path) -> None:
    program = shutil.which("systemd-analyze")
    if program is None:
        pytest.skip("there is no systemd-analyze here (Debian, Ubuntu: apt-get install systemd)")
    text = (root / UNIT).read_text(encoding="utf-8")
    command = re.search(r"^ExecStart=(\S+) serve$", text, re.MULTILINE)
    assert command is not None
    unit = tmp_path / "spaceserve.service"
    unit.write_text(text.replace(command[1], sys.executable))
    verified = subprocess.run([program, "verify", "--man=no", str(unit)], capture_output=True, text=True, check=False)
    assert (verified.returncode, verified.stderr) == (0, "")
    rated = [program, "security", "--offline=true", "--no-pager", "--threshold=20", str(unit)]
    assert subprocess.run(rated, capture_output=True, text=True, check=False).returncode == 0
    unit.write_text(unit.read_text().replace("TimeoutStopSec", "TimeoutStopSecs"))
    wrong = subprocess.run([program, "verify", "--man=no", str(unit)], capture_output=True, text=True, check=False)
    assert "TimeoutStopSecs" in wrong.stderr


@pytest.mark.slow
def test_the_bill_of_materials_names_every_package_that_images_install_with_its_hash(
    root: Path, tmp_path: Path
) -> None:
    out = tmp_path / "sbom.json"
    made = [sys.executable, "-P", str(root / "docker/locks/sbom.py"), str(out)]
    run = subprocess.run(made, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr[-2000:]
    bill = json.loads(out.read_text(encoding="utf-8"))
    assert (bill["bomFormat"], bill["specVersion"]) == ("CycloneDX", "1.6")
    assert bill["metadata"]["component"]["name"] == "spaceserve"
    text = "".join((root / "docker/locks" / name).read_text(encoding="utf-8") for name in ("run.txt", "torch.txt"))
    pinned = set(re.findall(r"^([A-Za-z0-9._-]+)(?:\[[a-z,-]+\])?==([^\s;\\]+)", text, re.MULTILINE))
    assert {(one["name"], one["version"]) for one in bill["components"]} == pinned
    hashed = [one for one in bill["components"] if any(ref.get("hashes") for ref in one["externalReferences"])]
    assert len(hashed) == len(pinned) - 1, "torch, whose builds for this or that device are no one file"
