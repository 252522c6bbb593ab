"""What one HTTP request asks of the engine, checked: prompts, choices, and how their text is to be shown."""

from dataclasses import dataclass

from space_router.engine.request import ValidRequest
from space_router.text.text_stream import TextRules


@dataclass(frozen=True)
class Prompt:
    """One prompt as ids, and as the text `echo` repeats."""

    ids: tuple[int, ...]
    text: str
    param: str = "prompt"  # the field it came in


@dataclass(frozen=True)
class Choice:
    """One continuation of one prompt: one request to the engine."""

    index: int  # among the choices of its HTTP request
    prompt: Prompt
    request: ValidRequest
    rules: TextRules


@dataclass(frozen=True)
class Plan:
    """All choices of one HTTP request; those of one prompt lie together, choice 0 of it first."""

    request_id: str  # as the client gave it, or ours
    seed: int  # the client's, or a fresh one
    prompts: tuple[Prompt, ...]
    choices: tuple[Choice, ...]
    num_shown: int  # choices of each prompt that are answered; fewer than there are with best_of
    limit_param: str  # the field that `max_tokens` came in
    answered: bool  # False: only the prompt is wanted (max_tokens 0); the engine's one token is dropped

    @property
    def per_prompt(self) -> int:
        """Choices of each prompt."""
        return len(self.choices) // len(self.prompts)

    @property
    def wants_prompt_logprobs(self) -> bool:
        """The first choice of each prompt has the prompt's log-probabilities."""
        return self.choices[0].request.num_prompt_logprobs is not None
