"""What `spaceserve doctor` finds: router and worker each look at their own part."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

State = Literal["ok", "note", "fail"]


@dataclass(frozen=True)
class Finding:
    """A fact of this machine; with `note` it may matter, with `fail` the server would not start."""

    part: str  # environment, gpu, kernels, model, memory, ports, ...
    state: State
    fact: str
    cure: str = ""  # what to do about it

    @property
    def sentence(self) -> str:
        """The fact and its cure, for a log or an error."""
        return f"{self.fact} {self.cure}".strip()
