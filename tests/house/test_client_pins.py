"""`make clients` installs what it was tried with, and names no place to install it from."""

import json
import re
from pathlib import Path

CLIENTS = Path(__file__).resolve().parents[1] / "clients"


def test_every_package_of_a_python_client_is_pinned() -> None:
    files = sorted((CLIENTS / "requirements").glob("*.txt"))
    assert {file.stem for file in files} >= {"openai", "openai-1", "langchain", "litellm", "lm-eval"}
    for file in files:
        for line in file.read_text(encoding="utf-8").splitlines():
            assert re.fullmatch(r"[A-Za-z0-9._-]+==[0-9][A-Za-z0-9.!+]*", line), f"{file.name}: {line}"


def test_nodes_packages_are_pinned_by_their_hashes_and_not_by_an_address() -> None:
    lock = json.loads((CLIENTS / "node" / "package-lock.json").read_text(encoding="utf-8"))
    wanted = json.loads((CLIENTS / "node" / "package.json").read_text(encoding="utf-8"))["dependencies"]
    installed = {place.removeprefix("node_modules/"): one for place, one in lock["packages"].items() if place}
    assert all("resolved" not in one and one["integrity"].startswith("sha512-") for one in installed.values())
    assert {name: installed[name]["version"] for name in wanted} == wanted


def test_each_client_of_the_table_has_its_pins_and_its_script() -> None:
    table = (CLIENTS / "run.py").read_text(encoding="utf-8")
    named = re.findall(
        r'^    Client\("[a-z0-9-]+", "([a-z_]+\.m?[a-z]+)"(?:, "([a-z0-9.-]+\.txt)")?', table, re.MULTILINE
    )
    assert {script for script, _ in named} == {file.name for file in CLIENTS.glob("check_*")}
    assert {pins for _, pins in named if pins} == {file.name for file in (CLIENTS / "requirements").glob("*.txt")}
