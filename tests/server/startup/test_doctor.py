"""What the worker's half of `spaceserve doctor` says, and that a worker agrees."""

import json
import os
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

import pytest
from space_common.finding import Finding
from space_kernels.build import cpu_library
from space_model.testing import tiny_checkpoint
from space_server.__main__ import main as serve
from space_server.config import parse
from space_server.startup.doctor import examine, main

LISTEN = ["--listen", "unix:/nowhere", "--device", "cpu"]
WORDS = [*LISTEN, "--model", "demo"]  # the last --model counts


def found(*words: str) -> list[Finding]:
    return list(examine(parse([*WORDS, *words])))


def failures(*words: str) -> list[Finding]:
    return [finding for finding in found(*words) if finding.state == "fail"]


@pytest.fixture(autouse=True)
def own_environment() -> Iterator[None]:
    """A worker sets variables of its process; this process is that of the tests behind it too."""
    with mock.patch.dict(os.environ):
        yield


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_checkpoint(tmp_path_factory.mktemp("tiny"), "qwen2", window=512)


def test_every_part_of_a_machine_that_can_serve_has_its_fact(tiny: Path) -> None:
    told = found("--model", str(tiny))
    assert {finding.part for finding in told} == {"environment", "gpu", "kernels", "model", "memory", "energy"}
    assert [finding.fact for finding in told if finding.state != "ok"] == []
    (model,) = [finding.fact for finding in told if finding.part == "model"]
    assert "qwen2, 2 layers, held in float32" in model
    (memory,) = [finding.fact for finding in told if finding.part == "memory"]
    assert "64.0 whole windows of 512" in memory


def test_it_is_told_as_json(tiny: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*WORDS, "--model", str(tiny)]) == 0
    told = [Finding(**one) for one in json.loads(capsys.readouterr().out)]
    assert {finding.state for finding in told} == {"ok"}


@pytest.mark.parametrize(
    ("words", "part", "fact"),
    [
        (["--model", "/no/such/folder"], "model", "There is no folder /no/such/folder"),
        (["--max-model-len", "100000"], "memory", "the model has 1024 positions"),
        (["--kv-memory", "100000GiB"], "memory", "--kv-memory asks for"),
        (["--num-blocks", "1000000000"], "memory", "--num-blocks 1000000000 needs"),
        (["--attention", "triton"], "kernels", "--attention triton: needs an NVIDIA GPU"),
        (["--space-mask-ids", "1,2", "--space-num-masks", "3"], "model", "mask"),
        (["--device", "warp"], "gpu", "no device that torch knows"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else None,
)
def test_what_keeps_a_worker_from_starting_is_found_and_a_worker_says_so_too(
    words: list[str], part: str, fact: str, capsys: pytest.CaptureFixture[str]
) -> None:
    told = failures(*words)
    assert [finding.part for finding in told] == [part]
    assert fact in told[0].fact
    assert serve([*WORDS, "--calibration-seconds", "0", *words]) != 0
    assert capsys.readouterr().err.startswith("error: ")


def test_the_default_model_is_judged_before_it_is_here(tmp_path: Path) -> None:
    told = list(examine(parse([*LISTEN, "--download-folder", str(tmp_path)])))
    assert [finding for finding in told if finding.state == "fail"] == []
    model = [finding.fact for finding in told if finding.part == "model"]
    assert "smollm2 is not here yet: 92.9 MB, are fetched at the first start" in model[0]
    assert "smollm2: llama, 30 layers" in model[1]
    assert "an adapter that drafts" in model[1]
    (memory,) = [finding.fact for finding in told if finding.part == "memory"]
    assert "windows of 8192" in memory


def test_a_folder_without_weights_is_named(tiny: Path, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_bytes((tiny / "config.json").read_bytes())
    (failure,) = failures("--model", str(tmp_path))
    assert "has no model.safetensors" in failure.fact


def test_a_model_that_does_not_fit_is_refused_with_what_fits(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from space_server.machine.memory import FreeMemory

    monkeypatch.setattr(FreeMemory, "on", lambda device: FreeMemory(1000, "the machine's memory"))
    (failure,) = failures("--model", str(tiny))
    assert failure.part == "memory"
    assert "needs" in failure.fact
    assert "the machine's memory leaves 0 MiB. No dtype and no length fits" in failure.fact
    assert "--tensor-parallel" in failure.fact


def test_compiled_operations_are_refused_where_the_model_is_no_bfloat16(
    tiny: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["--model", str(tiny), "--cpu-kernels", "compiled"]
    (failure,) = failures(*words)
    assert failure.part == "kernels"
    assert "held in float32. Add --dtype bfloat16" in failure.fact
    assert serve([*WORDS, *words]) == 3
    assert "Add --dtype bfloat16" in capsys.readouterr().err
    assert failures(*words, "--dtype", "bfloat16") == []
    (both,) = failures(*words, "--dtype", "bfloat16", "--attention", "torch")
    assert "exclude each other" in both.fact


def test_a_kind_of_compiled_operations_is_taken_where_this_processor_is_one(tiny: Path) -> None:
    own = cpu_library.own_kinds()
    if not own:
        pytest.skip("no kind of compiled operations is this processor's")
    words = ["--model", str(tiny), "--dtype", "bfloat16", "--cpu-kernels"]
    for kind in own:
        assert any(f"our own operations for {kind}," in finding.fact for finding in found(*words, kind))
        assert failures(*words, kind) == []
    other = next(kind for kinds in cpu_library.KINDS.values() for kind in kinds if kind not in own)
    (failure,) = failures(*words, other)
    assert f"this processor is no {other}." in failure.fact
    assert own[0] in failure.cure
    (failure,) = failures("--model", str(tiny), "--cpu-kernels", own[0])
    assert f"--cpu-kernels {own[0]}: our own operations take bfloat16" in failure.fact
