"""What a tensor leaves is used by the next one."""

import ctypes
import resource
import subprocess
import sys

import pytest

SIZE = 48 << 20
"""More than the largest that glibc ever keeps by itself."""

SCRIPT = f"""
import resource, sys, torch
from space_server.machine.memory import keep_freed_memory
if sys.argv[1] == "kept":
    assert keep_freed_memory()
for _ in range(10):
    torch.ones({SIZE} // 4)
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(10):
    torch.ones({SIZE} // 4)
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


def faults(how: str) -> int:
    run = subprocess.run([sys.executable, "-c", SCRIPT, how], capture_output=True, text=True, check=True, timeout=120)
    return int(run.stdout)


@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "mallopt"), reason="glibc alone has mallopt")
def test_memory_is_not_given_back_between_two_tensors() -> None:
    pages = SIZE // resource.getpagesize()
    assert faults("kept") < pages <= faults("given back") / 9
