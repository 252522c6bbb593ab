"""Installing from a checkout, and what the wheel holds."""

import importlib.metadata
import os
import re
import shutil
import subprocess
import sys
import tomllib
import zipfile
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

import pytest
from space_common.version import version

# Answers as python, venv and pip would, writes down how it was called, and remembers what it "installed".
STUB = r"""#!/bin/sh
echo "$*" >>"$STUB_STATE/calls"
echo "compiles=${PIP_COMPILE-yes} $*" >>"$STUB_STATE/compiles"
case "$*" in
    "-c "*) [ ! -e "$STUB_STATE/too-old" ] ;;
    -V) echo "Python 3.11.0" ;;
    "-P -m venv "*) mkdir -p "$4/bin" && cp "$0" "$4/bin/python" && : >"$4/pyvenv.cfg" ;;
    *installed.py*--project*) cd "$STUB_STATE" && [ -e torch ] && [ -e dependencies ] && [ -e project ] ;;
    *installed.py*torch.txt) [ -e "$STUB_STATE/torch" ] ;;
    *installed.py*) [ -e "$STUB_STATE/dependencies" ] ;;
    *" pip "*torch==*+cpu)
        [ ! -e "$STUB_STATE/interrupt-torch" ] || { trap '' TERM; kill -TERM 0; exit 1; }
        [ ! -e "$STUB_STATE/no-cpu-build" ] && : >"$STUB_STATE/torch" ;;
    *" pip "*torch==*) : >"$STUB_STATE/torch" ;;
    *" pip "*" -r "*)
        [ ! -e "$STUB_STATE/interrupt" ] || { kill -TERM 0; sleep 9; exit 1; }
        [ ! -e "$STUB_STATE/offline" ] || { echo "ERROR: no route to host" >&2; exit 1; }
        : >"$STUB_STATE/dependencies" ;;
    *" pip "*--no-build-isolation*) : >"$STUB_STATE/project" ;;
esac
"""


@dataclass
class Machine:
    """A machine with nothing but a python."""

    root: Path
    state: Path

    @property
    def venv(self) -> Path:
        return self.state / "venv"

    def install(self, *flags: str, device: str = "cpu", path: str = "") -> subprocess.CompletedProcess[str]:
        (self.state / "calls").write_text("")
        return subprocess.run(
            [str(self.root / "docker/install.sh"), "--venv", str(self.venv), "--device", device, *flags],
            env={
                "PATH": path or os.environ["PATH"],
                "PYTHON": str(self.state / "python"),
                "STUB_STATE": str(self.state),
            },
            capture_output=True,
            text=True,
            start_new_session=True,  # a group of its own, to be interrupted as a whole
        )

    def set(self, name: str) -> None:
        (self.state / name).touch()

    def unset(self, name: str) -> None:
        (self.state / name).unlink()

    @property
    def pip(self) -> list[str]:
        calls = (self.state / "calls").read_text().splitlines()
        return [call for call in calls if " pip " in call and " install " in call]

    @property
    def stages(self) -> list[str]:
        calls = (self.state / "calls").read_text()
        marks = {"environment": "-m venv ", "torch": "torch==", "dependencies": " -r ", "project": "-isolation"}
        found = {stage: calls.find(mark) for stage, mark in marks.items()}
        return sorted((stage for stage, at in found.items() if at >= 0), key=lambda stage: found[stage])


@pytest.fixture
def machine(root: Path, tmp_path: Path) -> Machine:
    python = tmp_path / "python"
    python.write_text(STUB)
    python.chmod(0o755)
    return Machine(root, tmp_path)


def test_the_first_run_installs_torch_before_everything_else_and_says_each_stage(machine: Machine) -> None:
    run = machine.install()
    assert run.returncode == 0, run.stderr
    assert machine.stages == ["environment", "torch", "dependencies", "project"]
    for word in ("creating", "torch: the CPU build", "dependencies:", "project: spaceserve", "ready after"):
        assert word in run.stdout


def test_the_second_run_does_nothing(machine: Machine) -> None:
    machine.install()
    second = machine.install()
    assert (second.returncode, second.stdout, machine.pip) == (0, "", [])


def test_a_development_environment_serves_too(machine: Machine) -> None:
    machine.install("--dev")
    assert machine.pip[1].endswith("dev.txt")
    machine.install()
    assert machine.pip == []


def test_without_a_gpu_the_cpu_build_is_looked_for_in_two_places_and_then_the_default_is_taken(
    machine: Machine,
) -> None:
    machine.set("no-cpu-build")
    assert machine.install().returncode == 0
    first, second, third = machine.pip[:3]
    assert "+cpu" in first
    assert "--index-url" not in first
    assert re.search(r"--retries 0 --timeout 10 --index-url \S+ torch==\S+\+cpu", second)
    assert re.search(r"install torch==[\d.]+$", third)


@pytest.mark.parametrize(("flags", "compiles"), [((), "0"), (("--stages", "environment torch dependencies"), "yes")])
def test_packages_are_compiled_at_their_import_and_in_images_at_once(
    machine: Machine, flags: tuple[str, ...], compiles: str
) -> None:
    assert machine.install(*flags).returncode == 0
    calls = [call for call in (machine.state / "compiles").read_text().splitlines() if " install " in call]
    assert len(calls) >= 2
    assert all(call.startswith(f"compiles={compiles} ") for call in calls), calls


def test_without_a_c_compiler_zig_is_installed_and_its_absence_ends_nothing(machine: Machine) -> None:
    tools = machine.state / "tools"
    tools.mkdir()
    for tool in ("bash", "dirname", "grep", "cat", "cksum", "awk", "uname", "mkdir", "mktemp", "rm", "cp", "basename"):
        (tools / tool).symlink_to(shutil.which(tool) or pytest.fail(f"there is no {tool}"))
    run = machine.install(path=str(tools))
    assert run.returncode == 0, run.stderr
    assert "there is no C++ compiler here, so zig" in run.stdout
    assert any(
        call.endswith("--require-hashes -r " + str(machine.root / "docker/locks/compiler.txt")) for call in machine.pip
    )
    (tools / "g++").symlink_to("/bin/true")
    assert machine.install("--dev", path=str(tools)).returncode == 0
    assert not any("compiler.txt" in call for call in machine.pip)


def test_with_a_gpu_the_default_build_is_taken(machine: Machine) -> None:
    assert machine.install(device="cuda").returncode == 0
    assert re.search(r"install torch==[\d.]+$", machine.pip[0])


def test_a_broken_environment_is_repaired(machine: Machine) -> None:
    machine.install()
    machine.unset("dependencies")
    assert machine.install().returncode == 0
    assert machine.stages == ["dependencies", "project"]


def test_an_interrupted_stage_is_done_again_from_its_beginning(machine: Machine) -> None:
    machine.set("interrupt")
    run = machine.install()
    assert run.returncode == 130
    assert "run it again" in run.stdout
    machine.unset("interrupt")
    machine.set("dependencies")  # some of it looks installed
    assert machine.install().returncode == 0
    assert machine.stages == ["dependencies", "project"]
    assert "--force-reinstall" in machine.pip[0]


def test_an_interrupt_that_pip_answers_with_a_failure_ends_the_install(machine: Machine) -> None:
    machine.set("interrupt-torch")
    run = machine.install()
    assert (run.returncode, len(machine.pip)) == (130, 1), run.stdout
    assert "run it again" in run.stdout
    assert run.stderr == ""
    machine.unset("interrupt-torch")
    assert machine.install().returncode == 0
    assert "--force-reinstall" in machine.pip[0]


def test_a_failure_shows_what_pip_said_and_the_cure(machine: Machine) -> None:
    machine.set("offline")
    run = machine.install()
    assert run.returncode == 1
    assert "no route to host" in run.stderr
    assert "PIP_INDEX_URL" in run.stderr
    assert not list(machine.venv.glob(".installed-*"))


def test_an_old_python_is_named_with_the_cure(machine: Machine, tmp_path: Path) -> None:
    machine.set("too-old")
    tools = tmp_path / "tools"
    tools.mkdir()
    for name in ("python3", "python"):
        (tools / name).symlink_to(machine.state / "python")
    for name in ("bash", "dirname", "cat", "grep", "mkdir", "rm", "mktemp", "uname", "ls", "env"):
        found = next(place for folder in os.environ["PATH"].split(":") if (place := Path(folder, name)).exists())
        (tools / name).symlink_to(found)
    run = subprocess.run(
        [str(machine.root / "docker/install.sh"), "--venv", str(machine.venv), "--device", "cpu"],
        env={"PATH": str(tools), "STUB_STATE": str(machine.state)}, capture_output=True, text=True,
    )  # fmt: skip
    assert run.returncode == 1
    assert "no Python 3.11 or newer" in run.stderr
    assert "apt-get install python3 python3-venv" in run.stderr


def test_a_folder_that_is_no_environment_is_left_alone(machine: Machine) -> None:
    machine.venv.mkdir()
    (machine.venv / "thesis.tex").write_text("years of work")
    run = machine.install()
    assert run.returncode == 1
    assert "not a virtual environment" in run.stderr
    assert (machine.venv / "thesis.tex").exists()


def test_the_lock_of_a_killed_install_is_no_hindrance(machine: Machine) -> None:
    lock = machine.state / "venv.lock"
    lock.mkdir()
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    (lock / "pid").write_text(str(gone.pid))
    assert machine.install().returncode == 0
    assert not lock.exists()


@pytest.mark.parametrize(
    ("flags", "message"),
    [(["--stages", "torhc"], "the stages are"), (["--device", "tpu"], "auto, cpu or cuda"), (["--fast"], "--help")],
)
def test_a_wrong_flag_is_named(machine: Machine, flags: list[str], message: str) -> None:
    run = machine.install(*flags)
    assert run.returncode == 1
    assert message in run.stderr


@pytest.mark.parametrize(
    ("pin", "said"),
    [
        (f"pytest=={metadata.version('pytest')} \\", ""),
        ("pytest==0.1 \\", "pytest is"),
        ("no-such-package==1 \\", "no-such-package is missing"),
        ("no-such-package==1 ; sys_platform == 'plan9' \\", ""),
    ],
    ids=["right", "other version", "missing", "other platform"],
)
def test_installed_compares_this_environment_with_a_lock(root: Path, tmp_path: Path, pin: str, said: str) -> None:
    lock = tmp_path / "lock.txt"
    lock.write_text(f"{pin}\n    --hash=sha256:00\n")
    command = [sys.executable, "-I", str(root / "docker/locks/installed.py"), str(lock)]
    run = subprocess.run(command, capture_output=True, text=True)
    assert said in run.stdout
    assert run.returncode == (1 if said else 0)


@pytest.mark.parametrize("lock", ["run.txt", "dev.txt"])
def test_every_locked_package_is_exact_and_hashed_and_torch_is_none_of_them(root: Path, lock: str) -> None:
    entries = (root / "docker/locks" / lock).read_text().replace("\\\n", " ").splitlines()
    assert len(entries) > 50
    assert [entry[:60] for entry in entries if not re.match(r"[a-z0-9-]+==\S+ .*--hash=sha256:", entry)] == []
    assert not any(entry.startswith(("torch==", "nvidia-")) for entry in entries)


def test_what_testing_adds_changes_no_version_that_serving_has(root: Path) -> None:
    def pins(lock: str) -> set[str]:
        return {line for line in (root / "docker/locks" / lock).read_text().splitlines() if "==" in line}

    assert pins("run.txt") <= pins("dev.txt")


def test_shell_scripts_are_clean(root: Path, files: list[Path]) -> None:
    scripts = [str(path) for path in files if path.suffix == ".sh" or path == Path(".ci/run")]
    assert len(scripts) >= 4
    checker = Path(sys.executable).with_name("shellcheck")
    run = subprocess.run([checker, *scripts], cwd=root, capture_output=True, text=True)
    assert run.stdout == ""


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
