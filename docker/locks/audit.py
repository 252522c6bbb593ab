"""Say what is known against the pinned packages: licences that oblige, versions taken back, known vulnerabilities.

    python docker/locks/audit.py [--where-reachable]

Licences are read here. Yanked versions are known to every package index. Vulnerabilities are known to databases that
pip-audit asks (PyPI's, and OSV's), which a mirror of the index mostly does not have: without one this fails, and with
--where-reachable says so and goes on. Exit status 1 if anything is found, 2 if something could not be asked.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterable
from importlib import metadata
from pathlib import Path
from typing import Any, NamedTuple

FOLDER = Path(__file__).parent
SHIPPED = (FOLDER / "run.txt", FOLDER / "torch.txt")
MODEL = FOLDER.parents[1] / "proto" / "space_common" / "default_model.txt"
"""The wheel that the default model's weights are taken from; nothing of it is installed."""
NOTICE = FOLDER.parents[1] / "server" / "space_smollm2" / "NOTICE"
LOCKS = (FOLDER / "run.txt", FOLDER / "dev.txt", FOLDER / "ray.txt", MODEL)

PIP_AUDIT = "pip-audit==2.10.1"
SECONDS = 300.0
"""Longest that an index or a database is waited for."""

FREE = re.compile(r"Apache|MIT|BSD|ISC|MPL|Mozilla|PSF|Python Software|Zlib|CC0|CNRI|BSL|Unlicense|HPND|Public Domain")
OBLIGING = re.compile(r"GPL|General Public|SSPL|BUSL|Commons Clause|NonCommercial|Proprietary", re.IGNORECASE)


class Audit(NamedTuple):
    """One question put to somebody."""

    question: str
    found: list[str]  # what speaks against packages
    not_asked: str = ""  # why it has no answer

    def sentence(self) -> str:
        if self.not_asked:
            return f"{self.question}: NOT ASKED, {self.not_asked}"
        return f"{self.question}: {len(self.found)}" + "".join(f"\n  {one}" for one in self.found)


def names(lock: Path) -> list[str]:
    """The packages of a lock file."""
    lines = lock.read_text(encoding="utf-8").splitlines()
    return [re.split(r"==|\[", line)[0] for line in lines if line[:1].isalnum()]


def licence(package: str) -> str | None:
    """In its own words; None where it is not installed, being for another system."""
    try:
        declared = metadata.metadata(package)
    except metadata.PackageNotFoundError:
        return None
    classes = [one.split(" :: ", 1)[1] for one in declared.get_all("Classifier") or () if one.startswith("License :: ")]
    return declared.get("License-Expression") or "; ".join(classes) or (declared.get("License") or "").split("\n")[0]


def model_licences(pins: Path = MODEL, notice: Path = NOTICE) -> Audit:
    """Of every work that the default model is made of, as the notice says that is shipped with it."""
    lines = notice.read_text(encoding="utf-8").splitlines()
    declared = dict(re.findall(r"^(\S.*): (.+)$", "\n".join(lines), re.MULTILINE))
    found = [f"{work}: {said}" for work, said in declared.items() if not _is_free(said)]
    pinned = [line.split(" ")[0] for line in pins.read_text(encoding="utf-8").splitlines() if line[:1].isalnum()]
    found += [f"{pin}: NOTICE does not name it" for pin in pinned if pin.replace("==", " ") not in declared]
    if not (notice.parent / "LICENSE").is_file():
        found.append(f"{notice.parent.name}: it has no LICENSE")
    return Audit("works in the default model under a licence that obliges, or unnamed", found)


def licences(locks: Iterable[Path] = SHIPPED) -> Audit:
    """Of what is shipped in images."""
    licences = {name: licence(name) for lock in locks for name in names(lock)}
    found = [
        f"{name}: {said or 'none is named'}"
        for name, said in licences.items()
        if said is not None and not _is_free(said)
    ]
    return Audit("packages shipped under a licence that obliges, or none", found)


def _is_free(said: str) -> bool:
    return bool(FREE.search(said)) and not OBLIGING.search(said)


def yanked(locks: Iterable[Path] = LOCKS) -> Audit:
    """Versions that their authors have taken back, as the index says."""
    question, found = "pinned versions that were yanked", []
    uv = os.environ.get("UV") or str(Path(sys.executable).with_name("uv"))
    for lock in locks:
        with tempfile.TemporaryDirectory() as empty:
            command = [uv, "pip", "install", "--dry-run", "--no-deps", "--target", empty, "--requirements", str(lock)]
            made = _run([*command, "--python", sys.executable])
        if made is None or made.returncode != 0:
            return Audit(question, [], f"no index answers: {_last_line(made)}")
        found += re.findall(r"`(\S+)` is yanked", made.stderr)
    return Audit(question, sorted(set(found)))


def vulnerabilities(locks: Iterable[Path] = LOCKS) -> Audit:
    """As a database says; none that knows nothing of any package is taken for one."""
    question, found, num_known, num_unknown = "known vulnerabilities", [], 0, 0
    uv = os.environ.get("UV") or str(Path(sys.executable).with_name("uv"))
    for lock in locks:
        command = [uv, "tool", "run", PIP_AUDIT, "--disable-pip", "--no-deps", "--require-hashes", "--format", "json"]
        made = _run([*command, "--progress-spinner", "off", "--requirement", str(lock)])
        try:
            dependencies: list[dict[str, Any]] = json.loads(made.stdout)["dependencies"] if made is not None else []
        except (ValueError, KeyError):
            dependencies = []
        if not dependencies:
            return Audit(question, [], f"no database answers: {_last_line(made)}")
        num_unknown += sum("skip_reason" in one for one in dependencies)
        num_known += sum("skip_reason" not in one for one in dependencies)
        for one in dependencies:
            found += [f"{one['name']} {one['version']}: {known['id']}" for known in one.get("vulns", ())]
    if num_known <= num_unknown:
        return Audit(question, [], f"the database knows {num_known} of {num_known + num_unknown} packages: it is none")
    return Audit(question, sorted(set(found)))


def _run(command: list[str]) -> subprocess.CompletedProcess[str] | None:
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=SECONDS, check=False)
    except (subprocess.TimeoutExpired, OSError):
        return None


def _last_line(made: subprocess.CompletedProcess[str] | None) -> str:
    lines = [] if made is None else made.stderr.strip().splitlines()
    return lines[-1][:200] if lines else f"nothing within {SECONDS:g} s"


def status(audits: Iterable[Audit], *, where_reachable: bool) -> int:
    """The exit status."""
    results = list(audits)
    if any(audit.found for audit in results):
        return 1
    return 2 if any(audit.not_asked for audit in results) and not where_reachable else 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--where-reachable", action="store_true", help="what nobody answers is said, and no failure")
    arguments = parser.parse_args()
    audits = []
    for ask in (licences, model_licences, yanked, vulnerabilities):
        audits.append(ask())
        sys.stdout.write(audits[-1].sentence() + "\n")
        sys.stdout.flush()
    return status(audits, where_reachable=arguments.where_reachable)


if __name__ == "__main__":
    sys.exit(main())
