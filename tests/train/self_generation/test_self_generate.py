"""Text that the model writes itself: the same texts however often interrupted, and never a worker left behind."""

import asyncio
import os
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest
import torch
from space_common.process import WorkerLost, WorkerProcess
from space_common.worker_settings import WorkerSettings
from space_model.loading.load import load_model
from space_model.space_model import SpaceModel
from space_model.testing import END, FIRST_MASK, tiny_checkpoint
from space_proto import worker_pb2 as pb
from space_server.grpc_server import WorkerService, start_server
from space_server.speculation.controller import FixedLayout
from space_server.worker import Worker
from space_train.data.examples import Example
from space_train.self_generation import self_generate
from space_train.self_generation.self_generate import (
    InvalidPrompt,
    OwnText,
    OwnTextFile,
    own_examples,
    prompts_of,
    read_own_texts,
    write_own_texts,
)
from space_train.train_plan import OwnTextError
from transformers import AutoModelForCausalLM

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

        settings = WorkerSettings.parse([*flags, "--listen", "unix:/w"], {})
        drafts = 0 if settings.speculation == "off" else 5
        self._worker = Mortal(
            self.model,
            num_blocks=self.num_blocks,
            block_size=16,
            max_sequences=settings.max_sequences,
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
def test_the_texts_do_not_depend_on_how_many_are_written_at_once_nor_on_speculation(
    folder: Path, tmp_path: Path
) -> None:
    drafted = write(folder, tmp_path / "a.jsonl")
    alone = write(folder, tmp_path / "b.jsonl", max_concurrent=1, speculation="off")
    assert drafted.texts == alone.texts
    assert [text.prompt for text in alone.texts] == [tuple(prompt) for prompt in PROMPTS]
    assert [text.temperature for text in alone.texts] == [0.0, 0.7, 1.0, 0.0, 0.7, 1.0, 0.0]
    assert [text.seed for text in alone.texts] == [5, 6, 7, 8, 9, 10, 11]
    assert all(len(text.output) == MAX_TOKENS for text in alone.texts)
    # One text at a time, plainly: a pass for each id (the prompt's gives the first), a row for each id but the last.
    assert alone.num_steps == alone.num_tokens == alone.num_new_tokens == 7 * MAX_TOKENS
    assert alone.num_rows == sum(map(len, PROMPTS)) + 7 * (MAX_TOKENS - 1)
    assert drafted.num_steps < alone.num_steps


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


def test_an_interrupted_file_is_completed_and_nothing_is_written_twice(
    folder: Path, tmp_path: Path, workers: type[ThreadWorker]
) -> None:
    whole = write(folder, tmp_path / "whole.jsonl")
    lines = (tmp_path / "whole.jsonl").read_bytes().splitlines(keepends=True)
    cut = tmp_path / "cut.jsonl"
    cut.write_bytes(b"".join(lines[:3]) + lines[3][:20])  # the process was killed while it wrote the fourth
    resumed = write(folder, cut)
    assert resumed.texts == whole.texts
    assert (resumed.num_kept, resumed.num_new_tokens) == (3, 4 * MAX_TOKENS)
    assert len(cut.read_bytes().splitlines()) == len(PROMPTS)
    assert own_examples(cut) == own_examples(tmp_path / "whole.jsonl")
    num_starts = workers.num_starts
    again = write(folder, cut)
    assert (again.texts, again.num_kept, again.num_steps) == (whole.texts, 7, 0)
    assert workers.num_starts == num_starts  # no worker for nothing


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
    again = write(folder, tmp_path / "again.jsonl", max_concurrent=3, speculation="off")
    assert again.texts == whole.texts
    assert workers.num_starts == 2
    assert "started again" in capsys.readouterr().err
    assert again.num_new_tokens == 7 * MAX_TOKENS  # what the first had written was not written again


def test_a_worker_that_dies_twice_for_nothing_is_an_error_and_loses_no_text(
    folder: Path, tmp_path: Path, workers: type[ThreadWorker]
) -> None:
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
def test_a_prompt_that_cannot_be_gone_on_from_is_named(
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
    own = write(folder, tmp_path / "own.jsonl", seed=1, dtype="float32", num_threads=1, max_concurrent=1)
    assert own.texts == wanted.texts
    assert len(started) == 2
    assert not any(map(is_alive, started))
