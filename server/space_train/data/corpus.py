"""The corpus of the embedded model: permissively licensed Python, cleaned, without duplicates, from pinned sources."""

from __future__ import annotations

import ast
import hashlib
import importlib.metadata
import json
import platform
import re
import subprocess
import sysconfig
import warnings
import zipfile
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from email import message_from_bytes
from email.message import Message
from pathlib import Path
from typing import cast

import numpy as np
import torch
from space_common.process import module_command
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor

PERMISSIVE = frozenset(
    {"0BSD", "Apache-2.0", "Apache-2.0 WITH LLVM-exception", "BSD-2-Clause", "BSD-3-Clause", "BSL-1.0", "CC0-1.0"}
    | {"HPND", "ISC", "MIT", "MIT-0", "MIT-CMU", "PSF-2.0", "Python-2.0", "Unlicense", "Zlib"}
)

# Free-text `License:` fields and trove classifiers as found in packages, mapped to SPDX identifiers.
FREE_TEXT = {
    "apache 2.0": "Apache-2.0",
    "apache 2.0 license": "Apache-2.0",
    "apache license 2.0": "Apache-2.0",
    "apache license, version 2.0": "Apache-2.0",
    "apache software license": "Apache-2.0",
    "bsd": "BSD-3-Clause",
    "bsd license": "BSD-3-Clause",
    "isc license (iscl)": "ISC",
    "mit license": "MIT",
    "python software foundation license": "PSF-2.0",
    "the unlicense (unlicense)": "Unlicense",
} | {identifier.lower(): identifier for identifier in PERMISSIVE}


class NotPermissive(ValueError):
    """A source whose metadata does not prove a permissive licence."""


def audited_licence(metadata: Message) -> str:
    """Return the SPDX identifiers that a distribution's metadata proves. Raises NotPermissive if it proves none. The
    order of trust: the SPDX expression (every part must be permissive; of an `OR`, one), the trove classifiers (all of
    them), the free-text field (exact phrases only: a pasted licence text proves nothing)."""
    name = metadata.get("Name", "a distribution without a name")
    expression = metadata.get("License-Expression")
    if expression:
        clauses = re.split(r"\s+AND\s+", expression.replace("(", " ").replace(")", " ").strip())
        chosen = [[part for part in re.split(r"\s+OR\s+", clause) if part.strip() in PERMISSIVE] for clause in clauses]
        if not all(chosen):
            raise NotPermissive(f"{name}: the licence expression {expression!r} has a part that is not permissive.")
        return " AND ".join(dict.fromkeys(parts[0].strip() for parts in chosen))
    lines = [line for line in metadata.get_all("Classifier", []) if line.startswith("License ::")]
    classifiers = [line.split("::")[-1].strip() for line in lines]
    classifiers = [line for line in classifiers if line != "OSI Approved"]
    if not classifiers and metadata.get("License"):
        classifiers = [str(metadata["License"]).strip()]
    identifiers = [FREE_TEXT.get(text.lower()) for text in classifiers]
    known = [identifier for identifier in identifiers if identifier is not None]
    if not known or len(known) != len(identifiers):
        raise NotPermissive(f"{name}: no permissive licence in its metadata (it says {classifiers or 'nothing'}).")
    return " AND ".join(dict.fromkeys(known))


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


# Folders that hold tests, vendored code, tables, or no library code.
TESTS = ("test", "tests", "testing", "idle_test")
COPIES = ("_vendor", "vendor", "_vendored", "vendored", "extern", "_extern", "externals", "third_party", "thirdparty")
TABLES = ("locale", "locales", "encodings", "pydoc_data", "migrations", "generated", "typeshed", "unicode_codes")
PROGRAMS = ("lib2to3", "idlelib", "turtledemo", "ensurepip", "_distutils", "site-packages")
DROPPED_FOLDERS = frozenset((*TESTS, *COPIES, *TABLES, *PROGRAMS))
DROPPED_NAMES = re.compile(r"(^|/)(test_[^/]*|[^/]*_test|conftest|[^/]*_pb2\w*)\.py$")
GENERATED = re.compile(r"(?i)do not edit|auto-?generated|generated by|this file (was|is) generated|autogenerated")
FEWEST_BYTES, MOST_FILE_BYTES, LONGEST_LINE = 200, 120_000, 240


@dataclass
class SourceReport:
    """Counts of what was kept of one source, for the model card."""

    name: str
    version: str
    licence: str
    held_out: bool
    num_files: int = 0
    num_bytes: int = 0
    num_functions: int = 0
    dropped: dict[str, int] = field(default_factory=dict)


class SeenLines:
    """Remembers every distinctive line kept so far, to recognise a file that mostly repeats others."""

    def __init__(self, most_repeated: float = 0.5) -> None:
        self.most_repeated = most_repeated
        self._seen: set[int] = set()

    def is_repeat(self, text: str) -> bool:
        """Return True if more than `most_repeated` of the distinctive lines are known; otherwise remember them."""
        lines = {hash_of(line.strip()) for line in text.splitlines() if len(line.strip()) >= 12}
        if lines and len(lines & self._seen) > self.most_repeated * len(lines):
            return True
        self._seen |= lines
        return False


def hash_of(text: str) -> int:
    """Return a 64-bit hash that is the same in every process (Python's own `hash` is not)."""
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big")


def reason_to_drop(path: str, content: bytes) -> str | None:
    """Return why a file is not training text, or None if it is."""
    if DROPPED_FOLDERS & set(Path(path).parts[:-1]) or DROPPED_NAMES.search(path):
        return "test, vendored or table folder"
    if not FEWEST_BYTES <= len(content) <= MOST_FILE_BYTES:
        return "too short or too long"
    try:
        text = content.decode("utf-8")
    except UnicodeDecodeError:
        return "not UTF-8"
    if GENERATED.search(text[:1500]):
        return "generated"
    lines = text.splitlines()
    if max(map(len, lines)) > LONGEST_LINE:
        return "very long lines"
    if sum(character.isalpha() for character in text) < 0.4 * len(text) - 0.3 * text.count(" "):
        return "data"
    if sum(not character.isascii() for character in text) > 0.002 * len(text):
        return "much text that is not ASCII"
    if sum(line.lstrip()[:1] in "'\"0123456789[{(-" for line in lines if line.strip()) > 0.5 * len(lines):
        return "table"
    return None


def cleaned(text: str) -> str:
    """Normalise newlines, and remove trailing spaces and the licence comment at the head."""
    lines = [line.rstrip() for line in text.replace("\r\n", "\n").replace("\r", "\n").split("\n")]
    while lines and (not lines[0] or lines[0].startswith("#")):
        lines.pop(0)
    return re.sub(r"\n{4,}", "\n\n\n", "\n".join(lines).strip("\n")) + "\n"


def documented_functions(text: str, tree: ast.Module) -> Iterator[str]:
    """Yield each short documented top-level function as a document, with the imports that it uses."""
    lines = text.split("\n")
    imports: dict[str, str] = {}
    for node in tree.body:
        if isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
            imports |= {alias.asname or alias.name: f"from {node.module} import {alias.name}" for alias in node.names}
        elif isinstance(node, ast.Import):
            imports |= {alias.name: f"import {alias.name}" for alias in node.names if alias.asname is None}
    for node in tree.body:
        if not isinstance(node, ast.FunctionDef) or node.name.startswith(("test", "_test")):
            continue
        body = "\n".join(lines[node.lineno - 1 : node.end_lineno])
        docstring = ast.get_docstring(node)
        if not docstring or not 3 <= body.count("\n") <= 60 or len(body) > 2000 or len(node.body) < 2:
            continue
        names = {inner.id for inner in ast.walk(node) if isinstance(inner, ast.Name)}
        used = [line for name, line in imports.items() if name in names]
        yield ("\n".join(used) + "\n\n\n" if used else "") + body + "\n"


def build_corpus(sources: Iterable[Source], folder: Path) -> list[SourceReport]:
    """Write `files.jsonl`, `functions.jsonl`, `held_out.jsonl` (a {"source", "path", "text"} a line) and `corpus.json`.
    Held-out sources must come first: a later file that repeats a held-out one, exactly (by content hash) or nearly (by
    its lines), is dropped from training."""
    folder.mkdir(parents=True, exist_ok=True)
    corpus, reports = Corpus(), []
    names = ("files", "functions", "held_out")
    with ExitStack() as stack:
        outputs = {name: stack.enter_context((folder / f"{name}.jsonl").open("w")) for name in names}
        for source in sources:
            report, records = corpus.admit(source)
            reports.append(report)
            for name, record in records:
                outputs[name].write(json.dumps(record) + "\n")
            print(f"corpus: {source.name} {report.num_files} files, {report.num_bytes / 1e6:.2f} MB", flush=True)
    (folder / "corpus.json").write_text(json.dumps([asdict(report) for report in reports], indent=1))
    return reports


class Corpus:
    """Deduplicates sources against everything kept so far."""

    def __init__(self) -> None:
        self._files, self._lines, self._functions = set[int](), SeenLines(), SeenLines(0.7)

    def admit(self, source: Source) -> tuple[SourceReport, list[tuple[str, dict[str, str]]]]:
        """Return the report of one source, and its records as (output, record)."""
        report = SourceReport(source.name, source.version, source.licence, source.name in HELD_OUT)
        records: list[tuple[str, dict[str, str]]] = []
        dropped: Counter[str] = Counter()
        # Ordered by a hash of the path, so that the size limit keeps an even sample of the package.
        for path, content in sorted(source.files(), key=lambda item: hash_of(item[0])):
            reason = reason_to_drop(path, content)
            if reason is None and report.num_bytes + len(content) > MOST_BYTES_OF.get(source.name, MOST_BYTES):
                reason = "over the source's share"
            text = cleaned(content.decode("utf-8")) if reason is None else ""
            if reason is None and self._is_known(text):
                reason = "short or near-duplicate"
            tree = parsed(text) if reason is None else None
            if tree is None:
                dropped[reason or "does not parse"] += 1
                continue
            report.num_files += 1
            report.num_bytes += len(text.encode())
            record = {"source": source.name, "path": path, "text": text}
            records.append(("held_out" if report.held_out else "files", record))
            if report.held_out:
                continue
            for function in documented_functions(text, tree):
                if not self._functions.is_repeat(function):
                    report.num_functions += 1
                    records.append(("functions", record | {"text": function}))
        report.dropped = dict(dropped)
        return report, records

    def _is_known(self, text: str) -> bool:
        """Return whether `text` is too short or mostly seen before; otherwise remember it."""
        if len(text) < FEWEST_BYTES or hash_of(text) in self._files or self._lines.is_repeat(text):
            return True
        self._files.add(hash_of(text))
        return False


def parsed(text: str) -> ast.Module | None:
    """Return the syntax tree, or None if this Python cannot parse the text."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return ast.parse(text)
    except (SyntaxError, ValueError, RecursionError):
        return None


def read_texts(path: Path) -> Iterator[str]:
    """Yield the texts of a `.jsonl` file, in order."""
    with path.open() as lines:
        for line in lines:
            yield json.loads(line)["text"]


END_OF_TEXT, START_OF_TURN, END_OF_TURN, PAD = "<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|pad|>"
NUM_MASK_TOKENS = 8
SPECIAL_TOKENS = [END_OF_TEXT, START_OF_TURN, END_OF_TURN, PAD]
SPECIAL_TOKENS += [f"<|mask_{number}|>" for number in range(1, NUM_MASK_TOKENS + 1)]
END_OF_TEXT_ID, PAD_ID, FIRST_MASK_ID = 0, 3, 4

# Pieces that BPE never merges across, in this order: an indentation; a word with the one character before it (so
# ` name`, `.append` and `_size` are tokens); up to three digits; punctuation with the line ends after it (`):\n`);
# line ends; other white space. An indentation is never joined to the line end before it, because prompts end there.
PIECES = r"[ \t]{2,}(?=\S)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+\n*|\n+|\s+"

CHAT_TEMPLATE = Path(__file__).with_name("chat_template.jinja").read_text(encoding="utf-8")


def train_tokenizer(texts: Iterable[str], vocab_size: int) -> Tokenizer:
    """Train a byte-level BPE of `vocab_size` ids, the special tokens first (end of text is 0)."""
    tokenizer = Tokenizer(models.BPE())
    pieces = pre_tokenizers.Split(Regex(PIECES), behavior="isolated")
    letters = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([pieces, letters])
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[AddedToken(token, special=True, normalized=False) for token in SPECIAL_TOKENS],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        max_token_length=24,
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def write_tokenizer(tokenizer: Tokenizer, folder: Path, window: int) -> None:
    """Write `tokenizer.json`, and the config and chat template that transformers' AutoTokenizer reads."""
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": END_OF_TEXT,
        "eos_token": END_OF_TEXT,
        "pad_token": PAD,
        "model_max_length": window,
        "clean_up_tokenization_spaces": False,
        "additional_special_tokens": [token for token in SPECIAL_TOKENS if token not in (END_OF_TEXT, PAD)],
    }
    (folder / "chat_template.jinja").write_text(CHAT_TEMPLATE, encoding="utf-8")
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=1) + "\n")


def held_out_windows(tokenizer: Tokenizer, path: Path, count: int = 96, length: int = 256) -> Tensor:
    """Return fixed windows [count, length], evenly spread over the held-out files."""
    ids: list[int] = []
    for encoding in tokenizer.encode_batch(list(read_texts(path)), add_special_tokens=False):
        ids.extend([*encoding.ids, END_OF_TEXT_ID])
    if len(ids) < length:
        raise ValueError(f"The held-out files have {len(ids)} ids; at least {length} are needed. Hold out more.")
    starts = np.linspace(0, len(ids) - length, count).astype(int)
    return torch.tensor([ids[start : start + length] for start in starts.tolist()])


def bytes_of_ids(tokenizer: Tokenizer) -> Tensor:
    """Return the bytes of each id, [V]; 0 for special tokens. (In byte-level BPE a character is a byte.)"""
    lengths = [len(tokenizer.id_to_token(index) or "") for index in range(tokenizer.get_vocab_size())]
    lengths[: len(SPECIAL_TOKENS)] = [0] * len(SPECIAL_TOKENS)
    return torch.tensor(lengths)


def characters_per_token(tokenizer: Tokenizer, path: Path) -> float:
    """Return the mean characters per token on the held-out files."""
    texts = list(read_texts(path))
    num_ids = sum(len(encoding.ids) for encoding in tokenizer.encode_batch(texts, add_special_tokens=False))
    return sum(map(len, texts)) / num_ids
