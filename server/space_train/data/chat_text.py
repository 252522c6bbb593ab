"""Renders a conversation to text and marks the characters that the model learns to write."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from jinja2 import TemplateError
from transformers import PreTrainedTokenizerBase

from space_train.data.data_error import UnusableTemplate
from space_train.data.data_forms import ConversationTurn, DataConversation, Role

PAPER_SYSTEM = (
    "A chat between a curious user and an artificial intelligence assistant. "
    "The assistant gives helpful, detailed, and polite answers to the user's questions."
)
ALPACA_SYSTEM = (
    "Below is an instruction that describes a task. Write a response that appropriately completes the request."
)


_BODY = """
{%- if messages and messages[0]['role'] == 'system' -%}
{%- set system = messages[0]['content'] -%}{%- set messages = messages[1:] -%}
{%- endif -%}
{%- if system -%}{{- system + behind_system -}}{%- endif -%}
{%- for message in messages -%}
{%- if message['role'] == 'assistant' -%}{{- before_answer + message['content'] + eos_token -}}
{%- else -%}{{- ('' if loop.first else between) + before_question + message['content'] -}}{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- before_answer.rstrip(' ') -}}{%- endif -%}
"""


def _template(**words: str) -> str:
    """Return the Jinja source of a plain chat template that puts these words around questions and answers."""
    return "".join(f"{{%- set {name} = {json.dumps(word)} -%}}" for name, word in words.items()) + _BODY.strip()


TEMPLATES: dict[str, str] = {
    "plain": _template(
        system="", behind_system="\n", before_question="User: ", before_answer="\nAssistant: ", between="\n"
    ),
    "paper": _template(
        system=PAPER_SYSTEM, behind_system="\n", before_question="Human: ", before_answer="\nAssistant: ", between="\n"
    ),
    "vicuna": _template(
        system=PAPER_SYSTEM, behind_system=" ", before_question="USER: ", before_answer=" ASSISTANT: ", between=""
    ),
    "alpaca": _template(
        system=ALPACA_SYSTEM,
        behind_system="\n\n",
        before_question="### Instruction:\n",
        before_answer="\n\n### Response:\n",
        between="\n\n",
    ),
    "raw": _template(system="", behind_system="", before_question="", before_answer="", between=""),
}
"""Built-in chat templates. `plain` is used if the tokenizer has none; `paper` is the one SPACE was published with;
`raw` joins question and answer as they are. The space after 'Assistant:' belongs to the answer, as tokenizers join it.
The prefix that a tokenizer adds to a text (BOS) is part of the template, because a server adds none to a rendered chat.
"""

FALLBACK = "plain"


@dataclass(frozen=True)
class AnsweredText:
    """A rendered conversation; answers[i] is the half-open character range of the model's i-th answer."""

    text: str
    answers: tuple[tuple[int, int], ...]

    @property
    def borders(self) -> list[int]:
        """The offsets at which answers begin and end, in order."""
        return [border for answer in self.answers for border in answer]


class ChatText:
    """Renders conversations with one chat template."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, template: str | None = None) -> None:
        self.tokenizer = tokenizer
        self.name, self.template = _chosen(tokenizer, template)

    def render(self, turns: Sequence[ConversationTurn], asking: bool) -> str:
        """Render `turns`; `asking` adds the generation prompt."""
        messages = [{"role": str(turn.role), "content": turn.content} for turn in turns]
        try:
            text = self.tokenizer.apply_chat_template(
                messages, chat_template=self.template, tokenize=False, add_generation_prompt=asking
            )
        except (TemplateError, TypeError, ValueError) as error:
            raise UnusableTemplate(
                f"the chat template ({self.name}) does not take this conversation: {error}. "
                f"Choose another with `template`: {', '.join(TEMPLATES)}, or a .jinja file."
            ) from error
        return str(text)

    def texts(self, conversation: DataConversation) -> list[AnsweredText]:
        """Return the texts to train on: none without an answer, otherwise one.

        If the template rewrites earlier turns as the conversation continues, as those of reasoning models do, it
        returns one text per answer, because only the last answer of a text then reads as the model would write it.
        """
        return answered_texts(conversation.turns, self.render)


def answered_texts(
    turns: Sequence[ConversationTurn], render: Callable[[Sequence[ConversationTurn], bool], str]
) -> list[AnsweredText]:
    """`ChatText.texts` for any `render`. Assistant turns before the first user turn are skipped."""
    first = next((i for i, turn in enumerate(turns) if turn.role in (Role.USER, Role.TOOL)), len(turns))
    turns = [turn for i, turn in enumerate(turns) if i >= first or turn.role is Role.SYSTEM]
    asked = [i for i, turn in enumerate(turns) if turn.learned and turn.content.strip()]
    if not asked:
        return []
    single = [_last_answered(turns[: i + 1], render) for i in asked]
    whole = single[-1].text
    if all(whole.startswith(text.text) for text in single):
        return [AnsweredText(whole, tuple(text.answers[0] for text in single))]
    return single


def _last_answered(
    turns: Sequence[ConversationTurn], render: Callable[[Sequence[ConversationTurn], bool], str]
) -> AnsweredText:
    """Return the conversation up to its last answer, with the range of that answer."""
    text, prompt = render(turns, False), render(turns[:-1], True)
    last_word = turns[-1].content.split()[-1]  # templates may reformat whitespace before it
    if text.startswith(prompt) and last_word in text[len(prompt) :]:
        return AnsweredText(text, ((len(prompt), len(text)),))
    # The text before an answer can differ from the generation prompt, so search for the answer itself.
    before = render(turns[:-1], False)
    start = text.find(turns[-1].content.strip(), len(before) if text.startswith(before) else 0)
    if start < 0:
        raise UnusableTemplate(
            "the chat template does not show the assistant's words as they are, so that they cannot be learned. "
            f"Choose another with `template`: {', '.join(TEMPLATES)}, or a .jinja file."
        )
    return AnsweredText(text, ((start, len(text)),))


def _chosen(tokenizer: PreTrainedTokenizerBase, template: str | None) -> tuple[str, str]:
    """Return name and Jinja source of the requested template, else the tokenizer's own, else the fallback."""
    if template is None:
        own = getattr(tokenizer, "chat_template", None)
        if own:
            return "the tokenizer's own", str(own["default"] if isinstance(own, dict) else own)
        return f"{FALLBACK}, as the tokenizer has none", _beginning(tokenizer) + TEMPLATES[FALLBACK]
    if template in TEMPLATES:
        return template, _beginning(tokenizer) + TEMPLATES[template]
    if template.endswith(".jinja"):
        try:
            return template, Path(template).expanduser().read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise UnusableTemplate(f"The chat template {template} cannot be read: {error}.") from error
    raise UnusableTemplate(f"There is no template {template!r}: use {', '.join(TEMPLATES)}, or a .jinja file.")


def _beginning(tokenizer: PreTrainedTokenizerBase) -> str:
    """Return the Jinja source of the prefix that the tokenizer adds to a text; empty if it adds none."""
    prefix = own_prefix(tokenizer)
    if not prefix:
        return ""
    if prefix == [tokenizer.bos_token_id]:
        return "{{- bos_token or '' -}}"
    return f"{{{{- {json.dumps(''.join(tokenizer.convert_ids_to_tokens(prefix)))} -}}}}"


def own_prefix(tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """Return the ids that the tokenizer adds before a text (BOS, if it has one)."""
    plain = tokenizer("a", add_special_tokens=False)["input_ids"]
    whole = tokenizer("a", add_special_tokens=True)["input_ids"]
    for start in range(len(whole) - len(plain) + 1):
        if whole[start : start + len(plain)] == plain:
            return list(whole[:start])
    return []
