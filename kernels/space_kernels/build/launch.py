"""One way in which a Triton kernel is launched: what compile_check compiles without a GPU."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Tuned:
    """A kernel and a configuration that its wrapper can launch it in. A Triton module lists them in `TUNED`."""

    kernel: Any  # what triton.jit returned
    signature: Mapping[str, str]  # argument -> "*bf16", "i32", "fp32", …; "*bf16" and "i64" may end in ":16", as below
    constexprs: Mapping[str, Any] = field(default_factory=dict)
    num_warps: int = 4
    num_stages: int = 3

    # Pointers are taken to be multiples of 16 bytes, as torch allocates; an integer only where it says so ("i64:16").

    @property
    def name(self) -> str:
        """kernel(bf16, fp32)[BLOCK=128, …]: the tensors' formats, and the constants."""
        formats = dict.fromkeys(
            kind.lstrip("*").partition(":")[0] for kind in self.signature.values() if kind[0] == "*"
        )
        constants = ", ".join(f"{name}={value}" for name, value in self.constexprs.items())
        return f"{self.kernel.__name__}({', '.join(formats)})[{constants}]"
