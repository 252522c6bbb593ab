"""What an installation takes on the disk: the distribution and all that it needs, without what else lies beside."""

from __future__ import annotations

from collections.abc import Callable
from importlib.metadata import Distribution, PackageNotFoundError, distribution

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name


def installed(name: str = "spaceserve", find: Callable[[str], Distribution] = distribution) -> dict[str, int]:
    """Bytes of each distribution that `name` needs here, itself included, extras left out; by name, largest first."""
    sizes: dict[str, int] = {}
    waiting = [name]
    while waiting:
        each = canonicalize_name(waiting.pop())
        if each in sizes:
            continue
        try:
            found = find(each)
        except PackageNotFoundError:
            continue  # wanted elsewhere only: its marker says another system
        sizes[each] = sum(_size(found, str(file)) for file in found.files or ())
        for line in found.requires or ():
            wanted = Requirement(line)
            if wanted.marker is None or wanted.marker.evaluate({"extra": ""}):
                waiting.append(wanted.name)
    return dict(sorted(sizes.items(), key=lambda item: -item[1]))


def _size(found: Distribution, file: str) -> int:
    try:
        return int(found.locate_file(file).stat().st_size)  # type: ignore[attr-defined]
    except OSError:
        return 0
