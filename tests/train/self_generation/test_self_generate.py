"""Text that the model writes itself: the same texts however often interrupted, and never a worker left behind."""

import asyncio
import errno
import io
import json
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from space_common.process import WorkerLost, WorkerNotReady, WorkerProcess
from space_common.worker.settings import WorkerSettings
from space_model.loading.load import load_model
from space_model.random_checkpoint import END, FIRST_MASK
from space_model.space_model import SpaceModel
from space_proto import worker_pb2 as pb
from space_server.grpc_server import WorkerService, start_server
from space_server.speculation.controller import FixedLayout
from space_server.worker import Worker
from space_train.data.examples import Example
from space_train.progress import ProgressLines
from space_train.self_generation import self_generate
from space_train.self_generation.self_generate import (
    InvalidPrompt,
    OtherTexts,
    OwnText,
    OwnTextFile,
    OwnTextRecipe,
    TextWorker,
    keep_asked,
    own_examples,
    prompts_of,
    read_own_texts,
    write_asked,
    write_own_texts,
)
from space_train.train_plan import OwnTextError
from tiny_checkpoints import tiny_checkpoint
from transformers import AutoModelForCausalLM

RECIPE = OwnTextRecipe("abc", 12, True)
TEXT = OwnText((1, 2), (3,), 0.7, 9)


def test_a_file_of_other_sampling_params_or_other_content_is_refused_whole(tmp_path: Path) -> None:
    path = tmp_path / "own.jsonl"
    with OwnTextFile(path, RECIPE) as file:
        file.append(TEXT)
    with (
        pytest.raises(OtherTexts, match="max_tokens 12, and 13 is asked for"),
        OwnTextFile(path, OwnTextRecipe("abc", 13, True)),
    ):
        pass
    with pytest.raises(OtherTexts, match="model abc, and abd"), OwnTextFile(path, OwnTextRecipe("abd", 12, True)):
        pass
    path.write_text('{"text": "hello"}\n')
    with pytest.raises(OwnTextError, match=r"Line 1 .* is no text"), OwnTextFile(path, RECIPE):
        pass


def test_a_file_that_another_process_writes_is_waited_for(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path, found = tmp_path / "own.jsonl", list[OwnText]()

    def second() -> None:
        with OwnTextFile(path, RECIPE) as file:
            found.extend(file.texts)

    with OwnTextFile(path, RECIPE) as file:
        waiting = threading.Thread(target=second)
        waiting.start()
        file.append(TEXT)
        while "waiting for another process" not in capsys.readouterr().err:
            assert waiting.is_alive()
    waiting.join(10)
    assert found == [TEXT]


def test_a_full_disk_is_named_and_half_a_line_is_forgotten(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "own.jsonl"
    with OwnTextFile(tmp_path / "one.jsonl", RECIPE) as file:
        file.append(TEXT)
    length = (tmp_path / "one.jsonl").stat().st_size

    class FillsUp(io.FileIO):
        def write(self, data: bytes) -> int:  # type: ignore[override]
            if self.tell() > 2.5 * length:
                raise OSError(errno.ENOSPC, "No space left on device")
            return super().write(data[:50])  # a disk may take a part

    monkeypatch.setattr("space_train.self_generation.self_generate.io.FileIO", FillsUp)
    with OwnTextFile(path, RECIPE) as file:
        file.append(replace(TEXT, seed=0))
        file.append(replace(TEXT, seed=1))
        with pytest.raises(OwnTextError, match=r"No space left on device.*make room"):
            file.append(replace(TEXT, seed=2))
    assert not path.read_bytes().endswith(b"\n")
    monkeypatch.undo()
    with OwnTextFile(path, RECIPE) as file:
        assert [text.seed for text in file.texts] == [0, 1]
    assert path.read_bytes().endswith(b"\n")


def test_a_file_that_cannot_be_opened_is_named(tmp_path: Path) -> None:
    with pytest.raises(OwnTextError, match="cannot be written: Is a directory"), OwnTextFile(tmp_path, RECIPE):
        pass


def test_a_line_says_all_that_its_text_depends_on(tmp_path: Path) -> None:
    path = tmp_path / "own.jsonl"
    with OwnTextFile(path, RECIPE) as file:
        file.append(TEXT)
    assert json.loads(path.read_text()) == {
        "prompt": [1, 2],
        "output": [3],
        "temperature": 0.7,
        "seed": 9,
        "model": "abc",
        "max_tokens": 12,
        "eos_stops": True,
        "banned_ids": [],
    }


def test_examples_learn_the_output_and_come_in_the_order_of_their_seeds(tmp_path: Path) -> None:
    path = tmp_path / "own.jsonl"
    with OwnTextFile(path, RECIPE) as file:
        file.append(TEXT)
        file.append(OwnText((5,), (6, 7), 0.0, 8))
    assert own_examples(path) == [Example([5, 6, 7], [False, True, True]), Example([1, 2, 3], [False, False, True])]


def test_of_a_file_only_what_is_asked_for_with_the_same_sampling_params_is_kept(tmp_path: Path) -> None:
    path, other = tmp_path / "own.jsonl", OwnText((5,), (6, 7, 8), 0.0, 8)
    assert keep_asked(path, RECIPE, {TEXT.question}) == 0.0
    with OwnTextFile(path, RECIPE) as file:
        file.append(other)
        file.append(TEXT)
    with path.open("a") as stream:
        stream.write('{"prompt": [1')
    assert keep_asked(path, RECIPE, {TEXT.question}) == 0.25  # one id of four
    with OwnTextFile(path, RECIPE) as file:
        assert file.texts == [TEXT]
    assert keep_asked(path, replace(RECIPE, model="abd"), {TEXT.question}) == 0.0
    assert not path.exists()


PROMPTS = [[20 + 7 * i % 80 for i in range(first, first + 1 + first % 5)] for first in range(7)]
MAX_TOKENS = 12


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_checkpoint(tmp_path_factory.mktemp("own") / "tiny", window=64)


@pytest.fixture(scope="session")
def model(folder: Path) -> SpaceModel:
    return load_model(folder, dtype="float32", num_threads=1)


@pytest.fixture(scope="session")
def loop() -> Iterator[asyncio.AbstractEventLoop]:
    """Turns in a thread of its own."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    yield loop
    loop.call_soon_threadsafe(loop.stop)
    thread.join()
    loop.close()


class ThreadWorker:
    """A worker in a thread, where self-generation expects a process: it starts at once."""

    loop: asyncio.AbstractEventLoop
    model: SpaceModel
    folder: Path
    num_blocks = 64
    dies: Callable[[int, int], bool]  # number of the start and of the step
    num_starts = 0

    def __init__(self, flags: Sequence[str]) -> None:
        type(self).num_starts += 1
        start, dies = self.num_starts, type(self).dies

        class Mortal(Worker):
            def step(self, report: pb.StepReport | None = None) -> pb.StepReport | None:
                if dies(start, self.num_forwards + 1):
                    raise RuntimeError("out of memory")
                return super().step(report)

        settings = WorkerSettings.parse([*flags, "--listen", "unix:/w"])
        drafts = 0 if settings.speculation == "off" else 5
        self._worker = Mortal(
            self.model,
            num_blocks=self.num_blocks,
            block_size=16,
            max_sequences=settings.max_sequences or 64,
            max_draft_length=drafts,
            controller=FixedLayout.full(drafts) if drafts else None,
        )
        self.address = f"unix:{self.folder / str(start)}"

    def __enter__(self) -> "ThreadWorker":
        starting = start_server(WorkerService(self._worker), self.address)
        self._server, _ = asyncio.run_coroutine_threadsafe(starting, self.loop).result(10)
        return self

    def __exit__(self, *_: object) -> None:
        asyncio.run_coroutine_threadsafe(self._server.stop(grace=1.0), self.loop).result(10)

    code = None

    def obituary(self, what: str) -> str:
        return f"{what}. It said last: nothing"


@pytest.fixture
def workers(
    loop: asyncio.AbstractEventLoop, model: SpaceModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> type[ThreadWorker]:
    class Workers(ThreadWorker):
        dies = staticmethod(lambda start, step: False)

    Workers.loop, Workers.model, Workers.folder = loop, model, tmp_path
    monkeypatch.setattr(self_generate, "WorkerProcess", Workers)
    return Workers


def write(folder: Path, file: Path, prompts: list[list[int]] = PROMPTS, **settings: object) -> self_generate.OwnTexts:
    defaults: dict[str, object] = {"max_tokens": MAX_TOKENS, "seed": 5, "eos_stops": False, "progress": False}
    return write_own_texts(folder, prompts, file=file, **{**defaults, **settings})  # type: ignore[arg-type]


@pytest.mark.usefixtures("workers")
def test_texts_do_not_depend_on_how_many_are_written_at_once_nor_on_speculation(folder: Path, tmp_path: Path) -> None:
    drafted = write(folder, tmp_path / "a.jsonl")
    alone = write(folder, tmp_path / "b.jsonl", max_sequences=1, speculation="off")
    assert drafted.texts == alone.texts
    assert [text.prompt for text in alone.texts] == [tuple(prompt) for prompt in PROMPTS]
    assert [text.temperature for text in alone.texts] == [0.0, 0.7, 1.0, 0.0, 0.7, 1.0, 0.0]
    assert [text.seed for text in alone.texts] == [5, 6, 7, 8, 9, 10, 11]
    assert all(len(text.output) == MAX_TOKENS for text in alone.texts)
    # One text at a time, plainly: a pass for each id (the prompt's gives the first), a row for each id but the last.
    assert alone.counts.num_steps == alone.counts.num_tokens == 7 * MAX_TOKENS
    assert alone.counts.num_rows == sum(map(len, PROMPTS)) + 7 * (MAX_TOKENS - 1)
    assert drafted.counts.num_steps < alone.counts.num_steps


@pytest.mark.usefixtures("workers")
def test_greedy_text_is_what_transformers_generates(folder: Path, tmp_path: Path) -> None:
    own = write(folder, tmp_path / "own.jsonl", temperatures=[0.0])
    oracle = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    masks = list(range(FIRST_MASK, FIRST_MASK + 5))
    for text in own.texts:
        ids = torch.tensor([text.prompt])
        wanted = oracle.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            do_sample=False,
            max_new_tokens=MAX_TOKENS,
            eos_token_id=None,
            pad_token_id=END,
            suppress_tokens=masks,
        )
        assert text.output == tuple(wanted[0, ids.shape[1] :].tolist())


def test_an_interrupted_file_is_completed_once(folder: Path, tmp_path: Path, workers: type[ThreadWorker]) -> None:
    whole = write(folder, tmp_path / "whole.jsonl")
    lines = (tmp_path / "whole.jsonl").read_bytes().splitlines(keepends=True)
    cut = tmp_path / "cut.jsonl"
    cut.write_bytes(b"".join(lines[:3]) + lines[3][:20])  # the process was killed while it wrote the fourth
    resumed = write(folder, cut)
    assert resumed.texts == whole.texts
    assert (resumed.num_kept, resumed.counts.num_tokens) == (3, 4 * MAX_TOKENS)
    assert len(cut.read_bytes().splitlines()) == len(PROMPTS)
    assert own_examples(cut) == own_examples(tmp_path / "whole.jsonl")
    num_starts = workers.num_starts
    again = write(folder, cut)
    assert (again.texts, again.num_kept, again.counts.num_steps) == (whole.texts, 7, 0)
    assert workers.num_starts == num_starts  # no worker for nothing


def test_one_worker_writes_texts_of_several_kinds(folder: Path, tmp_path: Path, workers: type[ThreadWorker]) -> None:
    alone = write(folder, tmp_path / "alone.jsonl")
    num_starts, questions = workers.num_starts, [text.question for text in alone.texts]
    with TextWorker(folder) as worker:
        parts = [
            write_asked(worker, asked, max_tokens=MAX_TOKENS, eos_stops=False, progress=False, file=tmp_path / name)
            for name, asked in (("turns.jsonl", questions[:3]), ("answers.jsonl", questions[3:]))
        ]
    assert workers.num_starts == num_starts + 1
    assert parts[0].texts + parts[1].texts == alone.texts


class Seconds:
    """Stands for the module `time`: a second passes at each look."""

    def __init__(self) -> None:
        self.now = 0.0

    def monotonic(self) -> float:
        self.now += 1.0
        return self.now


@pytest.mark.usefixtures("workers")
def test_texts_that_the_time_ends_are_kept_as_far_as_they_go_and_gone_on_with(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = write(folder, tmp_path / "whole.jsonl")
    few = {"max_sequences": 2, "speculation": "off"}
    with monkeypatch.context() as patched:
        patched.setattr(self_generate, "time", Seconds())
        patched.setattr(self_generate, "LEAST_IDS", 2)
        cut = write(folder, tmp_path / "own.jsonl", until=MAX_TOKENS + 8.0, **few)
    assert [text.is_unfinished for text in cut.texts] == [False, False, True, True]
    assert all(2 <= len(text.output) < MAX_TOKENS for text in cut.texts[2:])
    for text, complete in zip(cut.texts, whole.texts, strict=False):
        assert text.output == complete.output[: len(text.output)]
    begun = sum(len(text.output) for text in cut.texts)
    rest = write(folder, tmp_path / "own.jsonl", **few)
    assert (rest.texts, rest.num_kept) == (whole.texts, 2)
    assert rest.counts.num_tokens == len(PROMPTS) * MAX_TOKENS - begun, "no id is written twice"
    assert own_examples(tmp_path / "own.jsonl") == own_examples(tmp_path / "whole.jsonl")


def test_no_worker_starts_when_the_time_is_up(folder: Path, tmp_path: Path, workers: type[ThreadWorker]) -> None:
    whole = write(folder, tmp_path / "own.jsonl", PROMPTS[:1])
    assert write(folder, tmp_path / "own.jsonl", until=time.monotonic()).texts == whole.texts
    assert workers.num_starts == 1


@pytest.mark.usefixtures("workers")
def test_a_start_that_takes_all_the_time_still_gives_a_text(folder: Path, tmp_path: Path) -> None:
    late = write(folder, tmp_path / "own.jsonl", until=time.monotonic(), max_sequences=2, speculation="off")
    assert [len(text.output) for text in late.texts] == [MAX_TOKENS] * 2, "shorter than LEAST_IDS: until one ends"


def test_a_restart_keeps_no_unfinished_text(tmp_path: Path) -> None:
    path = tmp_path / "own.jsonl"
    with OwnTextFile(path, RECIPE) as file:
        file.append(TEXT)
        file.append(replace(TEXT, seed=10, is_unfinished=True))
    assert [text.is_unfinished for text in read_own_texts(path)] == [False, True]
    keep_asked(path, RECIPE, {TEXT.question, replace(TEXT, seed=10).question})
    assert read_own_texts(path) == [TEXT]


def test_the_time_left_is_by_the_last_steps_and_not_by_the_first_which_reads_prompts() -> None:
    stream, counts = io.StringIO(), self_generate.ScribeCounts()
    lines = ProgressLines(stream=stream, every=0.0, clock=lambda: 0.0)
    shown = self_generate._GenerationProgress(lines, 10, counts, "own texts", until=1000.0)
    shown.start_worker()
    for step in range(100):  # ten texts of 100 ids: a first step of 60 s, then ten ids a second
        counts.num_tokens += 10
        shown.show([], [step + 1] * 10, 60.0 + step, 100)
    said = stream.getvalue().splitlines()
    assert said[0] == "own texts: 0 of 10 (1 %)", "nothing is known yet"
    assert said[10].startswith("own texts: 0 of 10, 10 tokens/s, about 1 min 29 s more")
    counts.num_tokens += 10
    shown.show([], [50] * 10, 990.0, 100)
    assert "about 10 s more" in stream.getvalue().splitlines()[-1], "writing ends then"


@pytest.mark.usefixtures("workers")
def test_a_text_that_reaches_the_end_of_text_stops_there_and_keeps_it(folder: Path, tmp_path: Path) -> None:
    endless = write(folder, tmp_path / "endless.jsonl", max_tokens=40, temperatures=[3.0])
    ended = write(folder, tmp_path / "ended.jsonl", max_tokens=40, temperatures=[3.0], eos_stops=True)
    assert any(END in text.output for text in endless.texts)
    for long, short in zip(endless.texts, ended.texts, strict=True):
        end = long.output.index(END) + 1 if END in long.output else len(long.output)
        assert short.output == long.output[:end]


@pytest.mark.usefixtures("workers")
def test_a_banned_id_is_never_written(folder: Path, tmp_path: Path) -> None:
    free = write(folder, tmp_path / "free.jsonl")
    common = free.texts[0].output[0]
    banned = write(folder, tmp_path / "banned.jsonl", banned_ids=[common])
    assert all(common not in text.output for text in banned.texts)


def test_texts_wait_for_pages_where_there_are_few(folder: Path, tmp_path: Path, workers: type[ThreadWorker]) -> None:
    plenty = write(folder, tmp_path / "plenty.jsonl", max_tokens=30)
    workers.num_blocks = 4  # of 16 slots: one text of three blocks, or two of two
    assert write(folder, tmp_path / "few.jsonl", max_tokens=30).texts == plenty.texts


def test_a_worker_that_dies_is_started_again_and_goes_on(
    folder: Path, tmp_path: Path, workers: type[ThreadWorker], capsys: pytest.CaptureFixture[str]
) -> None:
    whole = write(folder, tmp_path / "whole.jsonl")
    workers.num_starts = 0
    workers.dies = staticmethod(lambda start, step: start == 1 and step == 7)
    again = write(folder, tmp_path / "again.jsonl", max_sequences=3, speculation="off")
    assert again.texts == whole.texts
    assert workers.num_starts == 2
    assert "started again" in capsys.readouterr().err
    assert again.counts.num_tokens == 7 * MAX_TOKENS  # what the first had written was not written again


def test_a_worker_that_dies_twice_loses_no_text(folder: Path, tmp_path: Path, workers: type[ThreadWorker]) -> None:
    first = write(folder, tmp_path / "own.jsonl", PROMPTS[:2])
    workers.num_starts = 0
    workers.dies = staticmethod(lambda start, step: True)
    with pytest.raises(WorkerLost, match="out of memory"):
        write(folder, tmp_path / "own.jsonl")
    assert workers.num_starts == 2
    assert read_own_texts(tmp_path / "own.jsonl") == list(first.texts)


@pytest.mark.usefixtures("workers")
@pytest.mark.parametrize(
    ("prompt", "words"),
    [
        ([], "1 .. 63 ids"),
        ([20] * 64, "got 64"),
        ([20, 128], "id 128.*vocabulary of 128"),
        ([20, FIRST_MASK], "id 4, which is a mask token"),
    ],
)
def test_a_prompt_that_cannot_be_continued_is_named(
    folder: Path, tmp_path: Path, prompt: list[int], words: str
) -> None:
    with pytest.raises(InvalidPrompt, match=words):
        write(folder, tmp_path / "own.jsonl", [[20], prompt])


def test_settings_that_make_no_sense_are_refused_before_anything_is_started(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(OwnTextError, match="max_tokens must be at least 1; got 0"):
        write(folder, tmp_path / "own.jsonl", max_tokens=0)
    with pytest.raises(OwnTextError, match="Temperatures"):
        write(folder, tmp_path / "own.jsonl", temperatures=[])
    with pytest.raises(OwnTextError, match="seed must lie in"):
        write(folder, tmp_path / "own.jsonl", seed=-1)
    assert not (tmp_path / "own.jsonl").exists()


def test_prompts_are_those_of_the_examples_and_windows_of_plain_text() -> None:
    chat = Example([1, 2, 3, 4], [False, False, False, True])
    text = Example(list(range(10, 30)), [False] + [True] * 19)
    prompts = prompts_of([chat, text], 40, length=5)
    assert len(prompts) == 40
    assert prompts.count([1, 2, 3]) == 20
    windows = [prompt for prompt in prompts if prompt != [1, 2, 3]]
    assert all(window == list(range(window[0], window[0] + 5)) for window in windows)
    assert len({window[0] for window in windows}) > 5
    assert prompts == prompts_of([chat, text], 40, length=5)
    assert prompts_of([chat, text], 2, longest=2) == prompts_of([text], 2)
    with pytest.raises(OwnTextError, match="None of the 1 examples"):
        prompts_of([chat], 1, longest=2)


def is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


@pytest.mark.slow
@pytest.mark.e2e
def test_a_real_worker_process_writes_the_same_texts_though_it_is_killed(
    folder: Path, tmp_path: Path, workers: type[ThreadWorker], monkeypatch: pytest.MonkeyPatch
) -> None:
    wanted = write(folder, tmp_path / "wanted.jsonl", seed=1)
    started: list[int] = []

    class Watched(WorkerProcess):
        def __enter__(self) -> WorkerProcess:
            entered = super().__enter__()
            started.append(self.pid)
            return entered

    class KillsOnce(OwnTextFile):
        def append(self, text: OwnText) -> None:
            super().append(text)
            if len(self.texts) == 1:
                os.kill(started[0], signal.SIGKILL)

    monkeypatch.setattr(self_generate, "WorkerProcess", Watched)
    monkeypatch.setattr(self_generate, "OwnTextFile", KillsOnce)
    own = write(folder, tmp_path / "own.jsonl", seed=1, dtype="float32", num_threads=1, max_sequences=1)
    assert own.texts == wanted.texts
    assert len(started) == 2
    assert not any(map(is_alive, started))


@pytest.fixture
def script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], str]:
    """Write a module that can be run in place of the worker; its name."""

    def written(code: str) -> str:
        (tmp_path / "not_quite_a_worker.py").write_text(code)
        return "not_quite_a_worker"

    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    return written


def test_a_worker_that_cannot_start_is_quoted(script: Callable[[str], str]) -> None:
    module = script("import sys; print('loading', file=sys.stderr); sys.exit('error: no weights')")
    process = WorkerProcess(["--model", "x"], module=module)
    with pytest.raises(WorkerNotReady, match=r"ended with code 1. It said last:\n    loading\n    error: no weights"):
        process.__enter__()


def test_a_worker_that_never_gets_ready_is_given_up_and_ended(script: Callable[[str], str]) -> None:
    process = WorkerProcess([], start_timeout=0.3, module=script("import time; time.sleep(600)"))
    with pytest.raises(WorkerNotReady, match=r"within 0\.3 s"):
        process.__enter__()
    assert process.pid == 0


def test_whatever_leaves_the_block_ends_the_process(script: Callable[[str], str]) -> None:
    module = script(
        "import sys, time; print('ready', sys.argv[sys.argv.index('--listen') + 1], flush=True); time.sleep(60)"
    )
    pids: list[int] = []

    def interrupted() -> None:
        with WorkerProcess([], module=module) as process:
            assert process.address.startswith("unix:")
            assert is_alive(process.pid)
            pids.append(process.pid)
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert not is_alive(pids[0])


def test_a_worker_that_was_killed_is_said_to_have_been(script: Callable[[str], str]) -> None:
    said = "print('step 9', file=sys.stderr, flush=True)"
    module = script(f"import sys, time; {said}; print('ready x', flush=True); time.sleep(60)")
    with WorkerProcess([], module=module) as process:
        os.kill(process.pid, signal.SIGKILL)
        assert process.obituary("It is gone") == "It is gone: it was ended by SIGKILL. It said last:\n    step 9"
