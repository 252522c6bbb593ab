"""Runs the quality tasks with one model: its worker and tokenizer."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from typing import Any

from space_common.repetition import is_looping
from space_common.worker.completion import CompletionOutput, CompletionRequest, complete
from space_model.checkpoint.checkpoint import Checkpoint
from space_model.loading.load import load_model
from space_model.space_model import SpaceModel
from space_proto import worker_pb2 as pb
from space_server.speculation.controller import FixedLayout
from space_server.worker import Worker
from tqdm import tqdm
from transformers import AutoTokenizer

from space_eval.acceptance.generation import text_behind
from space_eval.flags import FlagError
from space_eval.quality.perplexity import PerplexityMeter
from space_eval.quality.tasks import Answer, Answers, Perplexity, TaskPrompt, WritingTask

_BLOCK = 16
_TAIL = 32  # ids at the end of the output that are searched for a stop after each step


@dataclass(frozen=True)
class WritingSettings:
    """CompletionOutput settings."""

    samples: int  # per record
    temperature: float  # 0 is greedy
    top_p: float
    max_tokens: int  # new ones per text
    seed: int  # of the first record; each has its own
    chat: bool
    speculate: bool  # SPACE; False: plain decoding
    layout: str  # of SPACE: full (every draft and mask in every step) or auto (as served)
    batch: int  # concurrent texts


class QualityModel:
    """A loaded model and its tokenizer."""

    def __init__(
        self,
        label: str,
        path: str,
        *,
        dtype: str,
        device: str,
        num_threads: int | None,
        weights: str = "plain",
        kv_dtype: str = "auto",
    ) -> None:
        """`label`: its name in files and tables, model or base."""
        self.label = label
        self.model: SpaceModel = load_model(
            path, dtype=dtype, weights=weights, kv_dtype=kv_dtype, device=device, num_threads=num_threads
        )
        self.tokenizer: Any = AutoTokenizer.from_pretrained(str(Checkpoint.open(path).folder), local_files_only=True)

    def write(self, task: WritingTask, answers: Answers, writing: WritingSettings) -> None:
        """Generate and score every text of the task that is missing in `answers`."""
        wanted = [(key, sample) for key in task.keys for sample in range(writing.samples)]
        missing = [pair for pair in wanted if pair not in answers]
        if not missing:
            return
        order = {key: number for number, key in enumerate(task.keys)}
        prompts = {key: self.prompt_ids(task.asked(key), writing) for key, _ in missing}
        worker = self._worker(max(map(len, prompts.values())), writing)
        requests = (
            CompletionRequest(
                key,
                sample,
                prompts[key],
                pb.Sampling(
                    seed=writing.seed + order[key], choice=sample, temperature=writing.temperature, top_p=writing.top_p
                ),
            )
            for key, sample in missing
        )
        finished = complete(
            worker,
            requests,
            max_tokens=writing.max_tokens,
            max_draft_length=worker.max_draft_length if writing.speculate else 0,
            eos_ids=self.model.facts.eos_ids,
            is_whole=lambda ids: task.is_whole(self._text(ids[-_TAIL:])),
        )
        with (
            _progress(f"{self.label}: {task.name}", len(missing), "text") as progress,
            ThreadPoolExecutor(max_workers=2) as scorers,
        ):
            pending: set[Future[Answer]] = set()
            for request, generation in finished:
                pending.add(scorers.submit(self._scored, task, request, generation))
                pending = _collect(pending, answers, progress, most_left=8)
            _collect(pending, answers, progress, most_left=0)

    def read(self, task: Perplexity, answers: Answers, *, length: int, stride: int | None) -> None:
        """Score every text of the task that is missing in `answers`."""
        missing = [key for key in task.texts if (key, 0) not in answers]
        if not missing:
            return
        meter = PerplexityMeter(self.model, self.tokenizer, length=length, stride=stride)
        with _progress(f"{self.label}: {task.name}", len(missing), "text") as progress:
            for key in missing:
                answers.add({"record": key, "sample": 0, **task.score_answer(key, meter)})
                progress.update()

    def prompt_ids(self, asked: TaskPrompt, writing: WritingSettings) -> list[int]:
        """Return the prompt ids, with the text cut so that prompt and new tokens fit the window."""
        room = self.model.facts.window - writing.max_tokens
        empty = len(self._encoded(asked.template.replace("{prompt}", ""), chat=writing.chat))
        if room <= empty:
            raise FlagError(
                f"--max-tokens {writing.max_tokens} leaves {room} of the {self.model.facts.window} positions of "
                f"{self.model.facts.name} for a prompt. Give fewer."
            )
        ids = self._encoded(asked.template.replace("{prompt}", asked.text), chat=writing.chat)
        text = asked.text
        while len(ids) > room:  # usually once: the cut text may tokenize differently
            own = self.tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
            left = max(0, len(own) - (len(ids) - room))
            text = self._text(own[len(own) - left :] if asked.keep_end else own[:left])
            ids = self._encoded(asked.template.replace("{prompt}", text), chat=writing.chat)
            if not left:
                ids = ids[-room:]
        return ids

    def _encoded(self, text: str, *, chat: bool) -> list[int]:
        if not chat:
            return list(self.tokenizer(text, verbose=False)["input_ids"])
        if self.tokenizer.chat_template is None:
            raise FlagError(f"{self.model.facts.name} has no chat template. Leave out --chat.")
        turn = self.tokenizer.apply_chat_template(
            [{"role": "user", "content": text}], add_generation_prompt=True, tokenize=False
        )
        return list(self.tokenizer(turn, add_special_tokens=False, verbose=False)["input_ids"])

    def _worker(self, longest: int, writing: WritingSettings) -> Worker:
        most_drafts = self.model.facts.most_masks if writing.speculate else 0
        full = writing.speculate and writing.layout == "full"
        each = -(-(longest + writing.max_tokens + most_drafts + 1) // _BLOCK)
        return Worker(
            self.model,
            num_blocks=each * writing.batch,
            block_size=_BLOCK,
            max_sequences=writing.batch,
            max_draft_length=None if writing.speculate else 0,
            controller=FixedLayout.full(most_drafts) if full else None,
        )

    def _scored(self, task: WritingTask, request: CompletionRequest, generation: CompletionOutput) -> Answer:
        text = text_behind(self._text, generation.prompt_ids, generation.tokens)
        return {
            "record": request.key,
            "sample": request.sample,
            "text": text,
            "num_tokens": len(generation.tokens),
            "num_decoded": generation.num_decoded,
            "num_steps": len(generation.steps),
            "finish": pb.Finish.Name(generation.finish),  # FINISH_NONE: stopped early because complete
            "looping": is_looping(generation.tokens),
            **task.score_answer(request.key, text),
        }

    def _text(self, ids: Sequence[int]) -> str:
        text: str = self.tokenizer.decode(list(ids), skip_special_tokens=True, clean_up_tokenization_spaces=False)
        return text


def _collect(pending: set[Future[Answer]], answers: Answers, progress: Any, *, most_left: int) -> set[Future[Answer]]:
    """Store finished scores; wait while more than `most_left` are pending."""
    while len(pending) > most_left or any(future.done() for future in pending):
        done, pending = wait(pending, return_when=FIRST_COMPLETED)
        for future in done:
            answers.add(future.result())
            progress.update()
    return pending


def _progress(text: str, total: int, unit: str) -> Any:
    """Return a progress bar with the remaining time; in a log, it prints a line occasionally."""
    seconds = 0.2 if sys.stderr.isatty() else 30.0
    return tqdm(total=total, desc=text, unit=unit, file=sys.stderr, mininterval=seconds, maxinterval=2 * seconds)
