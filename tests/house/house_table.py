"""The repository in figures, of this checkout or of any commit: `python tests/house/house_table.py [COMMIT]`.

`--lists` takes out of the lists that may only shrink what they need not allow any more. `--grow` writes all of today's
state into them, for the day on which that is meant.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tarfile
import tempfile
import tomllib
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "support"))

from repository import DOCUMENTS, LARGEST_FOLDER, PACKAGES, Repository, old_words, prose_words

ROOT = Path(__file__).resolve().parents[2]
SNAPSHOTS = ROOT / "tests/house/snapshots"
LISTS = SNAPSHOTS / "may_only_shrink.toml"
SUFFIXES = {".py", ".cpp", ".hpp", ".h", ".cu", ".js", ".mjs", ".css", ".html", ".sh", ".proto", ".jinja"}
HEAD = """\
# What the house would not have today and has; `tests/house` fails where one of these grows, or is not needed any more.
# `python tests/house/house_table.py --lists` writes this file.
"""


def lists(repository: Repository, before: Mapping[str, Any] | None) -> str:
    """The lists that may only shrink, as TOML: at most what is in those `before`, if any."""
    words = repository.old_identifiers(old_words(SNAPSHOTS / "old_words.txt"))
    unwanted = prose_words(SNAPSHOTS / "old_prose.txt")
    prose = repository.old_prose(unwanted)
    sections: dict[str, Mapping[str, int]] = {
        "folders": {name: size for name, size in sorted(repository.folder_sizes().items()) if size > LARGEST_FOLDER},
        "shared_class_names": {name: len(where) for name, where in repository.shared_class_names().items()},
        "old_identifiers": dict(sorted(words.items())),
    }
    for place in (*PACKAGES, DOCUMENTS):
        sections[f"old_prose.{place}"] = {word: prose[place, word] for word in unwanted if prose[place, word]}
    cycles = {
        "modules": repository.module_cycles(),
        "rooms": repository.room_cycles(),
        "packages": repository.package_cycles(),
    }
    text = HEAD + "\n[cycles]\n"
    for kind, found in cycles.items():
        if before is not None:
            found = [each for each in found if any(set(each) <= set(old.split()) for old in before["cycles"][kind])]
        text += f"{kind} = [\n" + "".join(f'    "{" ".join(each)}",\n' for each in found) + "]\n"
    for title, entries in sections.items():
        if before is not None:
            allowed = before
            for part in title.split("."):
                allowed = allowed.get(part, {})
            entries = {name: min(size, allowed[name]) for name, size in entries.items() if name in allowed}
        text += f"\n[{title}]\n" + "".join(f'"{name}" = {value}\n' for name, value in entries.items())
    return text


def lines_of(paths: Sequence[Path]) -> int:
    return sum(len(path.read_text(encoding="utf-8").splitlines()) for path in paths)


def sources(folder: Path) -> list[Path]:
    """Code under a folder, made stubs left out."""
    return [
        path
        for path in sorted(folder.rglob("*"))
        if path.suffix in SUFFIXES and path.is_file() and "_pb2" not in path.name and ".venv" not in path.parts
    ]


def table(root: Path) -> str:
    repository = Repository(root)
    lines = ["| | files | lines | folders over 20 modules | room cycles (rooms in them) |", "|---|---:|---:|---:|---:|"]
    sizes, rooms = repository.folder_sizes(), repository.room_cycles()
    total: Counter[str] = Counter()
    for package, folder in PACKAGES.items():
        paths = sources(root / folder / package)
        large = [name for name, size in sizes.items() if name.partition(".")[0] == package and size > LARGEST_FOLDER]
        mine = [cycle for cycle in rooms if cycle[0].partition(".")[0] == package]
        row = {"files": len(paths), "lines": lines_of(paths), "large": len(large), "cycles": len(mine)}
        row["in"] = sum(map(len, mine))
        total.update(row)
        lines.append(_row(package, row))
    lines.append(_row("product", total))
    every = sources(root / "tests")
    tests = [path for path in every if path.name.startswith("test_") or path.name.endswith(".test.mjs")]
    support = [path for path in every if path not in tests]
    lines.append(f"| tests (test files) | {len(tests)} | {lines_of(tests)} | | |")
    lines.append(f"| support (all else under tests) | {len(support)} | {lines_of(support)} | | |")
    whole = total["lines"] + lines_of(every)
    lines.append(f"| product, tests, support | {total['files'] + len(every)} | {whole} | | |")
    lines += ["", f"Folders over {LARGEST_FOLDER} modules:"]
    lines += [f"- {name}: {size}" for name, size in sizes.most_common() if size > LARGEST_FOLDER]
    for kind, found in (
        ("packages", repository.package_cycles()),
        ("rooms", rooms),
        ("modules", repository.module_cycles()),
    ):
        lines += ["", f"Import cycles between {kind}: {len(found)}", *(f"- {' '.join(cycle)}" for cycle in found)]
    shared = repository.shared_class_names()
    lines += [
        "",
        f"Class names that mean more than one thing: {len(shared)} ({sum(map(len, shared.values()))} classes)",
    ]
    lines += [f"- {name}: {', '.join(where)}" for name, where in shared.items()]
    words = repository.old_identifiers(old_words(SNAPSHOTS / "old_words.txt"))
    lines += ["", f"Identifiers of the old vocabulary: {len(words)} words, written {words.total()} times"]
    lines += [f"- {word}: {count}" for word, count in words.most_common()]
    unwanted = prose_words(SNAPSHOTS / "old_prose.txt")
    prose = repository.old_prose(unwanted)
    lines += ["", f"Words that prose does without: {prose.total()}", ""]
    lines += ["| | " + " | ".join(unwanted) + " |", "|---|" + "---:|" * len(unwanted)]
    for place in (*PACKAGES, DOCUMENTS):
        lines.append(f"| {place} | " + " | ".join(str(prose[place, word]) for word in unwanted) + " |")
    return "\n".join(lines) + "\n"


def _row(title: str, row: Mapping[str, int]) -> str:
    return f"| {title} | {row['files']} | {row['lines']} | {row['large']} | {row['cycles']} ({row['in']}) |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("commit", nargs="?", help="of this repository; without it: the files that are here")
    parser.add_argument("--lists", action="store_true", help="shrink the lists that may only shrink")
    parser.add_argument("--grow", action="store_true", help="write today's state into them")
    options = parser.parse_args()
    if options.lists or options.grow:
        before = None if options.grow else tomllib.loads(LISTS.read_text(encoding="utf-8"))
        LISTS.write_text(lists(Repository(ROOT), before), encoding="utf-8")
        return
    if options.commit is None:
        sys.stdout.write(table(ROOT))
        return
    with tempfile.TemporaryDirectory() as folder, tempfile.TemporaryFile() as archive:
        subprocess.run(["git", "archive", options.commit], cwd=ROOT, check=True, stdout=archive)
        archive.seek(0)
        with tarfile.open(fileobj=archive) as files:
            files.extractall(folder, filter="data")
        sys.stdout.write(f"{options.commit}\n\n{table(Path(folder))}")


if __name__ == "__main__":
    main()
