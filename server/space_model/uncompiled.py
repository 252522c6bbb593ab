"""transformers without torch's compiler, for a process that never compiles a model.

transformers decorates some functions with `torch._dynamo`, and refers to one of its classes; torch does the same for
the meta device. That alone would import the compiler and, if it is installed, triton: this costs about a second at
start, and triton's leak warnings at the exit of a process that never used it.

While this module imports transformers, a stand-in replaces the compiler: its decorators return functions of
transformers and torch unchanged, and the class is resolved when it is instantiated. Any other access, by any package
(torchvision imports `torch._dynamo.utils`), imports the real compiler, which replaces the stand-in. A module that holds
a reference to the stand-in reaches the real one through it.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

from space_model.kept_structure import keep_structure

_COMPILER = "torch._dynamo"
_MARKS = frozenset({"disable", "assume_constant_result", "allow_in_graph"})
_INDEXING, _INDEX_CLASS = "torch._dynamo._trace_wrapped_higher_order_op", "TransformGetItemToIndex"
_MARKED = frozenset({"torch", "transformers"})
"""Packages whose functions may stay undecorated: this process compiles none of them."""
_MODULES = ("transformers.modeling_utils", "transformers.generation.utils")


class _StandIn(ModuleType):
    """Stands in for a module of the compiler; unknown attributes are looked up in the real module."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # Python's own attribute look-ups import nothing
            raise AttributeError(f"module {self.__name__!r} has no attribute {name!r}")
        known = _answer(self.__name__, name, sys._getframe(1).f_globals.get("__name__", ""))
        return getattr(_real(self.__name__), name) if known is None else known

    def __setattr__(self, name: str, value: Any) -> None:
        if name.startswith("__"):
            super().__setattr__(name, value)
        else:
            setattr(_real(self.__name__), name, value)

    def __dir__(self) -> list[str]:
        return dir(_real(self.__name__))


def _answer(module: str, name: str, asking: str) -> Any:
    """Return the stand-in's own value of `name` for the module `asking`; None if it has none."""
    if not isinstance(sys.modules.get(module), _StandIn):
        return None
    if module == _COMPILER and name in _MARKS:
        return _mark(name)
    ours = asking.partition(".")[0] in _MARKED
    return _indexing if module == _INDEXING and name == _INDEX_CLASS and ours else None


def _mark(name: str) -> Callable[..., Any]:
    """Return a stand-in for the compiler's decorator `name`, which skips torch's and transformers' functions."""

    def mark(function: Callable[..., Any] | None = None, *arguments: Any, **named: Any) -> Any:
        if function is None:
            return lambda function: mark(function, *arguments, **named)
        if str(getattr(function, "__module__", "")).partition(".")[0] in _MARKED:
            return function
        return getattr(_real(_COMPILER), name)(function, *arguments, **named)

    return mark


def _indexing() -> object:
    return getattr(_real(_INDEXING), _INDEX_CLASS)()


def _real(name: str) -> ModuleType:
    """Return the real module, importing it if needed."""
    _leave()
    return importlib.import_module(name)


class _Submodules(MetaPathFinder, Loader):
    """An import hook that replaces the stand-ins when any other module of the compiler is imported."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if not fullname.startswith(f"{_COMPILER}."):
            return None
        # Otherwise the import system would search the path of the stand-in, which it has already read.
        real = _real(fullname)
        return ModuleSpec(fullname, self, loader_state=real.__spec__, is_package=hasattr(real, "__path__"))

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return sys.modules[spec.name]

    def exec_module(self, module: ModuleType) -> None:
        if module.__spec__ is not None:
            module.__spec__ = module.__spec__.loader_state


_submodules = _Submodules()


@contextmanager
def without_compiler() -> Iterator[None]:
    """In the block, imports get the stand-in, which loads the real compiler on demand. If it is loaded already, it
    stays."""
    if _COMPILER in sys.modules:
        yield
        return
    for name in (_COMPILER, _INDEXING):
        module = _StandIn(name)
        module.__spec__ = ModuleSpec(name, None, is_package=name == _COMPILER)
        sys.modules[name] = module
    sys.modules[_COMPILER].__path__ = []  # marks a package, so that the import system asks the finder for submodules
    sys.meta_path.insert(0, _submodules)
    try:
        yield
    finally:
        _leave()


def _leave() -> None:
    """Remove the stand-ins, if they are still installed."""
    for name in (_COMPILER, _INDEXING):
        if isinstance(sys.modules.get(name), _StandIn):
            del sys.modules[name]
    if _submodules in sys.meta_path:
        sys.meta_path.remove(_submodules)


keep_structure()
with without_compiler():
    for _name in _MODULES:
        importlib.import_module(_name)
