"""How the tests are shared out among processes, where and how Triton's kernels run, and how async tests do."""

import asyncio
import functools
import gc
import inspect
import os
import re
import sys
from collections.abc import Iterator
from contextlib import AbstractAsyncContextManager, AsyncExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

from space_common.process import sleep_soon

sleep_soon(os.environ)  # before torch loads OpenMP: other test processes need the processors, too

import numpy as np  # noqa: E402
import pytest  # noqa: E402
import torch  # noqa: E402

if TYPE_CHECKING:
    from xdist.remote import Producer
    from xdist.scheduler import LoadScopeScheduling

# Read by triton where a kernel is declared: without a GPU kernels are interpreted.
if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")
# Programs that tests start find what tests share: `python -m doubles.router` is a scripted worker.
_TESTS = Path(__file__).parent
_SHARED = [str(_TESTS / "support"), str(_TESTS)]
os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [*_SHARED, os.environ.get("PYTHONPATH")]))
os.environ.setdefault("SPACESERVE_MODEL", "demo")  # of servers that a test gives no model
os.environ.setdefault("PIP_NO_INDEX", "1")  # and one that would fetch the default model fails
os.environ.setdefault("TRITON_DEFAULT_FP_FUSION", "1")  # as it is by default; triton 3.9 warns where it is not said


_TOGETHER = (
    "tests/e2e/",
    "tests/exactness/",
    "tests/house/test_",
    "tests/model/test_family_sweep.py",
    "tests/perf/test_measurements.py",
    "tests/real/",
    "tests/server/drafts/test_eagle.py",
    "tests/server/machine/test_loaded_bytes.py",
    "tests/server/machine/test_memory.py",
    "tests/server/tensor_parallel/",
    "tests/train/test_recipe.py",
)
"""Folders and files whose tests share what takes seconds to make."""


def pytest_addoption(parser: pytest.Parser, pluginmanager: pytest.PytestPluginManager) -> None:
    if not pluginmanager.hasplugin("timeout"):  # on a GPU machine with pytest alone
        parser.addini("timeout", "of pytest-timeout, which is not installed")


def pytest_configure(config: pytest.Config) -> None:
    if not config.pluginmanager.hasplugin("timeout"):
        config.addinivalue_line("markers", "timeout(seconds): of pytest-timeout, which is not installed")


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """`-m gpu` leaves files and folders without such tests unread: a GPU machine may lack what they import."""
    if config.option.markexpr != "gpu" or not (collection_path.is_dir() or collection_path.suffix == ".py"):
        return None
    files = collection_path.rglob("test_*.py") if collection_path.is_dir() else [collection_path]
    return None if any("pytest.mark.gpu" in file.read_text(encoding="utf-8") for file in files) else True


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: "Producer") -> "LoadScopeScheduling | None":
    """`--dist loadgroup`: tests that share a server or a long computation in one process; every other test by itself.

    pytest-xdist 3.8 marks groups by a suffix to node ids, which pytest 9.2 computes anew: the marks have no effect.
    """
    if config.getvalue("dist") != "loadgroup":
        return None
    from xdist.scheduler import LoadScopeScheduling

    class Scheduling(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return next((place for place in _TOGETHER if nodeid.startswith(place)), nodeid)

    return Scheduling(config, log)


def pytest_collection_finish() -> None:
    """Exclude what the tests' modules hold from garbage collection: each full one took over a second without this."""
    gc.collect()
    gc.freeze()


def pytest_unconfigure() -> None:
    gc.unfreeze()  # else extensions report frozen objects as leaks


def pytest_runtest_setup() -> None:
    """Save libraries that a test's module has imported work that no test looks at."""
    _patch_triton_once_a_launch()
    _format_no_config()
    _read_certificates_once()


def _read_certificates_once() -> None:
    """httpx reads the system's certificates for every client, `httpx.get` included, for 30 ms."""
    transports = sys.modules.get("httpx._transports.default")
    if transports is not None and not hasattr(transports.create_ssl_context, "cache_clear"):
        vars(transports)["create_ssl_context"] = functools.cache(transports.create_ssl_context)


def _format_no_config() -> None:
    """transformers formats each config that it reads, compared with its default one, for a log line that is not shown:
    a twentieth of the time of loading a tiny model. It compiles more regular expressions than Python keeps."""
    configs, generation = (
        sys.modules.get(f"transformers.{part}") for part in ("configuration_utils", "generation.configuration_utils")
    )
    if configs is not None and generation is not None:
        configs.PreTrainedConfig.__repr__ = generation.GenerationConfig.__repr__ = object.__repr__  # type: ignore[method-assign]
        vars(re)["_MAXCACHE"] = 1 << 14


def _patch_triton_once_a_launch() -> None:
    """Triton's interpreter, once a test's module has imported it, prepares its language once for each launch.

    Of itself it does so at each call of a device function, `tl.max` included: a third of a kernel's time.
    """
    interpreter = sys.modules.get("triton.runtime.interpreter")
    if interpreter is None or hasattr(interpreter, "_patch_lang_anew"):
        return
    plain = vars(interpreter)["_patch_lang_anew"] = interpreter._patch_lang
    prepared: set[frozenset[int]] = set()  # modules that the launch in progress has patched; repetition changes nothing

    def patch_lang(function: Any) -> Any:
        modules = (interpreter.tl, interpreter.tl.core)
        visible = frozenset(id(value) for value in function.__globals__.values() if any(value is m for m in modules))
        if visible in prepared:
            return interpreter._LangPatchScope()
        scope = plain(function)
        prepared.add(visible)
        restore = scope.restore

        def restored() -> None:
            prepared.clear()
            restore()

        scope.restore = restored
        return scope

    vars(interpreter)["_patch_lang"] = patch_lang


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """Run an async test in a loop of its own, with the context managers it asks for entered in the same loop.

    By asyncio.run, for grpc's one poller per process may still tell the loop of an earlier test something, which
    only asyncio itself takes lightly.
    """
    if not inspect.iscoroutinefunction(pyfuncitem.obj):
        return None
    arguments = {name: pyfuncitem.funcargs[name] for name in inspect.signature(pyfuncitem.obj).parameters}

    async def whole() -> None:
        async with AsyncExitStack() as stack:
            for name, value in arguments.items():
                if isinstance(value, AbstractAsyncContextManager):
                    arguments[name] = await stack.enter_async_context(value)
            await pyfuncitem.obj(**arguments)

    asyncio.run(whole())
    return True


@pytest.fixture(params=[1, 2, 3])
def num_threads(request: pytest.FixtureRequest) -> Iterator[int]:
    """Torch's, of this test."""
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


@pytest.fixture
def dots_round_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Products of float32 tiles in Triton's interpreter, as if summed exactly: numpy's library sums a row otherwise by
    its place in the tile, on processors with registers of 256 bits. A device does not."""
    if os.environ.get("TRITON_INTERPRET") != "1":
        return
    interpreter = pytest.importorskip("triton.runtime.interpreter")
    plain = interpreter.InterpreterBuilder.create_dot

    def create_dot(self: Any, a: Any, b: Any, d: Any, *settings: Any) -> Any:
        if a.data.dtype != np.float32 or b.data.dtype != np.float32:
            return plain(self, a, b, d, *settings)
        product = np.matmul(a.data.astype(np.float64), b.data.astype(np.float64)).astype(d.data.dtype)
        return interpreter.TensorHandle(product + d.data, d.dtype.scalar)

    monkeypatch.setattr(interpreter.InterpreterBuilder, "create_dot", create_dot)
