"""The worker's settings: its command line, parsed once."""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from space_common import default_model
from space_common.certificate import CertificateFiles
from space_common.tracing import TracingUnavailable, check_tracing
from space_kernels.attention_backends import ATTENTION_NAMES
from space_kernels.build import cpu_library
from space_model.precision import KV_DTYPES, WEIGHTS

from space_server.machine.cores import parse_cores
from space_server.machine.energy import POWERCAP
from space_server.machine.memory import NotEnoughMemory, parse_amount
from space_server.speculation.synthetic_acceptance import parse_chances
from space_server.tls import mutual_tls

LARGEST_BLOCK = 256
"""Largest block size in slots; FlashAttention 2 needs it."""

Speculation = Literal["auto", "off"] | int
Lookup = Literal["auto", "on", "off", "only"]
StepsHere = Literal["device", "eager", "host"]
Steps = Literal["auto"] | StepsHere


@dataclass(frozen=True)
class WorkerConfig:
    """The worker's settings; every field is a flag of `python -m space_server`."""

    model: str  # a folder, a hub id, `smollm2` or `demo`
    model_is_named: bool  # False: `demo` may replace the default model
    revision: str | None  # of a hub id: branch, tag or commit; None: main
    token_file: Path | None  # with the hub's token
    download_folder: Path | None  # of downloaded models; None: huggingface_hub's own
    offline: bool  # make no requests to the hub
    listen: str  # unix:PATH or HOST:PORT
    tls: CertificateFiles | None  # mutual TLS with routers
    dtype: str  # auto, float32, bfloat16, float16
    weights: str  # plain, int8 or fp8: see precision.py
    kv_dtype: str  # auto or fp8: see precision.py
    device: str  # auto, cpu, cuda, …
    kv_memory: int | float | None  # bytes; a fraction of the free memory; None: see memory.py
    num_blocks: int | None  # overrides kv_memory
    block_size: int  # slots
    max_model_len: int | None  # ids of one sequence; None: as the checkpoint says
    max_sequences: int  # at once
    prefill_budget: float | None  # longest step with prompt rows beside decoding sequences, in seconds; None: no bound
    calibration_seconds: float  # for measuring step costs if no valid file is kept; 0: do not measure
    speculation: Speculation  # auto: adaptive; off: plain decoding; K: always K drafts with whole groups
    lookup: Lookup  # drafts from what followed the same ids before: beside masks, not at all, or instead of them
    steps: Steps  # where sequence state is kept; device: with CUDA graphs, eager: without
    space_mask_ids: tuple[int, ...] | None  # overrides the checkpoint's own
    space_num_masks: int | None
    adapters: tuple[tuple[str, str], ...]  # name and folder of each gated adapter beside the checkpoint's own
    synthetic_acceptance: tuple[float, ...] | None  # acceptance by mask depth; None: real drafts
    attention: str  # auto or a backend: see attention_backends.py
    cpu_kernels: str  # auto, compiled or torch: see cpu_library.py
    exact: bool  # batch-invariant results on a GPU, too
    tensor_parallel: int  # processes (ranks) that share the model, one per GPU
    rank_timeout: float  # seconds of silence after which a rank counts as dead and the worker exits
    num_threads: int | None  # of one matmul on the CPU; None: from the weights' size and the cores
    num_workers: int  # workers that share the machine's cores
    cores: set[int] | Literal["auto"] | None  # CPU affinity; "auto": `keep_off_last`; None: unchanged
    powercap: Path  # the kernel's folder of power sensors
    tracing: bool  # export spans of sequences that the router traces
    parent_pid: int | None  # exit when this process ends
    log_level: str
    log_format: str  # text or json

    @property
    def max_draft_length(self) -> int | None:
        """Bound on drafts per sequence and step; None: the checkpoint's masks."""
        if isinstance(self.speculation, int):
            return self.speculation
        return 0 if self.speculation == "off" else None


def parse(arguments: Sequence[str]) -> WorkerConfig:
    """Parse the command line. Exits with status 2 and one line if it is invalid."""
    parser = argparse.ArgumentParser(prog="python -m space_server", description="The worker: steps a model on pages.")
    parser.add_argument(
        "--model",
        help=f"a folder, a hub id, `{default_model.NAME}`, or `{default_model.FALLBACK}`, which needs no download "
        f"(default: {default_model.NAME})",
    )
    parser.add_argument("--revision", metavar="REVISION", help="of a hub id: branch, tag or commit (default: main)")
    parser.add_argument("--token-file", type=Path, metavar="PATH", help="file with a token of the hub")
    parser.add_argument("--download-folder", type=Path, metavar="FOLDER", help="of downloaded models")
    parser.add_argument(
        "--offline", choices=("on", "off"), default="off", help="on: fetch nothing (default: %(default)s)"
    )
    parser.add_argument("--listen", required=True, help="unix:PATH or HOST:PORT; port 0 takes a free one")
    parser.add_argument("--tls-cert", metavar="PATH", help="certificate of this worker, PEM, which names its host")
    parser.add_argument("--tls-key", metavar="PATH", help="private key of --tls-cert, PEM")
    parser.add_argument(
        "--tls-client-ca",
        metavar="PATH",
        help="authority whose certificates routers must show, PEM; with --tls-cert and --tls-key the port speaks "
        "mutual TLS. Without, whoever reaches HOST:PORT can use this worker. Renewed files count from the next "
        "connection on",
    )
    parser.add_argument(
        "--dtype",
        default="auto",
        help="auto, float32, bfloat16 or float16: of weights, keys and values (default: %(default)s)",
    )
    parser.add_argument(
        "--weights",
        choices=WEIGHTS,
        default="plain",
        help="linears in eight bits, half the bytes of bfloat16: int8 on a CPU, fp8 on a GPU (default: %(default)s)",
    )
    parser.add_argument(
        "--kv-dtype",
        choices=KV_DTYPES,
        default="auto",
        help="of keys and values; fp8, on a GPU: twice as many fit as in bfloat16 (default: %(default)s, as --dtype)",
    )
    parser.add_argument("--device", default="auto", help="auto, cpu, cuda, cuda:1 … (default: %(default)s)")
    parser.add_argument(
        "--kv-memory", type=_amount, help="for keys and values: auto, bytes such as 1GiB, or a fraction of free memory"
    )
    parser.add_argument("--num-blocks", type=_at_least(1), help="blocks of keys and values; wins over --kv-memory")
    parser.add_argument(
        "--block-size",
        type=_block_size,
        default=16,
        help=f"slots per block, a power of two up to {LARGEST_BLOCK} (default: %(default)s; small wastes less; "
        f"--attention flash-attn-2 needs {LARGEST_BLOCK})",
    )
    parser.add_argument("--max-model-len", type=_at_least(2), help="ids of one sequence (default: the checkpoint's)")
    parser.add_argument("--max-sequences", type=_at_least(1), default=64, help="at once (default: %(default)s)")
    parser.add_argument("--speculation", type=_speculation, default="auto", help="auto, off, or drafts per step")
    parser.add_argument(
        "--prefill-budget",
        type=_prefill_budget,
        default=0.1,
        metavar="SECONDS",
        help="longest step that prompt rows may make while others decode; off: no bound (default: %(default)s)",
    )
    parser.add_argument(
        "--calibration-seconds",
        type=_seconds,
        default=3.0,
        metavar="SECONDS",
        help="measure what steps cost, at the first start on this machine that nothing else disturbs; later ones hold "
        "a plain step against what it has kept; 0: learn it while serving (default: %(default)s)",
    )
    parser.add_argument(
        "--lookup",
        default="auto",
        choices=["auto", "on", "off", "only"],
        help="drafts from what followed the same ids before: beside masks, never, or instead; auto is on where --steps "
        "are the host's, for on a device steps wait for each other while texts are read (default: %(default)s)",
    )
    parser.add_argument(
        "--steps",
        default="auto",
        choices=["auto", "device", "eager", "host"],
        help="device: sequences whose prompt is read keep their state on the device, which begins the next step before "
        "the host has read the last, each kind of step a CUDA graph from its second time on; eager: the same without "
        "graphs; host: every step waits for the host; auto: device on a GPU, host on a CPU (default: %(default)s)",
    )
    parser.add_argument("--space-mask-ids", type=_ids, help="comma-separated: one shared id, or one per mask")
    parser.add_argument("--space-num-masks", type=_at_least(1), help="masks per group")
    parser.add_argument(
        "--adapter",
        type=_adapter,
        action="append",
        default=[],
        dest="adapters",
        metavar="NAME=FOLDER",
        help="a gated adapter that drafts for requests naming it; repeatable",
    )
    parser.add_argument(
        "--synthetic-acceptance",
        type=_chances,
        metavar="P",
        help="for measuring without trained masks: when a request comes again, its drafts from mask 1 to 5 come true "
        "with these chances (.78, .57, or five numbers separated by commas); off by default",
    )
    parser.add_argument(
        "--attention",
        default="auto",
        choices=ATTENTION_NAMES,
        help="auto measures those that can be used on this GPU at start and takes the fastest, on a CPU ours; the log "
        "says why others are not used, and the cure (default: %(default)s)",
    )
    parser.add_argument(
        "--cpu-kernels",
        default="auto",
        choices=cpu_library.CHOICES,
        help="on a CPU, in bfloat16: auto compiles our own operations at the first start (some 10 s, then kept) "
        "and takes torch's where there is no C++ compiler; compiled: it is an error where they cannot be had; a kind "
        "of processor, such as avx2: the same, compiled for that kind; torch: torch's always (default: %(default)s)",
    )
    parser.add_argument(
        "--exact",
        choices=("on", "off"),
        default="off",
        help="on: a token's bits depend on nobody's company on a GPU either (our own products instead of the "
        "library's, slower); a CPU is always exact (default: %(default)s)",
    )
    parser.add_argument(
        "--tensor-parallel",
        type=_at_least(1),
        default=1,
        metavar="N",
        help="processes that share the model, one per GPU, started here or by torchrun (default: %(default)s)",
    )
    parser.add_argument(
        "--rank-timeout",
        type=_positive_seconds,
        default=60.0,
        metavar="SECONDS",
        help="silence of one of them after which the worker ends (default: %(default)s)",
    )
    parser.add_argument(
        "--num-threads",
        type=_at_least(1),
        help="threads of one product on the CPU [1 for weights below 64 MiB, else OMP_NUM_THREADS or the physical "
        "cores that affinity and the container's quota leave; of 4 and more, one is left to a router that started it]",
    )
    parser.add_argument(
        "--num-workers",
        type=_at_least(1),
        default=1,
        metavar="N",
        help="workers that share this machine's cores: each takes its part of the threads (default: %(default)s)",
    )
    parser.add_argument(
        "--cores",
        type=_cores,
        metavar="LIST",
        help="run on these processors alone, such as 0-2,5; auto: on all but the last, where products take one thread "
        "and --num-workers leave one",
    )
    parser.add_argument(
        "--powercap",
        type=Path,
        default=POWERCAP,
        metavar="FOLDER",
        help="the kernel's power sensors, or where a container gets the machine's (default: %(default)s)",
    )
    parser.add_argument("--parent-pid", type=_at_least(1), help="end when this process is gone")
    parser.add_argument(
        "--tracing",
        choices=("on", "off"),
        default="off",
        help="on: OpenTelemetry spans of the sequences that a router follows, over OTLP as the OTEL_* variables say "
        "(default: %(default)s)",
    )
    parser.add_argument("--log-format", choices=("text", "json"), default="text", help="(default: %(default)s)")
    parser.add_argument(
        "--log-level", type=str.upper, default="INFO", choices=["DEBUG", "INFO", "WARNING", "ERROR", "CRITICAL"]
    )
    options = vars(parser.parse_args(arguments))
    # Ranks must load the same model: with several, the default has no fallback.
    options["model_is_named"] = options["model"] is not None or options["tensor_parallel"] > 1
    options["model"] = options["model"] or default_model.NAME
    for name in ("exact", "offline", "tracing"):
        options[name] = options[name] == "on"
    if options["tracing"]:
        try:
            check_tracing(os.environ)
        except TracingUnavailable as error:
            parser.error(str(error))
    try:
        options["tls"] = mutual_tls(*(options.pop(name) for name in ("tls_cert", "tls_key", "tls_client_ca")))
    except ValueError as error:
        parser.error(str(error))
    if options["tls"] is not None and options["listen"].startswith("unix:"):
        parser.error("argument --tls-cert: does nothing on a Unix socket, which only this user may use")
    adapters = tuple(options.pop("adapters"))
    twice = [name for name, _ in adapters if [one for one, _ in adapters].count(name) > 1]
    if twice:
        parser.error(f"argument --adapter: there are two adapters named {twice[0]}")
    return WorkerConfig(adapters=adapters, **options)


def _cores(text: str) -> set[int] | str:
    if text == "auto":
        return text
    try:
        found = parse_cores(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
    if not hasattr(os, "sched_setaffinity"):
        raise argparse.ArgumentTypeError("this system binds no process to processors; leave --cores out")
    if missing := found - os.sched_getaffinity(0):
        raise argparse.ArgumentTypeError(f"this process may not run on {sorted(missing)[0]}; `taskset -p` shows where")
    return found


def _adapter(text: str) -> tuple[str, str]:
    name, _, folder = text.partition("=")
    if not name or not folder:
        raise argparse.ArgumentTypeError(f"must be NAME=FOLDER; got {text!r}")
    return name, folder


def _amount(text: str) -> int | float | None:
    if text == "auto":
        return None
    try:
        return parse_amount(text)
    except NotEnoughMemory as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def _at_least(bound: int) -> Callable[[str], int]:
    """A parser of integers with a lower bound."""

    def integer(text: str) -> int:
        if not text.isdecimal() or int(text) < bound:
            raise argparse.ArgumentTypeError(f"must be an integer of at least {bound}; got {text!r}")
        return int(text)

    return integer


def _block_size(text: str) -> int:
    if not text.isdecimal() or int(text) < 1 or LARGEST_BLOCK % int(text):
        raise argparse.ArgumentTypeError(f"must be a power of two up to {LARGEST_BLOCK}; got {text!r}")
    return int(text)


def _speculation(text: str) -> Speculation:
    if text == "auto":
        return "auto"
    if text == "off":
        return "off"
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"must be auto, off, or a number of drafts; got {text!r}")
    return int(text)


def _seconds(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value < float("inf"):
        raise argparse.ArgumentTypeError(f"must be seconds, 0 or more; got {text!r}")
    return value


def _positive_seconds(text: str) -> float:
    if not (value := _seconds(text)):
        raise argparse.ArgumentTypeError("must be above 0; got 0")
    return value


def _prefill_budget(text: str) -> float | None:
    if text == "off":
        return None
    if not (value := _seconds(text)):
        raise argparse.ArgumentTypeError("must be above 0, or off; got 0")
    return value


def _chances(text: str) -> tuple[float, ...]:
    try:
        return parse_chances(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def _ids(text: str) -> tuple[int, ...]:
    words = text.split(",")
    if not all(word.strip().isdecimal() for word in words):
        raise argparse.ArgumentTypeError(f"must be ids separated by commas; got {text!r}")
    return tuple(int(word) for word in words)
