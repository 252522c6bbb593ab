"""Imports run one way, and the router never loads torch."""

import ast
import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from repository import Repository, cycles, nodes_of

ROOMS = {
    "space_proto": ("proto", set()),
    "space_common": ("proto", {"space_proto"}),
    "space_kernels": ("kernels", set()),
    "space_demo": ("server", set()),
    "space_smollm2": ("server", set()),
    "space_router": ("router", {"space_common", "space_proto"}),
    "space_model": ("server", {"space_common", "space_kernels"}),
    "space_server": ("server", {"space_common", "space_model", "space_kernels", "space_proto"}),
    "space_train": ("server", {"space_common", "space_model", "space_kernels", "space_proto"}),
    "space_eval": (
        "server",
        {"space_router", "space_server", "space_train", "space_model", "space_kernels", "space_common", "space_proto"},
    ),
}  # fmt: skip
DISTRIBUTIONS = {
    "google": "protobuf", "grpc": "grpcio", "huggingface_hub": "huggingface-hub", "prometheus_client":
    "prometheus-client", "grpc_tools": "grpcio-tools", "yaml": "pyyaml", "grpc_health": "grpcio-health-checking",
    "grpc_reflection": "grpcio-reflection", "opentelemetry": "opentelemetry-sdk",
}  # fmt: skip
OPTIONAL = {"flash_attn", "triton", "ray"}


def imported(file: Path) -> set[str]:
    """Top-level names that a file imports anywhere, functions included."""
    names = set()
    for node in nodes_of(file.read_text(encoding="utf-8")):
        if isinstance(node, ast.Import):
            names |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
            names.add(node.module.partition(".")[0])
    return names


@pytest.mark.parametrize("room", ROOMS)
def test_a_room_imports_only_the_rooms_below_it(root: Path, room: str) -> None:
    folder, below = ROOMS[room]
    wrong = {
        str(file.relative_to(root)): sorted(others)
        for file in sorted((root / folder / room).rglob("*.py"))
        if (others := {name for name in imported(file) if name.startswith("space_")} - below - {room})
    }
    assert wrong == {}


@pytest.mark.parametrize("kind", ["modules", "rooms", "packages"])
def test_imports_make_no_circle(root: Path, repository: Repository, kind: str) -> None:
    """Between modules, rooms of a package, packages. Those there are today may only get fewer."""
    listed = tomllib.loads((root / "tests/house/snapshots/may_only_shrink.toml").read_text())["cycles"][kind]
    find = {"modules": repository.module_cycles, "rooms": repository.room_cycles, "packages": repository.package_cycles}
    now = find[kind]()
    new = [cycle for cycle in now if not any(set(cycle) <= set(each.split()) for each in listed)]
    assert {" ".join(cycle): repository.crossings(cycle) if kind == "rooms" else [] for cycle in new} == {}


def test_circles_are_found() -> None:
    assert cycles({"a": ["b"], "b": ["c", "d"], "c": ["a"], "d": ["e"], "e": ["d"]}) == [["a", "b", "c"], ["d", "e"]]
    assert cycles({"a": ["b", "c"], "b": ["c"]}) == []


@pytest.mark.parametrize("module", ["space_router", "space_router.cli", "space_router.app", "space_router.serve"])
def test_the_router_leaves_torch_unloaded(module: str) -> None:
    code = f"import sys, {module}; print({{'torch', 'transformers'}} & set(sys.modules))"
    run = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert run.stdout.strip() == "set()"


def test_every_imported_package_is_a_declared_dependency(root: Path) -> None:
    project = tomllib.loads((root / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    declared = {
        re.split(r"[^a-z0-9-]", line.lower())[0]
        for line in [*project["dependencies"], *extras["train"], *extras["dev"]]
    }
    missing = {}
    for room, (folder, _) in ROOMS.items():
        for file in sorted((root / folder / room).rglob("*.py")):
            for name in imported(file) - set(sys.stdlib_module_names) - ROOMS.keys() - OPTIONAL:
                if DISTRIBUTIONS.get(name, name) not in declared:
                    missing[str(file.relative_to(root))] = name
    assert missing == {}


BARE = (
    "accelerate", "datasets", "fastapi", "flash_attn", "grpc_health", "grpc_reflection", "httptools", "hypothesis",
    "jsonschema", "llguidance", "matplotlib", "openai", "opentelemetry", "orjson", "peft", "prometheus_client",
    "psutil", "pydantic", "rouge_score", "schemathesis", "sentencepiece", "space_router", "starlette", "tensorboard",
    "uvicorn", "uvloop",
)  # fmt: skip
"""Not there on a machine for models alone, which has torch, triton, transformers and theirs, grpcio and pytest."""


def test_worker_and_gpu_check_run_with_what_a_machine_for_models_has(root: Path) -> None:
    """Nothing of the router's and no pytest plugin; without llguidance, only requests with a grammar are refused."""
    code = f"""
import sys
sys.modules.update(dict.fromkeys({BARE!r}))
sys.path[:0] = ["tests/support", "tests"]
import importlib.resources, pytest
import gpu.__main__, space_server.__main__, space_server.grpc_server
from gpu.stages import kernel_tests
from space_server.grammar import Grammars
with importlib.resources.as_file(importlib.resources.files("space_demo")) as folder:
    print(Grammars.of(folder, 4096, ()).why_none)
words = ["--collect-only", "-qq", "-p", "no:cacheprovider"]
sys.exit(pytest.main([*words, "-m", "gpu", "tests"]) or pytest.main([*words, *kernel_tests()]))
"""
    environment = {**os.environ, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    run = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False, cwd=root, env=environment
    )
    assert run.returncode == 0, run.stdout + run.stderr
    assert "llguidance, which compiles them, is not installed" in run.stdout
    assert "tests/gpu/test_speed.py" in run.stdout
    assert "tests/server/device_runner/test_device_graphs.py" in run.stdout
