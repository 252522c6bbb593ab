"""llama.cpp's forward passes, through llama-cpp-python's C interface: neither sampling nor a scheduler."""

from __future__ import annotations

import ctypes
import importlib
import importlib.metadata
import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

ARM = "forward passes"


class LlamaCpp:
    """One context; every prompt is a sequence of its cache."""

    def __init__(self, settings: dict[str, Any]) -> None:
        given = settings.get("gguf")
        file = Path(given or settings["converted"] + ".gguf")
        if not given and settings["dtype"] != "bfloat16":
            raise ValueError(f"The dtype is {settings['dtype']}; {file} is bfloat16.")
        self._numpy: Any = importlib.import_module("numpy")
        self._c: Any = importlib.import_module("llama_cpp")
        self._settings, c = settings, self._c
        c.llama_backend_init()
        self._model = c.llama_model_load_from_file(os.fsencode(file), c.llama_model_default_params())
        if not self._model:
            raise RuntimeError(f"llama.cpp cannot load {file}; the reason is in its log.")
        params = c.llama_context_default_params()
        most = settings["most_sequences"]
        params.n_seq_max = most
        params.n_ctx = most * (-(-settings["most_ids"] // 256) * 256)
        params.n_batch = params.n_ctx
        params.n_threads = params.n_threads_batch = settings["threads"]
        params.kv_unified = False  # a cache for each sequence: none attends to the others' keys
        self._context = c.llama_init_from_model(self._model, params)
        if not self._context:
            raise RuntimeError("llama.cpp cannot make a context; the reason is in its log.")
        self._size = c.llama_vocab_n_tokens(c.llama_model_get_vocab(self._model))
        self._batch = c.llama_batch_init(params.n_batch, 0, 1)
        self._weights = f"of {file.name}" if given else "bf16"

    def facts(self) -> dict[str, Any]:
        shown = self._c.llama_print_system_info().decode()
        return {
            "version": f"llama-cpp-python {importlib.metadata.version('llama-cpp-python')}",
            "arms": [ARM],
            "settings": f"weights {self._weights}, KV f16, n_ubatch 512; {shown.strip()}",
            "lacks": "sampling and scheduler: only forward passes are timed; this script samples, untimed",
        }

    def prepare(self, arm: str, prompts: Sequence[Sequence[int]], max_tokens: int) -> None:
        self.run(arm, [prompt[:16] for prompt in prompts], 4)

    def run(self, arm: str, prompts: Sequence[Sequence[int]], max_tokens: int) -> Any:
        self._c.llama_memory_clear(self._c.llama_get_memory(self._context), True)
        outputs: list[list[int]] = [[] for _ in prompts]
        times: list[float] = []
        passed, pending = 0.0, [list(prompt) for prompt in prompts]
        lengths = [0] * len(prompts)
        for _ in range(max_tokens):
            seconds, chosen = self._pass(pending, lengths)
            passed += seconds
            times.append(passed)
            for n, id_ in enumerate(chosen):
                lengths[n] += len(pending[n])
                outputs[n].append(id_)
            pending = [[id_] for id_ in chosen]
        return outputs, [times for _ in prompts]

    def _pass(self, pending: Sequence[Sequence[int]], lengths: Sequence[int]) -> tuple[float, list[int]]:
        """Seconds of one pass, and each sequence's most likely id."""
        batch, at, asked = self._batch, 0, []
        for n, ids in enumerate(pending):
            for place, id_ in enumerate(ids):
                batch.token[at], batch.pos[at] = id_, lengths[n] + place
                batch.n_seq_id[at], batch.seq_id[at][0] = 1, n
                batch.logits[at] = place == len(ids) - 1
                at += 1
            asked.append(at - 1)
        batch.n_tokens = at
        begun = time.perf_counter()
        status = self._c.llama_decode(self._context, batch)
        self._c.llama_synchronize(self._context)
        seconds = time.perf_counter() - begun
        if status:
            raise RuntimeError(f"llama_decode gave {status}.")
        return seconds, [self._likeliest(row) for row in asked]

    def _likeliest(self, row: int) -> int:
        logits = ctypes.cast(
            self._c.llama_get_logits_ith(self._context, row), ctypes.POINTER(ctypes.c_float * self._size)
        )
        return int(self._numpy.frombuffer(logits.contents, dtype=self._numpy.float32).argmax())


def open_engine(settings: dict[str, Any]) -> LlamaCpp:
    return LlamaCpp(settings)
