"""Each attention backend says why it cannot be used, and what to do about it."""

import dataclasses
import functools
import subprocess
import sys
from collections.abc import Callable

import pytest
import torch
from space_kernels.attention.torch_backend import space_attention
from space_kernels.attention_backends import (
    BACKENDS,
    AttentionNeed,
    UnusableAttention,
    available_backends,
    backend_named,
    installed_version,
)

H100 = AttentionNeed(32, 8, 128, torch.bfloat16, 256, torch.device("cuda"), (9, 0))
ALL = {
    "triton": "3.6.0",
    "flash-attn": "2.8.3.post2",
    "flash-attn-3": "3.0.0b1",
    "flash-attn-4": "4.0.0b36",
    "flashinfer-python": "0.7.2.post1",
}


def having(**versions: str) -> Callable[[str], str | None]:
    return {name.replace("_", "-"): text for name, text in versions.items()}.get


def refusals(installed: Callable[[str], str | None] = ALL.get, **changes: object) -> dict[str, str]:
    return available_backends(dataclasses.replace(H100, **changes), installed=installed)[1]  # type: ignore[arg-type]


def test_on_an_h100_with_everything_installed_all_can_be_used() -> None:
    backends, absent = available_backends(H100, installed=ALL.get)
    assert [backend.name for backend in backends] == list(BACKENDS)
    assert absent == {}


@pytest.mark.parametrize(
    ("name", "changes", "refusal"),
    [
        ("flash-attn-4", {"fp8_kv": True}, "takes keys and values in the model's own dtype: leave out --kv-dtype fp8"),
        ("flashinfer", {"fp8_kv": True}, "takes keys and values in the model's own dtype: leave out --kv-dtype fp8"),
        ("triton", {"capability": (7, 5)}, "runs on compute capability 8.x and later; this GPU has 7.5"),
        ("flash-attn-4", {"capability": (8, 0)}, "runs on compute capability 9.x to 11.x; this GPU has 8.0"),
        ("flash-attn-4", {"capability": (12, 0)}, "runs on compute capability 9.x to 11.x; this GPU has 12.0"),
        (
            "flash-attn-2",
            {"block_size": 16},
            "takes pages of a multiple of 256 slots; these have 16: use --block-size 256",
        ),
        (
            "flash-attn-2",
            {"dtype": torch.float32},
            "takes float16 and bfloat16; the model is held in float32: use --dtype bfloat16",
        ),
        ("flashinfer", {"head_dim": 96}, "takes head sizes of 64, 128, 256; the model has 96"),
        ("flash-attn-2", {"head_dim": 512}, "takes head sizes in steps of 8 up to 256; the model has 512"),
        ("flash-attn-2", {"exact": True}, "gives results that depend on the rest of the batch: leave out --exact"),
        ("flashinfer", {"exact": True}, "gives results that depend on the rest of the batch: leave out --exact"),
        ("torch", {"exact": True}, "gives results that depend on the rest of the batch: leave out --exact"),
        ("flashinfer", {"capability": None, "device": "cpu"}, "needs an NVIDIA GPU; the model is on cpu"),
        ("flash-attn-3", {"capability": (10, 0)}, "runs on compute capability 9.x; this GPU has 10.0"),
        ("flash-attn-3", {"exact": True}, "gives results that depend on the rest of the batch: leave out --exact"),
    ],
)
def test_a_limit_is_named_with_the_value_and_the_cure(name: str, changes: dict[str, object], refusal: str) -> None:
    assert refusals(**changes)[name] == refusal


def test_an_absent_library_is_named_with_its_cure() -> None:
    absent = refusals(having(triton="3.6.0", flash_attn="2.7.4"))
    assert absent["flash-attn-2"].startswith("version 2.7.4 is older than 2.8.3: pip install")
    assert absent["flashinfer"] == "not installed: pip install flashinfer-python (compiles at the first step)"
    assert all("pip install" in line and "\n" not in line for line in absent.values())


def test_flash_attn_is_the_newest_that_can_be_used() -> None:
    assert backend_named("flash-attn", H100, installed=ALL.get).name == "flash-attn-4"
    assert backend_named("flash-attn", H100, installed=having(flash_attn="2.8.3")).name == "flash-attn-2"
    assert backend_named("flash-attn", H100, installed=having(flash_attn_3="3.0.0b1")).name == "flash-attn-3"
    assert backend_named("flash-attn", H100, installed=having(vllm="0.25.1")).name == "flash-attn-3"
    ampere = dataclasses.replace(H100, capability=(8, 6))
    assert backend_named("flash-attn", ampere, installed=ALL.get).name == "flash-attn-2"
    with pytest.raises(UnusableAttention, match=r"flash-attn-4 not installed: .*; flash-attn-2 not installed: "):
        backend_named("flash-attn", H100, installed=having())


def test_what_cannot_be_had_is_refused_by_name() -> None:
    with pytest.raises(UnusableAttention, match=r"no attention implementation 'fast'; there are torch, triton, flash-"):
        backend_named("fast", H100)
    with pytest.raises(UnusableAttention, match=r"--attention flashinfer: not installed: .* Or use --attention auto\."):
        backend_named("flashinfer", H100, installed=having())


def test_the_reference_is_always_there() -> None:
    cpu = AttentionNeed.on(
        torch.device("cpu"), num_heads=4, kv_heads=2, head_dim=20, dtype=torch.float32, block_size=16, exact=True
    )
    backend = backend_named("torch", cpu, installed=having())
    assert backend.load(cpu) is space_attention
    assert backend.attend(space_attention) is None
    assert [backend.name for backend in available_backends(cpu, installed=ALL.get)[0]] == ["torch"]


def test_versions_are_read_without_an_import() -> None:
    assert installed_version("numpy") is not None
    assert installed_version("no-such-package-here") is None


def test_naming_the_backends_imports_none_of_them() -> None:
    code = (
        "import sys, space_kernels.attention_backends as b; b.available_backends(b.AttentionNeed.on("
        "b.torch.device('cpu'), num_heads=4, kv_heads=2, head_dim=64, dtype=b.torch.bfloat16, block_size=256)); "
        "print(*(name for name in ('triton', 'flash_attn', 'flashinfer') if name in sys.modules))"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout.split() == []


@pytest.mark.parametrize("exact", [False, True])
def test_triton_is_told_whether_a_rows_bits_may_depend_on_the_batch(exact: bool) -> None:
    pytest.importorskip("triton")
    loaded = BACKENDS["triton"].load(dataclasses.replace(H100, exact=exact))
    assert isinstance(loaded, functools.partial)
    assert loaded.keywords == {"exact": exact}
