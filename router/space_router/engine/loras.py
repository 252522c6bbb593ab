"""The ordinary LoRA adapters that requests can name, and copies of their files that no change on disk reaches.

A request keeps the LoRA that it began with: it holds the LoRA by the hash of its content, and the copy stays until no
name and no request refers to it. So a worker that is started again loads what the lost one had.
"""

from __future__ import annotations

import shutil
import tempfile
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from space_common.files import LORA_CONFIG, LORA_FILES, hash_lora, is_contained

from space_router.engine.request.request import ServedLora


class LoraNotFound(Exception):
    """A folder that is no LoRA adapter of peft; the message says why."""


class LoraRegistry:
    """LoRAs by name.

    with contextlib.closing(LoraRegistry([("sql", "/loras/sql")])) as loras:
        loras.named["sql"].digest
    """

    def __init__(self, given: Sequence[tuple[str, str]] = ()) -> None:
        """`given`: names and folders at start; these copies stay. Raises LoraNotFound naming the LoRA."""
        self._copies: Path | None = None
        self._at_start: frozenset[str] = frozenset()
        self._holders: Counter[str] = Counter()  # requests by hash
        self._named: dict[str, ServedLora] = {}
        try:
            for name, folder in given:
                try:
                    self._named[name] = self.copied(name, folder)
                except LoraNotFound as error:
                    raise LoraNotFound(f"--lora {name}={folder}: {error}") from error
        except BaseException:
            self.close()
            raise
        self._at_start = frozenset(lora.digest for lora in self._named.values())

    @property
    def named(self) -> Mapping[str, ServedLora]:
        """Return the LoRAs that requests can name."""
        return self._named

    def copied(self, name: str, folder: str) -> ServedLora:
        """Copy a LoRA's files and return it, not named yet. Reads whole files. Raises LoraNotFound."""
        if self._copies is None:
            self._copies = Path(tempfile.mkdtemp(prefix="spaceserve-loras-"))
        place = Path(folder).expanduser()
        if not (place / LORA_CONFIG).is_file():
            raise LoraNotFound(f"there is no {LORA_CONFIG} in {folder}; give the folder of an adapter that peft saved")
        for file in LORA_FILES:
            if not is_contained(place / file, place):
                there = (place / file).resolve()
                raise LoraNotFound(f"{place / file} is a link to {there}, outside its folder. Copy the file to {place}")
        begun = Path(tempfile.mkdtemp(dir=self._copies))
        try:
            for file in LORA_FILES:
                shutil.copyfile(place / file, begun / file)
            digest = hash_lora(begun)  # of the copy, should the files change meanwhile
        except OSError as error:
            shutil.rmtree(begun, ignore_errors=True)
            raise LoraNotFound(f"{error.filename or folder} cannot be read: {error.strerror}") from error
        copy = self._copies / digest
        if copy.exists():
            shutil.rmtree(begun, ignore_errors=True)
        else:
            begun.rename(copy)
        return ServedLora(name, digest, str(copy), folder)

    def is_kept(self, lora: ServedLora | None) -> bool:
        """Return whether workers can still load this LoRA, or None is given."""
        if lora is None or self._holders[lora.digest] > 0:
            return True
        return any(one.digest == lora.digest for one in self._named.values())

    def adopt(self, found: Iterable[tuple[str, str]]) -> None:
        """Take names and hashes from workers that were started with their LoRAs elsewhere."""
        for name, digest in found:
            self._named.setdefault(name, ServedLora(name, digest, "", name))

    def publish(self, lora: ServedLora) -> ServedLora | None:
        """Let requests name this LoRA; return the one that had the name before."""
        before = self._named.get(lora.name)
        self._named[lora.name] = lora
        return before

    def withdraw(self, name: str) -> ServedLora | None:
        """Let no new request name this LoRA; return it, or None if there is none."""
        return self._named.pop(name, None)

    def hold(self, lora: ServedLora | None) -> None:
        """Count a request that uses a LoRA."""
        if lora is not None:
            self._holders[lora.digest] += 1

    def release(self, lora: ServedLora | None) -> bool:
        """Undo `hold`; return whether nothing refers to the LoRA any more (see `forget_unused`)."""
        if lora is None:
            return False
        self._holders[lora.digest] -= 1
        return self.forget_unused(lora)

    def forget_unused(self, lora: ServedLora) -> bool:
        """Delete the copy if neither a name nor a request refers to it, and return whether so."""
        if self._holders[lora.digest] > 0 or any(one.digest == lora.digest for one in self._named.values()):
            return False
        del self._holders[lora.digest]
        if lora.digest not in self._at_start and lora.folder:  # those are in the workers' command lines
            shutil.rmtree(lora.folder, ignore_errors=True)
        return True

    def close(self) -> None:
        """Delete all copies."""
        if self._copies is not None:
            shutil.rmtree(self._copies, ignore_errors=True)
