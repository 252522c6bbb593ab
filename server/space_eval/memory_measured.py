"""`python -m space_eval.memory_measured SLOTS FOLDER…`: load models, write all their pages, and say what memory grew.

A process of its own, so that nothing from before is reused. Prints one JSON object of bytes.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import torch
from space_common.python_process import module_command
from space_model.checkpoint.checkpoint import Checkpoint
from space_model.loading.load import load_model
from space_model.mapped_files import give_back, mappings
from space_server.machine.host_memory import keep_freed_memory, use_one_heap

BLOCK = 16


def main(arguments: Sequence[str]) -> int:
    num_slots, *folders = arguments
    use_one_heap()
    load_model(folders[-1])  # once unseen: what libraries make at their first use is nobody's weights
    keep_freed_memory()
    use_one_heap()
    files = [file for folder in folders for file in Checkpoint.open(folder).weights]
    give_back(files)
    start = _resident(files)
    models = [load_model(folder) for folder in folders]
    give_back(files)
    for model in models:
        model.embed(torch.arange(model.facts.vocab_size))  # what is read of the files from here on
    keep_freed_memory()
    loaded = _resident(files)
    pages = [model.allocate_kv(-(-int(num_slots) // BLOCK), BLOCK) for model in models]
    found = {"weights": loaded - start, "keys_values": _resident(files) - loaded, "pages": len(pages)}
    json.dump(found, sys.stdout)
    return 0


def measure(folders: Sequence[Path], num_slots: int) -> dict[str, int]:
    """In a process of its own. Raises subprocess.CalledProcessError."""
    words = module_command("space_eval.memory_measured", num_slots, *folders)
    done = subprocess.run(words, capture_output=True, text=True, check=True, timeout=600)
    found: dict[str, int] = json.loads(done.stdout.splitlines()[-1])
    return found


def _resident(files: Sequence[Path]) -> int:
    """Bytes in memory that belong to no file, and those of these files (Linux)."""
    status = Path("/proc/self/status").read_text(encoding="utf-8")
    own = int(status.partition("RssAnon:")[2].split()[0]) * 1024
    return own + sum(here.resident for here in mappings(files))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
