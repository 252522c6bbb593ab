"""Which tokens a chat template writes to end the assistant's turn: a chat model says one where its answer ends.

They are found by rendering conversations of our own. Many checkpoints name them nowhere else: a fine-tuned model with
`<|im_end|>` in its template and its base's `</s>` in generation_config.json would talk on in the user's name.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from space_router.errors import InvalidRequest
from space_router.text.chat_template import ChatTemplate
from space_router.text.tokenizer import Tokenizer

_QUESTION, _ANSWER, _THOUGHT, _NEXT, _CALLED = "spaceask", "spaceanswer", "spacethought", "spacenext", "spacecalled"


def turn_end_ids(template: ChatTemplate, tokenizer: Tokenizer) -> tuple[int, ...]:
    """Ids of the added tokens that follow the assistant's words directly, or behind white space; none where the
    template refuses the conversations. A token that the template also writes inside a turn, as between a thought and
    the answer or between words and a call, ends no turn.
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
    """The added token with which a text begins, white space aside; the longest of several."""
    behind = behind.lstrip()
    fitting = [token for token in tokenizer.added_texts if token.strip() and behind.startswith(token.strip())]
    return max(fitting, key=len, default=None)


def _rendered(template: ChatTemplate) -> Iterator[str]:
    """Conversations that end with an answer, and that go on behind it."""
    user, answer = _message(template, "user", _QUESTION), _message(template, "assistant", _ANSWER)
    for messages in ([user, answer], [user, answer, _message(template, "user", _NEXT)]):
        text = _try(template, messages)
        if _ANSWER in text:
            yield text


def _insides(template: ChatTemplate) -> Iterator[str]:
    """What the template writes between the parts of one turn of the assistant's."""
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
