"""Two ranks in two processes, over gloo: the text of one process, the same bits at every k, batch and start."""

from __future__ import annotations

import os
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import NoReturn

import psutil
import pytest
import torch
import torch.distributed as dist
from doubles.worker import PROMPTS, ScriptedDrafts
from space_common.worker.client import ClientSequence, GrpcWorker, WorkerClient
from space_model.geometry.forward_batch import ForwardBatch, Segment
from space_model.loading.load import load_model
from space_model.model_error import InvalidSetting
from space_model.model_facts import Ranks
from space_model.space_model import SpaceModel
from space_proto import worker_pb2 as pb
from space_server.__main__ import main
from space_server.config import parse
from space_server.model_runner import StepModel
from space_server.speculation.controller import FixedLayout
from space_server.tensor_parallel import GROUP_LOST, GroupLost, RankPlace, TensorParallelLeader, leading
from space_server.worker import Worker
from tiny_checkpoints import tiny_checkpoint

MAX_TOKENS = 20
SAMPLINGS = {"greedy": pb.Sampling(), "sampled": pb.Sampling(seed=3, temperature=0.9, top_k=40, repetition_penalty=1.2)}

DRAFTS = {
    "greedy": [("masks", 0), ("half right", 1), ("masks", 3), ("half right", 8)],
    "sampled": [("masks", 3), ("half right", 3)],
}

WATCHDOG = 4.0

Outcome = list[tuple[list[int], list[float]]]
"""Of each prompt: ids, and the bits of their log-probabilities."""


def flags(model: Path | str, listen: str = "unix:/w", timeout: float = 30.0) -> list[str]:
    words = f"--listen {listen} --tensor-parallel 2 --rank-timeout {timeout} --num-threads 1 --log-level warning"
    return ["--model", str(model), *words.split(), "--num-blocks", "64", "--calibration-seconds", "0"]


@contextmanager
def two_ranks(path: Path, lost: Callable[[str], NoReturn], timeout: float) -> Iterator[TensorParallelLeader]:
    """Rank 0 is this process; rank 1 is another one."""
    arguments = flags(path, timeout=timeout)

    def load(ranks: Ranks, device: str) -> SpaceModel:
        return load_model(path, dtype="auto", device=device, num_threads=1, ranks=ranks)

    with leading(parse(arguments), arguments, RankPlace.of(2, {}), load, lost) as lead:
        yield lead


def decode(
    model: StepModel, sampling: pb.Sampling, k: int, *, source: ScriptedDrafts | None = None, alone: bool = False
) -> tuple[Outcome, set[int]]:
    """Every prompt's text, together or one after the other, and how many drafts of a step were accepted."""
    worker = Worker(model, num_blocks=64, block_size=4, controller=FixedLayout.full(k), draft_source=source)
    router = WorkerClient(worker)
    runs: list[ClientSequence] = []
    for prompt in PROMPTS:
        number = router.admit(prompt, max_tokens=MAX_TOKENS, sampling=sampling, want_logprobs=True)
        runs.append(router.sequences[number])
        if alone:
            router.run()
    router.run()
    outcome = [(run.tokens, [entry.logprob for report in run.reports for entry in report.logprobs]) for run in runs]
    return outcome, {a for run in runs for a in run.accepted}


def half_right(outcome: Outcome) -> ScriptedDrafts:
    texts = {n: prompt + tokens for n, (prompt, (tokens, _)) in enumerate(zip(PROMPTS, outcome, strict=True), start=1)}
    return ScriptedDrafts(texts, wrong=lambda p: p % 16 in (0, 1, 4), other=lambda id_: 9 + (id_ - 8) % 119)


def teacher_forced(model: StepModel, texts: Outcome) -> list[list[int]]:
    """What the model says behind every prefix of the texts, greedily."""
    router = WorkerClient(Worker(model, num_blocks=1024, block_size=4, max_sequences=512))
    said = []
    for prompt, (tokens, _) in zip(PROMPTS, texts, strict=True):
        admit = partial(router.admit, num_prompt=len(prompt), max_draft_length=0)
        numbers = [admit(prompt + tokens[:n], max_tokens=n + 1) for n in range(len(tokens))]
        router.run()
        said.append([router.sequences[number].tokens[n] for n, number in enumerate(numbers)])
    return said


def is_tie(model: SpaceModel, ids: list[int]) -> bool:
    """The best two ids behind these are closer than rounding could be."""
    batch = ForwardBatch.build([Segment(ids, 0, range(16))], block_size=4, mask_ids=())
    logits = model.logits(model.forward(batch, model.allocate_kv(16, 4))[len(ids) - 1 : len(ids)])[0]
    first, second = logits.topk(2).values.tolist()
    return first - second <= 64 * torch.finfo(torch.float32).eps * float(logits.abs().max())


@dataclass
class Said:
    """What one group said, by everything that must make no difference, and how it ended."""

    texts: dict[tuple[str, str, int], tuple[Outcome, set[int]]] = field(default_factory=dict)
    forced: list[list[int]] = field(default_factory=list)
    instruction_set: str = ""  # as the worker tells the router
    reason: str = ""  # why the group was lost ...
    seconds: float = 0.0  # ... so long after a rank had been stopped


@pytest.fixture(scope="module")
def said(tiny_path: Path, tiny: SpaceModel) -> Said:
    """One group for all tests: a rank takes seconds to start."""
    said, silent = Said(), threading.Event()

    def note(reason: str) -> NoReturn:
        said.reason = said.reason or reason
        silent.set()
        raise GroupLost(reason)

    with pytest.raises(GroupLost), two_ranks(tiny_path, note, WATCHDOG) as lead:  # noqa: PT012
        said.instruction_set = Worker(lead, num_blocks=64, block_size=4).hello("1").instruction_set
        for name, sampling in SAMPLINGS.items():
            plain = said.texts[name, "plain", 0] = decode(lead, sampling, 0, alone=True)
            for drafts, k in DRAFTS[name]:
                source = half_right(plain[0]) if drafts == "half right" else None
                said.texts[name, drafts, k] = decode(lead, sampling, k, source=source)
        one, _ = decode(tiny, SAMPLINGS["greedy"], 0, alone=True)
        said.forced = teacher_forced(lead, one)
        (follower,) = children(os.getpid())
        time.sleep(WATCHDOG / 2)
        assert not said.reason  # signs of life are enough
        begun = time.monotonic()
        os.kill(follower, signal.SIGSTOP)
        assert silent.wait(60)
        said.seconds = time.monotonic() - begun
        raise GroupLost(said.reason)
    dist.destroy_process_group()  # a rank that is lost ends with its process; this one has other tests to run
    return said


def test_two_ranks_write_what_one_process_writes_up_to_ties(tiny: SpaceModel, said: Said) -> None:
    one, _ = decode(tiny, SAMPLINGS["greedy"], 0, alone=True)
    for prompt, (wanted, _), found in zip(PROMPTS, one, said.forced, strict=True):
        assert len(found) == len(wanted) == MAX_TOKENS
        differing = [n for n, (a, b) in enumerate(zip(found, wanted, strict=True)) if a != b]
        assert all(is_tie(tiny, prompt + wanted[:n]) for n in differing)
    for name in SAMPLINGS:
        wanted_text, _ = decode(tiny, SAMPLINGS[name], 0, alone=True)
        for (tokens, logprobs), (same, theirs) in zip(said.texts[name, "plain", 0][0], wanted_text, strict=True):
            assert tokens == same  # no tie among these
            assert logprobs == pytest.approx(theirs, abs=1e-5)


def test_a_worker_says_what_decides_the_last_bits_of_its_text(
    tiny: SpaceModel, said: Said, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert said.instruction_set == f"{tiny.facts.instruction_set}, 2 ranks"
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (9, 0))
    gpu = replace(tiny.facts, device=torch.device("cuda"), attention="triton")
    found = [replace(gpu, is_exact=is_exact, num_ranks=n).instruction_set for is_exact in (False, True) for n in (1, 4)]
    assert found == [
        "sm_90",
        "sm_90, 4 ranks",
        "sm_90 exact, triton attention",
        "sm_90 exact, triton attention, 4 ranks",
    ]


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_an_attention_that_is_not_the_processors_own_is_said(dtype: str, tiny_path: Path) -> None:
    own, other = (load_model(tiny_path, dtype=dtype, attention=name).facts for name in ("auto", "torch"))
    assert other.instruction_set == f"{own.instruction_set}{', torch attention' * (own.attention == 'compiled')}"
    assert own.attention == {"bfloat16": "compiled", "float32": "torch"}[dtype]


@pytest.mark.parametrize("sampling", SAMPLINGS)
def test_two_ranks_say_the_same_bits_at_every_k_and_batch(sampling: str, said: Said) -> None:
    plain, _ = said.texts[sampling, "plain", 0]
    for drafts, k in DRAFTS[sampling]:
        outcome, accepted = said.texts[sampling, drafts, k]
        assert outcome == plain
        if drafts == "half right":
            assert {0, k} <= accepted
            assert k == 1 or accepted & set(range(1, k))


def test_a_rank_that_falls_silent_ends_the_group_within_the_watchdog(said: Said) -> None:
    assert 0.9 * WATCHDOG <= said.seconds < WATCHDOG + 0.5 + 10.0  # the pause between beats, and a busy machine
    assert "waited" in said.reason
    assert "for signs of life, and another is gone: " in said.reason


def children(pid: int) -> list[int]:
    """Processes of `python -m space_server` that this one started."""
    return [child.pid for child in psutil.Process(pid).children() if "space_server" in child.cmdline()]


def address_of(process: subprocess.Popen[str], seconds: float = 120.0) -> str:
    """Where a worker listens, once it is ready; where it never is, the test fails with what each of its threads did."""
    assert process.stdout is not None
    assert process.stderr is not None
    if not select.select([process.stdout], [], [], seconds)[0]:
        for pid in (*children(process.pid), process.pid):
            os.kill(pid, signal.SIGABRT)  # with PYTHONFAULTHANDLER this dumps the stacks
        pytest.fail(f"not ready after {seconds:g} s: {process.stderr.read()}")
    word, address = process.stdout.readline().split()
    assert word == "ready"
    return address


def written(address: str, prompt: list[int]) -> tuple[list[int], list[float]]:
    """What the worker at the address writes behind a prompt, greedily."""
    with GrpcWorker(address) as worker:
        client = WorkerClient(worker, automatic=True)
        sequence = client.generate(prompt, max_tokens=MAX_TOKENS, want_logprobs=True)
        return sequence.tokens, [entry.logprob for entry in sequence.logprobs]


@pytest.mark.e2e
def test_another_group_of_a_whole_worker_says_the_same_bits_and_ends_when_a_rank_is_killed(
    tiny_path: Path, tmp_path: Path, said: Said
) -> None:
    command = [sys.executable, "-m", "space_server", *flags(tiny_path, f"unix:{tmp_path / 'w'}", timeout=60.0)]
    dumping = os.environ | {"PYTHONFAULTHANDLER": "1"}
    with (
        subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=dumping) as process,
        ExitStack() as ends,
    ):
        ends.callback(process.kill)  # else Popen would wait for ever for one that a failed test has left running
        address = address_of(process)
        assert process.stderr is not None
        assert written(address, PROMPTS[3]) == said.texts["greedy", "plain", 0][0][3]
        (follower,) = children(process.pid)
        os.kill(follower, signal.SIGKILL)
        assert process.wait(40) == GROUP_LOST  # and not only after the watchdog's time
        assert "Rank 1 " in process.stderr.read()


@pytest.mark.slow
@pytest.mark.e2e
def test_the_embedded_model_where_torchrun_starts_the_ranks_and_sigterm_ends_them(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    variables = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    command = [sys.executable, "-m", "space_server", *flags("demo", f"unix:{tmp_path / 'w'}")]
    ranks = [
        subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=os.environ | variables | {"RANK": str(rank)})
        for rank in (0, 1)
    ]
    leader, follower = ranks
    with leader, follower, ExitStack() as ends:
        for rank in ranks:
            ends.callback(rank.kill)
        assert leader.stdout is not None
        word, address = leader.stdout.readline().split()
        assert word == "ready"
        found, _ = written(address, [70, 71])
        for rank in reversed(ranks):  # as torchrun ends them
            rank.send_signal(signal.SIGTERM)
        assert (leader.wait(20), follower.wait(20)) == (0, 0)
    router = WorkerClient(Worker(load_model("demo", num_threads=1), num_blocks=4, block_size=16))
    sequence = router.generate([70, 71], max_tokens=MAX_TOKENS)
    assert found == sequence.tokens  # no tie among these


def test_the_place_of_a_rank_is_what_torchrun_says() -> None:
    assert RankPlace.of(2, {}) == RankPlace(0, 2, 0, "127.0.0.1", 0, owns_store=True, starts_others=True)
    variables = {"RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "MASTER_ADDR": "host", "MASTER_PORT": "29500"}
    assert RankPlace.of(4, variables) == RankPlace(3, 4, 1, "host", 29500, owns_store=False, starts_others=False)
    assert RankPlace.of(4, variables | {"RANK": "0"}).owns_store
    assert not RankPlace.of(4, variables | {"RANK": "0", "TORCHELASTIC_USE_AGENT_STORE": "True"}).owns_store
    with pytest.raises(InvalidSetting, match="WORLD_SIZE is 4 and RANK 3; --tensor-parallel 2 needs 2 ranks"):
        RankPlace.of(2, variables)
    with pytest.raises(InvalidSetting, match="Unset RANK"):
        RankPlace.of(2, {"RANK": "0"})


def test_each_rank_has_a_gpu_of_its_own_or_says_how_many_there_are(monkeypatch: pytest.MonkeyPatch) -> None:
    place = RankPlace.of(2, {})
    assert place.device("cpu") == "cpu"
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    variables = {"RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "MASTER_ADDR": "host", "MASTER_PORT": "29500"}
    assert [place.device("auto"), RankPlace.of(4, variables).device("cuda")] == ["cuda:0", "cuda:1"]
    with pytest.raises(InvalidSetting, match="names one GPU; with --tensor-parallel say --device cuda"):
        place.device("cuda:1")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    with pytest.raises(InvalidSetting, match="2 ranks on this machine need 2 GPUs; it has 1"):
        place.device("cuda")


def test_what_cannot_be_shared_is_one_line_before_any_rank_begins(
    tiny_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    words = flags(tiny_path)
    words[words.index("--tensor-parallel") + 1] = "3"
    assert main(words) == 3
    (error,) = [line for line in capfd.readouterr().err.splitlines() if line.startswith("error: ")]
    assert "3 ranks cannot share 4 heads evenly" in error


@pytest.mark.parametrize("draft_vocab", [None, 60], ids=["whole vocabulary", "draft vocabulary"])
def test_rank_0_alone_drafts_with_the_recurrent_head(draft_vocab: int | None, tmp_path: Path) -> None:
    """Its drafts, the same with one rank as with two, change no text."""
    path = tiny_checkpoint(tmp_path, num_masks=0, head_drafts=4, draft_vocab=draft_vocab)

    def decoded(model: StepModel, controller: FixedLayout) -> tuple[list[list[int]], list[list[int]]]:
        client = WorkerClient(Worker(model, num_blocks=64, block_size=4, controller=controller))
        numbers = [client.admit(prompt, max_tokens=MAX_TOKENS) for prompt in PROMPTS]
        client.run()
        runs = [client.sequences[number] for number in numbers]
        return [run.tokens for run in runs], [run.accepted for run in runs]

    alone = decoded(load_model(path, num_threads=1), FixedLayout.by_head(4))

    def lost(reason: str) -> NoReturn:
        raise AssertionError(reason)

    with two_ranks(path, lost, 30.0) as lead:
        plain, _ = decoded(lead, FixedLayout.full(0))
        assert decoded(lead, FixedLayout.by_head(4)) == alone
        assert plain == alone[0]
    assert {min(count, 1) for counts in alone[1] for count in counts} == {0, 1}
