"""Writes a checkpoint's small files (config.json, tokenizer, …) from a GGUF file's header to a folder.

Router and worker read these files from the same folder, so they agree. It is written atomically, once per header and
version of this code.
"""

from __future__ import annotations

import hashlib
import json
from functools import cache
from pathlib import Path

from space_common.gguf.config import Facts, check_kinds, config_of
from space_common.gguf.find import GgufError
from space_common.gguf.reader import GgufFile
from space_common.gguf.tensors import sources_of
from space_common.gguf.tokenizer import tokenizer_files
from space_common.kept_files import keep_files


def view_folder(file: Path) -> Path:
    """Return the folder with config.json, tokenizer.json and so on for a GGUF file. Raises GgufError."""
    return view_of(GgufFile.open(file))


def view_of(file: GgufFile) -> Path:
    """Return the folder for a file with its header read. Raises GgufError for an unsupported model."""
    try:
        return keep_files("gguf", file.header_hash[:24], _version(), lambda: view_files(file))
    except OSError as error:
        raise GgufError(f"{file.path}: {error}") from error


def view_files(file: GgufFile) -> dict[str, str]:
    """Return each file's text by name. Raises GgufError for an unsupported model."""
    Facts.of(file)  # another quantisation of a family that is not served would be refused as well
    check_kinds(file)
    config = config_of(file)
    sources_of(file, config)
    return {"config.json": json.dumps(config, indent=2) + "\n", **tokenizer_files(file.metadata)}


@cache
def _version() -> str:
    """Return eight hexadecimal digits that change with the code that writes these files."""
    digest = hashlib.sha256()
    for source in sorted(Path(__file__).parent.glob("*.py")):
        digest.update(source.read_bytes())
    return digest.hexdigest()[:8]
