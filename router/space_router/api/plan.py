"""What one HTTP request asks of the engine, checked: prompts, choices, and how their text is to be shown."""

from dataclasses import dataclass, replace

from space_router.engine.request.request import SamplingOptions, ValidRequest
from space_router.text.text_stream import TextRules


@dataclass(frozen=True)
class Prompt:
    """One prompt as ids, and as the text `echo` repeats."""

    ids: tuple[int, ...]
    text: str
    param: str = "prompt"  # the field it came in


@dataclass(frozen=True)
class PlannedChoice:
    """One continuation of one prompt: one request to the engine."""

    index: int  # among the choices of its HTTP request
    prompt: Prompt
    request: ValidRequest
    rules: TextRules

    def ending_in_prompt(self) -> "PlannedChoice":
        """Where only the prompt is wanted and fills the window: its last id becomes the one that the engine makes,
        whatever its probability. Log-probabilities are the model's own, be it of a prompt's id or of another.
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
        """The engine's one token is the prompt's last."""
        return len(self.request.prompt_ids) < len(self.prompt.ids)


@dataclass(frozen=True)
class GenerationPlan:
    """All choices of one HTTP request; those of one prompt lie together, choice 0 of it first."""

    request_id: str  # as the client gave it, or ours
    seed: int  # the client's, or a fresh one
    prompts: tuple[Prompt, ...]
    choices: tuple[PlannedChoice, ...]
    num_shown: int  # choices of each prompt that are answered; fewer than there are with best_of
    limit_param: str  # the field that `max_tokens` came in
    answered: bool  # False: only the prompt is wanted (max_tokens 0); the engine's one token is no answer

    @property
    def per_prompt(self) -> int:
        """Choices of each prompt."""
        return len(self.choices) // len(self.prompts)

    @property
    def wants_prompt_logprobs(self) -> bool:
        """The first choice of each prompt has the prompt's log-probabilities."""
        return self.choices[0].request.num_prompt_logprobs is not None
