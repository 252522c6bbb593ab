"""The validated form of one HTTP request: prompts, choices, and how their text is returned."""

from dataclasses import dataclass, replace

from space_router.engine.request.request import SamplingOptions, ValidRequest
from space_router.text.text_stream import TextRules


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
