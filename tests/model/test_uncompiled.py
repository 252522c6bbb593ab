"""A worker never compiles, and so need not import what does; a package that needs the compiler has the real one."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

LOADS = """
import sys
from space_model.unsharded import do_without_sharding
do_without_sharding()
import space_server.__main__
from space_model.loading.load import load_model
load_model("demo", num_threads=1)
heavy = {"torch._dynamo", "torch._inductor", "triton", "torch.distributed.tensor", "sympy"}
print(*sorted(heavy & sys.modules.keys()), "loaded")
import torch
assert torch.distributed.is_available()
from transformers.masking_utils import TransformGetItemToIndex
from transformers.utils import import_utils
print(type(import_utils.__loader__).__name__, hasattr(import_utils.define_import_structure, "__wrapped__"))
print(torch.compiler.disable(lambda: "marked")(), type(TransformGetItemToIndex()).__name__, torch._dynamo.__file__)
"""

FOREIGN = {
    "imports a module of it": "from torch._dynamo.utils import is_compile_supported\nis_compile_supported('cpu')",
    "imports it under a name and a module of that": (
        "import torch._dynamo as dynamo\nimport torch._dynamo.config\ndynamo.config.recompile_limit"
    ),
    "sets a setting of it": (
        "import torch\ntorch._dynamo.config.suppress_errors = True\n"
        "import torch._dynamo.config as config\nassert config.suppress_errors"
    ),
    "sets an attribute of it": "import torch._dynamo as one\none.added = 5\nimport torch._dynamo as two\ntwo.added",
    "looks a module of it up": (
        "import importlib.util\nassert importlib.util.find_spec('torch._dynamo.utils')\n"
        "assert importlib.util.find_spec('torch._dynamo')"
    ),
    "makes a class of one of its": (
        "from torch._dynamo._trace_wrapped_higher_order_op import TransformGetItemToIndex\n"
        "class Own(TransformGetItemToIndex):\n    pass\nassert isinstance(Own(), TransformGetItemToIndex)"
    ),
    "marks a function of its own": (
        "import torch\n@torch.compiler.disable\ndef own(x):\n    return x + 1\n"
        "assert own._torchdynamo_disable and own(1) == 2"
    ),
    "marks with a reason": (
        "import torch\n@torch.compiler.disable(recursive=False, reason='ours')\ndef own(x):\n    return x + 1\n"
        "assert own(1) == 2 and own is not own.__wrapped__"
    ),
    "asks which of its names there are": "import torch._dynamo\nassert 'optimize' in dir(torch._dynamo)",
}
"""What a package may do with the compiler where it is imported, as torchvision, accelerate or peft do."""


def run(code: str, folder: Path | None = None) -> list[str]:
    path = [str(folder)] * (folder is not None) + [os.environ[name] for name in ["PYTHONPATH"] if name in os.environ]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path)}
    ran = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False, timeout=300
    )
    assert ran.returncode == 0, ran.stderr
    return ran.stdout.splitlines()


def test_a_worker_loads_its_model_without_the_compiler_and_who_asks_for_it_then_has_the_real_one() -> None:
    loaded, structure, marked = run(LOADS)
    assert loaded == "loaded"
    assert structure == "SourceFileLoader True"  # its table of models comes from the cache
    assert marked.startswith("marked TransformGetItemToIndex ")
    assert marked.endswith("__init__.py")


TRIED = """
import os, sys, time, traceback
import torch
from space_model.uncompiled import without_compiler

def use(code):
    with without_compiler():
        exec(compile(code, "foreign", "exec"), {"__name__": "foreign"})
    import torch._dynamo, torch._dynamo.utils
    assert torch._dynamo is sys.modules["torch._dynamo"]
    assert torch._dynamo.__file__.endswith("__init__.py"), torch._dynamo
    assert torch._dynamo.utils.__spec__.origin == torch._dynamo.utils.__file__
    assert not [finder for finder in sys.meta_path if type(finder).__module__ == "space_model.uncompiled"]

for name, code in FOREIGN.items():
    if (child := os.fork()) == 0:
        try:
            use(code)
        except BaseException:
            print(name, traceback.format_exc(), flush=True)
        os._exit(0)
    os.waitpid(child, 0)
"""


@pytest.mark.slow
def test_a_package_that_is_imported_meanwhile_may_use_the_compiler() -> None:
    """Each in a process of its own, forked before the compiler is there."""
    assert run(f"FOREIGN = {FOREIGN!r}\n{TRIED}") == []


def test_what_a_package_keeps_of_the_compiler_is_the_real_one_afterwards(tmp_path: Path) -> None:
    (tmp_path / "foreign.py").write_text("import torch._dynamo as kept\nfrom torch._dynamo import disable")
    code = """
import torch
from space_model.uncompiled import without_compiler
with without_compiler():
    import foreign
print(foreign.kept.optimize is torch._dynamo.optimize, foreign.disable(lambda: 1)._torchdynamo_disable)
"""
    assert run(code, tmp_path) == ["True True"]


@pytest.mark.slow
def test_a_worker_loads_its_model_beside_torchvision(tmp_path: Path) -> None:
    """A package of that name which imports what the real one imports; transformers imports it where it is installed."""
    (tmp_path / "torchvision" / "transforms").mkdir(parents=True)
    (tmp_path / "torchvision" / "__init__.py").write_text(
        "import torch\nfrom torch._dynamo.utils import is_compile_supported\nfrom torchvision import transforms\n"
        "__version__ = '0.29.1'\n@torch.compiler.disable\ndef wrap(tensor):\n    return tensor\n"
    )
    names = "from enum import Enum\nclass InterpolationMode(Enum):\n    NEAREST = NEAREST_EXACT = 'nearest'\n"
    others = "".join(
        f"    {name} = {name.lower()!r}\n" for name in ("BILINEAR", "BICUBIC", "BOX", "HAMMING", "LANCZOS")
    )
    (tmp_path / "torchvision" / "transforms" / "__init__.py").write_text(names + others)
    (tmp_path / "torchvision" / "transforms" / "functional.py").write_text("def pil_to_tensor(image): ...\n")
    (tmp_path / "torchvision" / "io.py").touch()
    described = tmp_path / "torchvision-0.29.1.dist-info"
    described.mkdir()
    (described / "METADATA").write_text("Metadata-Version: 2.1\nName: torchvision\nVersion: 0.29.1\n")
    code = """
import sys
import space_server.__main__
from space_model.loading.load import load_model
load_model("demo", num_threads=1)
import transformers.image_utils, torch, torchvision
print(torchvision.is_compile_supported is torch._dynamo.utils.is_compile_supported, torchvision.wrap(1))
"""
    assert run(code, tmp_path) == ["True 1"]
