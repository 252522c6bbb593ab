"""How each model family is spoken to in the paper's evaluation. Text only: the tokenizer adds its own beginning."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

_ASSISTANT = (
    "A chat between a curious user and an artificial intelligence assistant. "
    "The assistant gives helpful, detailed, and polite answers to the user's questions."
)
_LLAMA_2_CHAT = (
    "<<SYS>>\nYou are a helpful, respectful and honest assistant. Always answer as helpfully as possible, while being "
    "safe.  Your answers should not include any harmful, unethical, racist, sexist, toxic, dangerous, or illegal "
    "content. Please ensure that your responses are socially unbiased and positive in nature.\n\n"
    "If a question does not make any sense, or is not factually coherent, explain why instead of answering something "
    "not correct. If you don't know the answer to a question, please don't share false information.\n<</SYS>>\n\n"
)


@dataclass(frozen=True)
class Family:
    """The frame around a dialogue: what stands before it, around each turn of the user's, and after each answer."""

    name: str
    system: str
    turn: str  # with {} for what the user says
    between: str = ""  # after an answer, before the next line
    is_chat: bool = True  # else the text is continued as it stands

    def prompt(self, turns: Sequence[str], answers: Sequence[str]) -> str:
        """The text before answer number `len(answers)`; `turns` holds one more than `answers`.

        Published: the parts are joined by one newline each, also where `system` is empty.
        """
        if not self.is_chat:
            parts = [part for pair in zip(turns, answers, strict=False) for part in pair]
            return "".join([*(f"{part}\n" for part in parts), turns[len(answers)]])
        history = self.system
        for said, answer in zip(turns, answers, strict=False):
            history = f"{history}\n{self.turn.format(said)}\n{answer}{self.between}"
        return f"{history}\n{self.turn.format(turns[len(answers)])}"


_HUMAN = "Human:{}\nAssistant:"

FAMILIES = {
    family.name: family
    for family in (
        Family("llama-2", _ASSISTANT, _HUMAN),  # fine-tuned from the base, as in Table 1
        Family("vicuna", _ASSISTANT, _HUMAN),  # the published Vicuna checkpoint was measured as `llama`
        Family("llama-2-chat", _LLAMA_2_CHAT, "[INST]{} [/INST]", " </s><s>"),
        Family("chatglm", "", "[Round 0]\n\n问：{}\n\n答："),
        Family(
            "qwen",
            "<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n",
            "<|im_start|>user\n{}<|im_end|>\n<|im_start|>assistant\n",
        ),
        Family("internlm", "", _HUMAN),
        Family("falcon", "", _HUMAN),
        Family("plain", "", "{}", is_chat=False),  # a base model, such as a code model
    )
}

_IN_NAMES = ("vicuna", "chatglm", "internlm", "qwen", "falcon")


def family_of(model_name: str) -> Family:
    """The family that the last part of a model's name speaks of; `plain` where it speaks of none.

    A last part `model` says nothing: every trained checkpoint is in such a folder of its run's.
    """
    name = model_name.rstrip("/").removesuffix("/model").rpartition("/")[2].lower().replace("_", "-")
    for family in _IN_NAMES:
        if family in name:
            return FAMILIES[family]
    if "llama-2" in name or "llama2" in name:
        return FAMILIES["llama-2-chat" if "chat" in name else "llama-2"]
    return FAMILIES["plain"]
