"""Each compiled library that this processor can run."""

from __future__ import annotations

import pytest
from space_kernels.build import cpu_library
from space_kernels.build.cpu_library import CpuLibrary


@pytest.fixture(params=cpu_library.own_kinds())
def library(request: pytest.FixtureRequest) -> CpuLibrary:
    return cpu_library.library_for(request.param)
