"""The images, without building them: what they copy exists, what they run is what `make` runs, nobody is root."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from space_router.metrics import Metrics

DOCKERFILES = ["Dockerfile", "docker/cpu.Dockerfile"]
ORDER = ["environment", "torch", "dependencies", "project"]


def instructions(text: str) -> list[tuple[str, str]]:
    """(instruction, arguments) of a Dockerfile, continuation lines joined."""
    joined = re.sub(r"\\\n\s*", " ", re.sub(r"^#.*\n", "", text, flags=re.MULTILINE))
    return [(word, rest) for line in joined.splitlines() if line for word, _, rest in [line.partition(" ")]]


@pytest.fixture(params=DOCKERFILES)
def steps(root: Path, request: pytest.FixtureRequest) -> list[tuple[str, str]]:
    return instructions((root / request.param).read_text())


def test_everything_that_is_copied_exists_and_is_let_through(root: Path, steps: list[tuple[str, str]]) -> None:
    through = [line[1:] for line in (root / ".dockerignore").read_text().splitlines() if line.startswith("!")]
    sources = [
        source
        for word, rest in steps
        if word == "COPY" and "--from=" not in rest
        for source in [part for part in rest.split() if not part.startswith("--")][:-1]
    ]
    assert sources
    assert [source for source in sources if not (root / source).exists()] == []
    assert [source for source in sources if not any(f"{source}/".startswith(f"{open_}/") for open_ in through)] == []


def test_the_install_script_does_all_its_stages_in_order(steps: list[tuple[str, str]]) -> None:
    runs = [rest for word, rest in steps if word == "RUN" and "docker/install.sh" in rest]
    stages = [stage for run in runs for stage in re.search(r'--stages ("[^"]+"|\S+)', run)[1].strip('"').split()]
    assert stages == ORDER
    assert "--no-editable" in runs[-1]


def test_a_change_in_the_source_reuses_the_dependency_layers(steps: list[tuple[str, str]]) -> None:
    order = [f"{word} {rest}" for word, rest in steps]
    dependencies = next(n for n, line in enumerate(order) if "--stages dependencies" in line)
    rooms = next(n for n, line in enumerate(order) if line.startswith("COPY server"))
    assert dependencies < rooms


def test_the_server_is_not_root_and_says_when_it_is_ready(steps: list[tuple[str, str]]) -> None:
    last = dict(steps)
    assert int(last["USER"]) >= 1000
    assert '"healthcheck"' in last["HEALTHCHECK"]
    assert json.loads(last["ENTRYPOINT"]) == ["entrypoint.sh"]
    assert json.loads(last["CMD"]) == ["serve"]
    assert "HF_HOME=/data/" in last["ENV"]


def test_hadolint_finds_nothing(root: Path) -> None:
    linter = Path(sys.executable).with_name("hadolint")
    if not linter.exists():
        pytest.skip("hadolint has no build for this platform")
    run = subprocess.run([linter, *DOCKERFILES], cwd=root, capture_output=True, text=True)
    assert run.stdout == ""


# ------------------------------------------------------------------------------------------------------- entrypoint


def entrypoint(root: Path, tmp_path: Path, *arguments: str, **environment: str) -> str:
    """What the entrypoint runs: the stub spaceserve says how it was called."""
    for name in ("spaceserve", "python"):
        stub = tmp_path / name
        stub.write_text(f'#!/bin/sh\necho "{name} $* host=$SPACESERVE_HOST"\n')
        stub.chmod(0o755)
    run = subprocess.run(
        [str(root / "docker/entrypoint.sh"), *arguments],
        env={"PATH": f"{tmp_path}:/usr/bin:/bin", **environment}, capture_output=True, text=True, check=True,
    )  # fmt: skip
    return run.stdout.strip()


@pytest.mark.parametrize(
    ("arguments", "run"),
    [
        ([], "spaceserve serve host=0.0.0.0"),
        (["serve", "--port", "9000"], "spaceserve serve --port 9000 host=0.0.0.0"),
        (["--model", "a b"], "spaceserve serve --model a b host=0.0.0.0"),
        (["router", "--worker-address", "w:1"], "spaceserve router --worker-address w:1 host=0.0.0.0"),
        (["worker", "--listen", "0.0.0.0:50051"], "spaceserve worker --listen 0.0.0.0:50051 host="),
        (["convert", "a", "b"], "spaceserve convert a b host="),
        (["echo", "anything", "else"], "anything else"),
    ],
)
def test_the_entrypoint_runs_what_it_is_told(root: Path, tmp_path: Path, arguments: list[str], run: str) -> None:
    assert entrypoint(root, tmp_path, *arguments) == run


def test_a_host_from_the_environment_wins(root: Path, tmp_path: Path) -> None:
    assert entrypoint(root, tmp_path, SPACESERVE_HOST="10.0.0.1") == "spaceserve serve host=10.0.0.1"


def test_the_health_check_asks_readyz_and_fails_when_nobody_answers(root: Path, tmp_path: Path) -> None:
    assert "/readyz" in (root / "docker/entrypoint.sh").read_text()
    (tmp_path / "python").symlink_to(sys.executable)
    run = subprocess.run(
        [str(root / "docker/entrypoint.sh"), "healthcheck"],
        env={"PATH": f"{tmp_path}:/usr/bin:/bin", "SPACESERVE_PORT": "1"}, capture_output=True, text=True,
    )  # fmt: skip
    assert run.returncode == 1
    assert "http://127.0.0.1:1/readyz" in run.stderr


# ---------------------------------------------------------------------------------------------- compose and Grafana


def test_compose_mounts_only_files_that_exist_and_builds_these_images(root: Path) -> None:
    services = yaml.safe_load((root / "docker/compose.yaml").read_text())["services"]
    gpu = yaml.safe_load((root / "docker/compose.gpu.yaml").read_text())["services"]
    assert services.keys() == {"spaceserve", "prometheus", "grafana"}
    assert [services["spaceserve"]["build"]["dockerfile"], gpu["spaceserve"]["build"]["dockerfile"]] == DOCKERFILES[
        ::-1
    ]
    mounts = [volume.split(":")[0] for service in services.values() for volume in service["volumes"]]
    local = [mount for mount in mounts if mount.startswith("./")]
    assert local
    assert all((root / "docker" / mount).is_file() for mount in local)


def test_the_dashboard_draws_only_series_that_the_router_has(root: Path) -> None:
    dashboard = json.loads((root / "docker/grafana/spaceserve.json").read_text())
    queries = " ".join(target["expr"] for panel in dashboard["panels"] for target in panel["targets"])
    used = set(re.findall(r"spaceserve_\w+", queries))
    rendered = Metrics().render().decode()
    present = set(re.findall(r"^(spaceserve_\w+)", rendered, flags=re.MULTILINE))
    assert used - present == set()
    assert "spaceserve_tokens_per_step_sum" in used
