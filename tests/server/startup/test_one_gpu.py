"""A process computes on the first GPU that it sees; which one that is says a variable."""

from __future__ import annotations

import subprocess
import sys

import pytest
from space_model.model_error import InvalidSetting
from space_server.config import parse
from space_server.startup.one_gpu import on_first_gpu
from space_server.tensor_parallel.rank_place import RankPlace

RANKS = {"WORLD_SIZE": "8", "MASTER_ADDR": "host", "MASTER_PORT": "29500"}


def seeing(device: str, found: int = 1, **environment: str) -> tuple[str, dict[str, str]]:
    """What the device is called then, and the variables."""
    config = parse(["--model", "demo", "--listen", "unix:/nowhere", "--device", device])
    config, place = on_first_gpu(config, None, environment, lambda: found)
    assert place is None
    return config.device, environment


def seen_by(rank: int, device: str, **environment: str) -> tuple[int, str | None]:
    """Its number among the GPUs that a rank sees, and those."""
    environment |= RANKS | {"RANK": str(rank)}
    config = parse(["--model", "demo", "--listen", "unix:/nowhere", "--device", device, "--tensor-parallel", "8"])
    same, place = on_first_gpu(config, RankPlace.of(8, environment), environment, lambda: 1)
    assert same == config
    assert place is not None
    return place.local_rank, environment.get("CUDA_VISIBLE_DEVICES")


@pytest.mark.parametrize("device", ["auto", "cpu", "cuda", "cuda:0", "meta"])
def test_the_first_gpu_needs_nothing(device: str) -> None:
    assert seeing(device, CUDA_VISIBLE_DEVICES="3,5") == (device, {"CUDA_VISIBLE_DEVICES": "3,5"})
    assert seeing(device, LOCAL_RANK="2") == (device, {"LOCAL_RANK": "2"})  # no ranks, whoever started it


def test_another_one_becomes_the_first() -> None:
    assert seeing("cuda:1") == ("cuda:0", {"CUDA_VISIBLE_DEVICES": "1"})
    assert seeing("cuda:2", CUDA_VISIBLE_DEVICES="7, 5,GPU-8f3") == ("cuda:0", {"CUDA_VISIBLE_DEVICES": "GPU-8f3"})
    assert seeing("cuda:1", found=0)[0] == "cuda:0"  # that there is none is said by who looks for its driver


@pytest.mark.parametrize("device", ["auto", "cuda"])
def test_each_rank_has_its_own(device: str) -> None:
    assert seen_by(0, device, LOCAL_RANK="0") == (0, None)
    assert seen_by(6, device, LOCAL_RANK="2") == (0, "2")
    assert seen_by(1, device) == (0, "1")
    assert seen_by(6, device, LOCAL_RANK="2", CUDA_VISIBLE_DEVICES="4,5,6,7") == (0, "6")
    assert seen_by(6, "cpu", LOCAL_RANK="2") == (2, None)


def test_a_number_that_is_not_seen_and_a_variable_that_comes_too_late_are_refused() -> None:
    with pytest.raises(InvalidSetting, match="GPU 2 is asked for; CUDA_VISIBLE_DEVICES=0,1 leaves 2"):
        seeing("cuda:2", CUDA_VISIBLE_DEVICES="0,1")
    with pytest.raises(InvalidSetting, match=r"torch sees 4\. Start it with CUDA_VISIBLE_DEVICES=1"):
        seeing("cuda:1", found=4)


def test_a_worker_reads_the_variable_before_it_asks_for_gpus() -> None:
    """What it must not do before: torch's first look at the driver settles which GPUs there are."""
    code = (
        "import torch\n"
        "from space_server import __main__\n"
        "def see(*_, **__): assert not looked; raise SystemExit(7)\n"
        "looked = []\n"
        "for name in ('is_available', 'device_count', 'current_device', '_lazy_init'):\n"
        "    setattr(torch.cuda, name, lambda *_, name=name: looked.append(name))\n"
        "__main__.on_first_gpu = see\n"
        "__main__.main(['--model', 'demo', '--listen', 'unix:/nowhere', '--device', 'cuda:1'])\n"
    )
    ran = subprocess.run([sys.executable, "-c", code], check=False, capture_output=True, text=True)
    assert ran.returncode == 7, ran.stderr
