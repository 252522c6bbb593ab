"""transformers' table of which module defines which class, kept in the cache.

transformers makes that table by reading the 2,500 files of its models, twice at each import: about a second of a
worker's start. `keep_structure` has it made once for an installation, and read from the cache from then on.
"""

from __future__ import annotations

import functools
import hashlib
import json
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from types import ModuleType
from typing import Any

from space_common.kept_files import keep_files

Structure = dict[frozenset[str], dict[str, set[str]]]
"""The packages that classes need -> their module -> their names."""
Define = Callable[..., Structure]

_MODULE, _FUNCTION = "transformers.utils.import_utils", "define_import_structure"
_FILE = "structure.json"


def keep_structure() -> None:
    """Have transformers read the table of its models from the cache, if it is not imported yet."""
    if "transformers" not in sys.modules and not any(isinstance(one, _Finder) for one in sys.meta_path):
        sys.meta_path.insert(0, _Finder())


class _Finder(MetaPathFinder):
    """An import hook: gives transformers.utils.import_utils a `_Loader`, and removes itself."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname != _MODULE:
            return None
        sys.meta_path.remove(self)
        spec = PathFinder.find_spec(fullname, path, target)
        if spec is not None and spec.loader is not None:
            spec.loader = _Loader(spec.loader)
        return spec


class _Loader(Loader):
    """Runs the module, replaces its function, and leaves the module with its own loader."""

    def __init__(self, own: Loader) -> None:
        self._own = own

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self._own.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        module.__loader__ = self._own
        if module.__spec__ is not None:
            module.__spec__.loader = self._own
        self._own.exec_module(module)
        define = getattr(module, _FUNCTION, None)
        if define is not None:
            setattr(module, _FUNCTION, _kept(define))


def _kept(define: Define) -> Define:
    """Return `define_import_structure` with the table of the folder `transformers/models` kept."""

    @functools.wraps(define)
    def kept(module_path: str | os.PathLike[str], prefix: str | None = None, **more: Any) -> Structure:
        path = Path(module_path)
        folder = path.parent if path.suffix == ".py" else path
        if more or folder.parts[-2:] != ("transformers", "models"):
            return define(module_path, prefix, **more)
        try:
            found = _read(folder, define)
        except (OSError, ValueError):  # no folder can be written, or the file is damaged
            return define(module_path, prefix)
        if prefix is None:
            return found
        return {needs: {f"{prefix}.{name}": made for name, made in modules.items()} for needs, modules in found.items()}

    return kept


def _read(folder: Path, define: Define) -> Structure:
    """Return the folder's table from the cache, where it is written if it is missing. Raises OSError, ValueError."""

    def make() -> dict[str, str]:
        table = define(folder)
        modules = [
            [sorted(needs), {name: sorted(made) for name, made in files.items()}] for needs, files in table.items()
        ]
        return {_FILE: json.dumps(modules)}

    kept = keep_files("transformers", _source(folder), "1", make) / _FILE
    try:
        modules = json.loads(kept.read_text(encoding="utf-8"))
        return {frozenset(needs): {name: set(made) for name, made in files.items()} for needs, files in modules}
    except (TypeError, AttributeError) as error:
        raise ValueError(f"{kept} is damaged") from error


def _source(folder: Path) -> str:
    """Return a hash of what the table is made from: path, size and time of each file, and of the function's."""
    digest = hashlib.sha256()
    rules = folder.parent / "utils" / "import_utils.py"
    for name, found in sorted((*_files(folder, ""), (rules.name, rules.stat())), key=lambda file: file[0]):
        digest.update(f"{name} {found.st_size} {found.st_mtime_ns}\n".encode())
    return digest.hexdigest()[:16]


def _files(folder: str | os.PathLike[str], under: str) -> Iterator[tuple[str, os.stat_result]]:
    """Yield the Python files of a folder and its subfolders."""
    with os.scandir(folder) as entries:
        for entry in entries:
            if entry.name == "__pycache__":
                continue
            if entry.is_dir():
                yield from _files(entry.path, f"{under}{entry.name}/")
            elif entry.name.endswith(".py"):
                yield f"{under}{entry.name}", entry.stat()
