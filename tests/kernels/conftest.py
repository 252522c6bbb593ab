"""Every kind of compiled library that this processor can run, and how many threads it takes."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from space_kernels import cpu_library
from space_kernels.cpu_library import CpuLibrary


@pytest.fixture(params=cpu_library.own_kinds())
def library(request: pytest.FixtureRequest) -> CpuLibrary:
    return cpu_library.library_for(request.param)


@pytest.fixture(params=[1, 2, 3])
def num_threads(request: pytest.FixtureRequest) -> Iterator[int]:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)
