"""Replaces other engines' flags on a command line, and their variables, by ours; says what was done."""

from __future__ import annotations

import difflib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from space_router.errors import ConfigError
from space_router.foreign_flags import table
from space_router.foreign_flags.flag import (
    KEYS,
    SWITCH_WORDS,
    ForeignFlag,
    OtherEngine,
    Surroundings,
    Texts,
    Value,
    ValueRefused,
)

PREFIX = "SPACESERVE_"
DROP_IN = "drop_in"  # the setting that has variables read

_UNMISTAKABLE = ("MODEL_ID", "NUM_SHARD", "QUANTIZE", "MAX_INPUT_TOKENS", "MAX_TOTAL_TOKENS", "LLAMA_ARG_MODEL")
"""Variables that only a user of another engine sets."""

_READABLE = "; every user of this machine can read it on a command line: put it into the variable or --api-key-file"

_FALSE = {"", "0", "false", "off", "no"}


@dataclass(frozen=True)
class Translated:
    """A command line and an environment with our names only."""

    arguments: list[str]  # behind the command's name
    environment: Mapping[str, str]
    notices: tuple[str, ...] = ()  # a line for each foreign flag or variable that was given


@dataclass
class _GivenSettings:
    """Which words have set which setting so far."""

    texts: dict[str, str] = field(default_factory=dict)
    words: dict[str, tuple[str, str]] = field(default_factory=dict)  # name of the flag; as it is shown, without keys

    def put(self, name: str, text: str, flag: str, typed: str) -> bool:
        """Take a setting's text; return whether it is new. Of one flag the last counts. Raises ConfigError if another
        flag set it to a different value."""
        if name in self.texts and self.words[name][0] != flag:
            if not _is_same(name, self.texts[name], text):
                raise ConfigError(
                    f"{self.words[name][1]} and {typed} both set {shown(name)}, to different values: give one."
                )
            return False
        self.texts[name], self.words[name] = text, (flag, typed)
        return True


def translate(
    arguments: Sequence[str], environment: Mapping[str, str], settings: Sequence[str], switches: Sequence[str] = ()
) -> Translated:
    """Translate the words behind a command's name.

    `settings`: names of the settings that the command has flags for. `switches`: its flags without a value. Raises
    ConfigError for an unknown flag, with the nearest; for a value that cannot be had, with the cure; and where
    two flags set one setting to different values.
    """
    own = {_flag(name): name for name in settings}
    words = list(_words(arguments, own, switches))
    given = {own[word.name]: word.value for word in words if word.row is None and word.name in own}
    from_variables = {
        name: text
        for name in [*settings, KEYS]
        if (text := environment.get(PREFIX + name.upper())) is not None and text
    }
    known = _GivenSettings()
    for name, text in given.items():
        known.put(name, text, _flag(name), f"{_flag(name)} {text}")
    drop_in = given.get(DROP_IN, environment.get(PREFIX + DROP_IN.upper()))
    engine = OtherEngine(drop_in) if drop_in in set(OtherEngine) else None
    variables = [] if engine is None else list(_variables(engine, environment))
    surroundings = Surroundings({**_plain(variables), **from_variables, **given, **_plain(words)}, environment)
    changed, added, notices = [], dict(environment), []
    for word in words:
        if word.row is None:
            changed += word.as_given
            continue
        texts = _translation(word.row, word.name, word.value, surroundings)
        typed = _typed(word.row, word.name, word.value)
        for name, text in texts.items():
            if name == KEYS:
                if from_variables.get(KEYS, text) != text:
                    raise ConfigError(f"{typed} and {PREFIX}API_KEYS have different keys: give one.")
                added[PREFIX + "API_KEYS"] = text
            elif name not in settings:
                raise ConfigError(f"{typed} is {_flag(name)} of a worker: give it to `spaceserve worker` there.")
            elif known.put(name, text, word.name, typed):
                changed += [_flag(name), text]
        if not _is_unchanged(word, texts, own):
            notices.append(_notice(typed, texts, word.row) + (_READABLE if KEYS in texts else ""))
    if engine is None:
        notices += _unread(environment)
    else:
        notices += _read_variables(engine, variables, added, environment, settings, known, surroundings)
    return Translated(changed, added, tuple(notices))


def shown(name: str) -> str:
    """Return how a setting is given: its flag, or the variable that has keys."""
    return PREFIX + "API_KEYS" if name == KEYS else _flag(name)


@dataclass(frozen=True)
class _Word:
    """One flag with its value, or the positional word."""

    name: str
    value: str
    row: ForeignFlag | None  # None: ours
    as_given: list[str]


def _words(arguments: Sequence[str], own: Mapping[str, str], switches: Sequence[str]) -> Iterator[_Word]:
    rest = list(arguments)
    dotted: dict[str, dict[str, Any]] = {}
    while rest:
        given = rest.pop(0)
        if not given.startswith("-") or given == "-":
            yield _Word(table.MODEL, given, table.BY_NAME[table.MODEL], [given])
            continue
        name, equals, value = given.partition("=")
        if name.startswith("--"):
            name = name.replace("_", "-") if "." not in name else name
        base, dot, path = name.partition(".")
        base = base.replace("_", "-")
        row = table.BY_NAME.get(base)
        if name in switches:
            yield _Word(name, "", None, [given])
        elif row is not None and dot:  # vLLM: a key of a JSON object, such as --speculative-config.method mtp
            _put(dotted.setdefault(base, {}), path, value if equals else _next(given, rest))
        elif row is not None:
            yield _Word(name, value if equals else _value_of(row, given, rest), row, [given])
        elif name in own:
            found = value if equals else _next(given, rest)
            yield _Word(name, found, None, [name, found])
        else:
            raise ConfigError(unknown(name, own))
    for base, keys in dotted.items():
        yield _Word(base, json.dumps(keys), table.BY_NAME[base], [base])


def _value_of(row: ForeignFlag, given: str, rest: list[str]) -> str:
    """Take the words that belong to a flag."""
    if row.value is Value.NONE:
        return ""
    if row.value is Value.OPTIONAL:
        return rest.pop(0) if rest and rest[0].lower() in SWITCH_WORDS else ""
    if row.value is Value.ONE:
        return _next(given, rest)
    found = [_next(given, rest)]
    while rest and not rest[0].startswith("-"):
        found.append(rest.pop(0))
    return "\n".join(found)


def _next(given: str, rest: list[str]) -> str:
    if not rest or rest[0].startswith("--"):
        raise ConfigError(f"{given} needs a value.")
    return rest.pop(0)


def _put(found: dict[str, Any], path: str, text: str) -> None:
    """Set a nested key; a value that is JSON is read as it."""
    *parents, last = path.replace("-", "_").split(".")
    for parent in parents:
        found = found.setdefault(parent, {})
    try:
        found[last] = json.loads(text)
    except ValueError:
        found[last] = text


def _plain(words: Sequence[_Word]) -> dict[str, str]:
    """Return the settings that foreign flags set, for translations that look at them. Where several set one, the flag
    wins that sets nothing else."""
    found: dict[str, str] = {}
    for word in sorted(words, key=lambda one: -len(one.row.ours) if one.row is not None else 0):
        if word.row is not None and set(word.row.ours) & {
            "model",
            "device",
            "workers",
            "tensor_parallel",
            "max_sequences",
        }:
            try:
                found |= {n: t for n, t in word.row.translate(word.value, Surroundings()).items() if n in word.row.ours}
            except ValueRefused:
                continue
    return found


def _translation(row: ForeignFlag, name: str, value: str, surroundings: Surroundings) -> Texts:
    try:
        return row.translate(value, surroundings)
    except ValueRefused as refused:
        raise ConfigError(f"{_typed(row, name, value)}: {refused}.") from None


def _typed(row: ForeignFlag, name: str, value: str) -> str:
    """Return the words as given, with their engine; without a key's text."""
    behind = "" if KEYS in row.ours or not value else f" {' '.join(value.splitlines())}"
    return f"{'' if name == table.MODEL else name}{behind} ({row.label})".strip()


def _is_unchanged(word: _Word, texts: Texts, own: Mapping[str, str]) -> bool:
    """Whether name and value are ours, too; or the model, which needs no explanation."""
    return word.name == table.MODEL or texts == {own.get(word.name): word.value}


def _notice(typed: str, texts: Texts, row: ForeignFlag) -> str:
    if not texts:
        why = row.how.partition(": ")[2] if row.how.startswith("nothing to do for") else row.how
        return f"{typed}: nothing to do here" + ("" if why.startswith("refused: ") else f" ({why.replace('`', '')})")
    ours = " ".join(shown(name) if name == KEYS else f"{shown(name)} {text}" for name, text in texts.items())
    return f"{typed} is {ours} here"


def _variables(engine: OtherEngine, environment: Mapping[str, str]) -> Iterator[_Word]:
    """Yield the variables of an engine that are set, as words: they set what its flags set."""
    for variable, row in table.variables(engine):
        value = environment.get(variable)
        if value and not (row.value is Value.NONE and value.lower() in _FALSE):
            yield _Word(variable, value if row.value is not Value.NONE else "", row, [f"{variable}={value}"])


def _read_variables(
    engine: OtherEngine,
    variables: Sequence[_Word],
    added: dict[str, str],
    environment: Mapping[str, str],
    settings: Sequence[str],
    known: _GivenSettings,
    surroundings: Surroundings,
) -> Iterator[str]:
    """Add an engine's variables under our names; yield a line for each. A flag wins over a variable."""
    by_flag = set(known.texts)
    for name, text in environment.items():  # ours, so that a different one is noticed
        setting = name.removeprefix(PREFIX).lower()
        if name.startswith(PREFIX) and setting in settings and setting not in by_flag and text:
            known.put(setting, text, name, f"{name}={text}")
    for word in variables:
        row = word.row
        if row is None:
            continue
        texts = _translation(row, word.name + "=", word.value, surroundings)
        typed = f"{word.name if KEYS in row.ours else word.as_given[0]} ({engine.label})"
        for name, text in texts.items():
            if name not in by_flag and name in (*settings, KEYS) and known.put(name, text, word.name, typed):
                added[PREFIX + name.upper()] = text
        yield _notice(typed, texts, row)


def _unread(environment: Mapping[str, str]) -> Iterator[str]:
    for variable in _UNMISTAKABLE:
        if environment.get(variable):
            engine = OtherEngine.LLAMA_CPP if variable.startswith("LLAMA") else OtherEngine.TGI
            yield f"{variable} is set, and nothing reads it: --drop-in {engine} reads {engine.label}'s variables"
            return


def unknown(flag: str, own: Mapping[str, str]) -> str:
    """Return the message for an unknown flag: the nearest of ours and of other engines'."""
    nearest = difflib.get_close_matches(flag, [*own, *table.BY_NAME], n=1, cutoff=0.7)
    if not nearest:
        return f"{flag[:100]} is no flag; `spaceserve serve --help` has all."
    row = table.BY_NAME.get(nearest[0])
    if nearest[0] in own or row is None:
        return f"{flag[:100]} is no flag; is {nearest[0]} meant?"
    return f"{flag[:100]} is no flag; is {nearest[0]} ({row.label}) meant?"


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")


def _is_same(name: str, first: str, second: str) -> bool:
    """Whether two texts of a setting mean the same."""
    from space_router.config import settings

    if first == second or name not in settings():
        return first == second
    parse = settings()[name][1].parse
    try:
        return bool(parse(first) == parse(second))
    except ValueError:
        return False
