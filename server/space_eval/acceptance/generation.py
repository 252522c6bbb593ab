"""Prompts in a checkpoint's ids, texts generated for an evaluation, and transformers' assisted generation."""

from __future__ import annotations

import copy
import platform
import statistics
import string
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from space_common.version import environment, machine
from space_model.checkpoint import family
from space_model.checkpoint.checkpoint import Checkpoint
from space_model.loading.transformers_model import read_whole_model
from space_model.model_error import CheckpointNotFound, InvalidSetting
from space_model.model_facts import ModelFacts
from space_model.space_model import SpaceModel
from tokenizers import Tokenizer
from transformers import AutoTokenizer, GenerationConfig, PreTrainedModel
from transformers.utils import logging as transformers_logging

from space_eval.data import Conversation
from space_eval.flags import FlagError

PUNCTUATION_AND_SPACE = frozenset(string.punctuation + string.whitespace)


def load_tokenizer(model: str) -> Tokenizer:
    """Load the checkpoint's tokenizer. Raises CheckpointNotFound without a fast tokenizer."""
    checkpoint = Checkpoint.open(model)
    file = checkpoint.tokenizer_file()
    if file is None:
        raise CheckpointNotFound(
            f"{checkpoint.folder} has no tokenizer.json. Save the tokenizer in its fast form, or run `spaceserve "
            "convert`."
        )
    return Tokenizer.from_file(str(file))


RenderChat = Callable[[list[dict[str, str]]], str]
"""Renders messages (role, content) to the text before the next answer; its control tokens are in the text."""


def load_chat_template(model: str) -> RenderChat | None:
    """Return the checkpoint's chat template, or None if it has none."""
    tokenizer: Any = AutoTokenizer.from_pretrained(str(Checkpoint.open(model).folder), local_files_only=True)
    if tokenizer.chat_template is None:
        return None
    return partial(tokenizer.apply_chat_template, add_generation_prompt=True, tokenize=False)


def encode_prompts(tokenizer: Tokenizer, prompts: Sequence[str], *, window: int, max_tokens: int) -> list[list[int]]:
    """Return the ids of each prompt, truncated on the left to leave `max_tokens` in `window`."""
    if max_tokens >= window:
        raise InvalidSetting(f"--max-tokens is {max_tokens}; it must be below the window of {window}.")
    return [tokenizer.encode(prompt).ids[max_tokens - window :] for prompt in prompts]


def encode_conversations(
    model: str, tokenizer: Tokenizer, conversations: Sequence[Conversation], chat: str, *, window: int, max_tokens: int
) -> list[list[int]]:
    """Return the ids of each conversation's first turn as `encode_prompts` does; those that `chat` (auto, always or
    never) sends through the chat template with it, whole. Raises FlagError without a template, or if one is too long.
    """
    prompts = encode_prompts(tokenizer, [one.turns[0] for one in conversations], window=window, max_tokens=max_tokens)
    if not any(one.uses_template(chat) for one in conversations):
        return prompts
    render = load_chat_template(model)
    if render is None:
        if chat == "auto":
            return prompts
        raise FlagError(f"{model} has no chat template. Leave out --chat always.")
    for number, one in enumerate(conversations):
        if one.uses_template(chat):
            text = render([{"role": "user", "content": one.turns[0]}])
            prompts[number] = tokenizer.encode(text, add_special_tokens=False).ids
            if len(prompts[number]) + max_tokens > window:
                raise FlagError(
                    f"Prompt {number + 1} has {len(prompts[number])} tokens with the chat template; with --max-tokens "
                    f"{max_tokens} it is above the window of {window}. Give fewer new tokens."
                )
    return prompts


def describe_prompts(name: str, prompts: Sequence[Sequence[int]]) -> str:
    """Format as `humaneval.jsonl (12, 180 tokens each)`."""
    return f"{name} ({len(prompts)}, {statistics.fmean(map(len, prompts)):.0f} tokens each)"


def torch_facts() -> str:
    """Return processor, threads and torch's version, in words."""
    return f"{platform.machine()}, {torch.get_num_threads()} threads, torch {torch.__version__}"


def environment_facts(model: SpaceModel) -> dict[str, object]:
    """Return the environment of the figures: arithmetic, device, machine, commit, date."""
    return {
        "dtype": model.facts.number_format,
        "device": str(model.facts.device),
        **environment(),
        "machine": f"{machine()}; {model.facts.num_threads} threads of torch {torch.__version__}",
    }


def is_filler(text: str) -> bool:
    """Return whether the text is only whitespace or punctuation, which any drafter predicts."""
    return all(character in PUNCTUATION_AND_SPACE for character in text)


def is_blank(text: str) -> bool:
    """Return whether the text is only whitespace."""
    return not text.strip()


def text_behind(decode: Callable[[Sequence[int]], str], prompt: Sequence[int], answer: Sequence[int]) -> str:
    """Decode `answer` as it follows `prompt`: some tokenizers drop a space at the start of a text."""
    before, whole = decode(prompt), decode([*prompt, *answer])
    return whole[len(before) :] if whole.startswith(before) else decode(answer)


LOOKUP = "prompt-lookup"
LOOKUP_TOKENS = 10  # drafts per lookup, as transformers' documentation suggests


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
        self.draft_kv_bytes_per_token = family.kv_numbers(self._draft.config) * facts.dtype.itemsize

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
    with _quiet():
        loaded: PreTrainedModel = read_whole_model(checkpoint, facts.dtype).to(facts.device).eval()
    loaded.requires_grad_(False)
    return loaded


def _check_same_vocabulary(base: Checkpoint, draft: Checkpoint) -> None:
    vocabularies = []
    for checkpoint in (base, draft):
        file = checkpoint.tokenizer_file()
        if file is None:
            raise FlagError(
                f"{checkpoint.folder} has no tokenizer.json; a draft model's vocabulary must be known. Save it there."
            )
        vocabularies.append(Tokenizer.from_file(str(file)).get_vocab())
    ours, theirs = vocabularies
    differing = [token for token in theirs if token in ours and ours[token] != theirs[token]]
    if differing or len(ours.keys() & theirs.keys()) < 0.9 * min(len(ours), len(theirs)):
        raise FlagError(
            f"The draft model {draft.name} has another vocabulary than {base.name}: a draft's ids would mean other "
            "text. Give a draft model with the base's tokenizer."
        )
