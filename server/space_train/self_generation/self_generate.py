"""Text that the model writes itself, by our own worker: masks learn most from what they will draft for (the idea: BiTA,
arXiv 2402.12522).

A text is a function of weights, prompt, temperature and seed alone (speculation only makes it come faster), so it does
not matter how often the writing is interrupted, nor how many texts are written at once.
"""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

import numpy as np
from space_model.checkpoint.checkpoint import Checkpoint
from space_proto import worker_pb2 as pb
from tqdm import tqdm

from space_train.data.examples import Example
from space_train.run_identity import fingerprint
from space_train.self_generation.own_text_file import (
    OwnText,
    OwnTextError,
    OwnTextFile,
    OwnTextRecipe,
    Question,
    keep_asked,
    read_own_texts,
)
from space_train.self_generation.scribe import Ends, Scribe, ScribeCounts, UnfinishedText
from space_train.self_generation.worker_link import WorkerLink
from space_train.self_generation.worker_process import WorkerLost, WorkerProcess

TEMPERATURES = (0.0, 0.7, 1.0)
"""Prompts take them in turn: served text is drafted for at any of them."""
NUM_SEEDS = 2**64


class InvalidPrompt(OwnTextError):
    """A prompt that the model cannot go on from."""


@dataclass(frozen=True)
class OwnTexts:
    """The texts asked for, in the order of their prompts, and what the new ones cost."""

    texts: tuple[OwnText, ...]
    num_kept: int  # of the texts were in the file already
    num_new_tokens: int  # of the others
    num_steps: int  # forward passes for them
    num_rows: int  # rows of these passes, prompts and masks included: the compute is 2 FLOPs x weights x rows
    seconds: float  # from the start of the worker on

    @property
    def num_tokens(self) -> int:
        """Written ids of all texts, the kept ones too."""
        return sum(len(text.output) for text in self.texts)


def write_own_texts(
    checkpoint: Path | str,
    prompts: Sequence[Sequence[int]],
    *,
    max_tokens: int,
    temperatures: Sequence[float] = TEMPERATURES,
    seed: int = 0,
    eos_stops: bool = True,
    banned_ids: Sequence[int] = (),
    max_concurrent: int | None = None,
    device: str = "auto",
    dtype: str = "auto",
    num_threads: int | None = None,
    speculation: str = "auto",
    progress: bool = True,
    file: Path,
) -> OwnTexts:
    """Let the model go on from every prompt, and append the texts to `file` as they end.

    Prompt i takes temperature i mod their number, and seed + i. Texts that are in `file` already are not written again.
    `eos_stops`: a text ends with the model's end of text, which it keeps; else only after `max_tokens` ids (or the
    window). `banned_ids` are never written. `max_concurrent`: texts at once (None: the worker's default, 64).
    `device`, `dtype`, `num_threads`, `speculation`: as `spaceserve worker` has them.

    A worker that dies is started again and goes on where it was; one that dies twice without having ended a text
    raises WorkerLost. Raises WorkerDidNotStart for a checkpoint that cannot be served, and OwnTextError for prompts or
    a file that cannot be used.
    """
    asked = _asked(prompts, temperatures, seed)
    if max_tokens < 1:
        raise OwnTextError(f"max_tokens must be at least 1; got {max_tokens}.")
    recipe = OwnTextRecipe(fingerprint(Checkpoint.open(checkpoint)), max_tokens, eos_stops, tuple(banned_ids))
    flags: dict[str, object] = {
        "--model": checkpoint,
        "--device": device,
        "--dtype": dtype,
        "--speculation": speculation,
        "--log-level": "warning",
    }
    if max_concurrent is not None:
        flags["--max-sequences"] = max_concurrent
    if num_threads is not None:
        flags["--num-threads"] = num_threads
    started, tally = time.monotonic(), ScribeCounts()
    with OwnTextFile(file, recipe) as own:
        kept = {text.question for text in own.texts}
        todo = {question: UnfinishedText(*question) for question in asked if question not in kept}
        with tqdm(total=len(todo) * max_tokens, unit="token", disable=not progress or not todo) as bar:
            _write_all(todo, own, flags, recipe, tally, bar)
        texts = {text.question: text for text in own.texts}
    return OwnTexts(
        texts=tuple(texts[question] for question in asked),
        num_kept=sum(question in kept for question in asked),
        num_new_tokens=tally.num_tokens,
        num_steps=tally.num_steps,
        num_rows=tally.num_rows,
        seconds=time.monotonic() - started,
    )


def forget_others(checkpoint: Path | str, prompts: Sequence[Sequence[int]], *, max_tokens: int, file: Path) -> float:
    """Keep of `file` only what `write_own_texts` is asked for; the share of its written ids that stays."""
    recipe = OwnTextRecipe(fingerprint(Checkpoint.open(checkpoint)), max_tokens, eos_stops=True)
    return keep_asked(file, recipe, frozenset(_asked(prompts, TEMPERATURES, seed=0)))


def own_examples(file: Path) -> list[Example]:
    """The texts of a file to learn from: the output is learnt, the prompt is not. Ordered by seed."""
    return [
        Example(ids=[*text.prompt, *text.output], learned=[False] * len(text.prompt) + [True] * len(text.output))
        for text in read_own_texts(file)
    ]


def prompts_of(
    examples: Sequence[Example], count: int, *, length: int = 64, longest: int | None = None, seed: int = 0
) -> list[list[int]]:
    """`count` beginnings for the model to go on from.

    Of an example with a prompt, the prompt, if it has at most `longest` ids; of plain text, `length` ids from a random
    place on. Examples come in a random order, and again in another one when there are not enough.
    """
    usable = [example for example in examples if example.ids and (longest is None or _num_prompt(example) <= longest)]
    if not usable:
        bound = "" if longest is None else f" of at most {longest} ids"
        cure = "" if longest is None else ", or longer rows"
        raise OwnTextError(f"None of the {len(examples)} examples has a prompt{bound}. Give other data{cure}.")
    prompts: list[list[int]] = []
    rng = np.random.default_rng(seed)
    while len(prompts) < count:
        for index in rng.permutation(len(usable))[: count - len(prompts)]:
            ids, num_prompt = usable[index].ids, _num_prompt(usable[index])
            start = 0 if num_prompt else int(rng.integers(max(1, len(ids) - length + 1)))
            prompts.append(list(ids[start : start + (num_prompt or length)]))
    return prompts


def _write_all(
    todo: dict[Question, UnfinishedText],
    own: OwnTextFile,
    flags: dict[str, object],
    recipe: OwnTextRecipe,
    tally: ScribeCounts,
    bar: tqdm[NoReturn],
) -> None:
    """Write until `todo` is empty. A worker that is lost is started again, if a text has ended since the last loss."""
    num_left_at_loss = None
    while todo:
        try:
            bar.set_description("own texts: loading the model")
            with WorkerProcess(flags) as process:
                bar.set_description("own texts")
                bar.unpause()  # the time to load says nothing about the time to write
                try:
                    _write_with(process, todo, own, recipe, tally, bar)
                except WorkerLost as error:
                    raise WorkerLost(process.obituary(str(error))) from error
        except WorkerLost as error:
            if num_left_at_loss == len(todo):
                raise
            num_left_at_loss = len(todo)
            first_line = str(error).partition("\n")[0]
            tqdm.write(f"{first_line} It is started again; no text is lost.", file=sys.stderr)


def _write_with(
    process: WorkerProcess,
    todo: dict[Question, UnfinishedText],
    own: OwnTextFile,
    recipe: OwnTextRecipe,
    tally: ScribeCounts,
    bar: tqdm[NoReturn],
) -> None:
    """Write with this worker; what ends leaves `todo`."""
    with WorkerLink(process.address) as link:
        ends = Ends(recipe.max_tokens, tuple(link.hello.eos_ids) if recipe.eos_stops else (), recipe.banned_ids)
        for text in todo.values():
            _check(text.prompt, link.hello, ends)
        num_tokens = tally.num_tokens
        for ended in Scribe(link, list(todo.values()), ends, tally).write():
            for text in ended:
                own.append(text.finished)
                del todo[text.finished.question]
                bar.total -= recipe.max_tokens - len(text.output)
            bar.update(tally.num_tokens - num_tokens)
            num_tokens = tally.num_tokens


def _asked(prompts: Sequence[Sequence[int]], temperatures: Sequence[float], seed: int) -> list[Question]:
    """Prompt, temperature and seed of every text."""
    if not temperatures or not all(math.isfinite(value) and value >= 0 for value in temperatures):
        raise OwnTextError(f"Temperatures must be one or more numbers from 0 on; got {list(temperatures)}.")
    if not 0 <= seed < NUM_SEEDS:
        raise OwnTextError(f"The seed must lie in 0 .. 2^64-1; got {seed}.")
    return [
        (tuple(map(int, prompt)), float(temperatures[index % len(temperatures)]), (seed + index) % NUM_SEEDS)
        for index, prompt in enumerate(prompts)
    ]


def _check(prompt: Sequence[int], hello: pb.Hello, ends: Ends) -> None:
    """Raise InvalidPrompt for what the worker would not take."""
    if not 1 <= len(prompt) < hello.window:
        raise InvalidPrompt(
            f"A prompt needs 1 .. {hello.window - 1} ids (the window is {hello.window}); got {len(prompt)}."
        )
    wrong = [id for id in prompt if not 0 <= id < hello.vocab_size or id in hello.mask_ids]
    if wrong:
        raise InvalidPrompt(
            f"A prompt holds id {wrong[0]}, which is a mask token or outside the vocabulary of {hello.vocab_size}. "
            "Tokenise with the model's own tokenizer."
        )
    if ends.num_blocks(prompt, hello) > hello.num_blocks:
        raise InvalidPrompt(
            f"A prompt of {len(prompt)} ids and {ends.max_tokens} more need {ends.num_blocks(prompt, hello)} blocks of "
            f"keys and values; the worker has {hello.num_blocks}. Lower max_tokens."
        )


def _num_prompt(example: Example) -> int:
    """Ids before the first that is learnt; 0 for plain text, whose first id has nothing to be predicted from."""
    first = next((index for index, learned in enumerate(example.learned) if learned), len(example.ids))
    return 0 if first <= 1 else first
