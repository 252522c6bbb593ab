"""transformers: plain `generate`, and its continuous batching."""

from __future__ import annotations

import importlib
import time
from collections.abc import Sequence
from typing import Any

GENERATE, CONTINUOUS = "generate", "continuous batching"
PAGE = 32


class Transformers:
    """One model, two loops."""

    def __init__(self, settings: dict[str, Any]) -> None:
        self._torch: Any = importlib.import_module("torch")
        self._library: Any = importlib.import_module("transformers")
        self._torch.set_num_threads(settings["threads"])
        self._library.utils.logging.set_verbosity_error()
        self._library.utils.logging.disable_progress_bar()
        self._settings = settings
        self._model = self._library.AutoModelForCausalLM.from_pretrained(
            settings["checkpoint"],
            dtype=getattr(self._torch, settings["dtype"]),
            attn_implementation="sdpa",
            local_files_only=True,
        ).eval()
        self._model.generation_config.eos_token_id = None

    def facts(self) -> dict[str, Any]:
        return {
            "version": f"{self._library.__version__}, torch {self._torch.__version__}",
            "arms": [GENERATE, CONTINUOUS],
            "settings": f"{self._settings['dtype']}, sdpa; {CONTINUOUS}: no block sharing, all prompts may go into one "
            "step",
            "lacks": f"{GENERATE}: no scheduler, no pages, a static batch; {CONTINUOUS}: nothing",
        }

    def prepare(self, arm: str, prompts: Sequence[Sequence[int]], max_tokens: int) -> None:
        self.run(arm, [prompt[:16] for prompt in prompts], 4)

    def run(self, arm: str, prompts: Sequence[Sequence[int]], max_tokens: int) -> Any:
        with self._torch.no_grad():  # its continuous batching writes to what it made elsewhere: no inference mode
            return (self._generate if arm == GENERATE else self._continuous)(prompts, max_tokens)

    def _config(self, max_tokens: int) -> Any:
        return self._library.GenerationConfig(
            do_sample=False, max_new_tokens=max_tokens, eos_token_id=None, pad_token_id=0
        )

    def _generate(self, prompts: Sequence[Sequence[int]], max_tokens: int) -> Any:
        ids, times = self._torch.tensor([list(prompt) for prompt in prompts]), []

        def watch(input_ids: Any, scores: Any, **kwargs: Any) -> Any:
            times.append(time.perf_counter())
            return input_ids.new_zeros(len(input_ids), dtype=self._torch.bool)

        begun = time.perf_counter()
        made = self._model.generate(
            ids,
            attention_mask=self._torch.ones_like(ids),
            generation_config=self._config(max_tokens),
            stopping_criteria=self._library.StoppingCriteriaList([watch]),
        )
        seconds = [moment - begun for moment in times]
        return made[:, ids.shape[1] :].tolist(), [seconds for _ in prompts]

    def _continuous(self, prompts: Sequence[Sequence[int]], max_tokens: int) -> Any:
        settings = self._settings
        config = self._library.ContinuousBatchingConfig(
            page_size=PAGE,
            num_blocks=settings["most_sequences"] * (settings["most_ids"] // PAGE + 2),
            max_batch_tokens=max(1024, settings["most_sequences"] * settings["most_ids"]),
            allow_block_sharing=False,
        )
        with self._model.continuous_batching_context_manager(
            generation_config=self._config(max_tokens), continuous_batching_config=config
        ) as manager:
            self._finished(manager, [[5, 6, 7]], 2)  # its thread and cache come with the first request
            begun = time.perf_counter()
            made = self._finished(manager, prompts, max_tokens)
        return (
            [list(one.generated_tokens) for one in made],
            [[moment - begun for moment in one.timestamps] for one in made],
        )

    def _finished(self, manager: Any, prompts: Sequence[Sequence[int]], max_tokens: int) -> list[Any]:
        names = manager.add_requests(
            inputs=[list(prompt) for prompt in prompts], max_new_tokens=max_tokens, record_timestamps=True
        )
        found: dict[str, Any] = {}
        while len(found) < len(names):
            one = manager.get_result(timeout=1)
            if one is None and not manager.is_running():
                raise RuntimeError("continuous batching ended before its requests.")
            if one is not None and one.error:
                raise RuntimeError(str(one.error))
            if one is not None and one.is_finished():
                found[one.request_id] = one
        return [found[name] for name in names]


def open_engine(settings: dict[str, Any]) -> Transformers:
    return Transformers(settings)
