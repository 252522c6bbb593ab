"""Sources of the training text: the standard library, installed packages and pinned wheels."""

from __future__ import annotations

import importlib.metadata
import platform
import subprocess
import sysconfig
import zipfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from email import message_from_bytes
from email.message import Message
from pathlib import Path
from typing import cast

from space_common.process import module_command

from space_train.data.licences import audited_licence

MEGABYTE = 1_000_000

INSTALLED = [
    "torch",
    "transformers",
    "sympy",
    "networkx",
    "numpy",
    "jinja2",
    "mpmath",
    "pydantic",
    "matplotlib",
    "fonttools",
    "sortedcontainers",
    "rich",
    "click",
    "pygments",
    "starlette",
    "fastapi",
    "httpx",
    "pyparsing",
    "setuptools",
    "packaging",
    "huggingface-hub",
    "anyio",
    "pytest",
    "mypy",
    "tomlkit",
    "python-dateutil",
    "typer",
    "pip",
]

WHEELS = [
    "aiohttp==3.14.5",
    "algorithms==1.0.1",
    "arrow==1.4.0",
    "astropy==8.0.2",
    "attrs==26.1.0",
    "babel==2.18.0",
    "black==26.10.1",
    "bokeh==3.9.2",
    "boltons==26.2.0",
    "bottle==0.13.4",
    "cachetools==8.0.1",
    "cirq-core==1.7.0",
    "coverage==7.17.3",
    "dask==2026.8.0",
    "django==5.2.19",
    "einops==0.8.2",
    "flask==3.1.3",
    "funcy==2.1",
    "galois==0.4.11",
    "glom==25.12.0",
    "gymnasium==1.4.0",
    "humanize==4.17.0",
    "inflect==7.6.0",
    "invoke==3.0.3",
    "ipython==9.18.1",
    "jedi==0.20.1",
    "keras==3.15.1",
    "lark==1.3.1",
    "markdown==3.11.3",
    "marshmallow==4.4.0",
    "more-itertools==11.2.1",
    "nltk==3.10.4",
    "numba==0.68.1",
    "openpyxl==3.1.5",
    "pandas==3.1.1",
    "parso==0.8.7",
    "prompt-toolkit==3.0.53",
    "pulp==3.3.2",
    "pycodestyle==2.15.0",
    "pydatastructs==1.2.3",
    "pyflakes==4.1.0",
    "pygorithm==1.0.4",
    "pyrsistent==0.20.0",
    "qiskit==2.6.2",
    "requests==2.34.2",
    "scikit-image==0.26.0",
    "scikit-learn==1.9.1",
    "scipy==1.17.1",
    "seaborn==0.13.2",
    "simpy==4.1.2",
    "spacy==3.8.18",
    "sphinx==9.0.4",
    "sqlalchemy==2.1.9",
    "statsmodels==0.15.0",
    "tabulate==0.10.0",
    "textdistance==4.6.3",
    "textual==8.2.8",
    "tinydb==4.9.0",
    "toolz==1.2.0",
    "tornado==6.6.1",
    "trio==0.35.0",
    "twisted==26.10.0",
    "urllib3==2.8.0",
    "werkzeug==3.1.9",
    "xarray==2026.9.0",
]

HELD_OUT = frozenset({"toolz", "flask", "tinydb", "humanize", "textdistance", "glom", "sortedcontainers"})

# Most bytes kept of one source, so that no single coding style dominates.
MOST_BYTES = 3 * MEGABYTE
MOST_BYTES_OF = {"python": 14 * MEGABYTE, "sympy": 7 * MEGABYTE, "transformers": 2 * MEGABYTE, "twisted": 2 * MEGABYTE}


@dataclass(frozen=True)
class Source:
    """One distribution: its name, the licence in its metadata, and its Python files."""

    name: str
    version: str
    licence: str
    root: Path  # a folder, or a wheel
    names: tuple[str, ...]  # paths under the root

    def files(self) -> Iterator[tuple[str, bytes]]:
        """Yield (path, content) of every Python file, in path order."""
        if self.root.suffix == ".whl":
            with zipfile.ZipFile(self.root) as wheel:
                for name in self.names:
                    yield name, wheel.read(name)
        else:
            for name in self.names:
                yield name, (self.root / name).read_bytes()


def standard_library() -> Source:
    """Return the running interpreter's own library (PSF-2.0)."""
    root = Path(sysconfig.get_path("stdlib"))
    names = sorted(str(path.relative_to(root)) for path in root.rglob("*.py") if "site-packages" not in path.parts)
    return Source("python", platform.python_version(), "PSF-2.0", root, tuple(names))


def installed(name: str) -> Source:
    """Return a distribution of the running environment. Raises PackageNotFoundError if it is not installed."""
    distribution = importlib.metadata.distribution(name)
    paths = [str(path) for path in distribution.files or () if path.suffix == ".py" and ".." not in path.parts]
    root = Path(str(distribution.locate_file("")))
    licence = audited_licence(cast(Message, distribution.metadata))
    names = tuple(sorted(path for path in paths if (root / path).is_file()))
    return Source(name, distribution.version, licence, root, names)


def wheel(path: Path) -> Source:
    """Return a downloaded wheel, read in place."""
    with zipfile.ZipFile(path) as archive:
        names = archive.namelist()
        described = next(name for name in names if name.endswith(".dist-info/METADATA"))
        metadata = message_from_bytes(archive.read(described))
    python = tuple(sorted(name for name in names if name.endswith(".py")))
    return Source(str(metadata["Name"]).lower(), str(metadata["Version"]), audited_licence(metadata), path, python)


def download(folder: Path, requirements: Sequence[str]) -> list[Path]:
    """Download the pinned wheels that are not in `folder` yet. Return all paths in order of `requirements`."""
    folder.mkdir(parents=True, exist_ok=True)
    paths = []
    for requirement in requirements:
        name, version = requirement.split("==")
        pattern = f"{name.replace('-', '_')}-{version}-*.whl"
        if not list(folder.glob(pattern)):
            print(f"downloading {requirement}", flush=True)
            command = module_command("pip", "download", "--quiet", "--no-deps", "--only-binary", ":all:")
            subprocess.run([*command, "--dest", str(folder), requirement], check=True)
        paths.extend(sorted(folder.glob(pattern))[:1])
    return paths


def all_sources(downloads: Path) -> list[Source]:
    """Return every source of the recipe, held-out ones first, so that deduplication keeps those."""
    sources = [standard_library(), *map(installed, INSTALLED), *map(wheel, download(downloads, WHEELS))]
    return sorted(sources, key=lambda source: (source.name not in HELD_OUT, source.name))
