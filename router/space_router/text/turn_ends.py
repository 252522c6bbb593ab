"""Find the tokens with which a chat template ends the assistant's turn; the model generates one to end its answer.

They are found by rendering probe conversations, because many checkpoints name them nowhere else. A fine-tuned model
with `<|im_end|>` in its template and its base's `</s>` in generation_config.json would otherwise go on to write the
user's next message.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from space_router.errors import InvalidRequest
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
