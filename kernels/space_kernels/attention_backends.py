"""The attention backends: requirements, availability and how to install each."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version

import torch
from torch import Tensor

from space_kernels.attention import flash_attn_backend as attention_flash
from space_kernels.attention import flashinfer_backend as attention_flashinfer
from space_kernels.attention import torch_backend as torch_attention
from space_kernels.attention.attention import QKV, Attention, AttentionSpec, KVPages
from space_kernels.attention.flash_attn_backend import PAGE_2
from space_kernels.dispatch import ops_for
from space_kernels.paging.step_rows import StepRows


@dataclass(frozen=True, slots=True)
class AttentionNeed:
    """The requirements of a loaded model on its attention backend."""

    num_heads: int
    kv_heads: int
    head_dim: int
    dtype: torch.dtype
    block_size: int
    device: torch.device
    capability: tuple[int, int] | None  # compute capability of a GPU; None: no GPU
    exact: bool = False  # a row's bits must not depend on the rest of the batch
    fp8_kv: bool = False  # the KV cache is fp8
    odd_values: bool = False  # values are a part of the keys (MLA), or of another size
    is_chunked: bool = False  # some layers see chunks of positions (Llama 4)

    @classmethod
    def on(
        cls,
        device: torch.device,
        *,
        num_heads: int,
        kv_heads: int,
        head_dim: int,
        dtype: torch.dtype,
        block_size: int,
        exact: bool = False,
        fp8_kv: bool = False,
        odd_values: bool = False,
        is_chunked: bool = False,
    ) -> AttentionNeed:
        """Build with the compute capability of the device."""
        capability = torch.cuda.get_device_capability(device) if device.type == "cuda" else None
        special = {"exact": exact, "fp8_kv": fp8_kv, "odd_values": odd_values, "is_chunked": is_chunked}
        return cls(num_heads, kv_heads, head_dim, dtype, block_size, device, capability, **special)


_HALVES = (torch.float16, torch.bfloat16)
_MOST = 99


@dataclass(frozen=True, slots=True)
class Backend:
    """One attention implementation: what it requires and what it guarantees."""

    name: str
    package: str | None  # distribution that must be installed; None: built in
    oldest: tuple[int, ...]  # oldest supported version of the package
    install: str  # how to install the package
    load: Callable[[AttentionNeed], Attention]  # raises ImportError for a broken package
    capabilities: tuple[tuple[int, int], ...] | None  # ranges of major compute capability; None: no GPU is needed
    dtypes: tuple[torch.dtype, ...] = _HALVES
    heads: tuple[int, ...] | range = range(8, 257, 8)  # head dimensions
    page_multiple: int = 1  # the block size must be a multiple of this many slots
    row_invariant: bool = False  # a row's bits do not depend on the rest of the batch (torch: only on a CPU)
    takes_stored: bool = False  # can attend pages that already hold the step's keys: see `attend`
    fp8_kv: bool = False  # supports an fp8 KV cache
    odd_values: bool = False  # supports values that are a part of the keys (MLA), or of another size
    chunked: bool = False  # supports chunked attention (Llama 4)
    captures: bool = True  # can be captured in a CUDA graph whose sequence lengths the host does not know
    limits: str = ""  # other limits, in one line
    carrier: str | None = None  # another distribution that contains the package

    def refusal(self, need: AttentionNeed, installed: Callable[[str], str | None]) -> str | None:
        """Return why this backend cannot serve the model, with the remedy, in one line; None if it can."""
        return self._unfit(need) or self._missing(installed)

    def attend(self, loaded: Attention) -> Attention | None:
        """Return the variant of `loaded` for pages that already hold the step's keys and values, or None."""
        library: Callable[..., Tensor] = loaded
        return functools.partial(library, is_stored=True) if self.takes_stored else None

    def _unfit(self, need: AttentionNeed) -> str | None:
        if self.capabilities is not None:
            if need.capability is None:
                return f"needs an NVIDIA GPU; the model is on {need.device}"
            if not any(low <= need.capability[0] <= high for low, high in self.capabilities):
                ranges = ", ".join(
                    f"{low}.x" if low == high else f"{low}.x and later" if high == _MOST else f"{low}.x to {high}.x"
                    for low, high in self.capabilities
                )
                major, minor = need.capability
                return f"runs on compute capability {ranges}; this GPU has {major}.{minor}"
        if need.odd_values and not self.odd_values:
            return "has no latent attention (MLA) and no values of another size than keys: use --attention torch"
        if need.is_chunked and not self.chunked:
            return "has no chunked attention, as the model has: use --attention torch"
        if need.dtype not in self.dtypes:
            taken = " and ".join(str(dtype).removeprefix("torch.") for dtype in self.dtypes)
            return f"takes {taken}; the model is held in {str(need.dtype).removeprefix('torch.')}: use --dtype bfloat16"
        if need.head_dim not in self.heads:
            known = self.heads
            taken = f"in steps of {known.step} up to {known[-1]}" if isinstance(known, range) else f"of {_list(known)}"
            return f"takes head sizes {taken}; the model has {need.head_dim}"
        if need.block_size % self.page_multiple:
            return (
                f"takes pages of a multiple of {self.page_multiple} slots; these have {need.block_size}: use "
                f"--block-size {self.page_multiple}"
            )
        if need.fp8_kv and not self.fp8_kv:
            return "takes keys and values in the model's own dtype: leave out --kv-dtype fp8"
        if need.exact and not (self.row_invariant and (need.capability is None or self.capabilities is not None)):
            return "gives results that depend on the rest of the batch: leave out --exact"
        return None

    def _missing(self, installed: Callable[[str], str | None]) -> str | None:
        if self.package is None:
            return None
        found = installed(self.package)
        if found is None and self.carrier is not None and installed(self.carrier) is not None:
            return None
        if found is None:
            return f"not installed: {self.install}"
        if _numbers(found) < self.oldest:
            return f"version {found} is older than {'.'.join(map(str, self.oldest))}: {self.install}"
        return None


def installed_version(package: str) -> str | None:
    """Return the installed version of a distribution, or None. Does not import it."""
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _list(numbers: tuple[int, ...]) -> str:
    return ", ".join(map(str, numbers))


def _numbers(text: str) -> tuple[int, ...]:
    """`2.8.3.post2` -> (2, 8, 3); `4.0.0b36` -> (4, 0, 0)."""
    numbers: list[int] = []
    for part in text.split("."):
        digits = part[: next((n for n, letter in enumerate(part) if not letter.isdigit()), len(part))]
        if not digits:
            break
        numbers.append(int(digits))
        if digits != part:
            break
    return tuple(numbers)


# -------------------------------------------------------------------------------------------------- the backends


def _torch(need: AttentionNeed) -> Attention:
    return torch_attention.space_attention


def _triton(need: AttentionNeed) -> Attention:
    return ops_for(need.device, attention="triton", exact=need.exact).space_attention


def _flash_attn_2(need: AttentionNeed) -> Attention:
    return functools.partial(attention_flash.space_attention, library=attention_flash.FlashAttn2.load())


def _flash_attn_3(need: AttentionNeed) -> Attention:
    return functools.partial(attention_flash.space_attention, library=attention_flash.FlashAttn3.load())


def _flash_attn_4(need: AttentionNeed) -> Attention:
    return functools.partial(attention_flash.space_attention, library=attention_flash.FlashAttn4.load())


def _flashinfer(need: AttentionNeed) -> Attention:
    library = attention_flashinfer.FlashInfer.load(need.device)
    return functools.partial(attention_flashinfer.space_attention, library=library)


BACKENDS: Mapping[str, Backend] = {
    backend.name: backend
    for backend in (
        Backend(
            "torch",
            package=None,
            oldest=(),
            install="",
            load=_torch,
            capabilities=None,
            dtypes=(torch.float32, torch.bfloat16, torch.float16),
            heads=range(1, 1 << 20),
            row_invariant=True,
            fp8_kv=True,
            odd_values=True,
            chunked=True,
            captures=False,
            limits="what the CPU runs; on a GPU the reference, not fast, and its plan is made on the host",
        ),
        Backend(
            "triton",
            package="triton",
            oldest=(3, 6),
            install="pip install triton, which the CUDA builds of torch bring along",
            load=_triton,
            capabilities=((8, _MOST),),
            dtypes=(torch.float32, torch.bfloat16, torch.float16),
            heads=range(1, 257),
            row_invariant=True,
            fp8_kv=True,
            limits="our own kernel: one read of the prefix for all rows of a sequence",
        ),
        Backend(
            "flash-attn-2",
            package="flash-attn",
            oldest=(2, 8, 3),
            install="pip install --no-build-isolation 'flash-attn>=2.8.3' (builds with a CUDA toolkit), or build the "
            "GPU image with FLASH_ATTN=with",
            load=_flash_attn_2,
            capabilities=((8, _MOST),),
            page_multiple=PAGE_2,
            takes_stored=True,
            limits="windows must be longer than a mask group; a group's prefix is read once more",
        ),
        Backend(
            "flash-attn-3",
            package="flash-attn-3",
            oldest=(3, 0, 0),
            install="pip install vllm, whose wheel contains it, or build hopper/ of flash-attention's sources",
            load=_flash_attn_3,
            capabilities=((9, 9),),
            takes_stored=True,
            carrier="vllm",
            limits="Hopper only; windows must be longer than a mask group; a group's prefix is read once more",
        ),
        Backend(
            "flash-attn-4",
            package="flash-attn-4",
            oldest=(4, 0, 0),
            install="pip install --pre flash-attn-4 (pure Python, compiles at the first step)",
            load=_flash_attn_4,
            capabilities=((9, 11),),
            takes_stored=True,
            limits="a pre-release; no paged keys and values on 8.x and 12.x; no split of long contexts on 9.0",
        ),
        Backend(
            "flashinfer",
            package="flashinfer-python",
            oldest=(0, 6),
            install="pip install flashinfer-python (compiles at the first step)",
            load=_flashinfer,
            capabilities=((8, _MOST),),
            takes_stored=True,
            heads=(64, 128, 256),
            captures=False,
            limits="plans every step on the host, so a step waits for the one before",
        ),
    )
}

JOINT = "+"


def joint(chains: Backend, masks: Backend, need: AttentionNeed) -> tuple[Backend, Attention]:
    """Return a backend of two, and its attention: `chains` for steps without mask rows, `masks` for those with some.

    A chain row's bits may then depend on whether its step has masks. Raises what loading either raises.
    """
    loaded = chains.load(need), masks.load(need)
    stored = tuple(
        # triton's own has a function for it instead of a parameter
        ops_for(need.device, attention="triton", exact=need.exact).attend
        if backend.name == "triton"
        else backend.attend(attention)
        for backend, attention in zip((chains, masks), loaded, strict=True)
    )

    def attention(qkv: QKV, pages: KVPages, rows: StepRows, spec: AttentionSpec, *, is_stored: bool = False) -> Tensor:
        number = int(len(rows.pattern.offsets) > rows.num_chain_rows)
        one = stored[number] if is_stored else loaded[number]
        assert one is not None, "asked for only where both have it"
        return one(qkv, pages, rows, spec)

    both = Backend(
        f"{chains.name}{JOINT}{masks.name}",
        package=None,
        oldest=(),
        install="",
        load=lambda need: attention,
        capabilities=None,
        takes_stored=None not in stored,
        captures=chains.captures and masks.captures,
    )
    return both, attention


def can_be_captured(name: str) -> bool:
    """Return whether steps with this attention, as `Ops` names it, can be CUDA graphs."""
    return all(BACKENDS[part].captures for part in name.split(JOINT))


FLASH_ATTN = ("flash-attn-4", "flash-attn-3", "flash-attn-2")
"""The backends that `flash-attn` tries, newest first."""

ATTENTION_NAMES = ("auto", *BACKENDS, "flash-attn")


class UnusableAttention(ValueError):
    """The requested attention backend is unavailable; the message says why and gives the remedy."""


def available_backends(
    need: AttentionNeed,
    *,
    installed: Callable[[str], str | None] = installed_version,
    backends: Mapping[str, Backend] = BACKENDS,
) -> tuple[list[Backend], dict[str, str]]:
    """Return the backends that can serve the model, and by name the reason why each other one cannot."""
    refusals = {name: backend.refusal(need, installed) for name, backend in backends.items()}
    return (
        [backend for name, backend in backends.items() if refusals[name] is None],
        {name: refusal for name, refusal in refusals.items() if refusal is not None},
    )


def backend_named(
    name: str,
    need: AttentionNeed,
    *,
    installed: Callable[[str], str | None] = installed_version,
    backends: Mapping[str, Backend] = BACKENDS,
) -> Backend:
    """Return the requested backend. Raises UnusableAttention."""
    if name not in ATTENTION_NAMES or name == "auto":
        raise UnusableAttention(f"There is no attention implementation {name!r}; there are {', '.join(backends)}.")
    refusals = []
    for candidate in FLASH_ATTN if name == "flash-attn" else (name,):
        refusal = backends[candidate].refusal(need, installed)
        if refusal is None:
            return backends[candidate]
        refusals.append(f"{candidate} {refusal}" if candidate != name else refusal)
    raise UnusableAttention(f"--attention {name}: {'; '.join(refusals)}. Or use --attention auto.")
