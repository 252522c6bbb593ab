"""The worker's command line."""

from __future__ import annotations

from collections.abc import Sequence

from space_common.worker_settings import WorkerSettings
from space_kernels.attention_backends import ATTENTION_NAMES
from space_kernels.build import cpu_library
from space_model.precision import KV_DTYPES, WEIGHTS

CHOICES = {
    "weights": WEIGHTS,
    "kv_dtype": KV_DTYPES,
    "attention": ATTENTION_NAMES,
    "cpu_kernels": cpu_library.CHOICES,
}


def parse(arguments: Sequence[str]) -> WorkerSettings:
    """Parse the command line. Exits with status 2 and one line if it is invalid."""
    return WorkerSettings.parse(arguments, CHOICES)
