"""Grammars that a worker has compiled, according to its reports."""

from __future__ import annotations

from collections import OrderedDict

from space_router.engine.request.request import Grammar

MOST = 64
"""Grammars remembered, most recently used first; the worker's own cache is bounded too."""


class KnownGrammars:
    """The grammars of sequences that have begun to compute."""

    def __init__(self) -> None:
        self._begun: OrderedDict[Grammar, None] = OrderedDict()

    def __contains__(self, grammar: Grammar | None) -> bool:
        return grammar is None or grammar in self._begun

    def add(self, grammar: Grammar | None) -> None:
        """Add the grammar of a sequence that has begun to compute."""
        if grammar is not None:
            self._begun[grammar] = None
            self._begun.move_to_end(grammar)
            if len(self._begun) > MOST:
                self._begun.popitem(last=False)
