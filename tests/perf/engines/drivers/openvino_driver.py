"""openvino-genai's continuous batching, step by step."""

from __future__ import annotations

import importlib
import importlib.metadata
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

ARM = "continuous batching"
ARM_OF_FILE, ARM_OF_OWN = "the same GGUF", "own format"
HOW = "optimum-cli export openvino --model CHECKPOINT --task text-generation-with-past --disable-convert-tokenizer OUT"
QUANTISED = ("i4", "u4", "i8", "u8", "nf4")


class OpenVino:
    """A pipeline for each arm; tokens come one step after the other, as its own `generate` takes them."""

    def __init__(self, settings: dict[str, Any]) -> None:
        folder, file = Path(settings["converted"]), settings.get("gguf")
        is_converted = (folder / "openvino_model.xml").is_file()
        if not is_converted and not file:
            raise FileNotFoundError(f"{folder} has no openvino_model.xml. Make it: {HOW}")
        if not file:
            check_weights(folder)
        self._genai: Any = importlib.import_module("openvino_genai")
        self._openvino: Any = importlib.import_module("openvino")
        self._numpy: Any = importlib.import_module("numpy")
        scheduler = self._genai.SchedulerConfig()
        scheduler.max_num_seqs = settings["most_sequences"]
        scheduler.max_num_batched_tokens = max(1024, settings["most_sequences"] * settings["most_ids"])
        scheduler.num_kv_blocks = settings["most_sequences"] * (settings["most_ids"] // 32 + 2)
        scheduler.enable_prefix_caching = False
        properties: dict[str, Any] = {"INFERENCE_NUM_THREADS": settings["threads"]}
        if not file:  # else its own choice, which is the fastest
            precision = self._precision(settings["dtype"])
            properties |= {"INFERENCE_PRECISION_HINT": precision, "KV_CACHE_PRECISION": precision}
        self._properties = properties
        sources = {ARM_OF_FILE: Path(file)} if file else {}
        if is_converted:
            sources[ARM if not file else ARM_OF_OWN] = folder
        self._pipes = {arm: self._open(source, scheduler, properties) for arm, source in sources.items()}
        self._num_requests = 0

    def _precision(self, dtype: str) -> str:
        """Of computing and of its cache: on a processor without bfloat16 instructions it knows float32 alone."""
        multiplied = self._openvino.Core().get_property("CPU", "OPTIMIZATION_CAPABILITIES")
        return "bf16" if dtype == "bfloat16" and "BF16" in multiplied else "f32"

    def _open(self, folder: Path, scheduler: Any, properties: dict[str, Any]) -> Any:
        return self._genai.ContinuousBatchingPipeline(str(folder), scheduler, "CPU", properties)

    def facts(self) -> dict[str, Any]:
        shown = ", ".join(f"{name} {value}" for name, value in self._properties.items())
        return {
            "version": importlib.metadata.version("openvino-genai"),
            "arms": list(self._pipes),
            "settings": f"{shown}; no prefix caching; all prompts may go into one step",
            "lacks": "nothing: scheduler and greedy choice are its own",
        }

    def prepare(self, arm: str, prompts: Sequence[Sequence[int]], max_tokens: int) -> None:
        self.run(arm, [prompt[:16] for prompt in prompts], 4)

    def run(self, arm: str, prompts: Sequence[Sequence[int]], max_tokens: int) -> Any:
        config = self._genai.GenerationConfig()
        config.max_new_tokens, config.ignore_eos, config.do_sample = max_tokens, True, False
        tensors = [self._openvino.Tensor(self._numpy.array([list(ids)], dtype=self._numpy.int64)) for ids in prompts]
        pipe = self._pipes[arm]
        begun = time.perf_counter()
        handles = []
        for tensor in tensors:
            handles.append(pipe.add_request(self._num_requests, tensor, config))
            self._num_requests += 1
        outputs: list[list[int]] = [[] for _ in prompts]
        seconds: list[list[float]] = [[] for _ in prompts]
        while pipe.has_non_finished_requests():
            pipe.step()
            now = time.perf_counter() - begun
            for handle, ids, times in zip(handles, outputs, seconds, strict=True):
                while handle.can_read():
                    for made in handle.read().values():
                        ids += made.generated_ids
                        times += [now] * len(made.generated_ids)
        return outputs, seconds


def check_weights(folder: Path) -> None:
    """Raise ValueError for quantised weights: above a billion optimum-cli makes them int8 where it finds nncf."""
    xml = (folder / "openvino_model.xml").read_text(encoding="utf-8")
    found = [kind for kind in QUANTISED if f'element_type="{kind}"' in xml]
    if found:
        raise ValueError(f"{folder} has weights in {found[0]}. Uninstall nncf, and convert again: {HOW}")


def open_engine(settings: dict[str, Any]) -> OpenVino:
    return OpenVino(settings)
