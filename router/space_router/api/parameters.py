"""Generation parameters, common to all APIs."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from space_router.engine.request.request import Grammar


@dataclass(frozen=True)
class Parameters:
    """Parameters of one generation before defaults are applied (None: not given)."""

    max_tokens: int | None = None
    limit_param: str = "max_tokens"  # the request field of max_tokens
    default_max_tokens: int | None = None  # if `max_tokens` is None; cut to what fits; None: all that fits
    min_tokens: int | None = None
    ignore_eos: bool | None = None
    end_ids: Sequence[int] = ()  # additional EOS ids
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
    grammar: Grammar | None = None  # already checked
    num_choices: int = 1  # generated for each prompt
    num_shown: int = 1
    seed: int | None = None
    num_logprobs: int | None = None  # None: no log-probabilities
    num_prompt_logprobs: int | None = None
    prediction: str | None = None  # text that the output is expected to contain
    speculation: str | int | None = None
    priority: int | None = None
    timeout: float | None = None
    request_id: str | None = None
    cache_salt: str | None = None
    adapter: str = ""  # a valid name; "" for none
    skip_special_tokens: bool | None = None
    shown_ids: frozenset[int] = frozenset()  # special tokens that are not skipped
