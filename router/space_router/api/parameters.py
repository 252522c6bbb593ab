"""What one generation can be told, whichever API it is told by."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from space_router.engine.request.request import Grammar


@dataclass(frozen=True)
class Parameters:
    """What all APIs can say about one generation, defaults not yet filled in (None: not said)."""

    max_tokens: int | None = None
    limit_param: str = "max_tokens"  # the field it came in
    default_max_tokens: int | None = None  # where `max_tokens` is not said: cut to what fits; None: as much as fits
    min_tokens: int | None = None
    ignore_eos: bool | None = None
    end_ids: Sequence[int] = ()  # end it as EOS does
    stop_token_ids: Sequence[int] | None = None
    stop: Any = None
    include_stop_str_in_output: bool | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    typical_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    logit_bias: Mapping[str, float] | None = None
    bad_words: Sequence[str] | None = None
    allowed_token_ids: Sequence[int] | None = None
    grammar: Grammar | None = None  # one that was checked
    num_choices: int = 1  # how many are generated for each prompt
    num_shown: int = 1
    seed: int | None = None
    num_logprobs: int | None = None  # None: no log-probabilities
    num_prompt_logprobs: int | None = None
    prediction: str | None = None  # a text that the output is expected to have
    speculation: str | int | None = None
    priority: int | None = None
    timeout: float | None = None
    request_id: str | None = None
    cache_salt: str | None = None
    adapter: str = ""  # a checked name
    skip_special_tokens: bool | None = None
    shown_ids: frozenset[int] = frozenset()  # special tokens that are text all the same
