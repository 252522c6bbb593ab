"""What one HTTP request asks for: its parameters, its prompts, its choices, and how their text is returned."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from space_router.engine.request.request import Grammar, SamplingOptions, ValidRequest
from space_router.text.fim import FillInTheMiddle
from space_router.text.text_stream import TextRules
from space_router.text.tokenizer import Tokenizer


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


@dataclass(frozen=True)
class Prompt:
    """One prompt: its ids, and the text that `echo` returns."""

    ids: tuple[int, ...]
    text: str
    param: str = "prompt"  # the request field of the prompt


@dataclass(frozen=True)
class PlannedChoice:
    """One choice for one prompt: one request to the engine."""

    index: int  # among the choices of its HTTP request
    prompt: Prompt
    request: ValidRequest
    rules: TextRules

    def ending_in_prompt(self) -> "PlannedChoice":
        """Return a choice in which the engine generates the prompt's last id, as its only allowed token.

        For a request that wants only prompt log-probabilities of a prompt that fills the window. The result is exact,
        because log-probabilities are the model's own and ignore `allowed_ids`.
        """
        request = self.request
        *before, last = request.prompt_ids
        sampling = SamplingOptions(seed=request.sampling.seed, choice=request.sampling.choice, allowed_ids=(last,))
        changed = replace(
            request,
            prompt_ids=tuple(before),
            sampling=sampling,
            eos_ids=(),
            stop_ids=(),
            max_draft_length=0,
            prediction=None,
            want_logprobs=request.num_prompt_logprobs is not None,
            num_logprobs=request.num_prompt_logprobs or 0,
            stops_on_text=False,
        )
        return replace(self, request=changed, rules=TextRules())

    @property
    def ends_in_prompt(self) -> bool:
        """Whether the engine's one token is the prompt's last."""
        return len(self.request.prompt_ids) < len(self.prompt.ids)


@dataclass(frozen=True)
class GenerationPlan:
    """All choices of one HTTP request, grouped by prompt, choice 0 of each prompt first."""

    request_id: str  # the client's, or a generated one
    seed: int  # the client's, or a fresh one
    prompts: tuple[Prompt, ...]
    choices: tuple[PlannedChoice, ...]
    num_shown: int  # choices returned for each prompt; fewer than generated with best_of
    limit_param: str  # the request field of max_tokens
    answered: bool  # False: max_tokens is 0, and the engine's one token is not returned

    @property
    def per_prompt(self) -> int:
        """Number of choices for each prompt."""
        return len(self.choices) // len(self.prompts)

    @property
    def wants_prompt_logprobs(self) -> bool:
        """Whether prompt log-probabilities are requested; the first choice of each prompt has them."""
        return self.choices[0].request.num_prompt_logprobs is not None


@dataclass(frozen=True)
class Infill:
    """A tokenised suffix, to be joined to prompts."""

    tokens: FillInTheMiddle
    suffix_ids: tuple[int, ...]

    @property
    def num_tokens(self) -> int:
        """Number of tokens added to a prompt."""
        return self.tokens.num_tokens + len(self.suffix_ids)

    def joined(self, prompt: Prompt, tokenizer: Tokenizer) -> Prompt:
        """Return the prompt joined with the suffix. A BOS stays first; `echo` still returns only the prompt."""
        ids = list(prompt.ids)
        num_bos = int(bool(ids) and ids[0] == tokenizer.bos_id)
        return Prompt((*ids[:num_bos], *self.tokens.ids(ids[num_bos:], self.suffix_ids)), prompt.text, prompt.param)
