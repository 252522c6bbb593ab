"""Generates training text with the model itself through a worker: masks learn most from text like that they draft for
(the idea: BiTA, arXiv 2402.12522).

A text depends only on weights, prompt, temperature and seed (speculation only makes it faster), so neither
interruptions nor the batch size change it.
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
from space_common.process import WorkerLost, WorkerProcess
from space_common.worker_client import GrpcWorker
from space_common.worker_settings import worker_argv
from space_model.checkpoint.checkpoint import Checkpoint
from space_proto import worker_pb2 as pb
from tqdm import tqdm

from space_train.data.example_encoder import Example
from space_train.run_folder import fingerprint
from space_train.self_generation.own_text_file import (
    OwnText,
    OwnTextError,
    OwnTextFile,
    OwnTextRecipe,
    Question,
    keep_asked,
    read_own_texts,
)
from space_train.self_generation.scribe import Ends, ScribeCounts, UnfinishedText, write_texts

TEMPERATURES = (0.0, 0.7, 1.0)
"""Temperatures that prompts use in turn, because drafts are served at all of them."""
NUM_SEEDS = 2**64


class InvalidPrompt(OwnTextError):
    """A prompt that the model cannot continue."""


@dataclass(frozen=True)
class OwnTexts:
    """The requested texts, in the order of their prompts, and the cost of the new ones."""

    texts: tuple[OwnText, ...]
    num_kept: int  # texts that were already in the file
    num_new_tokens: int  # ids of the new texts
    num_steps: int  # forward passes for them
    num_rows: int  # rows of these passes, prompts and masks included: the compute is 2 FLOPs x weights x rows
    seconds: float  # from the start of the worker on

    @property
    def num_tokens(self) -> int:
        """Generated ids of all texts, including kept ones."""
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
    """Generate a continuation of every prompt, and append the texts to `file` as they finish.

    Prompt i uses temperature i mod their number, and seed + i. Texts already in `file` are not generated again.
    `eos_stops`: a text ends with EOS, which is kept; otherwise only after `max_tokens` ids (or at the window's end).
    `banned_ids` are never sampled. `max_concurrent`: batch size (None: the worker's default, 64).
    `device`, `dtype`, `num_threads`, `speculation`: as the flags of `spaceserve worker`.

    A worker that dies is restarted and generation continues. Raises WorkerLost if it dies twice without finishing a
    text in between, WorkerNotReady for a checkpoint that cannot be served, and OwnTextError for unusable prompts or
    an unusable file.
    """
    asked = _asked(prompts, temperatures, seed)
    if max_tokens < 1:
        raise OwnTextError(f"max_tokens must be at least 1; got {max_tokens}.")
    recipe = OwnTextRecipe(fingerprint(Checkpoint.open(checkpoint)), max_tokens, eos_stops, tuple(banned_ids))
    flags = worker_argv(
        {
            "model": checkpoint,
            "device": device,
            "dtype": dtype,
            "speculation": speculation,
            "log_level": "WARNING",
            "max_sequences": max_concurrent,
            "num_threads": num_threads,
        }
    )
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
    """Keep only the texts of `file` that `write_own_texts` would request. Return the share of ids that is kept."""
    recipe = OwnTextRecipe(fingerprint(Checkpoint.open(checkpoint)), max_tokens, eos_stops=True)
    return keep_asked(file, recipe, frozenset(_asked(prompts, TEMPERATURES, seed=0)))


def own_examples(file: Path) -> list[Example]:
    """Return the texts of a file as examples, ordered by seed: outputs are targets, prompts are context."""
    return [
        Example(ids=[*text.prompt, *text.output], learned=[False] * len(text.prompt) + [True] * len(text.output))
        for text in read_own_texts(file)
    ]


def prompts_of(
    examples: Sequence[Example], count: int, *, length: int = 64, longest: int | None = None, seed: int = 0
) -> list[list[int]]:
    """Return `count` prompts for the model to continue.

    An example with a prompt of at most `longest` ids gives that prompt; plain text gives `length` ids from a random
    position. Examples are used in random order, and again in a new order if there are too few.
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
    flags: Sequence[str],
    recipe: OwnTextRecipe,
    tally: ScribeCounts,
    bar: tqdm[NoReturn],
) -> None:
    """Generate until `todo` is empty. A lost worker is restarted if a text has finished since the last loss."""
    num_left_at_loss = None
    while todo:
        try:
            bar.set_description("own texts: loading the model")
            with WorkerProcess(flags) as process:
                bar.set_description("own texts")
                bar.unpause()  # exclude the load time from the rate
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
    """Generate with this worker; finished texts are removed from `todo`."""
    with GrpcWorker(process.address) as worker:
        ends = Ends(recipe.max_tokens, tuple(worker.hello.eos_ids) if recipe.eos_stops else (), recipe.banned_ids)
        for text in todo.values():
            _check(text.prompt, worker.hello, ends)
        num_tokens = tally.num_tokens
        for ended in write_texts(worker, list(todo.values()), ends, tally):
            for text in ended:
                own.append(text.finished)
                del todo[text.finished.question]
                bar.total -= recipe.max_tokens - len(text.output)
            bar.update(tally.num_tokens - num_tokens)
            num_tokens = tally.num_tokens


def _asked(prompts: Sequence[Sequence[int]], temperatures: Sequence[float], seed: int) -> list[Question]:
    """Return prompt, temperature and seed of every text."""
    if not temperatures or not all(math.isfinite(value) and value >= 0 for value in temperatures):
        raise OwnTextError(f"Temperatures must be one or more numbers from 0 on; got {list(temperatures)}.")
    if not 0 <= seed < NUM_SEEDS:
        raise OwnTextError(f"The seed must lie in 0 .. 2^64-1; got {seed}.")
    return [
        (tuple(map(int, prompt)), float(temperatures[index % len(temperatures)]), (seed + index) % NUM_SEEDS)
        for index, prompt in enumerate(prompts)
    ]


def _check(prompt: Sequence[int], hello: pb.Hello, ends: Ends) -> None:
    """Raise InvalidPrompt for a prompt that the worker would reject."""
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
    """Return the number of ids before the first target; 0 for plain text, whose first id is never predicted."""
    first = next((index for index, learned in enumerate(example.learned) if learned), len(example.ids))
    return 0 if first <= 1 else first
