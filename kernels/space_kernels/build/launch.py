"""A launch configuration of a Triton kernel, for compile_check."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Tuned:
    """A kernel and one configuration that its wrapper launches it in. Triton modules list theirs in `TUNED`."""

    kernel: Any  # a triton.jit function
    signature: Mapping[str, str]  # argument -> "*bf16", "i32", "fp32", …; an integer may end in ":16", see below
    constexprs: Mapping[str, Any] = field(default_factory=dict)
    num_warps: int = 4
    num_stages: int = 3
    capabilities: tuple[int, ...] = ()  # compute capabilities that it is launched on; (): all

    # Pointers are assumed to be multiples of 16 bytes, as torch allocates them; integers only if marked ("i64:16").

    @classmethod
    def of(
        cls,
        kernel: Any,
        types: Mapping[str, str],
        constants: Mapping[str, Any],
        num_warps: int = 4,
        num_stages: int = 3,
    ) -> Tuned:
        """Build from types by argument names, which may include other kernels'."""
        kinds = {name: kind for names, kind in types.items() for name in names.split()}
        return cls(
            kernel,
            {name: kinds[name] for name in kernel.arg_names if name not in constants},
            constants,
            num_warps,
            num_stages,
        )

    @property
    def name(self) -> str:
        """The kernel with its tensor dtypes and constants: `kernel(bf16, fp32)[BLOCK=128, …]`."""
        formats = dict.fromkeys(
            kind.lstrip("*").partition(":")[0] for kind in self.signature.values() if kind[0] == "*"
        )
        constants = ", ".join(f"{name}={value}" for name, value in self.constexprs.items())
        return f"{self.kernel.__name__}({', '.join(formats)})[{constants}]"
