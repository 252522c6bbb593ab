"""Reasoning in chats: which format a model has, how a prompt asks for it, and the grammar of an answer behind it."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from space_common.grammar import lark

from space_router.api.openai.fields import Message
from space_router.api.request_builder import Parameters, RequestBuilder
from space_router.engine.request.request import Grammar
from space_router.errors import InvalidRequest
from space_router.http_server.body import short_repr
from space_router.http_server.warnings import warn
from space_router.text import reasoning
from space_router.text.chat_template import ChatTemplate
from space_router.text.json_places import places_behind_thinking
from space_router.text.reasoning import AnswerReasoning, ReasoningFormat, ThinkingRules

SWITCHES = ("enable_thinking", "thinking")
"""Names of the variable by which templates turn reasoning on and off."""


def format_of(builder: RequestBuilder, template: ChatTemplate) -> ReasoningFormat | None:
    """Return the format of the model's reasoning, or None if reasoning is not parsed."""
    match builder.config.reasoning_parser:
        case "off":
            return None
        case "auto":
            return reasoning.recognised(template.source)
        case name:
            return reasoning.FORMATS[name]


def thinking_of(
    builder: RequestBuilder, template: ChatTemplate, prompt: str, continued: Message | None
) -> AnswerReasoning | None:
    """Return how the answer to a rendered prompt thinks, or None. `continued`: the message that it continues."""
    known = format_of(builder, template)
    if known is None:
        return None
    if continued is None:
        return reasoning.at_end(known, prompt)
    text = continued.text.lstrip()
    begun = text.startswith(known.starts) and not any(end in text for end in known.ends)
    return AnswerReasoning(known, inside=True) if begun else None


def behind_thinking(
    builder: RequestBuilder, wanted: Parameters, thinking: AnswerReasoning | None, budget: int | None
) -> Parameters:
    """Return the parameters for an answer that may begin with reasoning: its grammar begins behind that, and the
    reasoning ends after `budget` tokens. Raises InvalidRequest.
    """
    if thinking is None:
        if budget is not None:
            warn("`thinking_token_budget` has no effect: the answer begins without reasoning.")
        return wanted
    tokenizer = builder.text.tokenizer
    special = (tokenizer.token_to_id(text) for text in thinking.format.markers)
    shown = wanted.shown_ids | {id_ for id_ in special if id_ is not None}
    wanted = replace(wanted, thinking=thinking, shown_ids=frozenset(shown))
    if wanted.grammar is None and budget is None:
        return wanted
    rules = ThinkingRules.of(thinking, tokenizer.token_to_id, budget, builder.facts.vocab_size)
    if budget is not None and (not rules.can_count or not builder.facts.takes_grammars):
        raise InvalidRequest(
            "`thinking_token_budget` needs markers of reasoning that are one token each, and this model's are not. "
            "Leave it out.",
            param="thinking_token_budget",
            code="unsupported_parameter",
        )
    answer = None if wanted.grammar is None else lark(wanted.grammar.kind, wanted.grammar.source)
    places = None if wanted.grammar is None else wanted.grammar.known_places
    places = None if places is None else places_behind_thinking(rules, places)
    return replace(wanted, grammar=Grammar("lark", rules.before(answer), places))


def template_variables(
    template: ChatTemplate,
    given: Mapping[str, Any] | None,
    effort: str | None,
    enable: bool | None,
    defaults: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """Return the variables that a template knows; of others a warning says that they have no effect. `defaults`: the
    server's, of what the request does not say.

    Raises InvalidRequest if the fields contradict each other.
    """
    variables = dict(given or {})
    if effort is not None and variables.setdefault("reasoning_effort", effort) != effort:
        raise InvalidRequest(
            f'`reasoning_effort` is "{effort}", and `chat_template_kwargs` has another; give one.',
            param="reasoning_effort",
        )
    if enable is not None and variables.setdefault("enable_thinking", enable) is not enable:
        raise InvalidRequest(
            f"`enable_thinking` is {str(enable).lower()}, and `chat_template_kwargs` has another; give one.",
            param="enable_thinking",
        )
    switch = next((name for name in SWITCHES if name in template.variables), None)
    own = _switched(template, variables, switch)
    others = _switched(template, dict(defaults or {}), switch)
    heeded = {key: value for key, value in others.items() if key in template.variables}
    for key, value in own.items():
        if key in template.variables:
            heeded[key] = value
        elif not (key == "reasoning_effort" and value == "none") and not (key in SWITCHES and switch is not None):
            names = ", ".join(sorted(template.variables)[:16]) or "none"
            warn(f"{short_repr(key)} is no variable of the chat template and has no effect; there are: {names}.")
    return heeded


def _switched(template: ChatTemplate, variables: dict[str, Any], switch: str | None) -> dict[str, Any]:
    """Return the variables with the one that switches reasoning on and off, under the template's name for it."""
    if switch is not None:
        if "enable_thinking" in variables:
            variables.setdefault(switch, variables["enable_thinking"])
        elif "reasoning_effort" in variables and "reasoning_effort" not in template.variables:
            variables.setdefault(switch, variables["reasoning_effort"] != "none")
            del variables["reasoning_effort"]
    return variables
