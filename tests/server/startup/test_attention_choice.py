"""`--attention auto` takes what is fastest on the model's shapes, and says what it left out and why."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from doubles.worker import ScriptedModel
from space_kernels.attention.attention import QKV, Attention, AttentionSpec, KVPages
from space_kernels.attention.torch_backend import space_attention
from space_kernels.attention_backends import (
    ATTENTION_NAMES,
    BACKENDS,
    AttentionNeed,
    Backend,
    UnusableAttention,
    can_be_captured,
    joint,
)
from space_kernels.paging.step_rows import StepRows
from space_model.model_facts import ModelFacts
from space_router.config import settings
from space_server.config import parse
from space_server.startup import attention_choice
from space_server.startup.attention_choice import (
    SECONDS,
    WEIGHTS,
    AttentionCase,
    AttentionChoice,
    MadeUpAttentionStep,
    cases,
    choose_attention,
    choose_ops,
    scores,
)
from torch import Tensor

FACTS = dataclasses.replace(ScriptedModel(window=1400).facts, num_heads=4, kv_heads=2, head_dim=16)
NEED = AttentionNeed(4, 2, 16, torch.float32, 16, torch.device("cpu"), (9, 0))  # says it is a GPU, computes on the CPU


class Clock:
    """Time passes only in calls of a fake backend."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def taking(clock: Clock, seconds: Callable[[bool], float], *, wrong: float = 0.0, breaks: str = "") -> Attention:
    """The reference, computed once for each step, with a time by whether there are masks."""
    known: dict[int, tuple[QKV, Tensor]] = {}  # each with what has this id

    def attention(qkv: QKV, pages: KVPages, rows: StepRows, spec: AttentionSpec) -> Tensor:
        if breaks:
            raise RuntimeError(breaks)
        clock.now += seconds(len(rows.pattern.offsets) > rows.num_chain_rows)
        if id(qkv) not in known:
            known[id(qkv)] = qkv, space_attention(qkv, pages, rows, spec) + wrong
        return known[id(qkv)][1]

    return attention


def fake(name: str, loaded: Attention | Exception) -> Backend:
    def load(need: AttentionNeed) -> Attention:
        if isinstance(loaded, Exception):
            raise loaded
        return loaded

    return Backend(name, None, (), "", load, ((8, 99),), dtypes=(torch.float32,))


def auto(clock: Clock, *fakes: Backend, facts: ModelFacts = FACTS, need: AttentionNeed = NEED) -> AttentionChoice:
    backends: Mapping[str, Backend] = {"torch": BACKENDS["torch"]} | {one.name: one for one in fakes}
    return choose_attention("auto", facts, block_size=16, backends=backends, clock=clock, need=need)


def test_on_a_cpu_it_is_torch_and_nothing_is_measured() -> None:
    choice = choose_attention("auto", FACTS, block_size=16, clock=lambda: pytest.fail("measured"))
    assert (choice.name, choice.seconds) == ("torch", {})
    assert choice.attention is space_attention
    assert str(choice) == "attention: torch"


def test_the_faster_one_is_taken_and_the_line_has_all_figures() -> None:
    clock = Clock()
    choice = auto(
        clock, fake("slow", taking(clock, lambda masks: 2e-3)), fake("fast", taking(clock, lambda masks: 1e-3))
    )
    assert choice.name == "fast"
    assert str(choice) == (
        "attention: fast | µs per layer: "
        "slow plain 1×1024 2000, whole 1×1024 2000, plain 16×1024 2000, whole 16×1024 2000; "
        "fast plain 1×1024 1000, whole 1×1024 1000, plain 16×1024 1000, whole 16×1024 1000"
    )


def test_who_wins_where_it_matters_most_wins() -> None:
    """Of all steps, where results are exact: twice as fast for whole layouts beats three halves for plain decoding."""
    clock = Clock()
    exact = dataclasses.replace(NEED, exact=True)
    whole = dataclasses.replace(fake("whole", taking(clock, lambda masks: 1e-3 if masks else 3e-3)), row_invariant=True)
    plain = dataclasses.replace(fake("plain", taking(clock, lambda masks: 2e-3)), row_invariant=True)
    assert auto(clock, plain, whole, need=exact).name == "whole"


def test_each_has_the_steps_that_it_is_faster_at() -> None:
    clock, used = Clock(), []

    def noting(name: str, seconds: Callable[[bool], float]) -> Attention:
        timed = taking(clock, seconds)

        def attention(*given: Any) -> Tensor:
            used.append(name)
            return timed(*given)

        return attention

    whole, plain = noting("whole", lambda masks: 1e-3 if masks else 3e-3), noting("plain", lambda masks: 2e-3)
    choice = auto(clock, fake("whole", whole), fake("plain", plain))
    assert (choice.name, choice.backend.captures) == ("plain+whole", True)
    assert choice.backend.attend(choice.attention) is None  # neither takes pages that hold the step's keys
    used.clear()
    for case in cases(3, 1400)[:2]:
        MadeUpAttentionStep.of(case, NEED).run(choice.attention)
    assert used == ["plain", "whole"]
    less = dataclasses.replace(fake("plain", plain), captures=False)
    assert not auto(clock, fake("whole", whole), less).backend.captures


def test_two_take_over_pages_that_hold_the_step_s_keys() -> None:
    def attention(name: str) -> Attention:
        return lambda *given, is_stored=False: (name, is_stored)  # type: ignore[misc, return-value]

    one, two = (dataclasses.replace(fake(name, attention(name)), takes_stored=True) for name in ("one", "two"))
    both, loaded = joint(one, two, NEED)
    stored = both.attend(loaded)
    assert stored is not None
    plain, whole = (MadeUpAttentionStep.of(case, NEED) for case in cases(3, 1400)[:2])
    spec = AttentionSpec(1.0)
    assert stored(plain.qkv, plain.pages, plain.rows, spec) == ("one", True)
    assert stored(whole.qkv, whole.pages, whole.rows, spec) == ("two", True)
    assert loaded(whole.qkv, whole.pages, whole.rows, spec) == ("two", False)


@pytest.mark.parametrize(
    ("name", "captured"),
    [("triton", True), ("flash-attn-3+triton", True), ("flashinfer", False), ("flashinfer+triton", False)],
)
def test_steps_of_two_can_be_captured_where_those_of_each_can(name: str, captured: bool) -> None:
    assert can_be_captured(name) is captured


def test_the_score_is_the_weighted_mean_of_times_over_the_best() -> None:
    one, two, three = (
        AttentionCase("plain", 1, 8, 1, 0),
        AttentionCase("whole", 1, 8, 4, 3),
        AttentionCase("prompt", 1, 8, 9, 0),
    )
    seconds = {"a": {one: 1.0, two: 4.0, three: 1.0}, "b": {one: 2.0, two: 2.0, three: 4.0}}
    alone = {("a", "a"): 0.25 + 0.5 * 2 + 0.25, ("b", "b"): 0.25 * 2 + 0.5 + 0.25 * 4}
    assert scores(seconds, may_join=False) == alone
    assert scores(seconds, may_join=True) == alone | {("a", "b"): 1.0, ("b", "a"): 0.25 * 2 + 0.5 * 2 + 0.25 * 4}
    without_masks = {name: {one: of[one]} for name, of in seconds.items()}
    assert set(scores(without_masks, may_join=True)) == {("a", "a"), ("b", "b")}
    assert sum(WEIGHTS.values()) == 1


def test_other_work_on_the_gpu_does_not_change_the_choice() -> None:
    """It begins or ends while one of them is measured, or comes and goes."""
    for period in (0.5, 0.011, 3.0):
        clock = Clock()

        def busy(seconds: float, clock: Clock = clock, period: float = period) -> Callable[[bool], float]:
            return lambda masks: seconds * (4.0 if clock.now % (2 * period) < period else 1.0)

        slow, fast = taking(clock, busy(1.2e-3)), taking(clock, busy(1.0e-3))
        assert auto(clock, fake("slow", slow), fake("fast", fast)).name == "fast"
        clock.now = period
        assert auto(clock, fake("fast", fast), fake("slow", slow)).name == "fast"


def test_of_two_that_take_nearly_as_long_every_start_takes_the_same() -> None:
    clock, choices = Clock(), []
    for seconds in (0.985e-3, 1e-3, 1.015e-3):
        first = taking(clock, lambda masks, seconds=seconds: seconds)  # type: ignore[misc]
        second = taking(clock, lambda masks: 1e-3)
        choices.append(auto(clock, fake("first", first), fake("second", second)).name)
    assert choices == ["first"] * 3


def test_one_that_breaks_only_after_a_while_is_left_out() -> None:
    clock, num_calls = Clock(), 0

    def breaking(masks: bool) -> float:
        nonlocal num_calls
        num_calls += 1
        if num_calls > 10:
            raise RuntimeError("an illegal memory access")
        return 1e-6

    choice = auto(clock, fake("breaks", taking(clock, breaking)), fake("right", taking(clock, lambda masks: 1e-3)))
    assert choice.name == "right"
    assert set(choice.seconds) == {"right"}
    assert choice.absent["breaks"] == "failed: RuntimeError: an illegal memory access"


def test_who_is_wrong_or_breaks_or_cannot_be_loaded_is_left_out_and_named() -> None:
    clock = Clock()
    choice = auto(
        clock,
        fake("wrong", taking(clock, lambda masks: 1e-6, wrong=0.1)),
        fake("breaks", taking(clock, lambda masks: 1e-6, breaks="no kernel image\nlong trace")),
        fake("broken", ImportError("libcudart.so.99 is missing")),
        fake("right", taking(clock, lambda masks: 1e-3)),
    )
    assert choice.name == "right"
    assert set(choice.seconds) == {"right"}
    assert choice.absent["wrong"].startswith("failed: ArithmeticError: off by 0.1 from the reference in plain 1×1024")
    assert choice.absent["breaks"] == "failed: RuntimeError: no kernel image"
    assert choice.absent["broken"] == "failed: ImportError: libcudart.so.99 is missing"
    assert "not used: wrong (failed: " in str(choice)


def test_where_nobody_is_left_it_is_torch() -> None:
    choice = auto(Clock(), fake("broken", ImportError("gone")))
    assert (choice.name, choice.absent) == ("torch", {"broken": "failed: ImportError: gone"})


def test_rather_none_than_one_that_breaks_the_promise() -> None:
    need = dataclasses.replace(NEED, exact=True)
    with pytest.raises(UnusableAttention, match=r"No attention is left\. torch .* leave out --exact.*broken: failed"):
        auto(Clock(), dataclasses.replace(fake("broken", ImportError("gone")), row_invariant=True), need=need)


def test_where_there_is_no_memory_to_measure_in_it_is_our_own(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock()
    fakes = [fake(name, taking(clock, lambda masks: 1e-3)) for name in ("fast", "triton")]

    def no_memory(*_: object) -> MadeUpAttentionStep:
        raise torch.OutOfMemoryError("CUDA out of memory.")

    monkeypatch.setattr(MadeUpAttentionStep, "of", no_memory)
    choice = auto(clock, *fakes)
    assert choice.name == "triton"
    assert "fast (no memory to try it in)" in str(choice)
    assert auto(clock, fakes[0]).name == "torch"


def test_the_absent_are_named_with_their_cures() -> None:
    choice = choose_attention("auto", FACTS, block_size=16, installed=lambda package: None, need=NEED, clock=Clock())
    assert choice.name == "torch"
    assert set(choice.absent) == set(BACKENDS) - {"torch"}
    assert "triton (not installed: pip install triton" in str(choice)


def test_measuring_ends_within_its_time() -> None:
    clock = Clock()
    auto(clock, fake("slow", taking(clock, lambda masks: 0.01)))
    assert clock.now <= SECONDS + 0.01 * (3 + len(cases(3, 1400)) * 1)


def test_a_named_one_is_taken_without_measuring_and_refused_with_the_cure() -> None:
    assert choose_attention("torch", FACTS, block_size=16, clock=lambda: pytest.fail("measured")).name == "torch"
    with pytest.raises(UnusableAttention, match=r"--attention triton: needs an NVIDIA GPU; the model is on cpu"):
        choose_attention("triton", FACTS, block_size=16)
    with pytest.raises(UnusableAttention, match=r"no attention implementation 'best'"):
        choose_attention("best", FACTS, block_size=16)
    broken = {"torch": BACKENDS["torch"], "flashinfer": fake("flashinfer", ImportError("no libcuda"))}
    with pytest.raises(UnusableAttention, match=r"--attention flashinfer: no libcuda\. Or use --attention auto\."):
        choose_attention("flashinfer", FACTS, block_size=16, backends=broken, need=NEED)


def test_the_choice_is_among_the_operations_and_in_the_log(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("INFO"):
        ops = choose_ops(FACTS, asked="auto", block_size=16)
    assert (ops.attention, ops.space_attention) == ("torch", space_attention)
    assert "attention: torch" in caplog.text
    with pytest.raises(UnusableAttention, match=r"--attention flash-attn: flash-attn-4 needs an NVIDIA GPU"):
        choose_ops(FACTS, asked="flash-attn", block_size=16)


def test_ranks_that_share_a_model_do_not_measure_each_for_itself(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("INFO"):
        assert choose_ops(dataclasses.replace(FACTS, num_ranks=2), asked="auto", block_size=16).attention == "torch"
    assert "not measured: 2 ranks share the model and must agree" in caplog.text


def test_a_library_s_attention_also_attends_pages_that_are_written(monkeypatch: pytest.MonkeyPatch) -> None:
    def attention(*given: Any, is_stored: bool = False, **options: Any) -> bool:
        return is_stored

    library = Backend("flashinfer", None, (), "", lambda need: attention, None, (torch.float32,), takes_stored=True)  # type: ignore[arg-type, return-value]
    monkeypatch.setattr(attention_choice, "choose_attention", lambda *_, **__: AttentionChoice(library, attention))  # type: ignore[arg-type]
    ops = choose_ops(FACTS, asked="flashinfer", block_size=16)
    assert ops.attention == "flashinfer"
    assert ops.attend is not None
    assert (ops.space_attention(), ops.attend()) == (False, True)  # type: ignore[call-arg]


def test_cases_fit_the_window_and_follow_the_masks() -> None:
    assert {case.kind for case in cases(5, 100_000)} == set(WEIGHTS)
    assert all(case.num_masks == 5 and case.num_chain == 6 for case in cases(5, 100_000) if case.kind == "whole")
    assert {case.kind for case in cases(0, 100_000)} == {"plain", "prompt"}
    assert cases(3, 64) == [AttentionCase("plain", 1, 63, 1, 0)]


@pytest.mark.parametrize("case", cases(3, 100_000))
def test_a_made_up_step_has_the_case_s_rows_on_pages_of_its_own(case: AttentionCase) -> None:
    step = MadeUpAttentionStep.of(case, NEED)
    assert step.num_rows == case.num_sequences * case.num_chain * (1 + case.num_masks)
    assert (step.rows.starts == case.context).all()
    pages = [page for held in step.rows.pages for page in held]
    assert len(set(pages)) == len(pages) == len(step.pages.keys)


def test_the_router_and_the_worker_know_the_same_names() -> None:
    known = settings()["attention"][1]
    for name in ATTENTION_NAMES:
        assert known.parse(name) == name
        assert parse(["--listen", "h:1", "--attention", name]).attention == name
    with pytest.raises(ValueError, match="must be one of auto, torch, triton, flash-attn, "):
        known.parse("best")
    with pytest.raises(SystemExit):
        parse(["--listen", "h:1", "--attention", "best"])


def test_a_model_with_latent_attention_takes_torch_s_and_says_why_not_another() -> None:
    latent = dataclasses.replace(NEED, kv_heads=1, head_dim=48, odd_values=True)
    choice = choose_attention("auto", FACTS, block_size=16, need=latent, clock=Clock())
    assert choice.name == "torch"
    assert "no latent attention (MLA)" in choice.absent["triton"]
    with pytest.raises(UnusableAttention, match=r"triton: has no latent attention \(MLA\).*use --attention torch"):
        choose_attention("triton", FACTS, block_size=16, need=latent)


def test_a_model_with_chunks_of_positions_takes_torch_s_and_says_why_not_another() -> None:
    chunked = dataclasses.replace(NEED, is_chunked=True)
    choice = choose_attention("auto", FACTS, block_size=16, need=chunked, clock=Clock())
    assert choice.name == "torch"
    assert "no chunked attention" in choice.absent["triton"]
