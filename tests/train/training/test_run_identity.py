"""A run goes on with what it was begun with: other weights, text or mask ids in their place are refused by name."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from doubles.training import random_examples, rows_for, run, tiny_plan
from space_model.checkpoint.checkpoint import Checkpoint
from space_model.testing import tiny_checkpoint
from space_train.data.examples import Example
from space_train.data.rows import MixedRows, PackedExamples, PackedTokens, RowStream, TokenRows
from space_train.run_folder import STATE_FILE, fingerprint, load_checkpoint, save_atomically
from space_train.train_plan import InvalidPlan, Method


@pytest.fixture
def base(tmp_path: Path) -> Path:
    return tiny_checkpoint(tmp_path / "base", num_masks=0)


def flip(file: Path) -> None:
    """The lowest bit of its last byte: names and shapes stay."""
    content = file.read_bytes()
    file.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))


def test_weights_that_differ_in_value_alone_have_another_fingerprint(base: Path, tmp_path: Path) -> None:
    same, other = tiny_checkpoint(tmp_path / "same", num_masks=0), tiny_checkpoint(tmp_path / "o", num_masks=0, seed=1)
    prints = [fingerprint(Checkpoint.open(path)) for path in (base, same, other)]
    assert prints[0] == prints[1] != prints[2]


def test_other_weights_under_the_same_name_are_refused(base: Path, tmp_path: Path) -> None:
    run(base, tiny_plan(), tmp_path / "out")
    shutil.rmtree(base)
    tiny_checkpoint(base, num_masks=0, seed=1)
    with pytest.raises(InvalidPlan, match=r"holds a run with weights of the model = .*--restart"):
        run(base, tiny_plan(), tmp_path / "out")


@pytest.mark.parametrize("part", ["gated_lora.safetensors", "draft_head.safetensors"])
def test_another_adapter_or_head_under_the_same_name_is_refused(part: str, base: Path, tmp_path: Path) -> None:
    source = run(base, tiny_plan(), tmp_path / "masks").folder
    assert source is not None
    run(source, tiny_plan(Method.HEAD), tmp_path / "out")
    flip(source / part)
    with pytest.raises(InvalidPlan, match="holds a run with adapter and draft head of the model = "):
        run(source, tiny_plan(Method.HEAD), tmp_path / "out")


@pytest.mark.parametrize("what", ["ids", "learned"])
def test_another_text_is_refused_wherever_it_is(what: str, base: Path, tmp_path: Path) -> None:
    """Of as many rows, and the same first one."""
    plan, examples = tiny_plan(pack=False), random_examples(12, 16, 32)
    run(base, plan, tmp_path / "out", data=rows_for(plan, examples))
    first = rows_for(plan, examples).rows(0, 1).ids[0].tolist()
    place = next(n for n, one in enumerate(examples) if one.ids != first[: len(one.ids)])
    one = examples[place]
    if what == "ids":
        examples[place] = Example([*one.ids[:-1], one.ids[-1] ^ 1], one.learned)
    else:
        examples[place] = Example(one.ids, [*one.learned[:8], not one.learned[8], *one.learned[9:]])
    with pytest.raises(InvalidPlan, match="holds a run with text of the data = "):
        run(base, plan, tmp_path / "out", data=rows_for(plan, examples))


def test_other_mask_ids_are_refused(base: Path, tmp_path: Path) -> None:
    plan = tiny_plan(Method.FULL)
    run(base, plan, tmp_path / "out")
    with pytest.raises(InvalidPlan, match=r"mask ids = \[100, 101, 102\]; this one has \[105, 106, 107\]"):
        run(base, plan, tmp_path / "out", given_mask_ids=[105, 106, 107])


def test_a_state_of_before_there_were_digests_is_gone_on_with(base: Path, tmp_path: Path) -> None:
    run(base, tiny_plan(), tmp_path, stop_after_steps=1)
    state = load_checkpoint(tmp_path / STATE_FILE)
    names = {"weights of the model", "adapter and draft head of the model", "text of the data", "mask ids"}
    old = {name: value for name, value in json.loads(state["plan"]).items() if name not in names}
    save_atomically(state | {"plan": json.dumps(old)}, tmp_path / STATE_FILE)
    assert run(base, tiny_plan(), tmp_path).counters.step == 3
    assert names <= set(json.loads(load_checkpoint(tmp_path / STATE_FILE)["plan"]))


def test_a_digest_is_over_every_stream_and_what_it_teaches() -> None:
    def tokens(last: int) -> TokenRows:
        return TokenRows(PackedTokens(np.array([*range(99), last], dtype=np.uint16), 0), 8)

    chats = PackedExamples([Example([1, 2, 3], [False, True, True])], length=4, seed=0, pad_id=0)
    own = RowStream(chats, 0.5)
    digests = [
        MixedRows(streams, 0).digest()
        for streams in (
            [RowStream(tokens(1), 0.5), own],
            [RowStream(tokens(1), 0.5), own],
            [RowStream(tokens(2), 0.5), own],
            [RowStream(tokens(1), 0.5), RowStream(chats, 0.5, teaches=False)],
            [RowStream(tokens(1), 0.6), own],
        )
    ]
    assert digests[0] == digests[1]
    assert len(set(digests)) == 4
