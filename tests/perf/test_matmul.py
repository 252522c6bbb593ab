"""`perf matmul` reports what it measured."""

import json
from pathlib import Path

import pytest
from space_kernels.build import cpu_library

from perf import matmul
from perf.harness import main


def test_a_small_measurement(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(matmul, "WORKING_SET", 1 << 20)
    flags = ["matmul", "--shapes", "64x32", "--rows", "1", "5", "--rounds", "3", "--num-threads", "1"]
    flags += ["--out", str(tmp_path)]
    assert main(flags) == 0
    record = json.loads((tmp_path / "matmul.json").read_text())
    assert [(row["outputs"], row["inputs"], row["rows"]) for row in record["rows"]] == [(64, 32, 1), (64, 32, 5)]
    assert all(0 < row["error"] < 1e-6 for row in record["rows"])
    assert all(row["seconds"] > 0 and row["over_plain"] > 0 and row["over_float32"] > 0 for row in record["rows"])
    assert all(0 < row["int8_error"] < 0.03 and row["int8_over_bfloat16"] > 0 for row in record["rows"])
    assert all(row["gb_per_second"] > 0 and row["gflop_per_second"] > 0 for row in record["rows"])
    assert "| 64×32 | 5 |" in capsys.readouterr().out
    assert main([*flags, "--kind", cpu_library.own_kinds()[-1]]) == 0
    assert json.loads((tmp_path / "matmul.json").read_text())["facts"]["kind"] == cpu_library.own_kinds()[-1]


def test_a_kind_that_this_processor_is_not_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    other = next(kind for kinds in cpu_library.KINDS.values() for kind in kinds if kind not in cpu_library.own_kinds())
    assert main(["matmul", "--kind", other]) == 2
    assert f"this processor is no {other}" in capsys.readouterr().err


def test_without_compiled_operations_there_is_nothing_to_measure(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv(cpu_library.SWITCH, "torch")
    cpu_library.cpu_library.cache_clear()
    assert main(["matmul"]) == 2
    assert "no compiled operations" in capsys.readouterr().err
    cpu_library.cpu_library.cache_clear()


@pytest.mark.parametrize("shape", ["64", "64x", "0x8", "8x7", "axb"])
def test_a_shape_that_is_none_is_refused(shape: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as refused:
        main(["matmul", "--shapes", shape])
    assert refused.value.code == 2
    assert "no shape" in capsys.readouterr().err
