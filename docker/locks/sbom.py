"""Write the bill of materials of what the images install: CycloneDX 1.6, with the hashes of the pinned files.

    python docker/locks/sbom.py [FILE]    # runs/sbom.json

It is made of the lock files by cyclonedx-py, which uv fetches. The same locks give the same file.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parents[2]
SHIPPED = (ROOT / "docker/locks/run.txt", ROOT / "docker/locks/torch.txt")
CYCLONEDX = "cyclonedx-bom==7.5.0"


def command(requirements: Path, out: Path) -> list[str]:
    """The command that makes and validates `out` of a file of pinned packages."""
    uv = os.environ.get("UV") or str(Path(sys.executable).with_name("uv"))
    options = ["--pyproject", str(ROOT / "pyproject.toml"), "--output-reproducible", "--validate"]
    return [
        uv,
        "tool",
        "run",
        "--from",
        CYCLONEDX,
        "cyclonedx-py",
        "requirements",
        *options,
        "-o",
        str(out),
        str(requirements),
    ]


def main() -> int:
    out = Path(sys.argv[1]) if len(sys.argv) > 1 else ROOT / "runs/sbom.json"
    out.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        whole = Path(folder) / "requirements.txt"
        whole.write_text("".join(lock.read_text(encoding="utf-8") for lock in SHIPPED), encoding="utf-8")
        return subprocess.run(command(whole, out), check=False).returncode


if __name__ == "__main__":
    sys.exit(main())
