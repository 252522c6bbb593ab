"""What the paper asks of models: data sets, prompts by model family, and how answers are measured."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from space_model.checkpoint.checkpoint import Checkpoint
from space_proto import worker_pb2 as pb
from space_train.run_folder import fingerprint, parts_digest
from tokenizers import Tokenizer

from space_eval.acceptance.generation import RenderChat, load_chat_template, text_behind
from space_eval.acceptance.paired_decoding import PLAIN, PairedDecoder, TimedAnswer
from space_eval.data import load_records
from space_eval.flags import RecordError
from space_eval.report import Journal

_CODE = (
    "Complete the following python code. Give the answer in a code block starts with '```python' and end with '``'\n"
)
_SUMMARY = "Document: {}\nBased on the previous text, provide a brief single summary:"


@dataclass(frozen=True)
class Question:
    """One prompt of a task, before a model family's format is applied."""

    name: str
    turns: tuple[str, ...]  # user messages, each followed by an answer
    plain_turns: tuple[str, ...]  # the same for a base model, which continues text and does not follow instructions
    category: str = ""
    reference: str = ""  # reference answer


@dataclass(frozen=True)
class PaperTask:
    """A set of questions."""

    name: str
    title: str
    hub_id: str  # for `datasets`, with :CONFIG and @SPLIT; "" if there is no reliable one
    read: Callable[[Mapping[str, Any], str], Question]  # (record, default name) -> question
    quality: str = ""  # metric: ROUGE-L, pass, exact match; "" for none


def _text(record: Mapping[str, Any], *fields: str) -> str:
    for field in fields:
        if isinstance(record.get(field), str):
            return str(record[field])
    raise KeyError(" or ".join(fields))


def _xsum(record: Mapping[str, Any], name: str) -> Question:
    asked = (_SUMMARY.format(_text(record, "document")),)
    return Question(str(record.get("id", name)), asked, asked, reference=_text(record, "summary"))


def _human_eval(record: Mapping[str, Any], name: str) -> Question:
    prompt = _text(record, "prompt")
    return Question(str(record.get("task_id", name)), (_CODE + prompt,), (prompt,))


def _cip(record: Mapping[str, Any], name: str) -> Question:
    asked = _text(record, "prompt", "instruction")
    if record.get("input"):
        asked = f"{asked}\n{record['input']}"
    return Question(str(record.get("id", name)), (asked,), (asked,))


def _turns(record: Mapping[str, Any], name: str) -> Question:
    turns = record.get("turns", record.get("prompt"))
    if not isinstance(turns, list) or not turns or not all(isinstance(turn, str) for turn in turns):
        raise KeyError("turns")
    name = str(record.get("question_id", record.get("prompt_id", name)))
    return Question(name, tuple(turns), tuple(turns), category=str(record.get("category", "")))


def _gsm8k(record: Mapping[str, Any], name: str) -> Question:
    asked = (_text(record, "question"),)
    return Question(name, asked, asked, reference=_text(record, "answer").rpartition("####")[2].strip())


TASKS = {
    task.name: task
    for task in (
        PaperTask("xsum", "XSum", "EdinburghNLP/xsum@test", _xsum, "ROUGE-L"),
        PaperTask("human_eval", "HumanEval-X", "openai/openai_humaneval@test", _human_eval, "pass"),
        PaperTask("cip", "CIP", "alespalla/chatbot_instruction_prompts@test", _cip),
        PaperTask("mt_bench", "MT-Bench", "HuggingFaceH4/mt_bench_prompts@train", _turns),
        PaperTask("gsm8k", "GSM8K", "openai/gsm8k:main@test", _gsm8k, "exact match"),
        PaperTask("spec_bench", "Spec-Bench", "", _turns),
    )
}
"""CIP: chatbot instruction prompts. The published script has no prompt for XSum; ours is from the authors' next paper
(BiTA). Their script for CIP reads the first 100 records and stops at 512 new tokens."""


def load_questions(task: PaperTask, source: str, limit: int | None = None) -> list[Question]:
    """Load the first `limit` questions of `source`: a JSON(L) file, or a hub id with optional :CONFIG and @SPLIT."""
    if not source:
        raise RecordError(f"{task.title} has no home on the hub. Give --data {task.name}=FILE, a JSONL file.")
    place, split = place_and_split(source)
    try:
        records = load_records(place, needs=((),), split=split)
    except RecordError as error:
        raise RecordError(f"{task.title}: {error} (--data {task.name}=FILE)") from error
    questions = []
    for number, record in enumerate(records[:limit], start=1):
        try:
            questions.append(task.read(record, f"{task.name}/{number}"))
        except KeyError as missing:
            raise RecordError(
                f"Record {number} of {source} has no field {missing.args[0]}, which {task.title} needs. "
                f"It has: {', '.join(sorted(record))}."
            ) from None
    return questions


def place_and_split(source: str) -> tuple[str, str]:
    """Split `owner/name:config@split` at the `@`; a path is not split. The default split is `test`."""
    place, at, split = source.rpartition("@")
    return (source, "test") if not at or Path(source).expanduser().exists() else (place, split)


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
class PromptFamily:
    """The prompt format of a model family: text before a dialogue, around each user turn, and after each answer."""

    name: str
    system: str
    turn: str  # with {} for the user's message
    between: str = ""  # after an answer, before the next turn
    is_chat: bool = True  # False: the text is continued as it is
    render: RenderChat | None = None  # a chat template, instead of the words above

    def prompt(self, turns: Sequence[str], answers: Sequence[str]) -> str:
        """Return the text before answer number `len(answers)`; `turns` has one more item than `answers`.

        As published, the parts are joined by newlines, even if `system` is empty.
        """
        if self.render is not None:
            messages = []
            for asked, answer in zip(turns, [*answers, None], strict=False):
                messages.append({"role": "user", "content": asked})
                if answer is not None:
                    messages.append({"role": "assistant", "content": answer})
            return self.render(messages)
        if not self.is_chat:
            parts = [part for pair in zip(turns, answers, strict=False) for part in pair]
            return "".join([*(f"{part}\n" for part in parts), turns[len(answers)]])
        history = self.system
        for asked, answer in zip(turns, answers, strict=False):
            history = f"{history}\n{self.turn.format(asked)}\n{answer}{self.between}"
        return f"{history}\n{self.turn.format(turns[len(answers)])}"


_HUMAN = "Human:{}\nAssistant:"

FAMILIES = {
    family.name: family
    for family in (
        PromptFamily("llama-2", _ASSISTANT, _HUMAN),  # fine-tuned from the base, as in Table 1
        PromptFamily("vicuna", _ASSISTANT, _HUMAN),  # the paper measured its Vicuna checkpoint as `llama`
        PromptFamily("llama-2-chat", _LLAMA_2_CHAT, "[INST]{} [/INST]", " </s><s>"),
        PromptFamily("chatglm", "", "[Round 0]\n\n问：{}\n\n答："),
        PromptFamily(
            "qwen",
            "<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n",
            "<|im_start|>user\n{}<|im_end|>\n<|im_start|>assistant\n",
        ),
        PromptFamily("internlm", "", _HUMAN),
        PromptFamily("falcon", "", _HUMAN),
        PromptFamily("plain", "", "{}", is_chat=False),  # a base model, such as a code model
    )
}

_IN_NAMES = ("vicuna", "chatglm", "internlm", "qwen", "falcon")


TEMPLATE = "template"  # the name of the family that has the model's own chat template


def template_of(model: str) -> PromptFamily | None:
    """Return the family of a model's own chat template, or None if it has none."""
    render = load_chat_template(model)
    return None if render is None else PromptFamily(TEMPLATE, "", "", render=render)


def family_of(model_name: str) -> PromptFamily:
    """Return the family named in the last part of a model's name, else `plain`.

    A last part `model` is skipped, because every trained checkpoint is in a folder of that name.
    """
    name = model_name.rstrip("/").removesuffix("/model").rpartition("/")[2].lower().replace("_", "-")
    for family in _IN_NAMES:
        if family in name:
            return FAMILIES[family]
    if "llama-2" in name or "llama2" in name:
        return FAMILIES["llama-2-chat" if "chat" in name else "llama-2"]
    return FAMILIES["plain"]


SAMPLE_TEMPERATURE = 0.8
SAMPLE_TOP_P = 0.95  # top-p of the samples for pass@10, as in HumanEval


@dataclass(frozen=True)
class Turn:
    """One turn's answers: of the model, plain and with SPACE, and of the base."""

    num_prompt_ids: int
    truncated: bool  # the prompt was truncated on the left to fit the answer
    plain: TimedAnswer
    space: TimedAnswer
    text: str  # answer with SPACE
    base: TimedAnswer | None = None
    base_text: str = ""

    @classmethod
    def parse(cls, record: Mapping[str, Any]) -> Turn:
        """The inverse of `dataclasses.asdict`, after JSON."""
        answers = {
            name: TimedAnswer.parse(record[name]) for name in ("plain", "space", "base") if record[name] is not None
        }
        return cls(**{**record, **answers})


@dataclass(frozen=True)
class MeasuredQuestion:
    """One question with all its turns, and sampled answers if requested."""

    question: Question
    turns: tuple[Turn, ...]
    samples: tuple[str, ...] = ()
    base_samples: tuple[str, ...] = ()

    def as_line(self) -> dict[str, Any]:
        """Return the line of the journal, without its key."""
        samples = {"samples": self.samples, "base_samples": self.base_samples}
        return {"name": self.question.name, "turns": list(map(asdict, self.turns)), **samples}

    @classmethod
    def parse(cls, question: Question, line: Mapping[str, Any]) -> MeasuredQuestion:
        """The inverse of `as_line`, after JSON."""
        turns = tuple(map(Turn.parse, line["turns"]))
        return cls(question, turns, tuple(line["samples"]), tuple(line["base_samples"]))


@dataclass(frozen=True)
class FittedPrompt:
    """Prompt ids, truncated to fit the window."""

    ids: list[int]
    truncated: bool  # truncated on the left
    room: int  # new ids that fit after it, at most the requested number


@dataclass(frozen=True)
class PromptedModel:
    """A model, its tokenizer and its prompt format."""

    decoder: PairedDecoder
    tokenizer: Tokenizer
    family: PromptFamily

    def prompt(self, question: Question, answers: Sequence[str], max_tokens: int) -> FittedPrompt:
        """Return the prompt of turn `len(answers)`.

        It is truncated on the left only if less than `max_tokens` and less than half of the window would remain.
        """
        window = self.decoder.model.facts.window
        turns = question.turns if self.family.is_chat else question.plain_turns
        text = self.family.prompt(turns, answers)
        ids = self.tokenizer.encode(text, add_special_tokens=self.family.render is None).ids
        kept = ids[-max(window - max_tokens, window // 2) :]
        return FittedPrompt(kept, len(kept) < len(ids), min(max_tokens, window - len(kept)))

    def answers(self, prompt: FittedPrompt, **how: Any) -> dict[int, TimedAnswer]:
        """Return the answers by k, including plain decoding; `how`: sampling and rounds."""
        return self.decoder.run(prompt.ids, max_tokens=prompt.room, **how)

    def text(self, prompt: FittedPrompt, answer: Sequence[int]) -> str:
        """Decode `answer` as it follows the prompt, without special tokens."""
        return text_behind(lambda ids: str(self.tokenizer.decode(list(ids))), prompt.ids, answer)


@dataclass(frozen=True)
class PaperProtocol:
    """Settings and models shared by all questions."""

    model: PromptedModel
    k: int
    rounds: int
    temperature: float
    seed: int
    base: PromptedModel | None = None
    num_samples: int = 0  # for pass@10

    def measure(self, question: Question, number: int, max_tokens: int) -> MeasuredQuestion:
        """Measure all turns of a question; later prompts include each model's own earlier answers."""
        sampling = pb.Sampling(seed=self.seed + number, temperature=self.temperature)
        how = {"sampling": sampling, "rounds": self.rounds}
        turns: list[Turn] = []
        while len(turns) < len(question.turns):
            prompt = self.model.prompt(question, [turn.text for turn in turns], max_tokens)
            answers = self.model.answers(prompt, **how)
            base, base_text = None, ""
            if self.base is not None:
                base_prompt = self.base.prompt(question, [turn.base_text for turn in turns], max_tokens)
                base = self.base.answers(base_prompt, **how)[PLAIN]
                base_text = self.base.text(base_prompt, base.ids)
            turns.append(
                Turn(
                    num_prompt_ids=len(prompt.ids),
                    truncated=prompt.truncated,
                    plain=answers[PLAIN],
                    space=answers[self.k],
                    text=self.model.text(prompt, answers[self.k].ids),
                    base=base,
                    base_text=base_text,
                )
            )
        return MeasuredQuestion(question, tuple(turns))

    def with_samples(self, measured: MeasuredQuestion, number: int, max_tokens: int) -> MeasuredQuestion:
        """Return `measured` with `num_samples` sampled first answers of the model (with SPACE) and of the base."""

        def samples(model: PromptedModel, k: int) -> Iterator[str]:
            prompt = model.prompt(measured.question, [], max_tokens)
            for choice in range(self.num_samples):
                how = pb.Sampling(
                    temperature=SAMPLE_TEMPERATURE, top_p=SAMPLE_TOP_P, seed=self.seed + number, choice=choice
                )
                answer = model.decoder.once(k, prompt.ids, sampling=how, max_tokens=prompt.room)
                yield model.text(prompt, answer.tokens)

        base = () if self.base is None else tuple(samples(self.base, PLAIN))
        return replace(measured, samples=tuple(samples(self.model, self.k)), base_samples=base)


def open_journal(file: Path, settings: Mapping[str, Any]) -> Journal[str]:
    """Open or create the journal of finished questions; its first line has the settings. Raises JournalError."""
    journal: Journal[str] = Journal(file, lambda line: str(line["key"]))
    journal.keep_settings(settings)
    return journal


def run_task(
    protocol: PaperProtocol,
    task: PaperTask,
    questions: Sequence[Question],
    journal: Journal[str],
    *,
    max_tokens: int,
    most_new: int | None = None,
) -> Iterator[MeasuredQuestion]:
    """Yield every question's result, from the journal or measured now; stop before new question `most_new` + 1."""
    num_new = 0
    for number, question in enumerate(questions):
        key = _key(protocol, task, question, number, max_tokens)
        if key not in journal:
            if num_new == most_new:
                return
            measured = protocol.measure(question, number, max_tokens)
            if protocol.num_samples > 0 and task.quality == "pass":
                measured = protocol.with_samples(measured, number, max_tokens)
            journal.add({"key": key, **measured.as_line()})
            num_new += 1
        yield MeasuredQuestion.parse(question, journal[key])


def _key(protocol: PaperProtocol, task: PaperTask, question: Question, number: int, max_tokens: int) -> str:
    """Return a key of everything an answer depends on that may change between two calls on one journal."""
    samples = protocol.num_samples if task.quality == "pass" else 0
    digest = hashlib.sha256("\0".join((*question.turns, *question.plain_turns)).encode()).hexdigest()[:12]
    return f"{task.name} {number} {digest} {max_tokens}" + (f" {samples} samples" if samples else "")


def weights_digest(model: str) -> str:
    """Return 24 hexadecimal digits of config, samples of the weights, adapter and draft head."""
    checkpoint = Checkpoint.open(model)
    return fingerprint(checkpoint) + parts_digest(checkpoint)
