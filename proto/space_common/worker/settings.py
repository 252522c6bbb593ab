"""The worker's settings: one table from which its command line is parsed and written.

`python -m space_server` parses it; the router, a Ray replica and `spaceserve doctor` write it when they start a worker.
A setting is one field here: its name is the flag's, and its `flag` has the default as typed, the help and the parser.
"""

# ruff: noqa: RUF009  # `flag` returns a field
from __future__ import annotations

import argparse
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import Field, dataclass, field, fields
from pathlib import Path
from typing import Any, Literal

from space_common import default_model
from space_common.certificate import CertificateError, CertificateFiles
from space_common.tracing import TracingUnavailable, check_tracing
from space_common.worker.choices import OF_WORKER
from space_common.worker.secret import SecretError, SecretFile, is_local

LARGEST_BLOCK = 256  # largest block size in slots; FlashAttention 2 needs it
POWERCAP = "/sys/class/powercap"
NAMED_CHANCES = {0.78: (0.84, 0.81, 0.78, 0.75, 0.72), 0.57: (0.63, 0.60, 0.57, 0.54, 0.51)}
"""The two acceptance profiles of SPACE §5 by their middle: probability by mask depth 1 to 5, given the drafts
before.
"""
_UNITS = {"": 1, "B": 1, "KIB": 1024, "MIB": 1024**2, "GIB": 1024**3, "TIB": 1024**4}
_UNITS |= {"KB": 1000, "MB": 1000**2, "GB": 1000**3, "TB": 1000**4}

Speculation = Literal["auto", "off"] | int
StepsHere = Literal["device", "eager", "host"]
Steps = Literal["auto"] | StepsHere


# Parsers of single flags. Each raises ValueError("must be …; got …").


def at_least(bound: int) -> Callable[[str], int]:
    """Return a parser of integers with a lower bound."""

    def integer(text: str) -> int:
        if not text.isdecimal() or int(text) < bound:
            raise ValueError(f"must be an integer of at least {bound}; got {text!r}")
        return int(text)

    return integer


def parse_amount(text: str) -> int | float:
    """`512MiB` -> bytes (int); `0.9` -> a fraction of the free memory (float)."""
    digits = text.strip().rstrip("BbKkMmGgTtIi")
    unit = text.strip()[len(digits) :].upper()
    try:
        amount = float(digits)
    except ValueError:
        amount = -1.0
    if unit not in _UNITS or not 0 < amount < float("inf"):
        raise ValueError(f"{text!r} is no amount of memory; write e.g. 1GiB, 800MiB, or a fraction such as 0.9.")
    if not unit and amount <= 1 and "." in digits:
        return amount
    return int(amount * _UNITS[unit])


def parse_size(text: str) -> int:
    """`512MiB` -> bytes."""
    if isinstance(amount := parse_amount(text), float):
        raise ValueError(f"must be a size such as 8GiB; got {text!r}")
    return amount


def parse_chances(text: str) -> tuple[float, ...]:
    """Parse `.78`, `.57`, or five comma-separated numbers p_1 .. p_5."""
    form = f"must be .78, .57, or five chances p_1,…,p_5 from 0 to 1; got {text!r}"
    try:
        chances = tuple(float(word) for word in text.split(","))
    except ValueError:
        raise ValueError(form) from None
    if len(chances) == 1:
        chances = NAMED_CHANCES.get(chances[0], ())
    if len(chances) != 5 or not all(0.0 <= chance <= 1.0 for chance in chances):
        raise ValueError(form)
    return chances


def parse_cores(text: str) -> set[int]:
    """`0-2,5` -> {0, 1, 2, 5}."""
    found: set[int] = set()
    for part in text.split(","):
        first, dash, last = part.partition("-")
        ends = [first, last if dash else first]
        if not all(end.isdecimal() for end in ends) or int(ends[1]) < int(ends[0]):
            raise ValueError(f"must be numbers of processors such as 0-2,5; got {text!r}")
        found |= set(range(int(ends[0]), int(ends[1]) + 1))
    return found


def _cores_here(text: str) -> set[int] | str:
    if text == "auto":
        return text
    found = parse_cores(text)
    if not hasattr(os, "sched_setaffinity"):
        raise ValueError("this system binds no process to processors; leave --cores out")
    if missing := found - os.sched_getaffinity(0):
        raise ValueError(f"this process may not run on {sorted(missing)[0]}; `taskset -p` shows where")
    return found


def _adapter(text: str) -> tuple[str, str]:
    name, _, folder = text.partition("=")
    if not name or not folder:
        raise ValueError(f"must be NAME=FOLDER; got {text!r}")
    return name, folder


def _block_size(text: str) -> int:
    if not text.isdecimal() or int(text) < 1 or LARGEST_BLOCK % int(text):
        raise ValueError(f"must be a power of two up to {LARGEST_BLOCK}; got {text!r}")
    return int(text)


def _speculation(text: str) -> Speculation:
    if text in ("auto", "off"):
        return "auto" if text == "auto" else "off"
    if not text.isdecimal():
        raise ValueError(f"must be auto, off, or a number of drafts; got {text!r}")
    return int(text)


def _seconds(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value < float("inf"):
        raise ValueError(f"must be seconds, 0 or more; got {text!r}")
    return value


def _positive_seconds(text: str, cure: str = "") -> float:
    if not (value := _seconds(text)):
        raise ValueError(f"must be above 0{cure}; got 0")
    return value


def _ids(text: str) -> tuple[int, ...]:
    words = text.split(",")
    if not all(word.strip().isdecimal() for word in words):
        raise ValueError(f"must be ids separated by commas; got {text!r}")
    return tuple(int(word) for word in words)


def flag(default: str | None, help: str | None, parse: Callable[[str], Any] = str, **more: Any) -> Any:
    """Return a field that is a flag.

    `default`: as typed, None: the flag is not given; `more`: of `add_argument`, and `none`: how None is typed.
    """
    value = None if default is None else parse(default)
    return field(default=value, metadata={"default": default, "help": help, "parse": parse, **more})


def named_folders(help: str) -> Any:
    """Return a field that is a repeatable flag NAME=FOLDER."""
    metadata = {"default": None, "action": "append", "parse": _adapter, "metavar": "NAME=FOLDER", "help": help}
    return field(default=(), metadata=metadata)


def switch(help: str) -> Any:
    """Return a field that is a flag with the values on and off; off is the default."""
    return field(default=False, metadata={"default": "off", "help": help, "parse": str, "choices": ("on", "off")})


@dataclass(frozen=True)
class WorkerSettings:
    """All settings of a worker process, in the order of its `--help`."""

    model: str = flag(
        None,
        f"a folder, a hub id, `{default_model.NAME}`, or `{default_model.FALLBACK}`, which needs no download "
        f"(default: {default_model.NAME})",
    )
    revision: str | None = flag(None, "of a hub id: branch, tag or commit (default: main)", metavar="REVISION")
    token_file: Path | None = flag(None, "file with a token of the hub", Path, metavar="PATH")
    download_folder: Path | None = flag(None, "of downloaded models", Path, metavar="FOLDER")
    offline: bool = switch("on: fetch nothing (default: %(default)s)")
    listen: str = flag(None, "unix:PATH or HOST:PORT; port 0 takes a free one", required=True)
    tls_cert: str | None = flag(None, "certificate of this worker, PEM, which names its host", metavar="PATH")
    tls_key: str | None = flag(None, "private key of --tls-cert, PEM", metavar="PATH")
    tls_client_ca: str | None = flag(
        None,
        "authority whose certificates routers must show, PEM; with --tls-cert and --tls-key the port speaks "
        "mutual TLS. Renewed files count from the next connection on",
        metavar="PATH",
    )
    worker_secret_file: str | None = flag(
        None,
        "file with the secrets that routers must know, one a line, of at least 32 characters (`openssl rand -hex 32`); "
        "they are proven, never sent. A port that other machines reach needs this or mutual TLS. A changed file counts "
        "from the next connection on",
        metavar="PATH",
    )
    dtype: str = flag("auto", "auto, float32, bfloat16 or float16: of weights, keys and values (default: %(default)s)")
    weights: str = flag(
        "auto",
        "linears in fewer bits: int8, int4 or, of a quantised checkpoint, packed on a CPU (gguf: of a GGUF alone), "
        "fp8 on a GPU; plain: none; auto: packed where it is quantised so, else plain (default: %(default)s)",
    )
    kv_dtype: str = flag(
        "auto", "of keys and values; fp8, on a GPU: twice as many fit as in bfloat16 (default: %(default)s, as --dtype)"
    )
    device: str = flag("auto", "auto, cpu, cuda, cuda:1 … (default: %(default)s)")
    kv_memory: int | float | None = flag(  # bytes; a fraction of the free memory; None: see memory.py
        "auto",
        "for keys and values: auto, bytes such as 1GiB, or a fraction of free memory",
        lambda text: None if text == "auto" else parse_amount(text),
    )
    kv_offload: int | None = flag(  # bytes
        None,
        "host memory that keeps blocks of shared prefixes when they must leave --kv-memory (default: none)",
        parse_size,
        metavar="SIZE",
    )
    state_cache: int | None = flag(  # bytes; None: see memory.py
        "auto",
        "memory that keeps states of recurrent layers behind prompts, so that prefixes can be shared: auto, bytes such "
        "as 1GiB, or off",
        lambda text: None if text == "auto" else 0 if text == "off" else parse_size(text),
        metavar="SIZE",
    )
    num_blocks: int | None = flag(None, "blocks of keys and values; wins over --kv-memory", at_least(1))
    block_size: int = flag(
        "16",
        f"slots per block, a power of two up to {LARGEST_BLOCK} (default: %(default)s; small wastes less; "
        f"--attention flash-attn-2 needs {LARGEST_BLOCK})",
        _block_size,
    )
    max_model_len: int | None = flag(None, "ids of one sequence (default: the checkpoint's)", at_least(2))
    max_sequences: int | None = flag(  # None: see memory.py
        "auto",
        "at once; auto: 64 on a CPU, 64 to 256 on a GPU, by its memory (default: %(default)s)",
        lambda text: None if text == "auto" else at_least(1)(text),
    )
    speculation: Speculation = flag("auto", "auto, off, or drafts per step", _speculation)
    prefill_budget: float | None = flag(  # seconds; None: no bound
        "0.1",
        "longest step that prompt rows may make while others decode; off: no bound (default: %(default)s)",
        lambda text: None if text == "off" else _positive_seconds(text, ", or off"),
        none="off",
        metavar="SECONDS",
    )
    calibration_seconds: float = flag(
        "3.0",
        "measure what steps cost, at the first start on this machine that nothing else disturbs; later ones hold "
        "a plain step against what it has kept; 0: learn it while serving (default: %(default)s)",
        _seconds,
        metavar="SECONDS",
    )
    lookup: Literal["auto", "on", "off", "only"] = flag(
        "auto",
        "drafts from what followed the same ids before: beside masks, never, or instead; auto is on where --steps "
        "are the host's, for on a device steps wait for each other while texts are read (default: %(default)s)",
        choices=("auto", "on", "off", "only"),
    )
    speculation_method: Literal["auto", "masks", "head"] = flag(
        "auto",
        "what of the model drafts: its masks, its recurrent head, --draft-model or --draft-head (head), or at each "
        "step the one that brings more tokens per second (auto); either is left out where the model has it not "
        "(default: %(default)s)",
        choices=("auto", "masks", "head"),
    )
    draft_model: str | None = flag(
        None,
        "a smaller model with the same tokenizer, which drafts in place of a recurrent head: a folder, a GGUF file or "
        "a hub id; mtp: the checkpoint's own layer for multi-token prediction; on a CPU only",
        metavar="MODEL",
    )
    draft_head: str | None = flag(
        None,
        "an EAGLE head that was trained for the model, which drafts in place of a recurrent head: a folder or a hub "
        "id, as EAGLE, SpecForge and speculators publish them; on a CPU only",
        metavar="HEAD",
    )
    embedding_model: str | None = flag(
        None,
        "an encoder or a cross-encoder beside the model, in float32, for /v1/embeddings, /v1/rerank and /v1/score: a "
        "folder or a hub id with safetensors and tokenizer.json, as sentence-transformers saves it",
        metavar="MODEL",
    )
    steps: Steps = flag(
        "auto",
        "device: sequences whose prompt is read keep their state on the device, which begins the next step before "
        "the host has read the last, each kind of step a CUDA graph from its second time on; eager: the same without "
        "graphs; host: every step waits for the host; auto: device on a GPU, host on a CPU (default: %(default)s)",
        choices=("auto", "device", "eager", "host"),
    )
    space_mask_ids: tuple[int, ...] | None = flag(None, "comma-separated: one shared id, or one per mask", _ids)
    space_num_masks: int | None = flag(None, "masks per group", at_least(1))
    adapter: tuple[tuple[str, str], ...] = named_folders(  # beside the checkpoint's own
        "a gated adapter that drafts for requests naming it; repeatable"
    )
    lora: tuple[tuple[str, str], ...] = named_folders(
        "an ordinary LoRA adapter, as peft saved it, for requests naming it; repeatable"
    )
    synthetic_acceptance: tuple[float, ...] | None = flag(
        None,
        "for measuring without trained masks: when a request comes again, its drafts from mask 1 to 5 are accepted "
        "with these chances (.78, .57, or five numbers separated by commas); off by default",
        parse_chances,
        metavar="P",
    )
    attention: str = flag(
        "auto",
        "auto measures those that can be used on this GPU at start and takes the fastest, on a CPU ours; the log "
        "says why others are not used, and the cure (default: %(default)s)",
    )
    cpu_kernels: str = flag(
        "auto",
        "on a CPU, in bfloat16: auto compiles our own operations at the first start (some 10 s, then kept) "
        "and takes torch's where there is no C++ compiler; compiled: it is an error where they cannot be had; a kind "
        "of processor, such as avx2: the same, compiled for that kind; torch: torch's always (default: %(default)s)",
    )
    exact: bool = switch(
        "on: a token's bits do not depend on the batch on a GPU either (our own products instead of the "
        "library's, slower); a CPU is always exact (default: %(default)s)"
    )
    tensor_parallel: int = flag(
        "1",
        "processes that share the model, one per GPU, started here or by torchrun (default: %(default)s)",
        at_least(1),
        metavar="N",
    )
    rank_timeout: float = flag(
        "60.0",
        "silence of one of them after which the worker ends (default: %(default)s)",
        _positive_seconds,
        metavar="SECONDS",
    )
    num_threads: int | None = flag(
        None,
        "threads of one product on the CPU [1 for weights below 64 MiB, else OMP_NUM_THREADS or the physical "
        "cores that affinity and the container's quota leave; of 4 and more, one is left to a router that started it]",
        at_least(1),
    )
    num_workers: int = flag(
        "1",
        "workers that share this machine's cores: each takes its part of the threads (default: %(default)s)",
        at_least(1),
        metavar="N",
    )
    cores: set[int] | Literal["auto"] | None = flag(  # CPU affinity; auto: `keep_off_last`; None: unchanged
        None,
        "run on these processors alone, such as 0-2,5; auto: on all but the last, where products take one thread "
        "and --num-workers leave one",
        _cores_here,
        metavar="LIST",
    )
    powercap: Path = flag(
        POWERCAP,
        "the kernel's power sensors, or where a container gets the machine's (default: %(default)s)",
        Path,
        metavar="FOLDER",
    )
    parent_pid: int | None = flag(None, "end when this process is gone", at_least(1))
    tracing: bool = switch(
        "on: OpenTelemetry spans of the sequences that a router follows, over OTLP as the OTEL_* variables say "
        "(default: %(default)s)"
    )
    log_format: str = flag("text", "(default: %(default)s)", choices=("text", "json"))
    log_level: str = flag("INFO", None, str.upper, choices=["DEBUG", "INFO", "WARNING", "ERROR", "CRITICAL"])

    model_is_named: bool = False  # False: `demo` may replace the default model

    @property
    def max_draft_length(self) -> int | None:
        """Bound on drafts per sequence and step; None: the checkpoint's masks."""
        if isinstance(self.speculation, int):
            return self.speculation
        return 0 if self.speculation == "off" else None

    def certificate(self) -> CertificateFiles | None:
        """Return the files of mutual TLS with routers; None: no TLS. Raises ValueError naming the flags."""
        given = {"--tls-cert": self.tls_cert, "--tls-key": self.tls_key, "--tls-client-ca": self.tls_client_ca}
        if not any(given.values()):
            return None
        if self.tls_cert is None or self.tls_key is None or self.tls_client_ca is None:
            missing = [name for name, path in given.items() if path is None]
            raise ValueError(f"{' and '.join(given)} go together; {' and '.join(missing)} is missing")
        if self.listen.startswith("unix:"):
            raise ValueError("argument --tls-cert: does nothing on a Unix socket, which only this user may use")
        try:
            return CertificateFiles(*map(Path, (self.tls_cert, self.tls_key, self.tls_client_ca)))
        except CertificateError as error:
            flags = " ".join(f"{name} {path}" for name, path in given.items())
            raise ValueError(f"argument {flags}: {error}") from None

    def secret(self) -> SecretFile | None:
        """Return the secrets that routers must know; None: the port has none. Raises ValueError naming the flag."""
        if self.worker_secret_file is None:
            return None
        if self.listen.startswith("unix:"):
            raise ValueError(
                "argument --worker-secret-file: does nothing on a Unix socket, which only this user may use"
            )
        try:
            return SecretFile(Path(self.worker_secret_file))
        except SecretError as error:
            raise ValueError(f"argument --worker-secret-file: {error}") from None

    def why_open(self) -> str | None:
        """Return why this worker must not listen: other machines reach its port, and nothing keeps them off; else None.

        Resolves the host's name.
        """
        if self.tls_cert is not None or self.worker_secret_file is not None or is_local(self.listen):
            return None
        return (
            f"--listen {self.listen}: other machines may reach this address, and a stranger could use the worker and "
            "read prompts. Give --worker-secret-file PATH here and at the router (`openssl rand -hex 32` makes a "
            "secret), or --tls-cert, --tls-key and --tls-client-ca, or listen on 127.0.0.1 or unix:PATH."
        )

    @classmethod
    def parse(cls, arguments: Sequence[str]) -> WorkerSettings:
        """Parse a command line. Exits with status 2 and one line if it is invalid."""
        parser = argparse.ArgumentParser(
            prog="python -m space_server", description="The worker: steps a model on pages."
        )
        for each in worker_flags():
            spec = {name: value for name, value in each.metadata.items() if name not in ("parse", "none")}
            if each.name in OF_WORKER:
                spec["choices"] = OF_WORKER[each.name]
            parser.add_argument(_name(each), type=_argument(each.metadata["parse"]), **spec)
        options = vars(parser.parse_args(arguments))
        for each in worker_flags():
            if isinstance(each.default, bool):
                options[each.name] = options[each.name] == "on"
        options["adapter"], options["lora"] = tuple(options["adapter"] or ()), tuple(options["lora"] or ())
        # Ranks must load the same model: with several, the default has no fallback.
        options["model_is_named"] = options["model"] is not None or options["tensor_parallel"] > 1
        options["model"] = options["model"] or default_model.NAME
        settings = cls(**options)
        names = [name for name, _ in (*settings.adapter, *settings.lora)]
        if twice := [name for name in names if names.count(name) > 1]:
            flag_name = "--lora" if twice[0] in dict(settings.lora) else "--adapter"
            parser.error(f"argument {flag_name}: there are two adapters named {twice[0]}")
        try:
            if settings.tracing:
                check_tracing(os.environ)
            settings.certificate()
            settings.secret()
        except (TracingUnavailable, ValueError) as error:
            parser.error(str(error))
        return settings

    def to_argv(self) -> list[str]:
        """Return the command line that `parse` turns into these settings."""
        values = {each.name: getattr(self, each.name) for each in worker_flags()}
        for each in worker_flags():
            if values[each.name] is None:
                values[each.name] = each.metadata.get("none")
        return worker_argv(values if self.model_is_named else values | {"model": None})


def worker_flags() -> list[Field[Any]]:
    """Return the fields of WorkerSettings that are flags, in order."""
    return [each for each in fields(WorkerSettings) if "parse" in each.metadata]


def worker_argv(values: Mapping[str, object]) -> list[str]:
    """Return a worker's command line; defaults are left out, repeatable flags come last.

    `values`: by field name of WorkerSettings, each a parsed value or a text as typed; other names are ignored.
    """
    words, repeated = [], []
    for each in worker_flags():
        value = values.get(each.name)
        if each.metadata.get("action") == "append":
            pairs: Any = value or ()
            repeated += [word for name, folder in pairs for word in (_name(each), f"{name}={folder}")]
        elif (text := _text(value)) is not None and text != each.metadata["default"]:
            words += [_name(each), text]
    return [*words, *repeated]


def _name(each: Field[Any]) -> str:
    return "--" + each.name.replace("_", "-")


def _text(value: object) -> str | None:
    """Return a value as typed; None: the flag is left out."""
    if isinstance(value, bool):
        return "on" if value else "off"
    if isinstance(value, tuple | set):
        return ",".join(map(str, sorted(value) if isinstance(value, set) else value)) or None
    return None if value is None else str(value)


def _argument(parse: Callable[[str], Any]) -> Callable[[str], Any]:
    """Return a parser for argparse, which shows the message of this error alone."""

    def argument(text: str) -> Any:
        try:
            return parse(text)
        except ValueError as error:
            raise argparse.ArgumentTypeError(str(error)) from None

    return argument
