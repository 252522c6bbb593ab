"""Downloads models from the Hugging Face hub, for router and workers.

Resumes interrupted downloads: huggingface_hub 2 discards the partial file of a killed process, and a shard of a large
model is gigabytes. Errors are one line with the cause and what to do.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
import re
import shutil
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from space_common.files import is_local_name

PROGRESS_SECONDS = 5.0  # seconds between two lines


@contextlib.contextmanager
def download_progress(
    name: str, total: int, measure: Callable[[], int], say: Callable[[str], None], *, what: str = ""
) -> Iterator[None]:
    """Say a line at the start, one every few seconds while the block runs, and one at its end unless it raises.

    `measure`: bytes present now, of `total`; `what` follows the name in the first line ("3 files, ").
    """
    before, begun = measure(), time.monotonic()
    resumed = f", {size_text(before)} of them since last time" if before else ""
    say(f"downloading {name}: {what}{size_text(total)}{resumed}")
    over = threading.Event()

    def watch() -> None:
        while not over.wait(PROGRESS_SECONDS):
            done = measure()
            share = f"{size_text(done)} of {size_text(total)}" + (f" ({done / total:.0%})" if total else "")
            if done > before:
                rate = (done - before) / (time.monotonic() - begun)
                pace = f"{size_text(rate)}/s, {max(total - done, 0) / rate:.0f} s left"
            else:  # pip may resolve and connect for longer than one interval
                pace = f"nothing received for {time.monotonic() - begun:.0f} s"
            say(f"downloading {name}: {share}, {pace}")

    watcher = threading.Thread(target=watch, name="download progress", daemon=True)
    watcher.start()
    try:
        yield
    finally:
        over.set()
        watcher.join()
    say(f"downloaded {name}: {size_text(total)} in {time.monotonic() - begun:.1f} s")


def size_text(num_bytes: float) -> str:
    """Return the size in the largest fitting unit: 92.9 MB."""
    for unit, bound in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if num_bytes >= bound:
            return f"{num_bytes / bound:.1f} {unit}"
    return f"{num_bytes:.0f} B"


PARTIAL = ".partial"  # suffix of a partly downloaded file

PAUSES = (1.0, 2.0, 4.0, 8.0)
"""Seconds between attempts that make no progress; an attempt with progress starts from the first again."""

READ_SECONDS = 30.0


class Damaged(OSError):
    """The downloaded file differs from the hub's."""


@dataclass(frozen=True)
class HubFile:
    """A file of a model at a commit."""

    model: str
    commit: str
    name: str
    cache: Path  # of all models
    token: str | None

    def fetch(self) -> None:
        """Download the file into the cache if needed. Raises network and huggingface_hub errors, and OSError."""
        from huggingface_hub import get_hf_file_metadata, hf_hub_url, utils

        url = hf_hub_url(self.model, self.name, revision=self.commit)
        found = get_hf_file_metadata(url, token=self.token)
        if found.etag is None or found.size is None:
            raise OSError(f"the hub says neither size nor tag of {self.name}")
        if not is_local_name(self.name) or not re.fullmatch(r"[\w-]+", found.etag):
            raise OSError(f"the hub names a file outside the model's folder: {self.name!r}, tag {found.etag!r}")
        home = self.cache / f"models--{self.model.replace('/', '--')}"
        blob = home / "blobs" / found.etag
        lock = self.cache / ".locks" / home.name / f"{found.etag}.lock"
        for folder in (blob.parent, lock.parent):
            folder.mkdir(parents=True, exist_ok=True)
        library: Any = utils  # its exports are not declared to type checkers
        with library.WeakFileLock(lock):
            if not blob.exists():
                part = blob.with_name(f"{found.etag}{PARTIAL}")
                self._complete(url, part, found.size)
                _check(part, found.etag, self.name)
                part.replace(blob)
            _link(home / "snapshots" / self.commit / self.name, blob)

    def _complete(self, url: str, part: Path, size: int) -> None:
        """Retry until the file is complete; gives up after several attempts without progress."""
        failures = 0
        while (have := part.stat().st_size if part.exists() else 0) != size:
            if have > size:
                part.unlink()
                continue
            failure: Exception | None = None
            try:
                self._go_on(url, part, have)
            except Exception as error:
                if not _may_pass(error):
                    raise
                failure = error
            if part.exists() and part.stat().st_size > have:
                failures = 0
            elif failures < len(PAUSES):
                time.sleep(PAUSES[failures])
                failures += 1
            else:
                raise failure or Damaged(f"{self.name} ends after {have} of {size} bytes, again and again")

    def _go_on(self, url: str, part: Path, have: int) -> None:
        """Append the bytes from offset `have` on."""
        from huggingface_hub import utils

        library: Any = utils
        headers = library.build_hf_headers(token=self.token) | {"Accept-Encoding": "identity"}
        if have:
            headers["Range"] = f"bytes={have}-"
        session = library.get_session()
        with session.stream("GET", url, headers=headers, timeout=READ_SECONDS, follow_redirects=True) as answer:
            library.hf_raise_for_status(answer)
            whole = have and answer.status_code == 200  # a proxy ignores range requests
            with part.open("wb" if whole else "ab") as file:
                for piece in answer.iter_bytes():
                    file.write(piece)


def _may_pass(error: Exception) -> bool:
    """Return whether a retry may help: network failures and the hub's 5xx, not refusals or a full disk."""
    from huggingface_hub.errors import HfHubHTTPError

    if isinstance(error, HfHubHTTPError):
        status = error.response.status_code
        return status >= 500 or status in (408, 429)
    network: Any = HfHubHTTPError.__mro__[1]  # HTTPError of the httpx that the library was built on
    return isinstance(error, (network, ConnectionError))


def _check(part: Path, etag: str, name: str) -> None:
    """Check the sha256, which is the etag of large files. Raises Damaged."""
    if len(etag) != 64:
        return
    with part.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    if digest != etag:
        part.unlink()
        raise Damaged(f"{name} came damaged (sha256 {digest[:12]}…, wanted {etag[:12]}…); it is fetched anew next time")


def _link(place: Path, blob: Path) -> None:
    """Link the blob as huggingface_hub does; copy it if the file system has no links."""
    place.parent.mkdir(parents=True, exist_ok=True)
    if place.exists():
        return
    try:
        place.symlink_to(os.path.relpath(blob, place.parent))
    except OSError:
        os.link(blob, place)


AT_ONCE = 8  # concurrent file downloads

SMALL_FILES = ("*.json", "*.jinja", "additional_chat_templates/*.jinja", "*.txt", "*.model", "*.tiktoken")
WEIGHTS = ("*.safetensors",)
SECOND_COPIES = ("consolidated*.safetensors", "original/*", "metal/*", "onnx/*", "openvino/*")
"""Copies of the weights in other programs' formats; never downloaded."""


class HubError(Exception):
    """The model cannot be downloaded; the message has the cause and what to do."""


@dataclass(frozen=True)
class Missing:
    """The part of a model that is not downloaded yet."""

    num_files: int
    num_bytes: int
    folder: Path  # download target
    free: int  # free bytes there


@dataclass(frozen=True)
class Hub:
    """How models are fetched: `--revision`, `--token-file`, `--download-folder`, `--offline`."""

    revision: str | None = None  # branch, tag or commit; None: main
    token_file: Path | None = None  # its first word is the token; None: HF_TOKEN, or what `hf auth login` stored
    folder: Path | None = None  # root of all downloads; None: huggingface_hub's own (HF_HOME)
    offline: bool = False  # use only downloaded files
    say: Callable[[str], None] = field(default=lambda line: None, compare=False)  # one line of progress

    def fetch(self, model: str, *, weights: bool = True) -> Path:
        """Download a model if needed and return its folder, or for `owner/repo:file` that file. Raises HubError.

        `weights`: include the weights.
        """
        repository, file = split_hub_file(model)
        if file is None:
            return self._fetch(model, [*SMALL_FILES, *(WEIGHTS if weights else ())])
        found = self._fetch(repository, [file]) / file
        if not found.is_file():
            raise HubError(f"{repository} has no file {file}; is the name right?")
        return found

    def _fetch(self, model: str, patterns: Sequence[str]) -> Path:
        """Download the files of a repository that match `patterns` and return their folder."""
        from huggingface_hub import snapshot_download  # imported late: a local model needs no network library
        from huggingface_hub.errors import DryRunError, LocalEntryNotFoundError

        token = self._token()
        asked: dict[str, Any] = {
            "revision": self.revision,
            "token": token,
            "cache_dir": self.folder,
            "allow_patterns": list(patterns),
            "ignore_patterns": list(SECOND_COPIES),
        }
        with self._named(model), _quiet():
            if not self.is_offline():
                if re.fullmatch("[0-9a-f]{40}", self.revision or ""):  # a commit never changes
                    with contextlib.suppress(LocalEntryNotFoundError):
                        return Path(snapshot_download(model, local_files_only=True, **asked))
                try:
                    files = snapshot_download(model, dry_run=True, **asked)
                except DryRunError as error:  # the hub is unreachable: use local files if complete
                    cause = error.__cause__
                    asked["local_files_only"] = True
                    try:
                        return Path(snapshot_download(model, **asked))
                    except OSError:
                        raise cause or error from None
                missing = [file for file in files if file.will_download]
                total = sum(file.file_size or 0 for file in missing)
                if missing:
                    cache = self.where()
                    folder = cache / f"models--{model.replace('/', '--')}"
                    self._check_space(model, folder, total)
                    wanted = [HubFile(model, file.commit_hash, file.filename, cache, token) for file in missing]
                    blobs = folder / "blobs"
                    whole = _bytes(blobs) - _bytes(blobs, f"*{PARTIAL}")
                    what, measure = f"{len(missing)} files, ", lambda: _bytes(blobs) - whole
                    with download_progress(model, total, measure, self.say, what=what):
                        _all_at_once(wanted)
                return Path(snapshot_download(model, **asked))
            return Path(snapshot_download(model, local_files_only=True, **asked))

    def missing(self, model: str) -> Missing:
        """Return what `fetch` would download. Raises HubError."""
        from huggingface_hub import snapshot_download
        from huggingface_hub.errors import DryRunError

        model, file = split_hub_file(model)
        asked: dict[str, Any] = {
            "revision": self.revision,
            "token": self._token(),
            "cache_dir": self.folder,
            "allow_patterns": [*SMALL_FILES, *WEIGHTS] if file is None else [file],
            "ignore_patterns": list(SECOND_COPIES),
        }
        there = next(parent for parent in (self.where(), *self.where().parents) if parent.exists())
        free = shutil.disk_usage(there).free
        with self._named(model), _quiet():
            if self.is_offline():
                snapshot_download(model, local_files_only=True, **asked)
                return Missing(0, 0, there, free)
            try:
                files = [file for file in snapshot_download(model, dry_run=True, **asked) if file.will_download]
            except DryRunError as error:
                try:
                    snapshot_download(model, local_files_only=True, **asked)
                except OSError:
                    raise error.__cause__ or error from None
                files = []
        return Missing(len(files), sum(file.file_size or 0 for file in files), there, free)

    def is_offline(self) -> bool:
        """Return whether downloads are forbidden: `--offline on`, or HF_HUB_OFFLINE."""
        from huggingface_hub import constants

        return self.offline or constants.HF_HUB_OFFLINE

    def _token(self) -> str | None:
        if self.token_file is None:
            return None
        try:
            words = self.token_file.read_text(encoding="utf-8-sig").split()
        except (OSError, UnicodeDecodeError) as error:
            raise HubError(f"--token-file {self.token_file} cannot be read: {_first_line(error)}.") from error
        if len(words) != 1:
            raise HubError(
                f"--token-file {self.token_file} holds {len(words)} words; it must hold one, a token of "
                "huggingface.co/settings/tokens."
            )
        return words[0]

    @contextlib.contextmanager
    def _named(self, model: str) -> Iterator[None]:
        """Convert the hub library's errors to HubError."""
        from huggingface_hub import errors

        network: Any = errors.HfHubHTTPError.__mro__[1]  # HTTPError of the httpx that the library was built on

        at = "" if self.revision is None else f" at revision {self.revision}"
        token = "the token in --token-file" if self.token_file else "a token in --token-file or HF_TOKEN"
        try:
            yield
        except errors.GatedRepoError as error:
            raise HubError(
                f"{model} is gated: accept its terms at {_endpoint()}/{model}, and give {token}, of the same account."
            ) from error
        except errors.RepositoryNotFoundError as error:
            raise HubError(
                f"{_endpoint()} has no model {model}, or it is private and {token} may not see it; is the id right?"
            ) from error
        except errors.RevisionNotFoundError as error:
            raise HubError(f"{model} has no revision {self.revision}; leave out --revision for main.") from error
        except errors.HFValidationError as error:
            raise HubError(f"{model} is no id of a model: {_first_line(error)}") from error
        except errors.LocalEntryNotFoundError as error:
            if not self.is_offline():
                raise HubError(_unreachable(model, error)) from error
            why = "--offline on" if self.offline else "HF_HUB_OFFLINE"
            raise HubError(
                f"{model}{at} is not, or not whole, in {self.where()}, and {why} forbids to fetch it; fetch it once "
                "without, or give the folder of a copy."
            ) from error
        except errors.HfHubHTTPError as error:
            status = error.response.status_code
            if status in (401, 403):
                raise HubError(f"{_endpoint()} refuses {model} ({status}): {token} is not valid for it.") from error
            raise HubError(f"{_endpoint()} gave status {status} for {model}{at}; try again later.") from error
        except (network, ConnectionError) as error:
            raise HubError(_unreachable(model, error)) from error
        except (OSError, ValueError, RuntimeError) as error:
            raise HubError(f"{model} could not be downloaded to {self.where()}: {_first_line(error)}") from error

    def where(self) -> Path:
        """Return the folder of all downloaded models."""
        from huggingface_hub import constants

        return self.folder or Path(constants.HF_HUB_CACHE)

    def _check_space(self, model: str, folder: Path, total: int) -> None:
        there = next(parent for parent in (folder, *folder.parents) if parent.exists())
        free = shutil.disk_usage(there).free
        left = total - _bytes(folder / "blobs", f"*{PARTIAL}")
        if left > free:
            raise HubError(
                f"{model} needs {size_text(left)} more in {there}, which has {size_text(free)} free: make room, or "
                "choose another folder with --download-folder."
            )


def is_hub_id(model: str) -> bool:
    """Return whether `model` is OWNER/NAME or OWNER/NAME:FILE.gguf, and not a path."""
    repository, file = split_hub_file(model)
    if file is None and model.lower().endswith(".gguf"):
        return False
    return not repository.startswith((".", "/", "~")) and repository.count("/") == 1


def split_hub_file(model: str) -> tuple[str, str | None]:
    """Split `owner/repo:file.gguf` into repository and GGUF file; the file is None if none is named."""
    repository, colon, file = model.partition(":")
    if not colon or not file.lower().endswith(".gguf"):
        return model, None
    return repository, file


def _all_at_once(files: Sequence[HubFile]) -> None:
    """Download several files concurrently. The first failure cancels the rest; partial downloads are kept."""
    with ThreadPoolExecutor(min(len(files), AT_ONCE)) as pool:
        fetching = [pool.submit(file.fetch) for file in files]
        try:
            for one in as_completed(fetching):
                one.result()
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Silence the library's progress bars and warnings; this module reports progress itself."""
    from huggingface_hub import utils

    library: Any = utils  # its exports are not declared to type checkers
    bars, level = not library.are_progress_bars_disabled(), library.logging.get_verbosity()
    library.disable_progress_bars()
    library.logging.set_verbosity_error()
    for name in ("httpx", "httpx2"):  # they log every request with its URL
        logging.getLogger(name).setLevel(logging.WARNING)
    try:
        yield
    finally:
        library.logging.set_verbosity(level)
        if bars:
            library.enable_progress_bars()


def _unreachable(model: str, error: Exception) -> str:
    return (
        f"{_endpoint()} cannot be reached for {model} ({_first_line(error)}), and it is not here already: check the "
        "network, HTTPS_PROXY and HF_ENDPOINT, or give the folder of a copy."
    )


def _endpoint() -> str:
    from huggingface_hub import constants

    return constants.ENDPOINT


def _bytes(folder: Path, pattern: str = "*") -> int:
    """Return the size of the matching files; files may disappear meanwhile."""
    total = 0
    for file in folder.glob(pattern):
        with contextlib.suppress(OSError):
            total += file.stat().st_size
    return total


def _first_line(error: Exception) -> str:
    lines: Sequence[str] = str(error).strip().splitlines() or [type(error).__name__]
    return lines[0][:200].rstrip(".")
