"""Training text that the model writes itself, through a worker: masks learn most from text like that they draft for
(the idea: BiTA, arXiv 2402.12522).

A text depends only on weights, prompt, temperature and seed (speculation only makes it faster), so neither
interruptions nor the batch size change it. Texts are kept in an append-only JSON-lines file.
"""

from __future__ import annotations

import contextlib
import fcntl
import io
import json
import math
import os
import sys
import time
from collections import Counter, deque
from collections.abc import Collection, Container, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
from space_common.process import WorkerLost, WorkerProcess
from space_common.worker.client import ClientSequence, GrpcWorker, SequenceRequest, WorkerClient
from space_common.worker.settings import worker_argv
from space_model.checkpoint.checkpoint import Checkpoint
from space_proto import worker_pb2 as pb
from tqdm import tqdm

from space_train.data.examples import Example
from space_train.progress import ProgressLines, duration
from space_train.run_folder import fingerprint
from space_train.train_plan import OwnTextError


class OtherTexts(OwnTextError):
    """The file holds texts of another model, or generated with other sampling parameters."""


Question = tuple[tuple[int, ...], float, int]  # prompt, temperature and seed, which determine the text under one recipe


@dataclass(frozen=True)
class OwnText:
    """A prompt and the model's continuation."""

    prompt: tuple[int, ...]
    output: tuple[int, ...]
    temperature: float
    seed: int
    is_unfinished: bool = False  # the time for writing ended before the text did

    @property
    def question(self) -> Question:
        return self.prompt, self.temperature, self.seed


@dataclass(frozen=True)
class OwnTextRecipe:
    """Everything a text depends on besides its question; the same for all texts of a file."""

    model: str  # fingerprint of the checkpoint
    max_tokens: int
    eos_stops: bool
    banned_ids: tuple[int, ...] = ()


class OwnTextFile:
    """The file, open for appending. Entering waits until no other process writes to it.

    with OwnTextFile(path, recipe) as file:
        file.texts   # texts already in the file
        file.append(text)
    """

    def __init__(self, path: Path, recipe: OwnTextRecipe) -> None:
        self.path, self.texts = path, list[OwnText]()
        self._recipe = _plain(recipe)
        self._stream: io.FileIO | None = None

    def __enter__(self) -> OwnTextFile:
        """Raises OtherTexts, or OwnTextError for a file that is malformed or cannot be written."""
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            stream = self._stream = io.FileIO(self.path, "ab")
        except OSError as error:
            raise OwnTextError(f"{self.path} cannot be written: {error.strerror}. Name another file.") from error
        try:
            try:
                fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                print(f"waiting for another process that writes {self.path}", file=sys.stderr, flush=True)
                fcntl.flock(stream, fcntl.LOCK_EX)
            stream.truncate(whole_lines(self.path))  # a killed run may have left half a line
            self.texts = list(_texts(self.path, self._recipe))
        except BaseException:
            stream.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        if self._stream is not None:
            with self._stream as stream:
                os.fsync(stream.fileno())

    def append(self, text: OwnText) -> None:
        """Append one line. Raises OwnTextError if the disk is full."""
        if self._stream is None:
            raise RuntimeError("OwnTextFile.append is called outside its `with` block")
        fields = asdict(text) | self._recipe
        if not text.is_unfinished:
            del fields["is_unfinished"]
        line = json.dumps(fields, separators=(",", ":")).encode() + b"\n"
        try:
            while line:
                line = line[self._stream.write(line) or 0 :]
        except OSError as error:
            raise OwnTextError(
                f"{self.path} cannot be written: {error.strerror}. What it holds is kept: make room, and start again."
            ) from error
        self.texts.append(text)


def read_own_texts(path: Path) -> list[OwnText]:
    """Return the texts of a file, ordered by seed; of an unfinished text and its continuation the latter."""
    found = {text.question: text for text in _texts(path, {})}
    return sorted(found.values(), key=lambda text: (text.seed, text.temperature, text.prompt))


def keep_asked(path: Path, recipe: OwnTextRecipe, asked: Container[Question]) -> float:
    """Drop lines of another recipe, texts that are not in `asked` or unfinished, and malformed lines. Return the share
    of the written ids that is kept."""
    lines, num_ids, num_kept = list[bytes](), 0, 0
    for number, line in enumerate(path.read_bytes().splitlines(keepends=True) if path.is_file() else (), start=1):
        with contextlib.suppress(OwnTextError):
            text = _text(path, number, line, {})
            num_ids += len(text.output)
            if text.question in asked and not text.is_unfinished and _text(path, number, line, _plain(recipe)):
                lines.append(line)
                num_kept += len(text.output)
    if not lines:
        path.unlink(missing_ok=True)
        return 0.0
    partial = path.with_suffix(".partial")
    partial.write_bytes(b"".join(lines))
    partial.replace(path)
    return num_kept / max(num_ids, 1)


def whole_lines(path: Path) -> int:
    """Return the bytes up to the end of the last complete line."""
    with path.open("rb") as stream:
        end = stream.seek(0, os.SEEK_END)
        while end:
            start = max(0, end - 65536)
            stream.seek(start)
            newline = stream.read(end - start).rfind(b"\n")
            if newline >= 0:
                return start + newline + 1
            end = start
    return 0


def _texts(path: Path, recipe: dict[str, Any]) -> Iterator[OwnText]:
    """Yield the texts of the complete lines, checking that each was written under `recipe`."""
    with path.open("rb") as stream:
        for number, line in enumerate(stream, start=1):
            if not line.endswith(b"\n"):
                return  # half a line of a run that was killed
            yield _text(path, number, line, recipe)


def _text(path: Path, number: int, line: bytes, recipe: dict[str, Any]) -> OwnText:
    """Parse line `number`, checking that it was written under `recipe`."""
    try:
        fields = json.loads(line)
        both = tuple(fields["prompt"]), tuple(fields["output"])
        is_unfinished = bool(fields.get("is_unfinished", False))
        text = OwnText(*both, float(fields["temperature"]), int(fields["seed"]), is_unfinished)
    except (ValueError, KeyError, TypeError) as error:
        raise OwnTextError(
            f"Line {number} of {path} is no text of a model's own ({error!r}). Name another file, or delete it."
        ) from error
    for name, value in recipe.items():
        if fields.get(name) != value:
            raise OtherTexts(
                f"{path} was written with {name} {fields.get(name)}, and {value} is asked for. "
                "Name another file, or delete this one."
            )
    return text


def _plain(recipe: OwnTextRecipe) -> dict[str, Any]:
    """Return the recipe as it reads back from JSON."""
    return asdict(recipe) | {"banned_ids": list(recipe.banned_ids)}


MAX_PREFILL_ROWS = 1024  # prompt rows per step: time to first token does not matter here, so prefill chunks are large


class TextFailed(OwnTextError):
    """The worker reported an error for this text."""


@dataclass
class UnfinishedText:
    """A text in generation; its tokens so far are kept if the worker dies."""

    prompt: tuple[int, ...]
    temperature: float
    seed: int
    output: list[int] = field(default_factory=list)

    @property
    def finished(self) -> OwnText:
        return OwnText(self.prompt, tuple(self.output), self.temperature, self.seed)

    @property
    def cut(self) -> OwnText:
        return replace(self.finished, is_unfinished=True)


@dataclass
class ScribeCounts:
    """Steps, rows and tokens of the generation."""

    num_steps: int = 0  # forward passes
    num_rows: int = 0  # rows of all passes: chain, masks and prompts
    num_tokens: int = 0  # generated

    def count(self, report: pb.StepReport) -> None:
        stats = report.stats
        rows = stats.chain_rows + stats.mask_rows + stats.prefill_rows
        self.num_steps += rows > 0
        self.num_rows += rows
        self.num_tokens += sum(len(part.tokens) for part in report.sequences)


@dataclass(frozen=True)
class Ends:
    """End conditions of texts, and banned ids."""

    max_tokens: int
    eos_ids: tuple[int, ...]
    banned_ids: tuple[int, ...] = ()

    def num_blocks(self, prompt: Sequence[int], hello: pb.Hello) -> int:
        """Return the blocks of a whole text; its last id has no KV cache entry."""
        return -(-min(len(prompt) + self.max_tokens - 1, hello.window) // hello.block_size)


def write_texts(
    worker: GrpcWorker, texts: Sequence[UnfinishedText], ends: Ends, counts: ScribeCounts
) -> Iterator[list[UnfinishedText]]:
    """Yield, after every step, the texts that it finished, in FIFO order of admission. Each text is admitted with all
    its pages, so that no running text waits for pages. Raises TextFailed or WorkerLost."""
    hello = worker.hello
    client = WorkerClient(
        worker, max_prefill_rows=MAX_PREFILL_ROWS, max_draft_length=hello.max_draft_length, keeps_reports=False,
        readmits=True,
    )  # fmt: skip
    limits = pb.Limits(max_tokens=ends.max_tokens, eos_ids=ends.eos_ids)
    banned = [pb.IdRun(ids=[id_]) for id_ in ends.banned_ids]

    def asked() -> Iterator[ClientSequence]:
        for text in texts:
            sampling = pb.Sampling(seed=text.seed, temperature=text.temperature, bad_words=banned)
            request = SequenceRequest(text.prompt, sampling, limits, max_draft_length=hello.max_draft_length)
            yield ClientSequence(request, text.output, key=text)

    def num_pages(sequence: ClientSequence) -> int:
        return ends.num_blocks(sequence.request.prompt, hello)

    for report, _ in client.run_in_turn(asked(), num_pages, at_once=hello.max_sequences):
        if report is None:
            continue
        counts.count(report)
        ended = []
        for part in report.sequences:
            if part.finish == pb.FINISH_NONE:
                continue
            text: UnfinishedText = client.running[part.seq_id].key
            if part.finish == pb.FINISH_ERROR:
                raise TextFailed(f"The text of seed {text.seed} ({len(text.prompt)} prompt ids) failed: {part.error}")
            client.release(part.seq_id)
            if part.finish != pb.FINISH_READMIT:
                ended.append(text)
        yield ended


class TextWorker:
    """The worker process that writes texts. It is started when a text is wanted, and ends with the block.

    with TextWorker("demo", max_sequences=64) as worker:
        write_asked(worker, ...)
        write_asked(worker, ...)   # by the same process
    """

    def __init__(self, checkpoint: Path | str, **settings: object) -> None:
        """`settings`: of `spaceserve worker`, such as max_sequences and device."""
        auto = dict.fromkeys(("device", "dtype", "speculation"), "auto")
        self.checkpoint = checkpoint
        self._flags = worker_argv({"model": checkpoint, "log_level": "WARNING", **auto, **settings})
        self._process: WorkerProcess | None = None
        self._stopping = contextlib.ExitStack()

    def __enter__(self) -> TextWorker:
        return self

    def __exit__(self, *error: object) -> None:
        self._process = None
        self._stopping.close()

    @property
    def is_running(self) -> bool:
        """Whether there is a process, which has not ended."""
        return self._process is not None and self._process.code is None

    def address(self) -> str:
        """Return the address of the process, started if there is none. Raises WorkerNotReady."""
        if self._process is None or self._process.code is not None:
            self._stopping.close()
            self._process = self._stopping.enter_context(WorkerProcess(self._flags))
        return self._process.address

    def give_up(self, lost: WorkerLost) -> WorkerLost:
        """Stop a process that does not answer. Return the error with what the process said last."""
        words = str(lost) if self._process is None else self._process.obituary(str(lost))
        self.__exit__()
        return WorkerLost(words)


LEAST_IDS = 16  # of a text that is kept unfinished
TEMPERATURES = (0.0, 0.7, 1.0)  # temperatures that prompts use in turn, because drafts are served at all of them
NUM_SEEDS = 2**64


class InvalidPrompt(OwnTextError):
    """A prompt that the model cannot continue."""


@dataclass(frozen=True)
class OwnTexts:
    """The requested texts that were written in time, in the order of their prompts, and the cost of the new ones."""

    texts: tuple[OwnText, ...]
    num_kept: int  # texts that were already in the file
    counts: ScribeCounts  # of the new texts: the compute is 2 FLOPs x weights x rows
    seconds: float  # from the start of the worker on


def write_own_texts(
    checkpoint: Path | str,
    prompts: Sequence[Sequence[int]],
    *,
    max_tokens: int,
    temperatures: Sequence[float] = TEMPERATURES,
    seed: int = 0,
    eos_stops: bool = True,
    banned_ids: Sequence[int] = (),
    progress: bool = True,
    until: float | None = None,
    file: Path,
    **worker: object,
) -> OwnTexts:
    """Generate a continuation of every prompt, and append the texts to `file` as they finish.

    Prompt i uses temperature i mod their number, and seed + i. Texts already in `file` are not generated again.
    `eos_stops`: a text ends with EOS, which is kept; otherwise only after `max_tokens` ids (or at the window's end).
    `banned_ids` are never sampled. `until`: when writing ends, on `time.monotonic`, or as soon as there is a text:
    those of LEAST_IDS or more are then kept unfinished, and a later call goes on with them. `worker`: settings of
    `spaceserve worker`, such as max_sequences and device.

    A worker that dies is restarted and generation continues. Raises WorkerLost if it dies twice without finishing a
    text in between, WorkerNotReady for a checkpoint that cannot be served, and OwnTextError for unusable prompts or
    an unusable file.
    """
    options: dict[str, Any] = {"eos_stops": eos_stops, "banned_ids": banned_ids, "progress": progress, "until": until}
    with TextWorker(checkpoint, **worker) as process:
        return write_asked(process, _asked(prompts, temperatures, seed), max_tokens=max_tokens, file=file, **options)


def write_asked(
    worker: TextWorker,
    asked: Sequence[Question],
    *,
    max_tokens: int,
    eos_stops: bool = True,
    banned_ids: Sequence[int] = (),
    progress: bool = True,
    what: str = "own texts",
    until: float | None = None,
    file: Path,
) -> OwnTexts:
    """Generate the text of every question, as `write_own_texts` does. `what`: names the texts in the progress."""
    if max_tokens < 1:
        raise OwnTextError(f"max_tokens must be at least 1; got {max_tokens}.")
    recipe = OwnTextRecipe(fingerprint(Checkpoint.open(worker.checkpoint)), max_tokens, eos_stops, tuple(banned_ids))
    started, tally = time.monotonic(), ScribeCounts()
    with OwnTextFile(file, recipe) as own:
        there = {text.question: text for text in own.texts}
        kept = {question for question, text in there.items() if not text.is_unfinished}
        todo = {q: UnfinishedText(*q, [*there[q].output] if q in there else []) for q in asked if q not in kept}
        lines = ProgressLines(is_off=not progress or not todo)
        with contextlib.closing(lines):
            _write_all(todo, own, worker, recipe, tally, _GenerationProgress(lines, len(todo), tally, what, until))
        for text in todo.values():
            if len(text.output) >= LEAST_IDS:
                own.append(text.cut)
        texts = {text.question: text for text in own.texts}
    num_kept = sum(question in kept for question in asked)
    found = tuple(texts[question] for question in asked if question in texts)
    return OwnTexts(found, num_kept, tally, time.monotonic() - started)


def forget_others(checkpoint: Path | str, prompts: Sequence[Sequence[int]], *, max_tokens: int, file: Path) -> float:
    """Keep only the texts of `file` that `write_own_texts` would request. Return the share of ids that is kept."""
    recipe = OwnTextRecipe(fingerprint(Checkpoint.open(checkpoint)), max_tokens, eos_stops=True)
    return keep_asked(file, recipe, frozenset(_asked(prompts, TEMPERATURES, seed=0)))


def own_examples(file: Path, prompts: Sequence[Sequence[int]] | None = None) -> list[Example]:
    """Return the texts of a file as examples, ordered by seed: outputs are targets, prompts are context. `prompts`:
    only the texts that `write_own_texts` returns for them; a file may hold more, of other prompts."""
    asked = None if prompts is None else frozenset(_asked(prompts, TEMPERATURES, seed=0))
    return [
        Example(ids=[*text.prompt, *text.output], learned=[False] * len(text.prompt) + [True] * len(text.output))
        for text in read_own_texts(file)
        if asked is None or text.question in asked
    ]


def prompts_of(
    examples: Sequence[Example], count: int, *, length: int = 64, longest: int | None = None, seed: int = 0
) -> list[list[int]]:
    """Return `count` prompts for the model to continue. An example with a prompt of at most `longest` ids gives that
    prompt; plain text gives `length` ids from a random position. Examples are used in random order, and again in a new
    order if there are too few."""
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


RATE_SECONDS, LEAST_RATE_SECONDS = 20.0, 3.0
"""The rate shown is of the last steps within RATE_SECONDS; no time left is shown before LEAST_RATE_SECONDS."""


class _GenerationProgress:
    """Shows how many texts are finished, the tokens per second of the last steps, and the time left. `until`: when
    writing ends, on `time.monotonic`."""

    def __init__(
        self, lines: ProgressLines, num_texts: int, counts: ScribeCounts, what: str, until: float | None = None
    ) -> None:
        self._lines, self._num_texts, self._counts, self._what = lines, num_texts, counts, what
        self.until = math.inf if until is None else until
        self._num_ended, self._num_tokens, self._num_stopped = 0, 0, 0
        self._steps = deque[tuple[float, int]]()  # times after the steps, and the tokens until then

    def show_loading(self) -> None:
        self._lines.show(f"{self._what}: loading the model", self._num_ended / self._num_texts)

    def start_worker(self) -> None:
        """Measure the rate anew: a worker has loaded the model. Its first step, which reads prompts, does not count."""
        self._steps.clear()

    def show(self, ended: Sequence[UnfinishedText], unfinished: Collection[int], now: float, max_tokens: int) -> None:
        """Show the progress after a step. `ended`: texts that it finished; `unfinished`: lengths of the others."""
        self._num_ended += len(ended)
        self._num_tokens += sum(len(text.output) for text in ended)
        self._num_stopped += sum(len(text.output) < max_tokens for text in ended)
        written = self._num_tokens + sum(unfinished)
        left = tokens_left(unfinished, max_tokens, self._num_stopped / max(1, written))
        text = f"{self._what}: {self._num_ended} of {self._num_texts}"
        self._steps.append((now, self._counts.num_tokens))
        while len(self._steps) > 2 and now - self._steps[1][0] >= RATE_SECONDS:
            self._steps.popleft()
        since, before = self._steps[0]
        if now - since >= LEAST_RATE_SECONDS and (rate := (self._counts.num_tokens - before) / (now - since)):
            text += f", {rate:,.0f} tokens/s, about {duration(max(0.0, min(left / rate, self.until - now)))} more"
        self._lines.show(text, written / max(1.0, written + left), is_due=self._num_ended == self._num_texts)


def tokens_left(lengths: Collection[int], max_tokens: int, stops: float) -> float:
    """Return the ids that unfinished texts of these `lengths` are expected to get, where each id ends its text with
    probability `stops`. The mean length of those that have ended would be too short: short texts end first."""
    mean = 1 / stops if stops else math.inf
    counted = Counter(lengths)
    return sum(
        count * (mean * -math.expm1(-(max_tokens - length) / mean) if stops else max_tokens - length)
        for length, count in counted.items()
    )


def _write_all(
    todo: dict[Question, UnfinishedText],
    own: OwnTextFile,
    worker: TextWorker,
    recipe: OwnTextRecipe,
    tally: ScribeCounts,
    progress: _GenerationProgress,
) -> None:
    """Generate until `todo` is empty or the time is up, but not before there is a text to learn from. A lost worker is
    restarted if a text has finished since the last loss."""

    def write_with(address: str) -> None:
        with GrpcWorker(address) as stream:
            ends = Ends(recipe.max_tokens, tuple(stream.hello.eos_ids) if recipe.eos_stops else (), recipe.banned_ids)
            for text in todo.values():
                _check(text.prompt, stream.hello, ends)
            for ended in write_texts(stream, list(todo.values()), ends, tally):
                for text in ended:
                    own.append(text.finished)
                    del todo[text.finished.question]
                unfinished = [len(text.output) for text in todo.values()]
                now = time.monotonic()
                progress.show(ended, unfinished, now, recipe.max_tokens)
                if now >= progress.until and has_some():
                    break

    def has_some() -> bool:
        return bool(own.texts) or any(len(text.output) >= LEAST_IDS for text in todo.values())

    num_left_at_loss = None
    while todo and not (time.monotonic() >= progress.until and has_some()):
        if not worker.is_running:
            progress.show_loading()
        address = worker.address()
        progress.start_worker()
        try:
            write_with(address)
        except WorkerLost as error:
            lost = worker.give_up(error)
            if num_left_at_loss == len(todo):
                raise lost from error
            num_left_at_loss = len(todo)
            first_line = str(lost).partition("\n")[0]
            tqdm.write(f"{first_line} It is started again; no text is lost.", file=sys.stderr)


def _asked(prompts: Sequence[Sequence[int]], temperatures: Sequence[float], seed: int) -> list[Question]:
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
