"""A grammar's text ends where it must, compiling it holds up nobody else, and what it forces is drafted."""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from pathlib import Path
from random import Random
from typing import Any

import pytest
from doubles.grammars import Case, choice_case, outputs, regex_case, rules_case, schema_case
from doubles.worker import ScriptedModel
from jsonschema import Draft202012Validator
from space_common.grammar import GrammarProcess
from space_common.worker.client import ClientSequence, WorkerClient
from space_common.worker.errors import CONTRADICTION, GRAMMAR, GRAMMARS_BUSY
from space_model.loading.load import load_model
from space_model.space_model import SpaceModel
from space_proto import worker_pb2 as pb
from space_router.engine.workers.worker_connection import GRAMMAR_SECONDS
from space_server import grammar as grammar_module
from space_server.drafts import DraftSources
from space_server.grammar import MOST_AT_ONCE, MOST_SECONDS, Grammars, GrammarTrial, Preparation, TokenVocabulary
from space_server.speculation.controller import FixedLayout
from space_server.worker import Worker
from tiny_checkpoints import tiny_checkpoint

EOS = 0
PROMPTS = [[70, 71, 72, 73], [40] * 17 + [90], [100, 101]]
REGEX = pb.Grammar(kind=pb.GRAMMAR_KIND_REGEX, source=r"([a-e]{3}-){6,30}(end|stop)\.?")


@pytest.fixture(scope="module")
def texts(byte_path: Path) -> list[bytes]:
    return list(TokenVocabulary.read(byte_path, 320).texts)


def one(model: Any, grammars: Grammars, kind: str, source: Any, **given: Any) -> ClientSequence:
    """One run of the first prompt."""
    value = pb.GrammarKind.Value(f"GRAMMAR_KIND_{kind.upper()}")
    grammar = pb.Grammar(kind=value, source=source if isinstance(source, str) else json.dumps(source))
    return outputs(PROMPTS[:1], model, grammars, grammar, given.pop("sampling", {}), **given)[0]


# -------------------------------------------------------------------------------------------- hostile grammars


REPEATED = 'start: ("a"{0,1000}){0,1000}\n'


@pytest.mark.parametrize(
    ("kind", "source"),
    [
        ("regex", "((a{0,99}){0,99}){0,99}"),
        ("regex", "(" * 60 + "a" + "{0,9})" * 60),
        ("regex", r"(\p{L}{1,100}){1,100}"),
        ("regex", "(.{1,500}){1,500}"),
        ("lark", "start: T\nT: ~/(.*[aeiou].*){3}/ & /.{5,200}/\n"),
        ("lark", "start: T\nT: /(.*a.{24})/ & /.*b.{23}/ & /.*c.{22}/\n"),
    ],
)
def test_a_grammar_beyond_the_limits_is_its_own_fault(byte_model: SpaceModel, kind: str, source: str) -> None:
    grammars = Grammars(lambda: TokenVocabulary([b"", *(bytes([byte]) for byte in range(255)), *[b"ab"] * 64]))
    ran = one(byte_model, grammars, kind, source, max_tokens=40)
    assert ran.finish != pb.FINISH_ERROR or ran.error.startswith(GRAMMAR)


def test_a_text_whose_positions_take_too_long_ends_with_its_grammar_named(
    byte_model: SpaceModel, grammars: Grammars, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert one(byte_model, grammars, "lark", REPEATED, max_tokens=6).finish != pb.FINISH_ERROR
    assert grammar_module.MOST_SLOW_SECONDS == 2.0
    monkeypatch.setattr(grammar_module, "SLOW_SECONDS", 0.0)
    monkeypatch.setattr(grammar_module, "MOST_SLOW_SECONDS", 1e-4)
    ran = one(byte_model, grammars, "lark", REPEATED, max_tokens=40)
    assert ran.finish == pb.FINISH_ERROR
    assert ran.error.startswith(f"{GRAMMAR}leaves no id at position ")
    assert "take too long" in ran.error


def test_a_grammar_that_others_left_no_time_for_is_nobodys_fault(byte_model: SpaceModel, byte_path: Path) -> None:
    grammars = Grammars(lambda: TokenVocabulary.read(byte_path, 320), most_seconds=0.5)
    trial = grammars._trial_with(grammars._known_vocabulary())
    with trial._turn:
        ran = one(byte_model, grammars, "regex", "a{3}b")
    assert ran.finish == pb.FINISH_ERROR
    assert ran.error.startswith(GRAMMARS_BUSY)


# -------------------------------------------------------------------------------------------- ends and contradictions


def text(ran: ClientSequence, texts: list[bytes]) -> str:
    return b"".join(texts[id_] for id_ in ran.tokens).decode()


@pytest.mark.parametrize("k", [0, 5])
@pytest.mark.parametrize(
    "sampling",
    [{"min_tokens": 50}, {"logit_bias": {EOS: -100.0}}, {"bad_words": [pb.IdRun(ids=[EOS])]}, {"min_tokens": 3}],
)
def test_a_complete_text_ends_whatever_speaks_against_its_end(
    byte_model: SpaceModel, grammars: Grammars, texts: list[bytes], sampling: dict[str, Any], k: int
) -> None:
    ran = one(byte_model, grammars, "choice", ["yes", "no"], sampling=sampling, k=k)
    assert text(ran, texts) in ("yes", "no")
    assert (ran.finish, ran.tokens[-1], ran.error) == (pb.FINISH_EOS, EOS, "")


@pytest.mark.parametrize("k", [0, 5])
def test_min_tokens_goes_on_where_the_text_can(
    byte_model: SpaceModel, grammars: Grammars, texts: list[bytes], k: int
) -> None:
    ran = one(byte_model, grammars, "regex", "[ab]*", sampling={"min_tokens": 20, "logit_bias": {EOS: 100.0}}, k=k)
    assert (len(ran.tokens), ran.tokens[-1], ran.finish) == (21, EOS, pb.FINISH_EOS)
    assert len(text(ran, texts)) == 20


@pytest.mark.parametrize("k", [0, 3])
def test_who_ignores_eos_goes_on_as_long_as_the_grammar_does(
    byte_model: SpaceModel, grammars: Grammars, texts: list[bytes], k: int
) -> None:
    ran = one(byte_model, grammars, "regex", "[ab]{2,30}", sampling={"logit_bias": {EOS: 100.0}}, eos_ids=(), k=k)
    assert (len(text(ran, texts)), ran.tokens[-1], ran.finish) == (30, EOS, pb.FINISH_EOS)


@pytest.mark.parametrize("k", [0, 3])
def test_where_nothing_is_possible_the_sequence_ends_with_the_reason(
    byte_model: SpaceModel, grammars: Grammars, texts: list[bytes], k: int
) -> None:
    a, b = texts.index(b"a"), texts.index(b"b")
    ran = one(byte_model, grammars, "regex", "aaaab", sampling={"bad_words": [pb.IdRun(ids=[b])]}, k=k)
    assert (ran.tokens, ran.finish) == ([a] * 4, pb.FINISH_ERROR)
    assert ran.error.startswith(CONTRADICTION)
    ran = one(byte_model, grammars, "regex", "aaaab", sampling={"allowed_ids": [a]}, k=k)
    assert (ran.tokens, ran.finish) == ([a] * 4, pb.FINISH_ERROR)


def test_a_text_that_no_id_writes_ends_with_the_reason(tiny: SpaceModel, tiny_path: Path) -> None:
    few_letters = Grammars.of(tiny_path, tiny.facts.vocab_size, set(tiny.facts.mask_ids))
    ran = one(tiny, few_letters, "regex", "abé", k=3)
    assert (len(ran.tokens), ran.finish) == (2, pb.FINISH_ERROR)
    assert ran.error == "The grammar leaves no id at position 6: no id goes on with it."


def test_stop_ids_of_text_are_text_and_special_ones_end_where_the_grammar_may(
    byte_model: SpaceModel, grammars: Grammars, texts: list[bytes]
) -> None:
    worker = Worker(byte_model, num_blocks=64, grammars=grammars)
    router = WorkerClient(worker)
    special = 3  # <|im_end|>
    sampling_params = pb.Sampling(
        grammar=pb.Grammar(kind=pb.GRAMMAR_KIND_REGEX, source="[ab]{3,9}"), logit_bias={special: 100.0}
    )
    sequence = router.generate(PROMPTS[0], sampling=sampling_params, stop_ids=[special])
    assert sequence.finish == pb.FINISH_STOP_ID
    assert len(sequence.tokens) == 4


# -------------------------------------------------------------------------------------------- compiling


def test_while_one_grammar_is_compiled_others_are_stepped(byte_path: Path) -> None:
    scripted = ScriptedModel(vocab_size=320)
    going = threading.Event()

    def slow() -> TokenVocabulary:
        assert going.wait(30)
        return TokenVocabulary.read(byte_path, 320)

    router = WorkerClient(Worker(scripted, num_blocks=64, grammars=Grammars(slow)))
    woken = threading.Event()
    router.worker.waiting.woken = woken.set
    waits = router.admit(PROMPTS[0], sampling=pb.Sampling(grammar=REGEX), eos_ids=[EOS], max_tokens=9)
    free = router.admit(PROMPTS[1], max_tokens=9)
    while router.sequences[free].finish == pb.FINISH_NONE:
        assert router.worker.has_work
        router.step()
    assert router.sequences[waits].reports == []
    assert not router.worker.has_work  # nobody spins
    going.set()
    assert woken.wait(30)
    assert router.worker.has_work
    router.run()
    assert router.sequences[waits].finish == pb.FINISH_LENGTH


@pytest.mark.parametrize(
    ("kind", "source", "reason"),
    [
        ("json_schema", '{"type": "nothing"}', "Invalid type: nothing"),
        ("regex", "a(", "unclosed group"),
        ("lark", "start: " + "(" * 100, "64 deep"),
    ],
)
def test_a_grammar_that_is_none_fails_its_sequence_alone(
    byte_model: SpaceModel, grammars: Grammars, kind: str, source: str, reason: str
) -> None:
    worker = Worker(byte_model, num_blocks=64, grammars=grammars)
    router = WorkerClient(worker)
    value = pb.GrammarKind.Value(f"GRAMMAR_KIND_{kind.upper()}")
    bad = router.admit(PROMPTS[0], sampling=pb.Sampling(grammar=pb.Grammar(kind=value, source=source)), eos_ids=[EOS])
    sequence = router.generate(PROMPTS[1], max_tokens=5)
    assert router.sequences[bad].finish == pb.FINISH_ERROR
    assert reason in router.sequences[bad].error
    assert (sequence.finish, sequence.error) == (pb.FINISH_LENGTH, "")


def test_a_grammar_that_is_not_ready_in_time_fails_its_sequence_alone(byte_path: Path) -> None:
    going = threading.Event()

    def slow() -> TokenVocabulary:
        going.wait(30)
        return TokenVocabulary.read(byte_path, 320)

    router = WorkerClient(
        Worker(ScriptedModel(vocab_size=320), num_blocks=64, grammars=Grammars(slow, most_seconds=0.2))
    )
    sequence = router.generate(PROMPTS[0], sampling=pb.Sampling(grammar=REGEX), eos_ids=[EOS])
    going.set()
    assert sequence.error == "The grammar was not compiled within 0.2 s. Make it smaller."


def test_an_overdue_grammar_leaves_no_thread_and_no_process_behind_and_the_next_one_is_compiled(
    byte_path: Path,
) -> None:
    known = Grammars(lambda: TokenVocabulary.read(byte_path, 320), most_seconds=30.0)
    router = WorkerClient(Worker(ScriptedModel(vocab_size=320), num_blocks=64, grammars=known))

    def error_of(source: str) -> str:
        grammar = pb.Grammar(kind=pb.GRAMMAR_KIND_REGEX, source=source)
        sequence = router.generate(PROMPTS[0], sampling=pb.Sampling(grammar=grammar), eos_ids=[EOS], max_tokens=3)
        return sequence.error

    assert error_of("[a-c]{9}") == ""
    assert known.trial is not None
    first = known.trial.pid
    assert first is not None
    os.kill(first, signal.SIGSTOP)  # as one that never comes to an end
    known.trial._seconds = 0.3
    assert "cannot be compiled within 0.3 s and the memory for it. Make it smaller" in error_of("[a-d]{9}")
    for thread in threading.enumerate():
        if thread.name == "grammar":
            thread.join(30)
            assert not thread.is_alive()
    with pytest.raises(ProcessLookupError):
        os.kill(first, 0)
    known.trial._seconds = 30.0
    assert error_of("[a-d]{9}") == ""
    assert known.trial.pid not in (None, first)


def test_a_process_that_could_not_be_told_the_vocabulary_tries_nothing(
    byte_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(process: GrammarProcess, *reported: object) -> bool:
        raise MemoryError

    trial = GrammarTrial(TokenVocabulary.read(byte_path, 320), 30.0)
    with monkeypatch.context() as failing:
        failing.setattr(GrammarProcess, "with_tokens", fails)
        with pytest.raises(MemoryError):
            trial.check("regex", "[a-c]", time.monotonic() + 30.0)
    assert trial.pid is None
    trial.check("regex", "[a-c]", time.monotonic() + 30.0)
    trial._end()


def test_the_router_takes_nobody_for_hung_who_waits_for_a_grammar_as_long_as_he_may() -> None:
    assert GRAMMAR_SECONDS >= MOST_SECONDS


def regex(source: str) -> pb.Grammar:
    return pb.Grammar(kind=pb.GRAMMAR_KIND_REGEX, source=source)


def prepare(grammars: Grammars, source: str) -> Preparation:
    return grammars.prepare(regex(source), eos_ids=[EOS], stop_ids=(), ignores_eos=False, output=(), done=lambda: None)


def test_slow_grammars_do_not_hold_up_a_known_one(byte_path: Path) -> None:
    known = Grammars(lambda: TokenVocabulary.read(byte_path, 320), most_seconds=60.0)
    assert prepare(known, "[a-c]{9}").wait(30)
    assert known.trial is not None
    assert known.trial.pid is not None
    os.kill(known.trial.pid, signal.SIGSTOP)  # whatever is tried hangs
    slow = [prepare(known, f"[a-d]{{{count}}}") for count in range(4)]
    again = prepare(known, "[a-c]{9}")
    assert again.wait(20)
    assert again.state is not None
    assert not any(one.is_over for one in slow)
    for one in slow:
        one.cancel()
    os.kill(known.trial.pid, signal.SIGCONT)


def test_many_grammars_take_few_threads_and_those_released_are_never_begun(byte_path: Path) -> None:
    going = threading.Event()

    def slow() -> TokenVocabulary:
        going.wait(30)
        return TokenVocabulary.read(byte_path, 320)

    before = threading.active_count()
    known = Grammars(slow)
    router = WorkerClient(Worker(ScriptedModel(vocab_size=320), num_blocks=64, grammars=known))
    gone = [
        router.admit([5], sampling=pb.Sampling(grammar=regex(f"a{{{n}}}")), eos_ids=[EOS], num_pages=1)
        for n in range(40)
    ]
    assert threading.active_count() - before <= MOST_AT_ONCE + 1
    for seq_id in gone:
        router.release(seq_id)
    router.run()
    going.set()
    assert prepare(known, "[ab]").wait(30)
    assert len(known._compiled) <= MOST_AT_ONCE + 1  # those that had begun, and the last


def test_where_no_thread_can_be_started_the_sequence_fails_alone(
    byte_model: SpaceModel, byte_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    router = WorkerClient(Worker(byte_model, num_blocks=64, grammars=Grammars.of(byte_path, 320, ())))
    good = router.admit(PROMPTS[1], max_tokens=5)
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", fails)
        bad = router.admit(PROMPTS[0], sampling=pb.Sampling(grammar=REGEX), eos_ids=[EOS], max_tokens=3)
    generated = router.generate(PROMPTS[0], sampling=pb.Sampling(grammar=REGEX), eos_ids=[EOS], max_tokens=3)
    assert router.sequences[bad].error == "The sequence could not be taken in: RuntimeError: can't start new thread"
    assert (router.sequences[good].finish, generated.finish) == (pb.FINISH_LENGTH, pb.FINISH_LENGTH)


def test_released_while_it_waits_a_sequence_is_forgotten(byte_path: Path) -> None:
    going = threading.Event()

    def slow() -> TokenVocabulary:
        going.wait(30)
        return TokenVocabulary.read(byte_path, 320)

    router = WorkerClient(Worker(ScriptedModel(vocab_size=320), num_blocks=64, grammars=Grammars(slow)))
    gone = router.admit(PROMPTS[0], sampling=pb.Sampling(grammar=REGEX), eos_ids=[EOS])
    router.release(gone)
    router.run()
    going.set()
    router.run()
    assert len(router.free) == 64
    assert router.sequences[gone].reports == []


def test_a_grammar_is_kept(byte_model: SpaceModel, grammars: Grammars, monkeypatch: pytest.MonkeyPatch) -> None:
    sources: list[str] = []

    def compile_and_note(tokenizer: Any, kind: str, source: str) -> Any:
        sources.append(source)
        return compile_grammar(tokenizer, kind, source)

    from space_server import grammar as module

    compile_grammar = module.compile_grammar
    monkeypatch.setattr(module, "compile_grammar", compile_and_note)
    for _ in range(2):
        outputs(PROMPTS, byte_model, grammars, pb.Grammar(kind=pb.GRAMMAR_KIND_REGEX, source="[xyz]{4}"), {})
    assert 1 <= sources.count("[xyz]{4}") <= 2  # two of the three sequences are compiled for at the same time


def test_a_worker_without_a_vocabulary_says_so_and_refuses(byte_model: SpaceModel, tmp_path: Path) -> None:
    for grammars, why in (
        (None, "it was started without them"),
        (Grammars.of(tmp_path, 320, ()), "the checkpoint has no tokenizer.json"),
    ):
        worker = Worker(byte_model, num_blocks=64, grammars=grammars)
        assert not worker.hello("life").takes_grammars
        router = WorkerClient(worker)
        sequence = router.generate(PROMPTS[0], sampling=pb.Sampling(grammar=REGEX), eos_ids=[EOS])
        assert sequence.error == f"This worker takes no grammars: {why}."


# -------------------------------------------------------------------------------------------- drafts for nothing


def test_what_the_grammar_forces_is_drafted_without_masks(byte_path: Path, texts: list[bytes]) -> None:
    scripted = ScriptedModel(vocab_size=320, num_masks=0)
    settings: dict[str, Any] = {"sources": DraftSources(masks=False), "controller": FixedLayout.full(8)}
    known = Grammars.of(byte_path, 320, ())
    ran = one(scripted, known, "regex", "the only way to say it", k=8, **settings)
    assert text(ran, texts) == "the only way to say it"
    assert {report.draft_source for report in ran.reports if report.num_drafted} == {pb.DRAFT_SOURCE_GRAMMAR}
    assert sum(ran.accepted) == sum(report.num_drafted for report in ran.reports)
    assert len(ran.reports) <= 2 + len(ran.tokens) // 9


OUTPUT_PROMPTS = [[70, 71, 72, 73], [90, 21]]
SOME, ALL, SCHEMAS = 2, 60, 5
"""Blocks of grammars at every change, and in the whole matrix; schemas in each, beside one each of the others."""

MOST = 400
"""Tokens of an output: most are complete before."""


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    sizes = {"hidden_size": 32, "num_heads": 2, "kv_heads": 1, "tie_word_embeddings": False}
    return tiny_checkpoint(tmp_path_factory.mktemp("small"), vocab_size=320, words=True, seed=1, **sizes)  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def small(path: Path) -> SpaceModel:
    return load_model(path, dtype="float32", num_threads=1)


@pytest.fixture(scope="module")
def vocabulary(path: Path, small: SpaceModel) -> TokenVocabulary:
    return TokenVocabulary.read(path, 320, {*small.facts.mask_ids, EOS})


@pytest.fixture(scope="module")
def known(vocabulary: TokenVocabulary) -> Grammars:
    return Grammars(lambda: vocabulary)


def texts_of(
    small: SpaceModel, known: Grammars, vocabulary: TokenVocabulary, grammar: pb.Grammar, chance: Random
) -> tuple[list[str], int]:
    """The complete texts of a few runs, the same with speculation and without, and how many were not complete."""
    blanks = {vocabulary.texts.index(blank): -3.0 for blank in (b"\t", b"\n", b" ")}  # a random model pads for ever
    sampling: dict[str, Any] = {"logit_bias": {EOS: 2.0, **blanks}}
    if chance.random() < 0.8:
        sampling |= {"seed": chance.getrandbits(32), "temperature": chance.choice([0.7, 1.0, 1.5])}
    ks = 0, chance.choice([1, 3, 5])
    runs: dict[int, list[ClientSequence]] = {
        k: outputs(OUTPUT_PROMPTS, small, known, grammar, sampling, k=k, max_tokens=MOST) for k in ks
    }
    plain, *others = runs.values()
    for other in others:
        assert [run.tokens for run in other] == [run.tokens for run in plain], grammar.source
    assert [run.error for run in plain] == ["", ""], grammar.source
    assert all(set(small.facts.mask_ids).isdisjoint(run.tokens) for run in plain)
    assert all(run.finish in (pb.FINISH_EOS, pb.FINISH_LENGTH) for run in plain)
    whole = [run for run in plain if run.finish == pb.FINISH_EOS]
    texts = [b"".join(vocabulary.texts[id_] for id_ in run.tokens).decode() for run in whole]
    return texts, len(plain) - len(whole)


BLOCKS = [pytest.param(n, marks=() if n < SOME else pytest.mark.slow) for n in range(ALL)]


@pytest.mark.parametrize("block", BLOCKS)
def test_complete_outputs_of_random_schemas_parse_and_validate(
    small: SpaceModel, known: Grammars, vocabulary: TokenVocabulary, block: int
) -> None:
    chance, num_whole, num_cut = Random(block), 0, 0
    for _ in range(SCHEMAS):
        grammar, schema = schema_case(chance)
        whole, cut = texts_of(small, known, vocabulary, grammar, chance)
        for text in whole:
            Draft202012Validator(schema).validate(json.loads(text))
        num_whole, num_cut = num_whole + len(whole), num_cut + cut
    assert num_whole > num_cut  # or little would be judged


@pytest.mark.parametrize("block", BLOCKS)
@pytest.mark.parametrize("make", [regex_case, choice_case, rules_case])
def test_complete_outputs_of_other_random_grammars_are_theirs(
    small: SpaceModel, known: Grammars, vocabulary: TokenVocabulary, make: Any, block: int
) -> None:
    chance = Random(block)
    case: Case = make(chance)
    whole, _ = texts_of(small, known, vocabulary, case.grammar, chance)
    assert [text for text in whole if not case.accepts(text)] == [], case.grammar.source
    assert make is rules_case or len(whole) == 2
