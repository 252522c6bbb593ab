"""Energy is counted where a sensor may be read, and said of nothing else."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from space_common.nvml import Nvml, NvmlError
from space_server.machine.sensors import Meter, find_sensors, this_machine

FULL = 262_143_328_850  # microjoules: what an Intel package counts to


class Powercap:
    """A folder as the kernel makes it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def zone(self, number: str, name: str, microjoules: int) -> None:
        zone = self.folder / f"intel-rapl:{number}"
        zone.mkdir(parents=True)
        (zone / "name").write_text(f"{name}\n")
        (zone / "max_energy_range_uj").write_text(f"{FULL}\n")
        self.count(number, microjoules)

    def count(self, number: str, microjoules: int) -> None:
        (self.folder / f"intel-rapl:{number}" / "energy_uj").write_text(f"{microjoules}\n")


@pytest.fixture
def powercap(tmp_path: Path) -> Powercap:
    made = Powercap(tmp_path / "powercap")
    made.zone("0", "package-0", 5_000_000)
    made.zone("0:0", "core", 1_000_000)
    made.zone("0:1", "dram", 2_000_000)
    made.zone("1", "psys", 9_000_000)
    return made


class FakeLibrary:
    """libnvidia-ml with two GPUs, in C's own types. `refused`: functions that give an error."""

    def __init__(self) -> None:
        self.millijoules = [7_000, 9_000]
        self.refused: set[str] = set()

    def __getattr__(self, name: str) -> Callable[..., int]:
        if not name.startswith("nvml"):
            raise AttributeError(name)
        return lambda *arguments: 3 if name in self.refused else (getattr(self, f"_{name}")(*arguments) or 0)

    def _nvmlInit_v2(self) -> None: ...

    def _nvmlSystemGetDriverVersion(self, buffer: Any, length: Any) -> None:
        buffer.value = b"580.65.06"

    def _nvmlSystemGetCudaDriverVersion_v2(self, number: Any) -> None:
        number._obj.value = 13000

    def _nvmlDeviceGetCount_v2(self, count: Any) -> None:
        count._obj.value = 2

    def _nvmlDeviceGetHandleByIndex_v2(self, index: Any, handle: Any) -> None:
        handle._obj.value = 100 + index.value

    def _nvmlDeviceGetMemoryInfo(self, handle: Any, memory: Any) -> None:
        memory._obj.total = 80 * 1024**3

    def _nvmlDeviceGetName(self, handle: Any, buffer: Any, length: Any) -> None:
        buffer.value = b"NVIDIA H100"

    def _nvmlDeviceGetUUID(self, handle: Any, buffer: Any, length: Any) -> None:
        buffer.value = f"GPU-{handle.value - 100}".encode()

    def _nvmlDeviceGetTotalEnergyConsumption(self, handle: Any, millijoules: Any) -> None:
        millijoules._obj.value = self.millijoules[handle.value - 100]


def drawn(meter: Meter) -> dict[str, float]:
    return {said.device: said.joules for said in meter.drawn()}


def test_a_package_and_its_memory_are_counted_and_nothing_twice(powercap: Powercap) -> None:
    meter = Meter(find_sensors([], powercap=powercap.folder))
    assert meter.devices == ["package-0", "package-0-dram"]
    for number, microjoules in (("0", 6_500_000), ("0:0", 9_000_000), ("0:1", 2_250_000), ("1", 99_000_000)):
        powercap.count(number, microjoules)
    assert drawn(meter) == {"package-0": 1.5, "package-0-dram": 0.25}
    assert drawn(meter) == {"package-0": 0.0, "package-0-dram": 0.0}


def test_a_counter_that_is_full_begins_again_and_loses_nothing(powercap: Powercap) -> None:
    powercap.count("0", FULL - 999_999)
    meter = Meter(find_sensors([], powercap=powercap.folder))
    powercap.count("0", 2_000_000)
    assert drawn(meter)["package-0"] == pytest.approx(3.0)


def test_without_counters_there_is_nothing_rather_than_zero(tmp_path: Path) -> None:
    assert Meter(find_sensors([], powercap=tmp_path / "none")).drawn() == []


def test_a_counter_that_cannot_be_read_is_left_out_and_one_that_fails_later_is_forgotten(powercap: Powercap) -> None:
    (powercap.folder / "intel-rapl:0:1" / "energy_uj").unlink()
    meter = Meter(find_sensors([], powercap=powercap.folder))
    assert meter.devices == ["package-0"]
    (powercap.folder / "intel-rapl:0" / "energy_uj").unlink()
    assert drawn(meter) == {}
    powercap.count("0", 9_000_000)
    assert drawn(meter) == {}


def test_only_the_gpus_that_compute_here_are_counted(tmp_path: Path) -> None:
    library = FakeLibrary()
    meter = Meter(find_sensors(["1"], powercap=tmp_path, open_nvml=lambda: Nvml(library)))
    library.millijoules = [50_000, 9_750]
    assert drawn(meter) == {"gpu-1": 0.75}


def test_a_gpu_without_a_counter_is_left_out(tmp_path: Path) -> None:
    library = FakeLibrary()
    library.refused = {"nvmlDeviceGetTotalEnergyConsumption"}
    assert Meter(find_sensors(["GPU-0"], powercap=tmp_path, open_nvml=lambda: Nvml(library))).devices == []


def test_the_driver_says_its_version_its_cuda_and_its_gpus() -> None:
    nvml = Nvml(FakeLibrary())
    assert (nvml.driver, nvml.cuda) == ("580.65.06", (13, 0))
    assert [(gpu.index, gpu.name, gpu.uuid, gpu.memory) for gpu in nvml.gpus] == [
        (0, "NVIDIA H100", "GPU-0", 80 * 1024**3),
        (1, "NVIDIA H100", "GPU-1", 80 * 1024**3),
    ]


def test_a_machine_without_a_driver_or_with_one_that_refuses_has_no_nvml() -> None:
    def missing(name: str) -> object:
        raise OSError(name)

    refusing = FakeLibrary()
    refusing.refused = {"nvmlInit_v2"}
    assert Nvml.open(missing) is None
    assert Nvml.open(lambda name: refusing) is None
    assert Nvml.open(lambda name: FakeLibrary()) is not None


def test_a_function_that_the_driver_lacks_is_named() -> None:
    nvml = Nvml(FakeLibrary())
    nvml._library = object()
    with pytest.raises(NvmlError, match="nvmlSystemGetDriverVersion"):
        nvml.driver  # noqa: B018


def test_all_processes_of_a_machine_call_it_the_same() -> None:
    assert this_machine() == this_machine() != ""
