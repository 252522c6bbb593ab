"""transformers without torch's compiler, for a process that never compiles a model.

transformers marks some functions for `torch._dynamo` where it defines them, and takes one of its classes by name; torch
does the like for what it does on the meta device. That alone would import the compiler and, where it is installed,
triton: about a second of a start, and triton's complaints about leaks at the end of a process that never used it. While
transformers is imported here, a mark leaves its function as it is, and the class is found when somebody makes one. Who
compiles later imports the compiler then.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

_COMPILER = "torch._dynamo"
_MARKS = ("disable", "assume_constant_result", "allow_in_graph")
_INDEXING, _INDEX_CLASS = "torch._dynamo._trace_wrapped_higher_order_op", "TransformGetItemToIndex"
_MODULES = ("transformers.modeling_utils", "transformers.generation.utils")


@contextmanager
def without_compiler() -> Iterator[None]:
    """Who imports the compiler finds one that does nothing; if the real one is there already, that stays."""
    if _COMPILER in sys.modules:
        yield
        return
    compiler, indexing = ModuleType(_COMPILER), ModuleType(_INDEXING)
    for mark in _MARKS:
        setattr(compiler, mark, _unmarked)
    compiler.__path__ = []  # a package: it has the other module
    setattr(indexing, _INDEX_CLASS, _indexing)
    sys.modules.update({_COMPILER: compiler, _INDEXING: indexing})
    try:
        yield
    finally:
        for name in (_COMPILER, _INDEXING):
            del sys.modules[name]


def _unmarked(function: Callable[..., Any] | None = None, *_: object, **__: object) -> Callable[..., Any]:
    return function if function is not None else _unmarked


def _indexing() -> object:
    return getattr(importlib.import_module(_INDEXING), _INDEX_CLASS)()


with without_compiler():
    for _name in _MODULES:
        importlib.import_module(_name)
