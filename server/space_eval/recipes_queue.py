"""The runs of a comparison: each in a process of its own, several at once, kept when cut off."""

from __future__ import annotations

import multiprocessing
import signal
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from multiprocessing.connection import wait
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from types import FrameType
from typing import Any

from space_eval.prompts import PromptError
from space_eval.recipes_run import RESULT_FILE, Job, process_main, read_result

_CONTEXT = multiprocessing.get_context("forkserver")
LOG_LINES = 3


class RunFailed(PromptError):
    """A run ended without a result; the message says where its log is."""


class Stopped(RuntimeError):
    """The comparison was told to stop; what is done is kept."""


class Queue:
    """Runs jobs under one folder, and says on stderr how far it is."""

    def __init__(self, folder: Path, num_processes: int) -> None:
        self.folder, self.num_processes = folder, num_processes
        self._seconds: list[float] = []
        _CONTEXT.set_forkserver_preload(["space_eval.recipes_run"])  # torch is imported once, not in every run

    def results(self, jobs: Sequence[Job]) -> list[dict[str, Any]]:
        """Of each job, in their order; runs what has none yet. Raises RunFailed behind the others' end."""
        folders = [self.folder / job.folder_name for job in jobs]
        todo: dict[Path, Job] = {}
        for folder, job in zip(folders, jobs, strict=True):
            if not (folder / RESULT_FILE).is_file() and folder not in todo:
                job.save(folder)
                todo[folder] = job
        failed = self._run(todo)
        if failed:
            log = failed[0] / "log.txt"
            last = log.read_text(encoding="utf-8", errors="replace").strip().splitlines()[-LOG_LINES:]
            raise RunFailed(f"{len(failed)} runs gave no result. The first one's log, {log}, ends: {' / '.join(last)}")
        found = [read_result(folder) for folder in folders]
        return [record | {"name": job.name} for record, job in zip(found, jobs, strict=True)]

    def _run(self, todo: dict[Path, Job]) -> list[Path]:
        """Run all; the folders without a result."""
        waiting, running, failed = list(todo.items()), dict[ForkServerProcess, tuple[Path, float]](), list[Path]()
        with _stoppable():
            try:
                while waiting or running:
                    while waiting and len(running) < self.num_processes:
                        folder, job = waiting.pop(0)
                        print(f"recipes: {job.name}, seed {job.seed} …", file=sys.stderr, flush=True)
                        process = _CONTEXT.Process(target=process_main, args=(folder,))
                        process.start()
                        running[process] = (folder, time.monotonic())
                    wait([process.sentinel for process in running])
                    for process in [process for process in running if not process.is_alive()]:
                        folder, began = running.pop(process)
                        process.join()
                        if not (folder / RESULT_FILE).is_file():
                            failed.append(folder)
                        self._say(todo[folder], folder, time.monotonic() - began, len(waiting) + len(running))
            except KeyboardInterrupt:
                for process in running:
                    process.terminate()  # the trainer keeps what it has
                for process in running:
                    process.join()
                raise Stopped(f"Stopped. What is done is kept in {self.folder}; the same command goes on.") from None
        return failed

    def _say(self, job: Job, folder: Path, seconds: float, num_left: int) -> None:
        self._seconds.append(seconds)
        mean = sum(self._seconds) / len(self._seconds) / self.num_processes
        if (folder / RESULT_FILE).is_file():
            result = read_result(folder)
            last = result["curve"][-1]
            drafts = f", {last['tokens_per_step']:.2f} held-out tokens per step" if "tokens_per_step" in last else ""
            text = f"loss {last['loss']:.3f}{drafts}, {result['flops']:.3g} operations in {result['seconds']:.0f} s"
        else:
            text = "no result"
        print(
            f"recipes: {job.name}, seed {job.seed}: {text}, {seconds:.0f} s in all; {num_left} more of this part, "
            f"about {num_left * mean / 60:.0f} min",
            file=sys.stderr,
            flush=True,
        )


@contextmanager
def _stoppable() -> Iterator[None]:
    """SIGTERM ends the comparison like Ctrl-C."""

    def stop(number: int, frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    try:
        before = signal.signal(signal.SIGTERM, stop)
    except ValueError:  # not the main thread
        yield
        return
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
