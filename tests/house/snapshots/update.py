"""Take the snapshots anew: `python tests/house/snapshots/update.py [openapi help metrics proto variables ids]`.

Without a word, all of them; `ids` imports every test and takes a minute. What changed shows in `git diff`. `lost` names
tests whose functions are not there any more, and where a test of the same name is: lines for `pytest_id_map.txt`.
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "support"))

import interface
from interface import SNAPSHOTS


def main(words: list[str]) -> None:
    wanted = set(words) or {*interface.FILES, "ids"}
    if "lost" in wanted:
        known = interface.IdMap.read(SNAPSHOTS / "pytest_id_map.txt")
        before = interface.unfold_ids((SNAPSHOTS / "pytest_ids.txt").read_text(encoding="utf-8"))
        lost = interface.lost_functions(before, interface.written_tests(), known)
        sys.stdout.write("".join(f"{each}\n" for each in lost))
        return
    if unknown := wanted - {*interface.FILES, "ids"}:
        sys.exit(f"unknown: {', '.join(sorted(unknown))}")
    if wanted & {"openapi", "metrics"}:
        served = interface.served()
        interface.write("openapi", served.openapi)
        interface.write("metrics", served.metrics)
    for name, take in (
        ("help", interface.help_text),
        ("proto", interface.proto_text),
        ("variables", interface.variables_text),
    ):
        if name in wanted:
            interface.write(name, take())
    if "ids" in wanted:
        (SNAPSHOTS / "pytest_ids.txt").write_text(interface.fold_ids(interface.collect()), encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])
