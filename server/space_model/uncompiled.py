"""transformers without torch's compiler, for a process that never compiles a model.

transformers marks some functions for `torch._dynamo` where it defines them, and takes one of its classes by name; torch
does the like for what it does on the meta device. That alone would import the compiler and, where it is installed,
triton: about a second of a start, and triton's complaints about leaks at the end of a process that never used it.

While transformers is imported here, a module stands in for the compiler: a mark of a function of transformers or torch
leaves it as it is, and the class is found when one is made. Everything else that is asked of it, by any package
(torchvision imports `torch._dynamo.utils`), imports the real compiler, which takes its place from then on. A module
that keeps a reference to the stand-in has the real one behind it.
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

_COMPILER = "torch._dynamo"
_MARKS = frozenset({"disable", "assume_constant_result", "allow_in_graph"})
_INDEXING, _INDEX_CLASS = "torch._dynamo._trace_wrapped_higher_order_op", "TransformGetItemToIndex"
_MARKED = frozenset({"torch", "transformers"})
"""Packages whose functions may stay unmarked: this process compiles none of them."""
_MODULES = ("transformers.modeling_utils", "transformers.generation.utils")


class _StandIn(ModuleType):
    """In the place of a module of the compiler: what it does not know itself is asked of the real one."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # what Python asks of every module imports nothing
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
    """What a stand-in says by itself to the module `asking`; None: nothing."""
    if not isinstance(sys.modules.get(module), _StandIn):
        return None
    if module == _COMPILER and name in _MARKS:
        return _mark(name)
    ours = asking.partition(".")[0] in _MARKED
    return _indexing if module == _INDEXING and name == _INDEX_CLASS and ours else None


def _mark(name: str) -> Callable[..., Any]:
    """The compiler's decorator `name`, which does nothing to functions of torch and transformers."""

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
    """The real module, imported if it is not there yet."""
    _leave()
    return importlib.import_module(name)


class _Submodules(MetaPathFinder, Loader):
    """Asked for any other module of the compiler, it lets the real one in."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if not fullname.startswith(f"{_COMPILER}."):
            return None
        # The import system would look in the stand-in's path, which it has asked for already: it gets the module whole.
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
    """Imports find the stand-in, and what needs more than a mark the real compiler; one that is there already stays."""
    if _COMPILER in sys.modules:
        yield
        return
    for name in (_COMPILER, _INDEXING):
        module = _StandIn(name)
        module.__spec__ = ModuleSpec(name, None, is_package=name == _COMPILER)
        sys.modules[name] = module
    sys.modules[_COMPILER].__path__ = []  # a package: the import system then asks the finder for what is in it
    sys.meta_path.insert(0, _submodules)
    try:
        yield
    finally:
        _leave()


def _leave() -> None:
    """The stand-ins make room, if they still stand."""
    for name in (_COMPILER, _INDEXING):
        if isinstance(sys.modules.get(name), _StandIn):
            del sys.modules[name]
    if _submodules in sys.meta_path:
        sys.meta_path.remove(_submodules)


with without_compiler():
    for _name in _MODULES:
        importlib.import_module(_name)
