"""A result of `spaceserve doctor`; router and worker each check their own part."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

State = Literal["ok", "note", "fail"]


@dataclass(frozen=True)
class Finding:
    """A fact about this machine; `note` may matter, `fail` prevents the server from starting."""

    part: str  # environment, gpu, kernels, model, memory, ports, ...
    state: State
    fact: str
    cure: str = ""  # what to do about it

    @property
    def sentence(self) -> str:
        """Return the fact and its cure, for a log or an error."""
        return f"{self.fact} {self.cure}".strip()
