"""A chat is learnt behind the ids that the server will read before the answer."""

from pathlib import Path
from typing import Any

import pytest
from space_model.testing import tiny_checkpoint
from space_router.config import ServeConfig
from space_router.text.chat_template import BUILT_IN
from space_router.text.model_text import ModelText
from space_train.data.examples import TEMPLATES, ChatText, Encoder
from space_train.data.records import ConversationTurn, DataConversation, Role, SourceRecord
from tokenizers.processors import TemplateProcessing
from transformers import AutoTokenizer

TURNS = [("system", "Be kind."), ("user", "Hi?"), ("assistant", "Ho."), ("user", "And?"), ("assistant", "No.")]


def bare_model(folder: Path, *, begins: bool) -> Any:
    """The tokenizer of a base without a chat template, which puts BOS before a text or does not."""
    tokenizer = AutoTokenizer.from_pretrained(tiny_checkpoint(folder, vocab_size=300, num_masks=0))
    tokenizer.chat_template, tokenizer.bos_token = None, "<|im_start|>"
    if begins:
        begin = (tokenizer.bos_token, tokenizer.bos_token_id)
        tokenizer.backend_tokenizer.post_processor = TemplateProcessing(single=f"{begin[0]} $A", special_tokens=[begin])
    tokenizer.save_pretrained(folder)
    return tokenizer


@pytest.mark.parametrize("begins", [True, False])
@pytest.mark.parametrize("template", [None, *sorted(TEMPLATES)])
def test_a_chat_begins_in_training_as_it_does_when_it_is_served(
    template: str | None, begins: bool, tmp_path: Path
) -> None:
    """With the template that a run leaves, and with the server's own of that name: a chat's ids are its text's."""
    tokenizer = bare_model(tmp_path, begins=begins)
    chat = ChatText(tokenizer, template)
    turns = tuple(ConversationTurn(Role(role), content, learned=role == "assistant") for role, content in TURNS)
    ((example,),) = Encoder(tokenizer, chat).examples([(SourceRecord("data", 1, {}), DataConversation(turns))])
    (tmp_path / "chat_template.jinja").write_text(chat.template)
    messages = [{"role": role, "content": content} for role, content in TURNS]
    for choice in (None, template) if begins and template in BUILT_IN else (None,):
        served = ModelText.load(ServeConfig(model=str(tmp_path), chat_template=choice))
        assert served.chat_template is not None
        for num_given in (2, 4):
            text = served.chat_template.render(messages[:num_given])
            ids = served.tokenizer.encode(text, add_special_tokens=False)
            assert (ids[0] == tokenizer.bos_token_id) == begins
            assert example.ids[: len(ids)] == ids
            assert example.learned[len(ids) - 1 : len(ids) + 1] == [False, True]
