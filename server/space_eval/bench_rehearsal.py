"""What a server whose drafts come true by decree must have written before it is measured: it foretells nothing else."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable

from space_eval.load_arm import Arm
from space_eval.load_client import Endpoint
from space_eval.load_dialect import Ask

Request = tuple[Endpoint, str | tuple[int, ...], int]
"""A server, a prompt, and the seed where the answer depends on it."""


class Rehearsal:
    """Which requests were run plainly on which server, and how far.

    A drafting arm that met a request for the first time would have the drafts of untrained masks, all wrong, and would
    teach the server's controller that drafts do not pay.
    """

    def __init__(self) -> None:
        self._lengths: dict[Request, int] = {}

    def of(self, arm: Arm, asks: Iterable[Ask]) -> tuple[Arm, list[Ask]]:
        """Who has to be asked what before `arm` is asked `asks`: each new request once, as long as it will be asked."""
        longest: dict[Request, Ask] = {}
        for ask in asks if arm.is_decreed and arm.speculation != "off" else ():
            request = arm.endpoint, ask.prompt, arm.sampling.seed + ask.number if arm.sampling.temperature else 0
            if ask.max_tokens > self._lengths.get(request, 0):
                self._lengths[request] = ask.max_tokens
                longest[request] = ask
        return dataclasses.replace(arm, speculation="off"), list(longest.values())
