"""What products are computed in: what the machine has, or what is asked for."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from doubles.training import tiny_plan
from space_model.checkpoint.checkpoint import Checkpoint
from space_model.testing import tiny_checkpoint
from space_train.__main__ import main
from space_train.session import choose_precision, load_base
from space_train.train_plan import Method


@pytest.mark.parametrize(
    ("found", "precision"), [({"avx512_bf16": True}, "bf16"), ({"amx_bf16": True}, "bf16"), ({"avx2": True}, "no")]
)
def test_a_cpu_without_bfloat16_products_computes_in_float32_unless_asked(
    found: dict[str, Any], precision: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: found)
    assert choose_precision(cpu=True)[0] == precision
    assert choose_precision(cpu=False)[0] == "bf16"


@pytest.mark.parametrize(
    ("flags", "precision", "said"),
    [("", "no", "precision: float32, as this CPU has no bfloat16 products"), ("--precision bf16", "bf16", "")],
)
def test_the_precision_that_the_machine_decides_is_said_and_kept(
    flags: str,
    precision: str,
    said: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(torch.cpu, "get_capabilities", dict)
    monkeypatch.setenv("ACCELERATE_USE_CPU", "true")
    base, data = tiny_checkpoint(tmp_path / "base", num_masks=0), tmp_path / "texts.jsonl"
    data.write_text("".join(json.dumps({"text": f"one dog saw {n} cats"}) + "\n" for n in range(9)))
    sizes = "--steps 1 --length 32 --rows-per-step 2 --num-masks 2 --held-out-share 0"
    run = ["--model", str(base), "--data", str(data), "--out", str(tmp_path / "out"), *sizes.split(), *flags.split()]
    assert main(run) == 0
    lines = [line for line in capsys.readouterr().err.splitlines() if line.startswith("precision: ")]
    assert [line.startswith(said) for line in lines] == [True] * bool(said)
    assert json.loads((tmp_path / "out" / "run.json").read_text())["plan"]["precision"] == precision


@pytest.mark.parametrize("method", [Method.GATED_LORA, Method.HEAD, Method.FULL])
@pytest.mark.parametrize("precision", ["bf16", "no"])
def test_a_base_is_held_as_it_was_saved_on_a_gpu_alone_and_where_products_may_be_so(
    method: Method, precision: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoint = Checkpoint.open(tiny_checkpoint(tmp_path, num_masks=0, dtype="bfloat16"))
    plan = tiny_plan(method, precision=precision)
    for has_gpu in (True, False):
        monkeypatch.setattr(torch.cuda, "is_available", lambda has_gpu=has_gpu: has_gpu)
        as_saved = has_gpu and precision == "bf16" and method is not Method.FULL
        assert load_base(checkpoint, plan).dtype is (torch.bfloat16 if as_saved else torch.float32)
