"""The command line of the worker."""

from __future__ import annotations

import subprocess
import sys

import pytest
from space_model.model_error import InvalidSetting
from space_server.config import on_first_gpu, parse
from space_server.tensor_parallel import RankPlace


def test_defaults() -> None:
    config = parse(["--listen", "unix:/tmp/w"])
    assert (config.model, config.speculation, config.max_draft_length) == ("smollm2", "auto", None)
    assert (config.block_size, config.max_sequences, config.kv_memory, config.log_level) == (16, None, None, "INFO")


def test_only_a_model_that_was_not_named_may_give_way_and_ranks_must_agree() -> None:
    assert not parse(["--listen", "h:1"]).model_is_named
    assert parse(["--listen", "h:1", "--model", "smollm2"]).model_is_named
    assert parse(["--listen", "h:1", "--tensor-parallel", "2"]).model_is_named


def test_every_flag_is_parsed_into_its_unit() -> None:
    words = "--listen h:1 --kv-memory 2MiB --speculation 3 --space-mask-ids 7,8 --space-num-masks 2 --num-blocks 9"
    config = parse([*words.split(), "--parent-pid", "12", "--log-level", "warning", "--max-model-len", "64"])
    assert (config.kv_memory, config.speculation, config.max_draft_length) == (2 * 1024**2, 3, 3)
    assert (config.space_mask_ids, config.space_num_masks, config.num_blocks) == ((7, 8), 2, 9)
    assert (config.parent_pid, config.log_level, config.max_model_len) == (12, "WARNING", 64)
    assert parse(["--listen", "h:1", "--speculation", "off"]).max_draft_length == 0
    assert parse(["--listen", "h:1", "--kv-memory", "auto"]).kv_memory is None
    adapters = parse(["--listen", "h:1", "--adapter", "code=/a=b", "--adapter", "prose=c"]).adapter
    assert adapters == (("code", "/a=b"), ("prose", "c"))


@pytest.mark.parametrize(
    "words",
    [
        "--listen unix:/w",
        "--listen h:1 --kv-memory 0.5 --prefill-budget off --speculation off --tracing off --space-mask-ids 7,8",
        "--listen h:1 --kv-memory 2MiB --prefill-budget 0.2 --speculation 3 --exact on --offline on --log-level debug",
        "--listen h:1 --model demo --cores 0 --synthetic-acceptance .78 --adapter a=/x=y --adapter b=/z",
        "--listen h:1 --revision r --token-file /t --download-folder /d --num-blocks 3 --block-size 4 --steps eager",
        "--listen h:1 --model demo --tensor-parallel 2 --rank-timeout 3 --powercap /p --lookup only --cores auto",
    ],
)
def test_settings_that_are_written_as_a_command_line_are_parsed_to_the_same(words: str) -> None:
    settings = parse(words.split())
    assert parse(settings.to_argv()) == settings


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "--listen"),
        (["--listen", "h:1", "--num-blocks", "0"], "must be an integer of at least 1; got '0'"),
        (["--listen", "h:1", "--block-size", "24"], "must be a power of two up to 256; got '24'"),
        (["--listen", "h:1", "--block-size", "0"], "must be a power of two up to 256; got '0'"),
        (["--listen", "h:1", "--speculation", "fast"], "must be auto, off, or a number of drafts; got 'fast'"),
        (["--listen", "h:1", "--kv-memory", "much"], "'much' is no amount of memory"),
        (["--listen", "h:1", "--space-mask-ids", "7,x"], "must be ids separated by commas"),
        (["--listen", "h:1", "--adapter", "code"], "must be NAME=FOLDER; got 'code'"),
        (["--listen", "h:1", "--adapter", "a=b", "--adapter", "a=c"], "there are two adapters named a"),
    ],
)
def test_what_makes_no_sense_exits_with_2(words: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit_:
        parse(words)
    assert exit_.value.code == 2
    assert message in capsys.readouterr().err


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
