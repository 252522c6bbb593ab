"""The text side of a checkpoint: tokenizer, chat template and default sampling parameters."""

import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from types import MappingProxyType

from space_common import default_model
from space_common.hub import Hub, HubError

from space_router.config import ServeConfig
from space_router.errors import ConfigError
from space_router.text import chat_template, checkpoint
from space_router.text.chat_template import ChatTemplate
from space_router.text.tokenizer import Tokenizer
from space_router.text.turn_ends import turn_end_ids

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
