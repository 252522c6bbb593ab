"""The text side of a checkpoint: tokenizer, chat template and default sampling parameters."""

import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from types import MappingProxyType
from typing import Any

from space_common import default_model
from space_common.hub import Hub, HubError

from space_router.config import ServeConfig
from space_router.errors import ConfigError, InvalidRequest
from space_router.text import chat_template, checkpoint
from space_router.text.chat_template import ChatTemplate
from space_router.text.tokenizer import Tokenizer

_QUESTION, _ANSWER, _THOUGHT, _NEXT, _CALLED = "spaceask", "spaceanswer", "spacethought", "spacenext", "spacecalled"


def turn_end_ids(template: ChatTemplate, tokenizer: Tokenizer) -> tuple[int, ...]:
    """Return the ids of added tokens that follow the assistant's text, white space aside.

    Tokens that the template also writes inside a turn (between reasoning and answer, or text and call) are excluded.
    Empty if the template rejects the probe conversations.
    """
    behind: list[str] = []  # what follows an answer
    inside: list[str] = []  # what is between the parts of a turn
    for one in (template, template.with_tools):
        if one is not None:
            _probe(one, behind, inside)
    found: dict[str, None] = {}
    for text in behind:
        fitting = [token for token in tokenizer.added_texts if token.strip() and text.startswith(token.strip())]
        found |= {max(fitting, key=len): None} if fitting else {}
    ids = (tokenizer.token_to_id(token) for token in found if not any(token in piece for piece in inside))
    return tuple(id_ for id_ in ids if id_ is not None)


def _probe(template: ChatTemplate, behind: list[str], inside: list[str]) -> None:
    """Render conversations that end with an answer or go on after it, and ones whose turn has several parts."""

    def message(role: str, text: str) -> dict[str, Any]:
        return {"role": role, "content": text if template.habits.takes_text else [{"type": "text", "text": text}]}

    def rendered(*messages: Mapping[str, Any]) -> str:
        try:
            return template.render(messages, add_generation_prompt=False)
        except InvalidRequest:
            return ""

    user, answer = message("user", _QUESTION), message("assistant", _ANSWER)
    for text in (rendered(user, answer), rendered(user, answer, message("user", _NEXT))):
        behind += [text.rpartition(_ANSWER)[2].lstrip()] if _ANSWER in text else []
    thought = dict.fromkeys(("reasoning_content", "thinking", "reasoning"), _THOUGHT)
    function = {"name": _CALLED, "arguments": "{}" if template.habits.arguments_as_text else {}}
    call = {"tool_calls": [{"id": "abcdefghi", "type": "function", "function": function}]}
    for more, before, after in ((thought, _THOUGHT, _ANSWER), (call, _ANSWER, _CALLED)):
        text = rendered(user, {**answer, **more})
        start, end = text.find(before), text.find(after)
        inside += [text[start:end]] if 0 <= start < end else []


log = logging.getLogger(__name__)

_SAMPLING_DEFAULTS = ("temperature", "top_p", "top_k", "min_p", "typical_p", "repetition_penalty")
"""What generation_config.json may set; the other parameters keep the API's defaults."""


@contextmanager
def malformed_is_unusable() -> Iterator[None]:
    """Turn the errors that malformed checkpoint files cause into ConfigError."""
    try:
        yield
    except (TypeError, ValueError, LookupError, AttributeError, ArithmeticError, RecursionError) as error:
        words = f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
        raise ConfigError(f"A text file of the model says what cannot be: {words}. Fetch it again.") from error


@dataclass(frozen=True)
class ModelText:
    """Tokenizer, chat template (None: the checkpoint has none) and default sampling parameters of one model."""

    name: str  # the model name in the API
    tokenizer: Tokenizer
    chat_template: ChatTemplate | None
    sampling_defaults: Mapping[str, float]

    @cached_property
    def turn_end_ids(self) -> tuple[int, ...]:
        """Ids that end an assistant turn, in addition to the EOS ids."""
        return () if self.chat_template is None else turn_end_ids(self.chat_template, self.tokenizer)

    @classmethod
    @malformed_is_unusable()
    def load(cls, config: ServeConfig) -> "ModelText":
        """Load a model's text files. Raises ConfigError if one is missing or unusable."""
        folder = checkpoint.locate(config.model, hub_of(config))
        tokenizer = Tokenizer.load(folder)
        template = chat_template.find(folder, config.chat_template, tokenizer.named_tokens)
        values = checkpoint.read_json(folder, "generation_config.json") if config.generation_config == "auto" else {}
        defaults = {key: values[key] for key in _SAMPLING_DEFAULTS if type(values.get(key)) in (int, float)}
        made = cls(config.model_name, tokenizer, template, MappingProxyType(defaults))
        log.debug("token ids that end an answer: %s", made.turn_end_ids)  # computed now: no request waits
        return made


def with_default_model(config: ServeConfig) -> ServeConfig:
    """Download the weights if the model is the default one, and return the config.

    If the user did not name a model and the download fails, the config has `demo` instead; for a named model it raises
    ConfigError.
    """
    try:
        model, fallback = default_model.choose(config.model, is_named=config.model_is_named, hub=hub_of(config))
    except HubError as error:
        raise ConfigError(f"--model={config.model!r}: {error}") from error
    if fallback is None:
        return config
    log.warning("%s", fallback)
    return replace(config, model=model, model_fallback=fallback)


def hub_of(config: ServeConfig) -> Hub:
    """Return the hub client for this config."""
    return Hub(
        revision=config.revision,
        token_file=None if config.token_file is None else Path(config.token_file).expanduser(),
        folder=None if config.download_folder is None else Path(config.download_folder).expanduser(),
        offline=config.offline == "on",
        say=log.info,
    )
