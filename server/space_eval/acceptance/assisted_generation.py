"""transformers' assisted generation on the same weights and prompts: a draft model, or lookup in the prompt.

The decoding loop is transformers', whose plain decoding differs in speed from ours for reasons unrelated to drafting.
So each ratio is over plain decoding in the same loop, and absolute times are reported beside it.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from space_model.checkpoint import family
from space_model.checkpoint.checkpoint import Checkpoint
from space_model.loading.whole_model import stream_model
from space_model.model_facts import ModelFacts
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM, GenerationConfig, PreTrainedModel
from transformers.utils import logging as transformers_logging

from space_eval.flags import FlagError

LOOKUP = "prompt-lookup"
LOOKUP_TOKENS = 10
"""Drafts per lookup, as transformers' documentation suggests."""


@dataclass(frozen=True)
class DraftMethod:
    """A value of `--against`: a draft model's folder, or prompt lookup (None)."""

    draft: str | None

    @classmethod
    def parse(cls, text: str) -> DraftMethod:
        """Parse `assisted:FOLDER` or `prompt-lookup`."""
        kind, _, draft = text.partition(":")
        if text == LOOKUP:
            return cls(None)
        if kind == "assisted" and draft:
            return cls(draft)
        raise FlagError(f"--against is {text!r}; it must read assisted:DRAFT_FOLDER or {LOOKUP}.")

    @property
    def name(self) -> str:
        return LOOKUP if self.draft is None else f"assisted:{self.draft}"


@dataclass(frozen=True)
class AssistedAnswer:
    """One output of transformers' `generate`."""

    ids: tuple[int, ...]
    num_forwards: int  # of the base, including the prefill
    num_draft_forwards: int
    seconds: float  # prompt and answer


class AssistedDecoder:
    """The base model in transformers, decoding plain or assisted; greedy, one sequence at a time."""

    def __init__(
        self, base: Checkpoint, facts: ModelFacts, method: DraftMethod, *, num_draft_tokens: int | None = None
    ) -> None:
        """`facts` of our model of the same checkpoint give dtype, device, and end and mask ids.

        `num_draft_tokens`: drafts per pass of the base; None leaves it to transformers (10 for lookup).
        """
        self.method = method
        self._device = facts.device
        self._base = _load(base, facts)
        self._draft: PreTrainedModel | None = None
        self.draft_weight_bytes = 0
        self.draft_kv_bytes_per_token = 0
        common: dict[str, Any] = {
            "do_sample": False,
            "eos_token_id": list(facts.eos_ids) or None,
            "pad_token_id": facts.eos_ids[0] if facts.eos_ids else 0,
            "suppress_tokens": sorted(set(facts.mask_ids)) or None,  # our model never samples masks either
        }
        self._plain = GenerationConfig(**common)
        self._assisted = GenerationConfig(**common)
        if method.draft is None:
            self._assisted.prompt_lookup_num_tokens = num_draft_tokens or LOOKUP_TOKENS
            return
        opened = Checkpoint.open(method.draft)
        _check_same_vocabulary(base, opened)
        self._draft = _load(opened, facts)
        if num_draft_tokens is not None:
            self._draft.generation_config.num_assistant_tokens = num_draft_tokens
            self._draft.generation_config.num_assistant_tokens_schedule = "constant"
        self.draft_weight_bytes = sum({p.data_ptr(): p.nbytes for p in self._draft.parameters()}.values())
        _, kv_heads, head_dim = family.sizes(self._draft.config)
        layers = int(self._draft.config.num_hidden_layers)
        self.draft_kv_bytes_per_token = 2 * layers * kv_heads * head_dim * facts.dtype.itemsize

    def plain(self, prompt: Sequence[int], max_tokens: int) -> AssistedAnswer:
        """Decode without drafts in transformers."""
        return self._generate(prompt, max_tokens, self._plain, None)

    def assisted(self, prompt: Sequence[int], max_tokens: int) -> AssistedAnswer:
        """Decode with drafts in transformers."""
        return self._generate(prompt, max_tokens, self._assisted, self._draft)

    def _generate(
        self, prompt: Sequence[int], max_tokens: int, config: GenerationConfig, draft: PreTrainedModel | None
    ) -> AssistedAnswer:
        ids = torch.tensor([list(prompt)], device=self._device)
        words: dict[str, Any] = {} if draft is None else {"assistant_model": draft}
        bounded = copy.deepcopy(config)
        bounded.max_new_tokens = max_tokens
        words |= {"attention_mask": torch.ones_like(ids), "generation_config": bounded}
        with _quiet(), _counted(self._base) as of_base, _counted(draft) as of_draft:
            started = time.perf_counter()
            made = self._base.generate(ids, **words)
            new = made[0, len(prompt) :].tolist()  # synchronises with the device
            seconds = time.perf_counter() - started
        return AssistedAnswer(tuple(new), of_base[0], of_draft[0], seconds)


@contextmanager
def _counted(model: PreTrainedModel | None) -> Iterator[list[int]]:
    """Count the forward passes of a model in the single item of the yielded list."""
    count = [0]
    if model is None:
        yield count
        return

    def one_more(module: torch.nn.Module, given: object) -> None:
        count[0] += 1

    hook = model.register_forward_pre_hook(one_more)
    try:
        yield count
    finally:
        hook.remove()


@contextmanager
def _quiet() -> Iterator[None]:
    """Silence progress bars and warnings of transformers."""
    level, bars = transformers_logging.get_verbosity(), transformers_logging.is_progress_bar_enabled()
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    try:
        yield
    finally:
        transformers_logging.set_verbosity(level)
        if bars:
            transformers_logging.enable_progress_bar()


def _load(checkpoint: Checkpoint, facts: ModelFacts) -> PreTrainedModel:
    """Load the checkpoint with transformers in our model's dtype and on its device."""
    try:
        with _quiet():
            if checkpoint.gguf is not None:
                config = family.read_config(checkpoint)
                model, _ = stream_model(checkpoint, config, facts.dtype, torch.device("cpu"), copies=True)
            else:
                model = AutoModelForCausalLM.from_pretrained(
                    str(checkpoint.folder),
                    dtype=facts.dtype,
                    use_safetensors=True,
                    trust_remote_code=False,
                    local_files_only=True,
                )
    except (OSError, ValueError, RuntimeError) as error:
        reason = " ".join(str(error).split())[:200]
        raise FlagError(f"transformers cannot load {checkpoint.name}: {reason}") from error
    loaded: PreTrainedModel = model.to(facts.device).eval()
    loaded.requires_grad_(False)
    return loaded


def _check_same_vocabulary(base: Checkpoint, draft: Checkpoint) -> None:
    vocabularies = []
    for checkpoint in (base, draft):
        file = checkpoint.folder / "tokenizer.json"
        if not file.is_file():
            raise FlagError(f"{file} does not exist; a draft model's vocabulary must be known. Save it there.")
        vocabularies.append(Tokenizer.from_file(str(file)).get_vocab())
    ours, theirs = vocabularies
    differing = [token for token in theirs if token in ours and ours[token] != theirs[token]]
    if differing or len(ours.keys() & theirs.keys()) < 0.9 * min(len(ours), len(theirs)):
        raise FlagError(
            f"The draft model {draft.name} has another vocabulary than {base.name}: a draft's ids would mean other "
            "text. Give a draft model with the base's tokenizer."
        )
