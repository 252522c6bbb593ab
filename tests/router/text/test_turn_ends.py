"""The tokens that end an answer are read off the chat template."""

import pytest
from doubles.tokenizers import byte_level
from space_router.text.chat_template import BUILT_IN, ChatTemplate
from space_router.text.model_text import turn_end_ids
from space_router.text.tokenizer import Tokenizer
from tokenizers import AddedToken

TOKENS = (
    "<s>", "</s>", "<|eot_id|>", "<|start_header_id|>", "<|end_header_id|>", "<start_of_turn>", "<end_of_turn>",
    "<|end|>", "<|user|>", "<|assistant|>", "<|start|>", "<|channel|>", "<|message|>", "<|return|>", "<|call|>",
    "<tool_call>",
)  # fmt: skip
INNER = byte_level()
INNER.add_tokens([AddedToken(token, special=token != "<tool_call>") for token in TOKENS])
TOKENIZER = Tokenizer(INNER, {"bos_token": "<s>", "eos_token": "</s>"})

LOOP = "{% for m in messages %}"
TEMPLATES = {
    "llama-3": (
        LOOP + "<|start_header_id|>{{ m.role }}<|end_header_id|>\n\n{{ m.content | trim }}<|eot_id|>{% endfor %}",
        {"<|eot_id|>"},
    ),
    "gemma": (
        LOOP + "<start_of_turn>{{ 'model' if m.role == 'assistant' else m.role }}\n{{ m.content }}<end_of_turn>\n"
        "{% endfor %}",
        {"<end_of_turn>"},
    ),
    "phi-3": (LOOP + "<|{{ m.role }}|>\n{{ m.content }}<|end|>\n{% endfor %}", {"<|end|>"}),
    "glm-4, where the next user's mark is the end": (
        LOOP + "<|{{ m.role }}|>\n{{ m.content }}{% endfor %}",
        {"<|user|>"},
    ),
    "parts of a message": (
        LOOP + "{% for part in m.content %}{{ part.text }}{% endfor %}<|eot_id|>{% endfor %}",
        {"<|eot_id|>"},
    ),
    "gpt-oss, which ends a thought with the token that ends a past answer": (
        LOOP + "{% if m.thinking is defined %}<|start|>assistant<|channel|>analysis<|message|>{{ m.thinking }}<|end|>"
        "{% endif %}<|start|>{{ m.role }}<|message|>{{ m.content }}"
        "{{ '<|return|>' if loop.last and m.role == 'assistant' else '<|end|>' }}{% endfor %}",
        {"<|return|>"},
    ),
    "words, an end and then a call": (
        LOOP + "<|{{ m.role }}|>{{ m.content }}<|end|>{% for call in m.tool_calls or [] %}<|call|>"
        "{{ call.function.name }}{% endfor %}</s>{% endfor %}",
        set(),
    ),
    "a call behind the words, before the end": (
        LOOP + "<|{{ m.role }}|>{{ m.content }}{% for call in m.tool_calls or [] %}<tool_call>"
        "{{ call.function.name }}</tool_call>{% endfor %}<|end|>{% endfor %}",
        {"<|end|>"},
    ),
    "text": (LOOP + "{{ m.role | upper }}: {{ m.content }}\n{% endfor %}", set()),
    "one that hides answers": (LOOP + "{% if m.role == 'user' %}{{ m.content }}</s>{% endif %}{% endfor %}", set()),
    "one that takes one message": (
        "{% if messages | length > 1 %}{{ raise_exception('one') }}{% endif %}{{ messages[0].content }}</s>",
        set(),
    ),
}


@pytest.mark.parametrize("name", TEMPLATES)
def test_the_token_that_a_template_writes_behind_an_answer_ends_a_turn(name: str) -> None:
    source, expected = TEMPLATES[name]
    ids = turn_end_ids(ChatTemplate(source, TOKENIZER.named_tokens), TOKENIZER)
    assert {INNER.id_to_token(id_) for id_ in ids} == expected


@pytest.mark.parametrize(
    ("name", "expected"), [("vicuna", "</s>"), ("llama-2", "</s>"), ("chatml", "<|im_end|>"), ("alpaca", "</s>")]
)
def test_a_built_in_template_has_its_end(name: str, expected: str) -> None:
    ids = turn_end_ids(ChatTemplate(BUILT_IN[name], TOKENIZER.named_tokens), TOKENIZER)
    assert [INNER.id_to_token(id_) for id_ in ids] == [expected]


def test_a_template_for_tools_adds_its_ends() -> None:
    tools = ChatTemplate(LOOP + "{{ m.content }}<|eot_id|>{% endfor %}", {})
    both = ChatTemplate(LOOP + "{{ m.content }}<|end|>{% endfor %}", {}, with_tools=tools)
    assert {INNER.id_to_token(id_) for id_ in turn_end_ids(both, TOKENIZER)} == {"<|end|>", "<|eot_id|>"}
