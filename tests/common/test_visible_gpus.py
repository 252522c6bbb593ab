"""Which GPUs CUDA shows a process, and which of them each of several workers gets."""

from types import SimpleNamespace
from typing import Any, cast

import pytest
from space_common.nvml import Nvml, NvmlError
from space_common.visible_gpus import VISIBLE, gpus_of, num_workers_for, visible_gpus

GPUS = ("GPU-a", "GPU-b", "GPU-c", "GPU-d")


def nvml(*uuids: str) -> Nvml:
    return cast(Nvml, SimpleNamespace(gpus=[SimpleNamespace(uuid=uuid) for uuid in uuids]))


class Refusing:
    @property
    def gpus(self) -> list[Any]:
        raise NvmlError("no")


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        ({}, GPUS),
        ({VISIBLE: "2,0"}, ("2", "0")),
        ({VISIBLE: " 1 , GPU-d,MIG-x"}, ("1", "GPU-d", "MIG-x")),
        ({VISIBLE: "1,-1,2"}, ("1",)),  # CUDA ignores what follows the first that is no GPU
        ({VISIBLE: "0,4,1"}, ("0",)),
        ({VISIBLE: "NoDevFiles"}, ()),
        ({VISIBLE: ""}, ()),
    ],
)
def test_gpus_are_those_that_cuda_would_show(environment: dict[str, str], expected: tuple[str, ...]) -> None:
    assert visible_gpus(environment, open_nvml=lambda: nvml(*GPUS), torch="2.11.0+cu130") == expected


def test_there_are_none_without_a_driver_and_for_a_torch_that_has_no_cuda() -> None:
    asked = {VISIBLE: "0,1"}
    assert visible_gpus(asked, open_nvml=lambda: None, torch="2.11.0") == ()
    assert visible_gpus(asked, open_nvml=lambda: cast(Nvml, Refusing()), torch="2.11.0") == ()
    assert visible_gpus(asked, open_nvml=lambda: nvml(*GPUS), torch="2.13.0+cpu") == ()


@pytest.mark.parametrize(
    ("num_gpus", "per_worker", "expected"), [(0, 1, 1), (4, 1, 4), (4, 2, 2), (3, 2, 1), (1, 2, 1)]
)
def test_as_many_workers_as_there_are_gpus_for(num_gpus: int, per_worker: int, expected: int) -> None:
    assert num_workers_for(GPUS[:num_gpus], per_worker) == expected


def test_each_worker_has_gpus_of_its_own_where_they_are_enough() -> None:
    assert [gpus_of(number, GPUS, 2, 2) for number in range(2)] == [GPUS[:2], GPUS[2:]]
    assert [gpus_of(number, GPUS, 3, 1) for number in range(3)] == [GPUS[:1], GPUS[1:2], GPUS[2:3]]
    assert gpus_of(1, (), 2, 1) == ()


def test_workers_of_one_gpu_share_and_ranks_do_not() -> None:
    assert [gpus_of(number, GPUS[:2], 3, 1) for number in range(3)] == [("GPU-a",), ("GPU-b",), ("GPU-a",)]
    with pytest.raises(ValueError, match=r"2 workers of 2 GPUs need 4; CUDA_VISIBLE_DEVICES leaves 3"):
        gpus_of(0, GPUS[:3], 2, 2)
