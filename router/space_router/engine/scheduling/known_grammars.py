"""Grammars that a worker has compiled, as far as its reports tell."""

from __future__ import annotations

from collections import OrderedDict

from space_router.engine.request.request import Grammar

MOST = 64
"""Of the last ones; the worker forgets them, too."""


class KnownGrammars:
    """Those with which a sequence has begun."""

    def __init__(self) -> None:
        self._begun: OrderedDict[Grammar, None] = OrderedDict()

    def __contains__(self, grammar: Grammar | None) -> bool:
        return grammar is None or grammar in self._begun

    def add(self, grammar: Grammar | None) -> None:
        """A sequence has computed something under it."""
        if grammar is not None:
            self._begun[grammar] = None
            self._begun.move_to_end(grammar)
            if len(self._begun) > MOST:
                self._begun.popitem(last=False)
