"""Other engines on the same GPU: where they are installed, how their servers are started, and what these load."""

from __future__ import annotations

import fcntl
import gc
import itertools
import json
import operator
import os
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import torch
from processes import free_port
from safetensors.torch import save_file
from space_common.process import children, module_command
from space_common.worker.settings import NAMED_CHANCES
from space_model.random_checkpoint import write_byte_tokenizer

from gpu.llama import NUM_MASKS, Shape, draft_head, random_llama, recurrent_head, write_checkpoint

CHANCES = NAMED_CHANCES[0.78]
ACCEPTED = tuple(itertools.accumulate(CHANCES, operator.mul))
"""Chance that the first n drafts are all accepted, for each n from 1 on."""

MOST_TOKENS = 4096  # of a sequence, in every engine
STOP_SECONDS = 20.0  # from SIGTERM to SIGKILL
LAST_LINES = 12  # of a server's log, where it fails


class ServerFailed(Exception):
    """A server that ended, or that did not answer in time; the message has its last lines."""


@dataclass(frozen=True)
class Weights:
    """Folders that servers load: ours with masks and heads, the same weights without, and an EAGLE-3 head's config."""

    folder: Path
    shape: Shape

    @property
    def ours(self) -> Path:
        return self.folder / "ours"

    @property
    def plain(self) -> Path:
        return self.folder / "plain"

    @property
    def eagle(self) -> Path:
        return self.folder / "eagle3"

    def make(self, device: torch.device) -> bool:
        """Write them where they are not there yet; whether they were written. Processes that ask at once wait."""
        self.folder.mkdir(parents=True, exist_ok=True)
        done = self.folder / "done"
        with (self.folder / "lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if done.exists():
                return False
            self._write(device)
            done.touch()
        return True

    def _write(self, device: torch.device) -> None:
        shape = self.shape
        for folder in (self.ours, self.plain, self.eagle):
            folder.mkdir(exist_ok=True)
        model = random_llama(shape, device)
        write_checkpoint(self.ours, model, draft_head(shape, device))
        del model
        gc.collect()
        if device.type == "cuda":
            torch.cuda.empty_cache()
        config = json.loads((self.ours / "config.json").read_text(encoding="utf-8"))
        section = config.pop("space")
        (self.plain / "config.json").write_text(json.dumps(config, indent=1), encoding="utf-8")
        for file in self.ours.glob("model*"):  # with their index; a draft head's file would be read by others, too
            link = self.plain / file.name
            link.unlink(missing_ok=True)
            link.symlink_to(file)
        head = recurrent_head(shape, device)
        tensors = {"recurrent_head.w1.weight": head.w1, "recurrent_head.w2.weight": head.w2}
        tensors |= {} if head.ids is None else {"recurrent_head.ids": head.ids}
        file = self.ours / "recurrent_head.safetensors"
        save_file({name: tensor.cpu() for name, tensor in tensors.items()}, file, metadata={"format": "pt"})
        section["recurrent_head"] = {
            "file": file.name,
            "hidden": len(head.w1),
            "embedding_scale": head.embedding_scale,
            "num_drafts": head.num_drafts,
        }
        (self.ours / "config.json").write_text(json.dumps(config | {"space": section}, indent=1), encoding="utf-8")
        eagle = {"architectures": ["LlamaForCausalLMEagle3"], "num_hidden_layers": 1, "draft_vocab_size": 32000}
        (self.eagle / "config.json").write_text(json.dumps(config | eagle, indent=1), encoding="utf-8")
        for folder in (self.ours, self.plain):
            write_byte_tokenizer(folder, shape.vocab_size, NUM_MASKS, words=True)


@dataclass(frozen=True)
class Command:
    """What starts a server, and the variables that are added to its environment."""

    words: Sequence[str]
    environment: Mapping[str, str]


@dataclass(frozen=True)
class Peer:
    """Another engine."""

    name: str
    label: str
    module: str  # that its interpreter can import
    pip: str  # what installs it
    flags: Callable[[Weights, int, Sequence[int]], Command]  # (weights, k, batches) -> what Python runs; k 0: no drafts

    def missing(self, python: str) -> str:
        """Why this interpreter cannot run it, with what would install it; "" where it can."""
        look = f"import importlib.util, sys; sys.exit(importlib.util.find_spec({self.module!r}) is None)"
        try:
            found = subprocess.run(
                [python, "-P", "-c", look], capture_output=True, timeout=60, check=False, env=_environment_of(python)
            )
            if found.returncode == 0:
                return ""
            why = f"{self.label} is not installed in {python}."
        except (OSError, subprocess.SubprocessError) as error:
            why = f"{python} cannot be run ({error})."
        return (
            f"{why} Install it in an environment of its own: python3 -m venv {self.name} && "
            f"{self.name}/bin/pip install {self.pip}; then --peer {self.name}={self.name}/bin/python"
        )

    def command(self, python: str, weights: Weights, port: int, num_drafts: int, batches: Sequence[int]) -> Command:
        made = self.flags(weights, num_drafts, batches)
        words = [python, *made.words, "--host", "127.0.0.1", "--port", str(port), "--served-model-name", self.name]
        return Command(words, {**_environment_of(python), **made.environment})


def _environment_of(python: str) -> dict[str, str]:
    """This process's, without our packages where the interpreter is another."""
    return dict(os.environ) if python == sys.executable else {**os.environ, "PYTHONPATH": ""}


def _vllm(weights: Weights, num_drafts: int, batches: Sequence[int]) -> Command:
    """With graphs for all rows that are timed, and drafts accepted at our synthetic rates."""
    words = ["-m", "vllm.entrypoints.cli.main", "serve", str(weights.plain), "--dtype", "bfloat16"]
    words += ["--max-model-len", str(MOST_TOKENS), "--max-num-seqs", str(max(batches)), "--no-enable-prefix-caching"]
    words += ["--gpu-memory-utilization", "0.45"]
    if num_drafts:
        rows = [batch * (num_drafts + 1) for batch in (*(2**n for n in range(max(batches).bit_length())), *batches)]
        speculative = {
            "method": "eagle3",
            "model": str(weights.eagle),
            "num_speculative_tokens": num_drafts,
            "rejection_sample_method": "synthetic",
            "synthetic_acceptance_rates": [round(chance, 4) for chance in ACCEPTED[:num_drafts]],
        }
        words += ["--load-format", "dummy", "--speculative-config", json.dumps(speculative)]
        words += ["--compilation-config", json.dumps({"cudagraph_capture_sizes": sorted(set(rows))})]
    return Command(words, {"VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1"})


def _sglang(weights: Weights, num_drafts: int, batches: Sequence[int]) -> Command:
    """Drafts are accepted so that a step gives as many tokens as at our synthetic rates."""
    words = ["-m", "sglang.launch_server", "--model-path", str(weights.plain), "--dtype", "bfloat16"]
    words += ["--context-length", str(MOST_TOKENS), "--max-running-requests", str(max(batches))]
    words += ["--cuda-graph-max-bs", str(max(batches)), "--disable-radix-cache", "--mem-fraction-static", "0.7"]
    if not num_drafts:
        return Command(words, {"HF_HUB_OFFLINE": "1"})
    words += ["--load-format", "dummy", "--speculative-draft-load-format", "dummy"]
    words += ["--speculative-algorithm", "EAGLE3", "--speculative-draft-model-path", str(weights.eagle)]
    words += ["--speculative-num-steps", str(num_drafts), "--speculative-eagle-topk", "1"]
    words += ["--speculative-num-draft-tokens", str(num_drafts + 1)]
    simulated = {
        "SGLANG_SIMULATE_ACC_LEN": f"{1 + sum(ACCEPTED[:num_drafts]):.3f}",
        "SGLANG_SIMULATE_ACC_METHOD": "match-expected",
        "SGLANG_SIMULATE_ACC_TOKEN_MODE": "real-draft-token",
    }
    return Command(words, {"HF_HUB_OFFLINE": "1", **simulated})


PEERS: Mapping[str, Peer] = {
    "vllm": Peer("vllm", "vLLM", "vllm", "vllm", _vllm),
    "sglang": Peer("sglang", "SGLang", "sglang", '"sglang[all]"', _sglang),
}


def our_command(folder: Path, port: int, *flags: object, dry: bool) -> Command:
    """Our own server of the weights in `folder`."""
    words = ["serve", "--model", folder, "--port", port, *flags]
    if dry:
        words += ["--device", "cpu", "--num-blocks", 64, "--calibration-seconds", 0.2, "--max-sequences", 2]
    else:
        words += ["--max-model-len", MOST_TOKENS, "--max-sequences", 256, "--kv-memory", 0.4]
        words += ["--max-prefill-rows", 8192]
    return Command(module_command("space_router", *words), dict(os.environ))


class Server:
    """A server of any engine: entering waits until /health says that it serves, leaving ends it and all it started.

    Its processes stay in this process's group, so that ending the group ends them. Raises ServerFailed.
    """

    def __init__(self, name: str, command: Callable[[int], Command], *, log: Path, start_seconds: float) -> None:
        """`command`: what starts it on a port; `log`: file for its output; `start_seconds`: until it must answer."""
        port = free_port()
        self.name, self.url = name, f"http://127.0.0.1:{port}"
        self._command, self._log, self._start_seconds = command(port), log, start_seconds
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Server:
        try:
            with self._log.open("wb") as out:
                self._process = subprocess.Popen(
                    self._command.words, env=dict(self._command.environment), stdin=subprocess.DEVNULL, stdout=out,
                    stderr=subprocess.STDOUT,
                )  # fmt: skip
        except OSError as error:
            raise ServerFailed(f"{self.name} cannot be started: {error}") from error
        try:
            self._wait()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    @property
    def code(self) -> int | None:
        """Its exit code; None while it runs."""
        return None if self._process is None else self._process.poll()

    def last_words(self) -> str:
        """The last lines of its output."""
        lines = self._log.read_text(encoding="utf-8", errors="replace").splitlines() if self._log.exists() else []
        return " / ".join(line.strip()[:200] for line in lines[-LAST_LINES:] if line.strip()) or "nothing"

    def close(self) -> None:
        """End it: by SIGTERM, then by SIGKILL, with the processes that it started."""
        if self._process is None:
            return
        started = _descendants(self._process.pid)
        with suppress(ProcessLookupError):
            self._process.terminate()
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(STOP_SECONDS)
        for pid in [self._process.pid] * (self._process.returncode is None) + started:
            with suppress(ProcessLookupError, PermissionError):
                if os.getpgid(pid) == os.getpgrp():
                    os.kill(pid, signal.SIGKILL)
        self._process.wait()

    def _wait(self) -> None:
        ask = urllib.request.build_opener(urllib.request.ProxyHandler({})).open
        until = time.monotonic() + self._start_seconds
        while time.monotonic() < until:
            if self.code is not None:
                raise ServerFailed(f"{self.name} ended with status {self.code}. It said last: {self.last_words()}")
            with suppress(OSError), ask(f"{self.url}/health", timeout=5) as answer:
                if answer.status == 200:
                    return
            time.sleep(0.1)
        raise ServerFailed(
            f"{self.name} did not answer within {self._start_seconds:g} s. It said last: {self.last_words()}"
        )


def _descendants(pid: int) -> list[int]:
    own = children(pid)
    return [*own, *itertools.chain.from_iterable(map(_descendants, own))]
