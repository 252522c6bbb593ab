"""A machine that cannot serve as it was asked is told so at the start, with the cure."""

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from space_server.__main__ import _check_machine
from space_server.config import parse
from space_server.machine.nvml import NvmlError
from space_server.startup import machine_check
from space_server.startup.machine_check import TorchBuild, check_compiler, check_gpu, check_shared_memory

H100 = SimpleNamespace(name="NVIDIA H100", memory=80 * 1024**3)
CUDA_13 = TorchBuild("2.13.0", "13.0", sees_gpu=True)
ON_CPU = TorchBuild("2.13.0+cpu", None, sees_gpu=False)


@dataclass
class Driver:
    """What NVML would say."""

    driver: str = "580.65.06"
    cuda: tuple[int, int] = (13, 0)
    gpus: list[Any] = field(default_factory=lambda: [H100])


def look(asked: str, build: TorchBuild, driver: Driver | None, tmp_path: Path, *, device_file: bool = False) -> Any:
    if device_file:
        (tmp_path / "nvidia0").touch()
    opened: Callable[[], Any] = lambda: driver  # noqa: E731
    return check_gpu(asked, build, open_nvml=opened, devices=tmp_path)


def test_a_gpu_that_can_be_used_is_named_with_its_driver(tmp_path: Path) -> None:
    found = look("auto", CUDA_13, Driver(), tmp_path)
    assert (found.state, found.fact) == ("ok", "NVIDIA H100 (80 GiB), driver 580.65.06, CUDA 13.0.")


@pytest.mark.parametrize("asked", ["auto", "cuda", "cuda:1"])
def test_a_driver_that_is_too_old_for_torch_is_named_with_the_one_that_is_needed(asked: str, tmp_path: Path) -> None:
    found = look(asked, CUDA_13, Driver("535.104", (12, 2)), tmp_path)
    assert found.state == "fail"
    assert "driver 535.104, which runs CUDA up to 12.2; torch 2.13.0 is built for 13.0" in found.fact
    assert "Install driver 580 or newer on the machine" in found.cure


def test_a_driver_of_the_same_major_cuda_is_new_enough(tmp_path: Path) -> None:
    assert look("auto", TorchBuild("2.13.0", "12.8", True), Driver("535.104", (12, 2)), tmp_path).state == "ok"


def test_without_a_gpu_auto_takes_the_cpu_and_cuda_says_how_a_container_gets_one(tmp_path: Path) -> None:
    assert look("auto", CUDA_13, None, tmp_path).state == "ok"
    found = look("cuda", CUDA_13, None, tmp_path)
    assert found.state == "fail"
    assert "docker run --gpus all" in found.cure


def test_a_gpu_whose_driver_is_silent_is_not_passed_over(tmp_path: Path) -> None:
    found = look("auto", CUDA_13, None, tmp_path, device_file=True)
    assert found.state == "fail"
    assert "NVIDIA_DRIVER_CAPABILITIES=compute,utility" in found.cure


@pytest.mark.parametrize(("asked", "state"), [("auto", "note"), ("cuda", "fail")])
def test_a_torch_without_cuda_beside_a_gpu_is_said(asked: str, state: str, tmp_path: Path) -> None:
    found = look(asked, ON_CPU, Driver(), tmp_path)
    assert found.state == state
    assert "docker/install.sh --device cuda" in found.cure


def test_a_gpu_that_torch_does_not_see_is_not_passed_over(tmp_path: Path) -> None:
    found = look("auto", TorchBuild("2.13.0", "13.0", sees_gpu=False), Driver(), tmp_path)
    assert found.state == "fail"
    assert "CUDA_VISIBLE_DEVICES" in found.cure


def test_a_driver_that_refuses_is_quoted(tmp_path: Path) -> None:
    class Refusing(Driver):
        @property
        def gpus(self) -> list[Any]:  # type: ignore[override]
            raise NvmlError("nvmlDeviceGetCount_v2 gave status 999")

        @gpus.setter
        def gpus(self, value: list[Any]) -> None: ...

    found = look("auto", CUDA_13, Refusing(), tmp_path)
    assert (found.state, "gave status 999" in found.fact) == ("fail", True)


def test_who_asks_for_the_cpu_is_asked_nothing_of_gpus(tmp_path: Path) -> None:
    assert look("cpu", CUDA_13, Driver("1", (9, 0)), tmp_path).state == "ok"


def test_a_worker_with_a_driver_that_is_too_old_ends_before_it_reads_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    from space_server import __main__ as worker

    bad = machine_check.Finding("gpu", "fail", "The driver is too old.", "Install another.")
    monkeypatch.setattr(worker, "check_gpu", lambda asked, build: bad)
    with pytest.raises(Exception, match=r"The driver is too old\. Install another\."):
        _check_machine(parse(["--listen", "h:1"]))


def test_shared_memory_matters_to_ranks_on_gpus_alone(tmp_path: Path) -> None:
    assert check_shared_memory(1, True, tmp_path) is None
    assert check_shared_memory(2, False, tmp_path) is None


@pytest.mark.parametrize(("mib", "state"), [(64, "note"), (1024, "ok")])
def test_shared_memory_as_small_as_dockers_is_said_with_the_flag_that_raises_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, mib: int, state: str
) -> None:
    monkeypatch.setattr(machine_check.shutil, "disk_usage", lambda folder: SimpleNamespace(total=mib * 1024**2))
    found = check_shared_memory(2, True, tmp_path)
    assert found is not None
    assert (found.state, f"has {mib} MiB" in found.fact) == (state, True)
    assert ("--shm-size 1g" in found.cure) == (state == "note")


def test_triton_needs_a_compiler_and_pythons_headers(tmp_path: Path) -> None:
    found = check_compiler(True, lambda name: None, tmp_path)
    assert found.state == "fail"
    assert f"missing here: a C compiler, Python.h in {tmp_path}." in found.fact
    (tmp_path / "Python.h").touch()
    assert check_compiler(True, lambda name: f"/usr/bin/{name}", tmp_path).state == "ok"
    assert check_compiler(False, lambda name: None, tmp_path).state == "ok"
