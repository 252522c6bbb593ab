"""Drives onnxruntime-genai's generator, which steps a static batch."""

from __future__ import annotations

import importlib
import importlib.metadata
import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

ARM = "static batch"
HOW = "python -m onnxruntime_genai.models.builder -m CHECKPOINT -o OUT -p int4 -e cpu"


class OnnxRuntime:
    """One model; a generator for each run."""

    def __init__(self, settings: dict[str, Any]) -> None:
        folder = Path(settings["converted"])
        if not (folder / "genai_config.json").is_file():
            raise FileNotFoundError(f"{folder} has no genai_config.json. Make it: {HOW}")
        self._genai: Any = importlib.import_module("onnxruntime_genai")
        self._numpy: Any = importlib.import_module("numpy")
        config = self._genai.Config(str(folder))
        threads = {"session_options": {"intra_op_num_threads": settings["threads"]}}
        config.overlay(json.dumps({"model": {"decoder": threads}}))
        self._threads = settings["threads"]
        made = json.loads((folder / "genai_config.json").read_text(encoding="utf-8"))["model"]
        self._pad = int(made["pad_token_id"])
        self._model = self._genai.Model(config)

    def facts(self) -> dict[str, Any]:
        return {
            "version": importlib.metadata.version("onnxruntime-genai"),
            "arms": [ARM],
            "settings": f"as its model builder wrote it, {self._threads} threads; shorter prompts are padded",
            "lacks": "a scheduler: all sequences begin and end together",
        }

    def prepare(self, arm: str, prompts: Sequence[Sequence[int]], max_tokens: int) -> None:
        self.run(arm, [prompt[:16] for prompt in prompts], 4)

    def run(self, arm: str, prompts: Sequence[Sequence[int]], max_tokens: int) -> Any:
        longest = max(map(len, prompts))
        rows = [[self._pad] * (longest - len(ids)) + list(ids) for ids in prompts]
        params = self._genai.GeneratorParams(self._model)
        length = longest + max_tokens  # at least that too: an end of text is never chosen
        params.set_search_options(max_length=length, min_length=length, do_sample=False, batch_size=len(rows))
        ids = self._numpy.array(rows, dtype=self._numpy.int32)
        outputs: list[list[int]] = [[] for _ in prompts]
        begun, times = time.perf_counter(), list[float]()
        generator = self._genai.Generator(self._model, params)
        generator.append_tokens(ids)
        for _ in range(max_tokens):
            generator.generate_next_token()
            for made, id_ in zip(outputs, generator.get_next_tokens(), strict=True):
                made.append(int(id_))
            times.append(time.perf_counter() - begun)
        return outputs, [times for _ in prompts]


def open_engine(settings: dict[str, Any]) -> OnnxRuntime:
    return OnnxRuntime(settings)
