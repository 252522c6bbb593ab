"""What the worker's half of `spaceserve doctor` says, and that a worker agrees."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast
from unittest import mock

import pytest
import torch
from doubles.encoders import write_encoder
from eagle_heads import DenseHead, HeadShape, dense_base
from space_common.finding import Finding
from space_common.nvml import NvmlError
from space_kernels.build import cpu_library
from space_model.checkpoint.checkpoint import Checkpoint
from space_model.draft_networks.eagle import load_eagle
from space_model.loading.load import load_model
from space_server.__main__ import _check_machine
from space_server.__main__ import main as serve
from space_server.config import ModelSource, parse
from space_server.startup import doctor
from space_server.startup.doctor import TorchBuild, check_compiler, check_gpu, check_shared_memory, examine, main
from space_server.startup.model_need import ModelNeed, shown
from tiny_checkpoints import add_mtp_layer, released_adapter, tiny_checkpoint, tiny_lora
from transformers import AutoModel

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
    return check_gpu(asked, build, open_nvml=cast(Any, lambda: driver), devices=tmp_path)


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

    bad = doctor.Finding("gpu", "fail", "The driver is too old.", "Install another.")
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
    monkeypatch.setattr(doctor.shutil, "disk_usage", lambda folder: SimpleNamespace(total=mib * 1024**2))
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
    findings = found("--model", str(tiny))
    assert {finding.part for finding in findings} == {"environment", "gpu", "kernels", "model", "memory", "energy"}
    assert [finding.fact for finding in findings if finding.state != "ok"] == []
    (model,) = [finding.fact for finding in findings if finding.part == "model"]
    assert "qwen2, 2 layers, held in float32" in model
    (memory,) = [finding.fact for finding in findings if finding.part == "memory"]
    assert "64.0 whole windows of 512. At most 64 sequences run at once." in memory


def test_it_is_told_as_json(tiny: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*WORDS, "--model", str(tiny)]) == 0
    findings = [Finding(**one) for one in json.loads(capsys.readouterr().out)]
    assert {finding.state for finding in findings} == {"ok"}


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
    findings = failures(*words)
    assert [finding.part for finding in findings] == [part]
    assert fact in findings[0].fact
    assert serve([*WORDS, "--calibration-seconds", "0", *words]) != 0
    assert capsys.readouterr().err.startswith("error: ")


def test_an_adapter_of_another_base_is_found_and_a_worker_says_so_too(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The checkpoint's own, beside weights that it was not made for, and one that a flag gives."""
    own = tiny_checkpoint(tmp_path / "own", adapter_rank=2)
    config = json.loads((own / "config.json").read_text())
    config["space"]["base_sha256"] = "0" * 64
    (own / "config.json").write_text(json.dumps(config))
    base = tiny_checkpoint(tmp_path / "base", num_masks=0)
    for words in (["--model", str(own)], ["--model", str(base), "--adapter", f"mine={own}"]):
        findings = failures(*words)
        assert [finding.part for finding in findings] == ["model"]
        assert "The adapter was made for weights with the sha256 0000" in findings[0].fact
        capsys.readouterr()
        assert serve([*WORDS, "--calibration-seconds", "0", *words]) != 0
        assert "The adapter was made for weights" in capsys.readouterr().err


def test_a_lora_is_described_or_refused_with_its_cure(tmp_path: Path) -> None:
    base = tiny_checkpoint(tmp_path / "base")
    good, dora = tiny_lora(tmp_path / "good", base), tiny_lora(tmp_path / "dora", base, use_dora=True)
    other = tiny_lora(tmp_path / "other", tiny_checkpoint(tmp_path / "wider", hidden_size=128))
    words = ["--model", str(base), "--lora", f"a={good}", "--lora", f"b={dora}", "--lora", f"c={other}"]
    found = [finding for finding in examine(parse([*LISTEN, *words])) if finding.fact.startswith("--lora")]
    assert [finding.state for finding in found] == ["ok", "fail", "fail"]
    assert "Is it for this base?" in found[2].fact
    assert found[0].fact == "--lora a: a LoRA, rank 4 on 14 linears"
    assert "DoRA" in found[1].fact
    assert "merge_and_unload" in found[1].fact


def test_a_released_adapter_is_named_by_its_format(tmp_path: Path) -> None:
    base = tiny_checkpoint(tmp_path / "base", num_masks=0, num_layers=2)
    uno, idlm = (released_adapter(tmp_path / form, base, rank=8) for form in ("uno", "i-dlm"))
    words = ["--model", str(base), "--adapter", f"a=uno:{uno}", "--adapter", f"b=i-dlm:{idlm}"]
    findings = [finding for finding in examine(parse([*LISTEN, *words])) if finding.fact.startswith("--adapter")]
    assert {finding.part for finding in findings} == {"model"}
    assert [finding.fact for finding in findings] == [
        "--adapter a: an adapter that drafts, in Uno's format (masks read noise ids); rank 8 on 14 linears, 7 masks",
        "--adapter b: an adapter that drafts, in I-DLM's format (masks read one id); rank 8 on 14 linears, 3 masks",
    ]
    (failure,) = failures("--model", str(base), "--adapter", f"a={uno}")
    assert "or is said to be one of Uno or I-DLM" in failure.fact


def test_the_default_model_is_judged_before_it_is_here(tmp_path: Path) -> None:
    findings = list(examine(parse([*LISTEN, "--download-folder", str(tmp_path)])))
    assert [finding for finding in findings if finding.state == "fail"] == []
    model = [finding.fact for finding in findings if finding.part == "model"]
    assert "smollm2 is not here yet: 92.9 MB, are fetched at the first start" in model[0]
    assert "smollm2: llama, 30 layers" in model[1]
    assert "kept as Q4_1 (GGUF); an adapter that drafts" in model[1]
    (memory,) = [finding.fact for finding in findings if finding.part == "memory"]
    assert "windows of 8192" in memory
    # Processors without our compiled operations hold it in float32.
    known = range(115, 145) if "gguf weights" in model[1] else range(300, 700)
    assert int(memory.partition("the model takes ")[2].split()[0]) in known


def test_the_default_model_dequantised_is_judged_before_it_is_here(tmp_path: Path) -> None:
    findings = examine(parse([*LISTEN, "--download-folder", str(tmp_path), "--weights", "plain"]))
    (memory,) = [finding.fact for finding in findings if finding.part == "memory"]
    assert int(memory.partition("the model takes ")[2].split()[0]) > 300


def test_a_folder_without_weights_is_named(tiny: Path, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_bytes((tiny / "config.json").read_bytes())
    (failure,) = failures("--model", str(tmp_path))
    assert "has no model.safetensors" in failure.fact


def test_weights_of_another_config_are_named_by_the_first_that_lacks(tiny: Path, tmp_path: Path) -> None:
    folder = tmp_path / "deeper"
    shutil.copytree(tiny, folder)
    config = json.loads((folder / "config.json").read_text())
    config["num_hidden_layers"] += 1
    config.pop("layer_types", None)
    (folder / "config.json").write_text(json.dumps(config))
    (failure,) = failures("--model", str(folder))
    assert f"The weights of {folder} lack model.layers.{config['num_hidden_layers'] - 1}." in failure.fact


def test_a_model_that_does_not_fit_is_refused_with_what_fits(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from space_model.free_memory import FreeMemory

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


def test_a_draft_model_is_counted_or_refused_with_its_cure(tmp_path: Path) -> None:
    target = tiny_checkpoint(tmp_path / "target", num_masks=0)
    other = tiny_checkpoint(tmp_path / "other", num_masks=2)

    def findings(*words: str) -> list[Finding]:
        return list(examine(parse([*LISTEN, "--model", str(target), *words])))

    alone, both = findings(), findings("--draft-model", str(target))
    (found,) = [one for one in both if one.fact.startswith("--draft-model")]
    assert found.state == "ok"
    assert found.fact.endswith(f"llama, 2 layers, drafts with {target}'s tokenizer")
    before, after = ([one.fact for one in each if one.part == "memory"][-1] for each in (alone, both))
    assert "what drafts" in after
    assert "what drafts" not in before
    (refused,) = [one for one in findings("--draft-model", str(other)) if one.state == "fail"]
    assert "has another tokenizer than" in refused.fact
    (many,) = [one for one in findings("--draft-model", str(target), "--tensor-parallel", "2") if one.state == "fail"]
    assert "leave it out, or --tensor-parallel 2" in many.fact


def test_an_eagle_head_is_counted_or_refused_with_its_cause(tmp_path: Path) -> None:
    target = tiny_checkpoint(tmp_path / "target", num_masks=0, num_layers=4)
    other = tiny_checkpoint(tmp_path / "other", num_masks=0, hidden_size=32)
    head = DenseHead(dense_base(target), HeadShape(draft_ids=tuple(range(50))), (2, 2, 1)).save(tmp_path / "head")

    def findings(model: Path, *words: str) -> list[Finding]:
        return list(examine(parse([*LISTEN, "--model", str(model), "--draft-head", str(head), *words])))

    found = findings(target)
    assert f"--draft-head {head}: an EAGLE-3 head, drafts 50 of the ids for {target}" in [one.fact for one in found]
    assert "what drafts" in [one.fact for one in found if one.part == "memory"][-1]
    (refused,) = [one for one in findings(other) if one.state == "fail"]
    assert "reads hidden states of 64 numbers, and those of" in refused.fact
    (both,) = [one for one in findings(target, "--draft-model", str(target)) if one.state == "fail"]
    assert "leave one of them out" in both.fact
    config = parse([*LISTEN, "--model", str(target), "--draft-head", str(head), "--dtype", "float32"])
    source = ModelSource(config)
    model, files = load_model(target, dtype="float32"), source.draft_head()
    assert files is not None
    need = ModelNeed.asked(config, source.checkpoint(), None, files)
    assert need.kv_bytes_per_token == model.drafted_by(load_eagle(files, model)).facts.kv_bytes_per_token


def test_an_mtp_layer_is_counted_alone(tmp_path: Path) -> None:
    sizes: dict[str, Any] = {"num_masks": 0, "tie_word_embeddings": False, "num_nextn_predict_layers": 1}
    target = add_mtp_layer(tiny_checkpoint(tmp_path, "glm4_moe", **sizes))
    words = [*LISTEN, "--model", str(target), "--draft-model", "mtp"]
    found = [one.fact for one in examine(parse(words))]
    assert f"--draft-model mtp: the MTP layer of {target} drafts" in found
    config = parse(words)
    whole, layer = ModelSource(config).checkpoint(), ModelSource(config).draft_checkpoint()
    assert layer is not None
    alone, both = ModelNeed.asked(config, whole), ModelNeed.asked(config, whole, layer)
    assert 0 < both.drafting - alone.drafting < alone.weights
    states = 64 * both.dtype.itemsize
    assert both.kv_bytes_per_token == alone.kv_bytes_per_token * 3 // 2 + states


def test_the_encoder_beside_the_model_is_counted(tmp_path: Path) -> None:
    model, place = tiny_checkpoint(tmp_path), write_encoder(tmp_path / "encoder")
    words = [*LISTEN, "--model", str(model), "--embedding-model", str(place)]
    alone, both = (ModelNeed.asked(parse(words[:end]), Checkpoint.open(str(model))) for end in (-2, None))
    loaded = AutoModel.from_pretrained(place, dtype=torch.float32)
    assert both.encoder == sum(one.numel() * 4 for one in loaded.parameters())
    assert both.fixed == alone.fixed + both.encoder
    assert both.held_in(torch.bfloat16).encoder == both.encoder
    assert f"the encoder {shown(both.encoder)}" in both.parts()
    assert any(f"the encoder {shown(both.encoder)}" in one.fact for one in examine(parse(words)))
