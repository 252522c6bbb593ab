"""A flag of another engine, and what it becomes here: one or more settings, nothing, or a refusal with its cure."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from enum import Enum, StrEnum
from functools import cached_property

from space_common.visible_gpus import visible_gpus

KEYS = "api_keys"
"""Stands for SPACESERVE_API_KEYS, which is a variable and no flag."""

Texts = Mapping[str, str]
"""Names of settings, or KEYS -> their texts, as on a command line."""


class OtherEngine(StrEnum):
    """Where a flag comes from; the value is its name in `--drop-in`."""

    TGI = "tgi"
    VLLM = "vllm"
    LLAMA_CPP = "llama.cpp"

    @property
    def label(self) -> str:
        return {"tgi": "TGI", "vllm": "vLLM", "llama.cpp": "llama.cpp"}[self.value]


class Value(Enum):
    """How many words follow a flag."""

    NONE = "no word"
    ONE = "one word"
    OPTIONAL = "one of SWITCH_WORDS, or no word"
    MANY = "all words up to the next flag; a translation sees them separated by line breaks"


SWITCH_WORDS = frozenset({"on", "off", "auto", "0", "1", "true", "false"})


class ValueRefused(ValueError):
    """The value cannot be had here; the message is the reason and the cure, without a period at the end."""


@dataclass(frozen=True)
class Surroundings:
    """What a translation may look at beside the value."""

    texts: Texts = field(default_factory=dict)  # settings that are given by our own flags and variables
    environment: Mapping[str, str] = field(default_factory=dict)

    @cached_property
    def num_gpus(self) -> int:
        """GPUs that a worker would see; 0 on a CPU."""
        on_gpu = self.texts.get("device", "auto").startswith(("auto", "cuda"))
        return len(visible_gpus(self.environment)) if on_gpu else 0

    def number(self, name: str, default: int) -> int:
        """Return a setting's whole number, or the default where it has none."""
        text = self.texts.get(name, "")
        return int(text) if text.isdecimal() else default


Translation = Callable[[str, Surroundings], Texts]
"""From a value to our settings; empty: nothing is to do. Raises ValueRefused."""


@dataclass(frozen=True)
class ForeignFlag:
    """One row of the table."""

    engines: tuple[OtherEngine, ...]
    names: tuple[str, ...]  # as typed, the one that documents use first; MODEL: the positional word
    how: str  # for the documents: how the value is translated, or why nothing is to do, or why it is refused
    translate: Translation
    ours: tuple[str, ...] = ()  # settings that it may set
    value: Value = Value.ONE
    is_refused: bool = False  # whatever its value
    variables: tuple[tuple[OtherEngine, str], ...] = ()  # with --drop-in

    @property
    def label(self) -> str:
        return " and ".join(engine.label for engine in self.engines)


def _as_it_is(name: str) -> Translation:
    return lambda value, surroundings: {name: value}


def _nothing(value: str, surroundings: Surroundings) -> Texts:
    return {}


@dataclass(frozen=True)
class Rows:
    """Makes rows of one engine, or of several that have the same flag."""

    engines: tuple[OtherEngine, ...]

    def same(
        self, names: str, ours: str, how: str = "as it is", *, variable: str | None = None, value: Value = Value.ONE
    ) -> ForeignFlag:
        """A flag with our meaning and values."""
        return self.row(names, how, _as_it_is(ours), ours, variable=variable, value=value)

    def words(
        self, names: str, ours: str, words: Mapping[str, str], *, variable: str | None = None, how: str = ""
    ) -> ForeignFlag:
        """A flag with our meaning, some of whose words are called otherwise here; others are passed on."""
        words_typed = "; ".join(f"`{theirs}` is `{our}`" for theirs, our in words.items())
        return self.row(
            names, how or words_typed, lambda value, _: {ours: words.get(value, value)}, ours, variable=variable
        )

    def switch(self, names: str, ours: str, text: str, how: str = "", *, variable: str | None = None) -> ForeignFlag:
        """A flag without a value that stands for one of our values."""
        return self.row(
            names, how or f"`{text}`", lambda value, _: {ours: text}, ours, variable=variable, value=Value.NONE
        )

    def nothing(
        self, names: str, why: str, *, value: Value = Value.ONE, variable: str | None = None, only: str = ""
    ) -> ForeignFlag:
        """A flag that is accepted with nothing to do. `only`: values, separated by spaces, that are; others are
        refused."""
        allowed = only.split()

        def translate(given: str, surroundings: Surroundings) -> Texts:
            if allowed and given.lower() not in allowed:
                raise ValueRefused(f"only {', '.join(allowed)} can be had: {why}. Leave it out")
            return {}

        how = f"nothing to do for {', '.join(f'`{word}`' for word in allowed)}: {why}" if allowed else why
        return self.row(names, how, translate if allowed else _nothing, variable=variable, value=value)

    def refused(
        self, names: str, why: str, *, value: Value = Value.ONE, variable: str | None = None, allowed: str = ""
    ) -> ForeignFlag:
        """A flag that is refused. `why`: reason and cure, a period between them. `allowed`: values, separated by
        spaces, that ask for nothing."""

        def translate(given: str, surroundings: Surroundings) -> Texts:
            if given.lower() in allowed.split():
                return {}
            raise ValueRefused(why)

        row = self.row(names, f"refused: {why}", translate, variable=variable, value=value)
        return row if allowed else replace(row, is_refused=True)

    def row(
        self,
        names: str,
        how: str,
        translate: Translation,
        *ours: str,
        variable: str | None = None,
        value: Value = Value.ONE,
    ) -> ForeignFlag:
        """`names`: separated by spaces. `variable`: as many names as there are, separated by spaces."""
        variables = tuple((engine_of(each), each) for each in (variable or "").split())
        return ForeignFlag(self.engines, tuple(names.split()), how, translate, ours, value, variables=variables)


def engine_of(variable: str) -> OtherEngine:
    """Return the engine that reads a variable of this name."""
    prefixes = {"LLAMA_": OtherEngine.LLAMA_CPP, "VLLM_": OtherEngine.VLLM}
    return next((engine for prefix, engine in prefixes.items() if variable.startswith(prefix)), OtherEngine.TGI)
