"""Whatever a complete output is, it is one of its grammar: random grammars, judged by somebody else."""

import json
from pathlib import Path
from random import Random
from typing import Any

import pytest
from doubles.grammars import Case, choice_case, outputs, regex_case, rules_case, schema_case
from jsonschema import Draft202012Validator
from space_common.worker_client import ClientSequence
from space_model.loading.load import load_model
from space_model.space_model import SpaceModel
from space_model.testing import tiny_checkpoint
from space_proto import worker_pb2 as pb
from space_server.grammar.grammars import Grammars
from space_server.grammar.vocabulary import TokenVocabulary

EOS = 0
PROMPTS = [[70, 71, 72, 73], [90, 21]]
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
        k: outputs(PROMPTS, small, known, grammar, sampling, k=k, max_tokens=MOST) for k in ks
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
