"""The repository read as a whole: modules and what they import, folders, class names, words.

Nothing is imported: everything is read from the source, of any checkout.
"""

from __future__ import annotations

import ast
import io
import re
import tokenize
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path

PACKAGES = {
    "space_proto": "proto", "space_common": "proto", "space_kernels": "kernels", "space_router": "router",
    "space_model": "server", "space_server": "server", "space_train": "server", "space_eval": "server",
}  # fmt: skip
"""Packages with code, and the top-level folder of each."""
LARGEST_FOLDER = 20  # modules, `__init__` not counted
DOCUMENTS = "documents"


@dataclass(frozen=True)
class OldWord:
    """An identifier of the old vocabulary."""

    word: str
    now: str
    package: str  # in which it is meant; empty: everywhere
    pattern: re.Pattern[str]  # of a whole identifier

    @classmethod
    def parse(cls, line: str) -> OldWord:
        """`OLD -> NEW`, or `OLD -> NEW in PACKAGE`.

        A word with capitals is a whole identifier, underscores before it aside; one without is a part of one, between
        underscores; `=word` is a whole identifier too.
        """
        word, _, rest = line.partition(" -> ")
        now, _, package = rest.partition(" in ")
        bare = word.removeprefix("=")
        if bare != word or bare != bare.lower():
            pattern = rf"_*{re.escape(bare)}"
        else:
            pattern = rf"(?:\w*_)?{re.escape(bare)}(?:_\w*)?"
        return cls(bare, now, package, re.compile(pattern))


def old_words(path: Path) -> list[OldWord]:
    """The vocabulary that is not used any more, from its file: a word a line."""
    lines = (line.partition("#")[0].strip() for line in path.read_text(encoding="utf-8").splitlines())
    return [OldWord.parse(line) for line in lines if line]


def prose_words(path: Path) -> dict[str, re.Pattern[str]]:
    """Words that docstrings, comments and pages do without, from their file: the words of a line count as one."""
    lines = (line.partition("#")[0].split() for line in path.read_text(encoding="utf-8").splitlines())
    return {words[0]: re.compile(rf"\b(?:{'|'.join(words)})\b", re.IGNORECASE) for words in lines if words}


@cache
def nodes_of(source: str) -> list[ast.AST]:
    """Return the nodes of a source's syntax tree as `ast.walk` yields them; every call returns the same, unchanged.

    Raises SyntaxError.
    """
    return list(ast.walk(ast.parse(source)))


@dataclass(frozen=True)
class Module:
    """One file of Python."""

    name: str  # dotted; of a package without `.__init__`
    path: Path
    is_package: bool

    @cached_property
    def text(self) -> str:
        return self.path.read_text(encoding="utf-8")

    @property
    def nodes(self) -> list[ast.AST]:
        return nodes_of(self.text)

    @cached_property
    def identifiers(self) -> Counter[str]:
        """How often each is written."""
        return Counter(identifiers(self))

    @cached_property
    def prose(self) -> str:
        """Docstrings and comments, each from a line of its own on."""
        return "\n".join(prose(self))

    @property
    def package(self) -> str:
        return self.name.partition(".")[0]

    @property
    def folder(self) -> str:
        return self.name if self.is_package else self.name.rpartition(".")[0]


class Repository:
    """The product code of a checkout, made stubs left out."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.modules: dict[str, Module] = {}
        for package, folder in PACKAGES.items():
            for path in sorted((root / folder / package).rglob("*.py")):
                if re.search(r"_pb2(_grpc)?$", path.stem):
                    continue
                parts = path.relative_to(root / folder).with_suffix("").parts
                is_package = parts[-1] == "__init__"
                name = ".".join(parts[:-1] if is_package else parts)
                self.modules[name] = Module(name, path, is_package)

    @cached_property
    def imports(self) -> dict[str, set[str]]:
        """Each module's modules of ours, wherever in it they are imported, for types alone too."""
        return {name: set(self._imported(module)) - {name} for name, module in self.modules.items()}

    def _imported(self, module: Module) -> Iterator[str]:
        for node in module.nodes:
            if isinstance(node, ast.Import):
                yield from (alias.name for alias in node.names if alias.name in self.modules)
            elif isinstance(node, ast.ImportFrom):
                base = node.module or ""
                if node.level:
                    parts = module.folder.split(".")
                    base = ".".join([*parts[: len(parts) - node.level + 1], *filter(None, [base])])
                for alias in node.names:
                    if (whole := f"{base}.{alias.name}") in self.modules:
                        yield whole
                    elif base in self.modules:
                        yield base

    def room(self, module: str) -> str:
        """Its folder; a module beside folders is a room of its own."""
        known = self.modules[module]
        return module if known.folder in self._with_folders else known.folder

    @cached_property
    def _with_folders(self) -> set[str]:
        return {known.folder.rpartition(".")[0] for known in self.modules.values()}

    def module_cycles(self) -> list[list[str]]:
        return cycles(self.imports)

    def room_cycles(self) -> list[list[str]]:
        """Of rooms of one package."""
        return cycles(self._between(self.room, lambda a, b: a.partition(".")[0] == b.partition(".")[0]))

    def package_cycles(self) -> list[list[str]]:
        return cycles(self._between(lambda module: module.partition(".")[0], lambda a, b: True))

    def _between(self, place: Callable[[str], str], counts: Callable[[str, str], bool]) -> dict[str, set[str]]:
        graph: dict[str, set[str]] = {}
        for module, others in self.imports.items():
            here = place(module)
            for other in others:
                there = place(other)
                if here != there and counts(here, there):
                    graph.setdefault(here, set()).add(there)
        return graph

    def crossings(self, rooms: Iterable[str]) -> list[str]:
        """The imports between these rooms."""
        inside = set(rooms)
        return sorted(
            f"{module} -> {other}"
            for module, others in self.imports.items()
            for other in others
            if (here := self.room(module)) in inside and (there := self.room(other)) in inside and here != there
        )

    def folder_sizes(self) -> Counter[str]:
        """Modules in each folder."""
        return Counter(known.folder for known in self.modules.values() if not known.is_package)

    def shared_class_names(self) -> dict[str, list[str]]:
        """Names that more than one class has, and the modules of those."""
        places: dict[str, list[str]] = {}
        for name, module in self.modules.items():
            for node in module.nodes:
                if isinstance(node, ast.ClassDef):
                    places.setdefault(node.name, []).append(name)
        return {name: sorted(found) for name, found in sorted(places.items()) if len(found) > 1}

    def old_identifiers(self, words: Iterable[OldWord]) -> Counter[str]:
        """How often each word of the old vocabulary is written as an identifier."""
        seen: dict[str, Counter[str]] = {}
        for module in self.modules.values():
            seen.setdefault(module.package, Counter()).update(module.identifiers)
        found: Counter[str] = Counter()
        for word in words:
            for package, names in seen.items():
                if word.package in ("", package):
                    found[word.word] += sum(count for name, count in names.items() if word.pattern.fullmatch(name))
        return +found

    def old_prose(self, words: Mapping[str, re.Pattern[str]]) -> Counter[tuple[str, str]]:
        """How often each of these is in docstrings and comments of a package, or on pages."""
        found: Counter[tuple[str, str]] = Counter()
        for module in self.modules.values():
            for word, pattern in words.items():
                found[module.package, word] += len(pattern.findall(module.prose))
        for path in self.root.rglob("*.md"):
            if not {".venv", ".git", ".clients"} & set(path.relative_to(self.root).parts):
                text = re.sub(r"```.*?```", "", path.read_text(encoding="utf-8"), flags=re.DOTALL)
                for word, pattern in words.items():
                    found[DOCUMENTS, word] += len(pattern.findall(text))
        return +found


def identifiers(module: Module) -> Iterator[str]:
    """Every identifier each time it is written, and the module's own name; those of protobuf's stubs left out."""
    yield module.path.stem
    for node in module.nodes:
        match node:
            case ast.Name(id=name) | ast.arg(arg=name):
                yield name
            case ast.ClassDef(name=name) | ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name):
                yield name
            case ast.Attribute(value=ast.Name(id=owner)) if owner.endswith("_pb2"):
                pass
            case ast.Attribute(attr=name):
                yield name
            case ast.keyword(arg=str(name)):
                yield name
            case ast.ImportFrom(module=path, names=aliases):
                yield from (path or "").split(".")
                yield from (alias.asname or alias.name for alias in aliases)
            case ast.Import(names=aliases):
                for alias in aliases:
                    yield from alias.name.split(".")


def prose(module: Module) -> Iterator[str]:
    """Its docstrings, those of attributes too, and its comments."""
    for node in module.nodes:
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            yield node.value.value
    for token in tokenize.generate_tokens(io.StringIO(module.text).readline):
        if token.type == tokenize.COMMENT:
            yield token.string


def cycles(graph: Mapping[str, Iterable[str]]) -> list[list[str]]:
    """The strongly connected components of more than one node, sorted (Tarjan 1972, without recursion)."""
    number: dict[str, int] = {}
    lowest: dict[str, int] = {}
    stack: list[str] = []
    found: list[list[str]] = []
    for start in sorted(graph):
        if start in number:
            continue
        number[start] = lowest[start] = len(number)
        stack.append(start)
        path = [(start, iter(sorted(graph[start])))]
        while path:
            node, others = path[-1]
            other = next(others, None)
            if other is None:
                path.pop()
                if path:
                    above = path[-1][0]
                    lowest[above] = min(lowest[above], lowest[node])
                if lowest[node] == number[node]:
                    at = stack.index(node)
                    component, stack[at:] = sorted(stack[at:]), []
                    if len(component) > 1:
                        found.append(component)
            elif other not in number:
                number[other] = lowest[other] = len(number)
                stack.append(other)
                path.append((other, iter(sorted(graph.get(other, ())))))
            elif other in stack:
                lowest[node] = min(lowest[node], number[other])
    return sorted(found)
