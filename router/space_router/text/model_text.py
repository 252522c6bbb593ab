"""The text side of a checkpoint: tokenizer, chat template and default sampling parameters."""

import logging
from collections.abc import Iterator, Mapping, Sequence
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
    found: dict[str, None] = {}
    templates = [template] if template.with_tools is None else [template, template.with_tools]
    for one in templates:
        for text in _rendered(one):
            if (token := _first_token(text.rpartition(_ANSWER)[2], tokenizer)) is not None:
                found[token] = None
    inside = [piece for one in templates for piece in _insides(one)]
    ids = (tokenizer.token_to_id(token) for token in found if not any(token in piece for piece in inside))
    return tuple(id_ for id_ in ids if id_ is not None)


def _first_token(behind: str, tokenizer: Tokenizer) -> str | None:
    """Return the longest added token that the text begins with, white space aside, or None."""
    behind = behind.lstrip()
    fitting = [token for token in tokenizer.added_texts if token.strip() and behind.startswith(token.strip())]
    return max(fitting, key=len, default=None)


def _rendered(template: ChatTemplate) -> Iterator[str]:
    """Yield conversations that end with an answer, and ones that continue after it."""
    user, answer = _message(template, "user", _QUESTION), _message(template, "assistant", _ANSWER)
    for messages in ([user, answer], [user, answer, _message(template, "user", _NEXT)]):
        text = _try(template, messages)
        if _ANSWER in text:
            yield text


def _insides(template: ChatTemplate) -> Iterator[str]:
    """Yield what the template writes between the parts of one assistant turn."""
    user, answer = _message(template, "user", _QUESTION), _message(template, "assistant", _ANSWER)
    thought = dict.fromkeys(("reasoning_content", "thinking", "reasoning"), _THOUGHT)
    function = {"name": _CALLED, "arguments": "{}" if template.habits.arguments_as_text else {}}
    call = {"tool_calls": [{"id": "abcdefghi", "type": "function", "function": function}]}
    for more, before, after in ((thought, _THOUGHT, _ANSWER), (call, _ANSWER, _CALLED)):
        text = _try(template, [user, {**answer, **more}])
        start, end = text.find(before), text.find(after)
        if 0 <= start < end:
            yield text[start:end]


def _message(template: ChatTemplate, role: str, text: str) -> dict[str, Any]:
    content: Any = text if template.habits.takes_text else [{"type": "text", "text": text}]
    return {"role": role, "content": content}


def _try(template: ChatTemplate, messages: Sequence[Mapping[str, Any]]) -> str:
    try:
        return template.render(messages, add_generation_prompt=False)
    except InvalidRequest:
        return ""


log = logging.getLogger(__name__)

_SAMPLING_DEFAULTS = ("temperature", "top_p", "top_k", "min_p", "typical_p", "repetition_penalty")


@contextmanager
def malformed_is_unusable() -> Iterator[None]:
    """Turn the errors that malformed checkpoint files cause into ConfigError."""
    try:
        yield
    except (TypeError, ValueError, LookupError, AttributeError, ArithmeticError, RecursionError) as error:
        words = " ".join(str(error).split())[:300]
        raise ConfigError(
            f"A text file of the model says what cannot be: {type(error).__name__}: {words}. Fetch it again."
        ) from error


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
        defaults = _defaults(folder) if config.generation_config == "auto" else {}
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


def _defaults(folder: Path) -> dict[str, float]:
    """Return the sampling parameters in generation_config.json; the others keep the API's defaults."""
    values = checkpoint.read_json(folder, "generation_config.json")
    return {
        key: value
        for key in _SAMPLING_DEFAULTS
        if isinstance(value := values.get(key), int | float) and not isinstance(value, bool)
    }
