"""What users, clients and operators can see of this product, as text that can be kept and compared.

Every `*_text` function takes one view of the checkout it is in. `tests/house/snapshots` holds what they gave, and
`tests/house/test_snapshots.py` compares.
"""

from __future__ import annotations

import ast
import contextlib
import io
import itertools
import json
import os
import re
import runpy
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any, NoReturn

import pytest
from repository import nodes_of

ROOT = Path(__file__).resolve().parents[2]
SNAPSHOTS = ROOT / "tests/house/snapshots"
PRODUCT = ("proto", "kernels", "router", "server")
FILES = {
    "openapi": "openapi.json", "help": "help.txt", "metrics": "metrics.txt", "proto": "proto.txt",
    "variables": "variables.txt",
}  # fmt: skip
"""The snapshot of each view, in `SNAPSHOTS`; tests are in `pytest_ids.txt` beside them."""


def commands() -> list[str]:
    """Every command that documents name, but `space_router.commands.healthcheck`, which has no --help."""
    lines = (SNAPSHOTS / "commands.txt").read_text(encoding="utf-8").splitlines()
    return [line for line in lines if not line.startswith("#")]


def read(name: str) -> str:
    return (SNAPSHOTS / FILES[name]).read_text(encoding="utf-8")


def write(name: str, text: str) -> None:
    (SNAPSHOTS / FILES[name]).write_text(text, encoding="utf-8")


# Commands


@dataclass(frozen=True)
class Answer:
    """What one command printed."""

    status: int
    stdout: str
    stderr: str


def help_answers(moved: Mapping[str, str] = MappingProxyType({})) -> dict[str, Answer]:
    """The answer of each command to `--help`, 100 columns wide; `moved`: what is asked in place of some.

    All are run by one process, so that torch is loaded once.
    """
    environment = {**os.environ, "COLUMNS": "100", "HOME": "/nowhere", "NO_COLOR": "1"}
    run = subprocess.run(
        [sys.executable, "-P", "-W", "ignore", __file__, *(moved.get(name, name) for name in commands())],
        check=True, capture_output=True, text=True, cwd="/", env=environment,
    )  # fmt: skip
    answers = json.loads(run.stdout)
    return {name: Answer(*answers[moved.get(name, name)]) for name in commands()}


class _Replaced(Exception):
    """A command would have replaced its process by one with these words."""


def _answer(command: str) -> tuple[int, str, str]:
    words = command.split()
    module, rest = ("space_router", words[1:]) if words[0] == "spaceserve" else (words[2], words[3:])
    out, err = io.StringIO(), io.StringIO()
    status: object = 1
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            try:
                _become(module, [*rest, "--help"])
            except _Replaced as called:
                argv = called.args[0]
                at = argv.index("-m")
                _become(argv[at + 1], argv[at + 2 :])
        except SystemExit as end:
            status = end.code
        if isinstance(status, str):
            err.write(f"{status}\n")
    return status if isinstance(status, int) else int(status is not None), out.getvalue(), err.getvalue()


def _become(module: str, arguments: Sequence[str]) -> None:
    sys.argv = [module, *arguments]
    runpy.run_module(module, run_name="__main__", alter_sys=True)


def _replaced(path: Any, argv: Any, environment: Any) -> NoReturn:
    raise _Replaced(argv)


def help_text() -> str:
    """What each command says to `--help`, one after the other."""
    parts = []
    for command, answer in help_answers().items():
        if answer.status:
            raise RuntimeError(f"{command} --help: status {answer.status}: {answer.stderr}")
        parts.append(f"$ {command} --help\n{answer.stdout.rstrip()}\n")
    return "\n".join(parts)


def split_help(text: str) -> dict[str, str]:
    """The parts of `help_text`, by command."""
    parts = re.split(r"^\$ (.*) --help\n", text, flags=re.MULTILINE)
    return dict(zip(parts[1::2], parts[2::2], strict=True))


def entries(text: str) -> list[str]:
    """A help text by paragraph and flag, each on one line: how lines are wrapped is of no account."""
    found: list[tuple[int, str]] = []
    for line in text.splitlines():
        if not line.strip():
            found.append((99, ""))
            continue
        indent, words = len(line) - len(line.lstrip()), " ".join(line.split())
        above, before = found[-1] if found else (99, "")
        heading = (above == 0 and before.endswith(":")) or re.fullmatch(r"\{\S+\}|[A-Z]+", before) is not None
        if not heading and (indent > above or indent == above == 0):
            found[-1] = (above, f"{before} {words}")
        else:
            found.append((indent, words))
    return [words for _, words in found if words]


# A running router


@dataclass(frozen=True)
class Served:
    """What a router answers, with an operator's API key called `team-a` in its file and no worker."""

    openapi: str  # JSON, keys sorted
    metrics: str  # the series' names, types and labels


def served() -> Served:
    """Start a router on the demo model, ask it, and end it."""
    with tempfile.TemporaryDirectory() as folder, socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        taken.close()
        keys = Path(folder) / "keys"
        keys.write_text("sk-secret name=team-a operator=yes\n")
        keys.chmod(0o600)
        words = ["--model", "demo", "--port", str(port), "--api-key-file", str(keys)]
        words += ["--worker-address", f"unix:{folder}/none"]
        with (Path(folder) / "log").open("wb+") as log:
            command = [sys.executable, "-P", "-m", "space_router", "router", *words]
            router = subprocess.Popen(command, cwd=folder, stdout=log, stderr=log)
            try:
                document = json.loads(_fetched(f"http://127.0.0.1:{port}/openapi.json", router))
                metrics = _fetched(f"http://127.0.0.1:{port}/metrics", router).decode()
            except ConnectionError as error:
                log.seek(0)
                raise ConnectionError(log.read().decode()) from error
            finally:
                router.terminate()
                router.wait()
    return Served(json.dumps(document, indent=1, sort_keys=True, ensure_ascii=False) + "\n", series(metrics))


def _fetched(url: str, router: subprocess.Popen[bytes]) -> bytes:
    request = urllib.request.Request(url, headers={"Authorization": "Bearer sk-secret"})
    for _ in range(600):
        with contextlib.suppress(urllib.error.URLError), urllib.request.urlopen(request, timeout=10) as answer:
            body: bytes = answer.read()
            return body
        if router.poll() is not None:
            break
        time.sleep(0.05)
    raise ConnectionError(f"the router does not answer at {url}")


def series(exposition: str) -> str:
    """Prometheus' text format without its figures and help, and the label names of series that have no sample yet."""
    lines = set()
    for line in exposition.splitlines():
        if line.startswith("# TYPE "):
            lines.add(line.removeprefix("# TYPE "))
        elif not line.startswith("#"):
            lines.add(line.rpartition(" ")[0])
    from space_router.metrics import Metrics

    for metric in vars(Metrics()).values():
        if labels := getattr(metric, "_labelnames", ()):
            lines.add(f"{metric._name} by {', '.join(labels)}")
    return "\n".join(sorted(lines)) + "\n"


# The protocol


def proto_text() -> str:
    """Messages, fields, numbers, types and services of the descriptors, a line each."""
    from google.protobuf.descriptor_pb2 import FileDescriptorProto
    from space_proto import generate_pb2, worker_pb2

    lines: list[str] = []
    for module in (generate_pb2, worker_pb2):
        file = FileDescriptorProto()
        module.DESCRIPTOR.CopyToProto(file)
        lines.append(f"file {file.name}, package {file.package}, {file.syntax}")
        for message in file.message_type:
            lines += _message_lines(message, "")
        for enum in file.enum_type:
            lines += _enum_lines(enum, "")
        for service in file.service:
            for method in service.method:
                sides = [
                    ("stream " if streams else "") + kind
                    for kind, streams in (
                        (method.input_type, method.client_streaming), (method.output_type, method.server_streaming)
                    )
                ]  # fmt: skip
                lines.append(f"service {service.name}.{method.name}({sides[0]}) returns {sides[1]}")
    return "\n".join(lines) + "\n"


def _message_lines(message: Any, outer: str) -> Iterator[str]:
    name = outer + message.name
    yield f"message {name}"
    for one in message.field:
        label = one.Label.Name(one.label).removeprefix("LABEL_").lower()
        kind = one.type_name or one.Type.Name(one.type).removeprefix("TYPE_").lower()
        if one.proto3_optional:
            label = "maybe"
        elif one.HasField("oneof_index"):
            label = f"oneof {message.oneof_decl[one.oneof_index].name}"
        packed = " unpacked" if one.options.HasField("packed") and not one.options.packed else ""
        yield f"  {one.number} {one.name}: {label} {kind}{packed}"
    for inner in message.nested_type:
        yield from _message_lines(inner, f"{name}.")
    for enum in message.enum_type:
        yield from _enum_lines(enum, f"{name}.")


def _enum_lines(enum: Any, outer: str) -> Iterator[str]:
    yield f"enum {outer}{enum.name}"
    yield from (f"  {one.number} {one.name}" for one in enum.value)


# Environment variables


def variables(folders: Iterable[str] = PRODUCT) -> set[str]:
    """Every `SPACESERVE_*` that code, scripts and images name outside comments, and those of serve's settings."""
    from space_router.config import settings

    found = {f"SPACESERVE_{name.upper()}" for name in settings()}
    pattern = re.compile(r"\bSPACESERVE_[A-Z][A-Z0-9_]*(?<!_)\b(?!_)")
    files = [ROOT / "Makefile", ROOT / "Dockerfile"]
    for folder in folders:
        files += [path for path in (ROOT / folder).rglob("*") if path.is_file()]
    for path in files:
        if path.suffix not in {".py", ".sh", ".yaml", ".yml", ".hpp", ".cpp", ".js", ".mjs", ""}:
            continue
        text = path.read_text(encoding="utf-8", errors="replace")
        if "SPACESERVE_" not in text:
            continue
        for part in _strings(text) if path.suffix == ".py" else [re.sub(r"#.*", "", text)]:
            found |= set(pattern.findall(part))
    return found


def variables_text() -> str:
    return "\n".join(sorted(variables())) + "\n"


def _strings(source: str) -> Iterator[str]:
    """Text of a module's strings, docstrings left out."""
    nodes = nodes_of(source)
    docs = {node.value for node in nodes if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)}
    for node in nodes:
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and node not in docs:
            yield node.value


# Tests


TestId = tuple[str, str, str]
"""A test: stem of its file, name, parameters with their brackets. Folder and class are of no account."""


def parse_id(node: str) -> TestId:
    """From pytest's id of a node."""
    path, _, rest = node.partition("::")
    name, bracket, parameters = rest.partition("[")
    return Path(path).stem, name.rpartition("::")[2] or name, bracket + parameters


def written_tests() -> Counter[tuple[str, str]]:
    """Stem and name of every test function under tests/, read without importing anything."""
    found: Counter[tuple[str, str]] = Counter()
    for path in (ROOT / "tests").rglob("test_*.py"):
        body = ast.parse(path.read_text(encoding="utf-8")).body
        while body:
            node = body.pop()
            if isinstance(node, ast.ClassDef | ast.If | ast.Try):
                body += [child for child in ast.iter_child_nodes(node) if isinstance(child, ast.stmt)]
            elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name.startswith("test_"):
                found[path.stem, node.name] += 1
    return found


@dataclass
class IdMap:
    """Where tests went: `pytest_id_map.txt`."""

    files: dict[str, list[str]] = field(default_factory=dict)  # a stem: the stems that hold its tests now
    tests: dict[tuple[str, str], tuple[str, str]] = field(default_factory=dict)
    gone: dict[str, str] = field(default_factory=dict)  # `stem` or `stem::name`: with which code
    parameters: set[str] = field(default_factory=set)  # `stem` or `stem::name` whose parameters may differ
    words: dict[str, list[str]] = field(default_factory=dict)  # a word of stems and names: what it is called now

    @classmethod
    def read(cls, path: Path) -> IdMap:
        known = cls()
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
            words = line.partition("#")[0].split()
            match words:
                case []:
                    pass
                case ["file", old, *new] if new:
                    known.files[old] = new
                case ["word", old, *new] if new:
                    known.words[old] = new
                case ["test", old, new] if "::" in old and "::" in new:
                    known.tests[_pair(old)] = _pair(new)
                case ["gone", old, *reason] if reason:
                    known.gone[old] = " ".join(reason)
                case ["parameters", old, *reason] if reason:
                    known.parameters.add(old)
                case _:
                    raise ValueError(f"{path.name}:{number}: {line!r}")
        return known

    def named(self) -> set[str]:
        """Stems, and tests as `stem::name`, that there must have been."""
        return {*self.files, *map("::".join, self.tests), *self.gone, *self.parameters}

    def is_gone(self, stem: str, name: str) -> bool:
        return stem in self.gone or f"{stem}::{name}" in self.gone

    def places(self, stem: str, name: str) -> list[tuple[str, str]]:
        """Where that test may be now."""
        if (stem, name) in self.tests:
            return [self.tests[stem, name]]
        stems = self.files.get(stem) or self.worded(stem)
        return [(new_stem, new_name) for new_stem in stems for new_name in self.worded(name)]

    def worded(self, text: str) -> list[str]:
        """It, and it with words that were replaced."""
        choices = [[part, *self.words.get(part, ())] for part in re.split(r"([A-Za-z]+)", text)]
        return ["".join(parts) for parts in itertools.product(*choices)]

    def is_free(self, stem: str, name: str) -> bool:
        """Its parameters are not compared."""
        return stem in self.parameters or f"{stem}::{name}" in self.parameters


def _pair(text: str) -> tuple[str, str]:
    stem, _, name = text.partition("::")
    return stem, name


class Recorder:
    """A pytest plugin that keeps the ids of all tests, those that are deselected afterwards too."""

    def __init__(self) -> None:
        self.ids: Counter[TestId] = Counter()

    @pytest.hookimpl(tryfirst=True)
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        self.ids = Counter(parse_id(item.nodeid) for item in items)


def collect() -> Counter[TestId]:
    """Every test under tests/, collected by a pytest of its own."""
    code = "import sys, interface; sys.exit(interface.print_ids())"
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parent)}
    run = subprocess.run(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, check=True, cwd=ROOT, env=environment
    )
    return Counter({(stem, name, parameters): count for stem, name, parameters, count in json.loads(run.stdout)})


def print_ids() -> int:
    recorder = Recorder()
    with contextlib.redirect_stdout(sys.stderr):
        status = pytest.main(["--collect-only", "-qq", "-p", "no:cacheprovider", "tests"], plugins=[recorder])
    sys.stdout.write(json.dumps([(*key, count) for key, count in recorder.ids.items()]))
    return int(status)


def lost_functions(before: Counter[TestId], now: Counter[tuple[str, str]], known: IdMap) -> list[str]:
    """Tests that were there and have no function now, each with where its name is now."""
    functions = {(stem, name) for stem, name, _ in before if name.startswith("test_")}  # else made by a library
    lost = []
    for stem, name in sorted(functions):
        if known.is_gone(stem, name) or any(place in now for place in known.places(stem, name)):
            continue
        elsewhere = sorted(other for other, same in now if same == name)
        lost.append(f"{stem}::{name}" + (f" (there is one in {', '.join(elsewhere)})" if elsewhere else ""))
    return lost


def lost_ids(before: Counter[TestId], now: Counter[TestId], known: IdMap) -> list[str]:
    """Tests that were there and were not collected now, with their parameters."""
    left = Counter(now)
    names = {(stem, name) for stem, name, _ in now}
    lost = []
    for (stem, name, parameters), count in sorted(before.items()):
        places = known.places(stem, name)
        if known.is_gone(stem, name) or (known.is_free(stem, name) and any(place in names for place in places)):
            continue
        for _ in range(count):
            candidates = ((*place, same) for place in places for same in known.worded(parameters))
            there = next((each for each in candidates if left[each] > 0), None)
            if there is None:
                lost.append(f"{stem}::{name}{parameters}")
            else:
                left[there] -= 1
    return lost


def fold_ids(ids: Counter[TestId]) -> str:
    """A line for each file, test and set of parameters, indented under each other; `*2`: there are two alike."""
    lines = []
    shown: tuple[str, str] = ("", "")
    for (stem, name, parameters), count in sorted(ids.items()):
        if stem != shown[0]:
            lines.append(stem)
        again = f" *{count}" if count > 1 else ""
        if (stem, name) != shown and not parameters:
            lines.append(f" {name}{again}")
        elif (stem, name) != shown:
            lines.append(f" {name}")
        if parameters:
            lines.append(f"  {parameters[1:-1]}{again}")
        shown = (stem, name)
    return "\n".join(lines) + "\n"


def unfold_ids(text: str) -> Counter[TestId]:
    ids: Counter[TestId] = Counter()
    stem = name = ""
    lines = text.splitlines()
    for line, following in zip(lines, [*lines[1:], ""], strict=True):
        words, _, again = line.partition(" *") if re.search(r" \*\d+$", line) else (line, "", "")
        count = int(again or 1)
        if not words.startswith(" "):
            stem = words
        elif not words.startswith("  "):
            name = words[1:]
            if not following.startswith("  "):
                ids[stem, name, ""] += count
        else:
            ids[stem, name, f"[{words[2:]}]"] += count
    return ids


if __name__ == "__main__":
    vars(os)["execve"] = _replaced
    sys.stdout.write(json.dumps({command: _answer(command) for command in sys.argv[1:]}))
