"""A pytest plugin (`-p gpu.watch`) that ends a stage, and all that it started, with the check that started it.

A stage that outlives its check keeps the GPU and writes over what the next check finds.
"""

import os
import signal
import threading
import time


def _end_with(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(0.5)
    os.killpg(os.getpgrp(), signal.SIGKILL)


def pytest_configure() -> None:
    """Start watching. Processes that the stage starts are in its group, and end with it."""
    if os.getpgrp() == os.getpid():
        threading.Thread(target=_end_with, args=(os.getppid(),), name="check watch", daemon=True).start()
