"""A worker is told what the server was told."""

from __future__ import annotations

import os
import sys

from space_router.config import ServeConfig
from space_router.engine.workers.worker_command import worker_command


def flags_of(command: list[str]) -> dict[str, str]:
    return dict(zip(command[4::2], command[5::2], strict=True))


def test_what_was_not_said_is_left_to_the_worker() -> None:
    command = worker_command(ServeConfig(), "unix:/w.sock")
    assert command[:4] == [sys.executable, "-P", "-m", "space_server"]
    flags = flags_of(command)
    assert flags["--listen"] == "unix:/w.sock"
    assert flags["--parent-pid"] == str(os.getpid())
    assert not {"--kv-memory", "--num-blocks", "--max-model-len", "--space-mask-ids", "--num-threads"} & flags.keys()
    assert "--tensor-parallel" not in flags


def test_what_was_said_is_passed_on() -> None:
    config = ServeConfig(
        model="/m",
        kv_memory="1GiB",
        num_blocks=9,
        max_model_len=77,
        space_mask_ids=(5, 6),
        space_num_masks=2,
        num_threads=1,
        powercap="/host/powercap",
        tensor_parallel=2,
        synthetic_acceptance=".78",
        adapter=(("code", "/a"), ("prose", "b")),
    )
    assert worker_command(config, "h:1")[-4:] == ["--adapter", "code=/a", "--adapter", "prose=b"]
    flags = flags_of(worker_command(config, "h:1"))
    assert flags["--model"] == "/m"
    assert flags["--kv-memory"] == "1GiB"
    assert flags["--num-blocks"] == "9"
    assert flags["--max-model-len"] == "77"
    assert flags["--space-mask-ids"] == "5,6"
    assert flags["--space-num-masks"] == "2"
    assert flags["--num-threads"] == "1"
    assert flags["--powercap"] == "/host/powercap"
    assert flags["--tensor-parallel"] == "2"
    assert flags["--synthetic-acceptance"] == ".78"


def test_the_certificate_for_clients_is_not_a_workers() -> None:
    assert "--tls-cert" not in worker_command(ServeConfig(tls_cert="/c", tls_key="/k"), "h:1")
