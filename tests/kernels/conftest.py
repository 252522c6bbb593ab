"""Every kind of compiled library that this processor can run, and how many threads it takes."""

from __future__ import annotations

import pytest
from space_kernels import cpu_library
from space_kernels.cpu_library import CpuLibrary


@pytest.fixture(params=cpu_library.own_kinds())
def library(request: pytest.FixtureRequest) -> CpuLibrary:
    return cpu_library.library_for(request.param)
