"""Real clients, each in an environment of its own, against a server started here: `make clients`.

    python tests/clients/run.py [NAME ...]      all of CLIENTS, or those named

Environments are kept in .clients (or SPACESERVE_CLIENTS) and made anew when their pins change. Every script prints a
line per check; the table at the end has them all. Exit code 1 if a check failed or a client could not be installed.
"""

import hashlib
import os
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from space_common.process import ServerProcess

HERE = Path(__file__).resolve().parent
CACHE = Path(os.environ.get("SPACESERVE_CLIENTS") or HERE.parents[1] / ".clients").resolve()
KEY = "sk-clients"
MODEL = "spaceserve-demo"
SECONDS = 600.0  # Longest that one client's script may take

WIDE = ["--model", "demo", "--dtype", "float32", "--num-threads", "1", "--num-blocks", "2048"]
WIDE += ["--chat-template", "chatml"]
"""float32, for lm-eval's figures are compared to those of transformers in float32; a template that shows tools."""
NARROW = [*WIDE, "--max-sequences", "1", "--max-queue", "0"]


@dataclass(frozen=True)
class Client:
    """A client to try: what to install, and the script that uses it."""

    name: str
    script: str
    requirements: str = ""  # a file in requirements/; "": packages of `packages`
    packages: str = "node"  # folder of a package-lock.json
    is_agent: bool = False  # a program with a server of its own, which its script starts with this Python
    shared: bool = False  # also sees what this Python has: nobody needs a second torch


CLIENTS = (
    Client("openai", "check_openai.py", "openai.txt"),
    Client("openai-1", "check_openai.py", "openai-1.txt"),
    Client("openai-node", "check_openai.mjs"),
    Client("huggingface-hub", "check_hub.py", "huggingface-hub.txt"),
    Client("text-generation", "check_text_generation.py", "text-generation.txt"),
    Client("langchain", "check_langchain.py", "langchain.txt"),
    Client("litellm", "check_litellm.py", "litellm.txt"),
    Client("lm-eval", "check_lm_eval.py", "lm-eval.txt", shared=True),
    Client("anthropic", "check_anthropic.py", "anthropic.txt"),
    Client("pydantic-ai", "check_pydantic_ai.py", "pydantic-ai.txt"),
    Client("instructor", "check_instructor.py", "instructor.txt"),
    Client("smolagents", "check_smolagents.py", "smolagents.txt"),
    Client("llama-index", "check_llama_index.py", "llama-index.txt"),
    Client("dspy", "check_dspy.py", "dspy.txt"),
    Client("open-webui", "check_open_webui.py", "open-webui.txt"),
    Client("guidellm", "check_guidellm.py", "guidellm.txt", shared=True),
    Client("sentence-transformers", "encoders/check_embeddings.py", "sentence-transformers.txt", shared=True),
    Client("vercel-ai", "check_vercel.mjs", packages="vercel"),
    Client("claude-code", "check_claude_code.py", packages="agents", is_agent=True),
    Client("codex", "check_codex.py", packages="agents", is_agent=True),
    Client("aider", "check_aider.py", "aider.txt", is_agent=True),
)


@dataclass
class Outcome:
    """What became of one client."""

    name: str
    version: str = "?"
    checks: list[tuple[bool, str]] = field(default_factory=list)
    trouble: str = ""  # why there are no (more) checks

    @property
    def ok(self) -> bool:
        return bool(self.checks) and not self.trouble and all(held for held, _ in self.checks)


class InstallError(RuntimeError):
    """A client could not be installed; the installer's last words are in the message."""


def say(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


def call(*command: str, folder: Path | None = None) -> None:
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    if done.returncode:
        raise InstallError("\n".join((done.stdout + done.stderr).strip().splitlines()[-12:]))


def install(client: Client) -> Path:
    """The client's folder, with everything in it; nothing is done where it is there already."""
    folder = CACHE / client.name
    there = (
        Path("requirements", client.requirements) if client.requirements else Path(client.packages, "package-lock.json")
    )
    pins = HERE / there
    wanted = hashlib.sha256(pins.read_bytes() + sys.version.encode()).hexdigest()
    stamp = folder / "installed"
    if stamp.is_file() and stamp.read_text() == wanted:
        return folder
    say(f"installing {client.name} in {folder}")
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    if client.requirements:
        call(sys.executable, "-m", "venv", "--without-pip", str(folder / "venv"))
        python = folder / "venv" / "bin" / "python"
        if client.shared:
            packages = Path(sysconfig.get_path("purelib", vars={"base": str(folder / "venv")}))
            own = sysconfig.get_path("purelib")
            (packages / "shared.pth").write_text(f"import site; site.addsitedir({own!r})\n")
        pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--python", str(python)]
        call(*pip, "install", "--quiet", "--no-deps", "--requirement", str(pins))
        call(*pip, "check") if not client.shared else None
    else:
        for name in ("package.json", "package-lock.json", ".npmrc"):
            shutil.copy(HERE / client.packages / name, folder)
        call("npm", "ci", "--ignore-scripts", "--no-audit", "--no-fund", folder=folder)
    stamp.write_text(wanted)
    return folder


def run(client: Client, environment: Mapping[str, str]) -> Outcome:
    """Install the client, run its script, read what it says."""
    outcome = Outcome(client.name)
    try:
        folder = install(client)
    except (InstallError, OSError) as error:
        outcome.trouble = f"could not be installed: {error}"
        return outcome
    program = str(folder / "venv" / "bin" / "python") if client.requirements else "node"
    if client.is_agent:
        program = sys.executable
    # Nothing of this Python's own settings may reach the client.
    others = ("PYTHON", "OPENAI", "ANTHROPIC", "CLAUDE", "CODEX", "AIDER", "HF_")
    kept = {name: value for name, value in os.environ.items() if not name.startswith(others)}
    reported = {
        **kept,
        **environment,
        "SPACESERVE_NODE_MODULES": str(folder),
        "SPACESERVE_CLIENT": str(folder),
        "SPACESERVE_PYTHON": sys.executable,
        "HF_HOME": str(folder / "hub"),
        "TQDM_DISABLE": "1",
    }
    try:
        done = subprocess.run(
            [program, str(HERE / client.script)],
            env=reported,
            capture_output=True,
            text=True,
            timeout=SECONDS,
            check=False,
        )
    except subprocess.TimeoutExpired:
        outcome.trouble = f"took more than {SECONDS:g} s"
        return outcome
    for line in done.stdout.splitlines():
        kind, _, text = line.partition("\t")
        if kind == "version":
            outcome.version = text
        elif kind in ("ok", "failed"):
            outcome.checks.append((kind == "ok", text))
    if done.returncode:
        say(done.stderr.strip()[-6000:])
        if all(held for held, _ in outcome.checks):
            outcome.trouble = "ended early: " + (done.stderr.strip().splitlines() or ["without a word"])[-1]
    return outcome


def table(outcomes: list[Outcome]) -> str:
    """One row per check."""
    rows = [("client", "version", "what was checked", "ok")]
    for outcome in outcomes:
        first = True
        for held, what in outcome.checks:
            rows.append(
                (outcome.name if first else "", outcome.version if first else "", what, "yes" if held else "NO")
            )
            first = False
        if outcome.trouble:
            rows.append((outcome.name, outcome.version, outcome.trouble.splitlines()[0][:110], "NO"))
    widths = [max(len(row[place]) for row in rows) for place in range(4)]
    rows.insert(1, tuple("-" * width for width in widths))  # type: ignore[arg-type]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows
    )


def main(names: list[str]) -> int:
    known = {client.name for client in CLIENTS}
    if unknown := set(names) - known:
        say(f"no client is called {', '.join(sorted(unknown))}; there are {', '.join(sorted(known))}")
        return 2
    chosen = [client for client in CLIENTS if not names or client.name in names]
    keys = {"SPACESERVE_API_KEYS": KEY}
    with ServerProcess(WIDE, environment=keys) as wide, ServerProcess(NARROW, environment=keys) as narrow:
        reported = {
            "SPACESERVE_URL": wide.url,
            "SPACESERVE_NARROW_URL": narrow.url,
            "SPACESERVE_KEY": KEY,
            "SPACESERVE_MODEL": MODEL,
        }
        outcomes = []
        for client in chosen:
            say(f"running {client.name}")
            outcomes.append(run(client, reported))
    say("\n" + table(outcomes))
    for outcome in outcomes:
        if outcome.trouble:
            say(f"\n{outcome.name} {outcome.trouble}")
    num_ok = sum(outcome.ok for outcome in outcomes)
    say(f"\n{num_ok} of {len(outcomes)} clients ok")
    return 0 if num_ok == len(outcomes) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
