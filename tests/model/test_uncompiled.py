"""A worker never compiles, and so need not import what does."""

from __future__ import annotations

import subprocess
import sys

LOADS = """
import sys
import space_server.__main__
from space_model.load import load_model
load_model("demo", num_threads=1)
print(*sorted({"torch._dynamo", "torch._inductor", "triton"} & sys.modules.keys()), "loaded")
import torch
from transformers.masking_utils import TransformGetItemToIndex
print(torch.compiler.disable(lambda: "marked")(), type(TransformGetItemToIndex()).__name__, torch._dynamo.__file__)
"""


def test_a_worker_loads_its_model_without_the_compiler_and_who_asks_for_it_then_has_the_real_one() -> None:
    ran = subprocess.run([sys.executable, "-c", LOADS], capture_output=True, text=True, check=False, timeout=300)
    assert ran.returncode == 0, ran.stderr
    loaded, marked = ran.stdout.splitlines()
    assert loaded == "loaded"
    assert marked.startswith("marked TransformGetItemToIndex ")
    assert marked.endswith("__init__.py")
