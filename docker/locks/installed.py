"""Say whether this environment holds exactly what lock files pin; exit 1 and name the first difference if not.

python -I docker/locks/installed.py [--device cpu|cuda] [--project] LOCK...
"""

import argparse
import sys
from importlib import metadata
from pathlib import Path


def pins(lock: Path) -> list[str]:
    """The `name==version ; marker` of each entry, without hashes and comments."""
    lines = lock.read_text(encoding="utf-8").splitlines()
    return [line.rstrip(" \\") for line in lines if line[:1].isalnum()]


def first_difference(locks: list[Path], device: str | None, project: bool) -> str | None:
    """One sentence about what is missing or different; None where all is as it should be."""
    try:
        from packaging.requirements import Requirement
        from packaging.version import Version
    except ModuleNotFoundError:
        return "packaging is missing"
    for requirement in (Requirement(pin) for lock in locks for pin in pins(lock)):
        if requirement.marker is not None and not requirement.marker.evaluate():
            continue
        try:
            found = metadata.version(requirement.name)
        except metadata.PackageNotFoundError:
            return f"{requirement.name} is missing"
        if found is None or not requirement.specifier.contains(found, prereleases=True):
            return f"{requirement.name} is {found}, wanted {requirement.specifier}"
        if requirement.name == "torch" and device == "cuda" and Version(found).local == "cpu":
            return f"torch is {found}, wanted a CUDA build"
    if project:
        try:
            metadata.version("spaceserve")
        except metadata.PackageNotFoundError:
            return "spaceserve is missing"
        if not Path(sys.prefix, "bin", "spaceserve").exists():
            return "the command spaceserve is missing"
    return None


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("locks", nargs="+", type=Path)
    parser.add_argument("--device", choices=("cpu", "cuda"))
    parser.add_argument("--project", action="store_true")
    arguments = parser.parse_args()
    difference = first_difference(arguments.locks, arguments.device, arguments.project)
    if difference is not None:
        sys.stdout.write(f"install: {difference}\n")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
