"""Drafts of a second model: what it reads, what it drafts, and which models are taken."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from space_common.worker.client import WorkerClient
from space_model.checkpoint.checkpoint import Checkpoint
from space_model.draft_networks.draft_model import check_tokenizer, load_draft_model
from space_model.draft_networks.place import check_place
from space_model.geometry.draft_layout import DraftLayout
from space_model.geometry.forward_batch import ForwardBatch, Segment
from space_model.loading.load import load_model
from space_model.model_error import InvalidSetting
from space_model.space_model import SpaceModel
from space_proto import worker_pb2 as pb
from space_server.drafters.network_drafter import FEW_UNREAD, MOST_UNREAD
from space_server.drafts import DraftSources
from space_server.speculation.controller import Controller, DraftLimits, FixedLayout
from space_server.worker import Worker
from tiny_checkpoints import perturbed, tiny_checkpoint

SAMPLINGS = [
    pb.Sampling(),
    pb.Sampling(seed=3, temperature=0.9),
    pb.Sampling(seed=5, temperature=1.0, top_p=0.8),
    pb.Sampling(seed=8, temperature=0.6, repetition_penalty=1.3, frequency_penalty=0.2),
]
PROMPTS = [[20, 30, 40, 50], [60, 31, 41, 51, 61], [70] * 7, [45, 55]]
SIZES = {"hidden_size": 32, "num_heads": 2, "kv_heads": 1, "tie_word_embeddings": False}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A model of two layers, and the same with its second layer changed: it drafts right now and then."""
    target = tiny_checkpoint(tmp_path_factory.mktemp("target"), num_masks=0, seed=1, **SIZES)
    return target, perturbed(target, tmp_path_factory.mktemp("draft"))


def with_draft(folders: tuple[Path, Path], dtype: str = "float32") -> SpaceModel:
    target, draft = folders
    model = load_model(target, dtype=dtype, num_threads=1)
    return model.drafted_by(load_draft_model(Checkpoint.open(draft), Checkpoint.open(target), model.facts, dtype=dtype))


@pytest.fixture(scope="module")
def model(folders: tuple[Path, Path]) -> SpaceModel:
    return with_draft(folders)


def run(
    model: SpaceModel, controller: Controller | None, prompts: list[list[int]] = PROMPTS, **of_worker: object
) -> tuple[list[list[int]], WorkerClient]:
    """All prompts in one batch: their texts."""
    worker = Worker(model, num_blocks=400, block_size=4, controller=controller, **of_worker)  # type: ignore[arg-type]
    client = WorkerClient(worker)
    numbers = [
        client.admit(prompt, max_tokens=32, sampling=sampling)
        for prompt, sampling in zip(prompts, SAMPLINGS, strict=False)
    ]
    client.run()
    return [client.sequences[number].tokens for number in numbers], client


@pytest.mark.parametrize("every", [1, 3], ids=["at every step", "at every third step"])
def test_greedy_drafts_are_what_the_draft_model_writes(
    every: int, model: SpaceModel, folders: tuple[Path, Path]
) -> None:
    num_steps = 0

    def layout(limit: DraftLimits) -> DraftLayout:
        return DraftLayout.by_head(limit.num_drafts, 0 if num_steps % every else 5)

    worker = Worker(model, num_blocks=100, block_size=4, controller=FixedLayout(layout))
    client = WorkerClient(worker)
    number = client.admit(PROMPTS[0], max_tokens=60)
    alone = load_model(folders[1], dtype="float32", num_threads=1)
    for num_steps in range(12):
        client.step()
        (sequence,) = worker.batch
        known, wanted = [*sequence.ids], []
        for _ in range(0 if num_steps % every else 5):
            batch = ForwardBatch.build([Segment(known, 0, range(40), DraftLayout.plain())], block_size=4, mask_ids=())
            hidden = alone.forward(batch, alone.allocate_kv(40, 4))[len(known) - 1]
            known.append(int(alone.logits(hidden[None]).argmax()))
            wanted.append(known[-1])
        assert sequence.drafts == wanted
    assert len({report.num_accepted for report in client.sequences[number].reports if report.num_drafted}) > 2


@pytest.mark.parametrize("num_drafts", [1, 3, 8])
def test_the_text_is_plain_decoding_s_and_some_drafts_are_accepted(model: SpaceModel, num_drafts: int) -> None:
    plain, _ = run(model, FixedLayout.full(0))
    texts, client = run(model, FixedLayout.by_head(num_drafts))
    assert texts == plain
    reports = [report for sequence in client.sequences.values() for report in sequence.reports if report.num_drafted]
    assert max(report.num_drafted for report in reports) == num_drafts
    assert {report.draft_source for report in reports} == {pb.DRAFT_SOURCE_MODEL}
    assert {min(report.num_accepted, 1) for report in reports} == {0, 1}


def test_a_long_prompt_is_read_in_parts_while_others_decode(model: SpaceModel) -> None:
    prompt = [20 + n % 90 for n in range(MOST_UNREAD + 80)]
    worker = Worker(model, num_blocks=400, block_size=4, controller=FixedLayout.by_head(3))
    client = WorkerClient(worker)
    short = client.admit(PROMPTS[0], max_tokens=32)
    long = client.admit(prompt, max_tokens=8)
    counts = []
    while len(client.sequences[long].tokens) < 6:
        client.step()
        found = {sequence.seq_id: len(sequence.drafts) for sequence in worker.batch}
        counts.append((found.get(short, 0), found.get(long, 0)))
    assert counts[0] == (3, 0)  # its prompt has more unread positions than a step reads
    assert any(of_long for _, of_long in counts[1:3])
    assert FEW_UNREAD < MOST_UNREAD


def test_a_prefix_that_was_read_is_not_read_again(model: SpaceModel) -> None:
    worker = Worker(model, num_blocks=100, block_size=4, controller=FixedLayout.by_head(3))
    client = WorkerClient(worker)
    prompt = [20 + n for n in range(22)]
    first = client.admit(prompt, max_tokens=8)
    client.step()
    pages = client.sequences[first].pages[:5]
    kv = worker.kv.draft
    assert kv is not None
    assert [int(kv.num_read[page]) for page in pages] == [4] * 5
    kv.forget(pages[3:])
    assert kv.num_read_of(next(iter(worker.batch)).page_numbers) == 12


def test_a_request_may_command_its_drafts_up_to_the_draft_model_s(model: SpaceModel) -> None:
    worker = Worker(model, num_blocks=100, block_size=4, controller=FixedLayout.full(0))
    hello = worker.hello("life")
    assert (hello.num_head_drafts, hello.head_kind) == (8, "model")
    client = WorkerClient(worker)
    some, many = (client.admit(PROMPTS[0], max_tokens=30, num_forced_drafts=count) for count in (2, 9))
    client.run()
    assert max(report.num_drafted for report in client.sequences[some].reports) == 2
    assert client.sequences[many].error == (
        "9 drafts per step are asked for; this worker drafts at most 8 without masks."
    )


def test_a_worker_that_is_to_draft_by_masks_alone_leaves_the_draft_model_out(model: SpaceModel) -> None:
    worker = Worker(model, num_blocks=100, block_size=4, sources=DraftSources(head=False))
    hello = worker.hello("life")
    assert (hello.num_head_drafts, hello.head_kind) == (0, "")


def test_the_draft_model_drafts_in_place_of_a_recurrent_head_and_for_every_adapter(
    folders: tuple[Path, Path], tmp_path: Path
) -> None:
    path = tiny_checkpoint(tmp_path, adapter_rank=4, num_masks=2, head_drafts=5, seed=1, **SIZES)
    model = load_model(path, dtype="float32", num_threads=1)
    draft = load_draft_model(Checkpoint.open(folders[1]), Checkpoint.open(path), model.facts, dtype="float32")
    drafted = model.drafted_by(draft)
    assert drafted.recurrent_head_of(0) is None
    assert drafted.facts.head_of(0) == drafted.facts.head == draft.facts
    assert drafted.facts.kv_bytes_per_token == 2 * model.facts.kv_bytes_per_token
    plain, _ = run(model, FixedLayout.full(0))
    texts, client = run(drafted, FixedLayout.by_head(4))
    assert texts == plain
    assert any(report.num_drafted for sequence in client.sequences.values() for report in sequence.reports)


def test_a_draft_model_with_fewer_positions_drafts_as_far_as_it_has_them(
    folders: tuple[Path, Path], tmp_path: Path
) -> None:
    short = tiny_checkpoint(tmp_path, num_masks=0, seed=1, window=20, **SIZES)
    model = with_draft((folders[0], short))
    assert model.draft_network is not None
    assert model.draft_network.window == 20
    plain, _ = run(model, FixedLayout.full(0))
    texts, client = run(model, FixedLayout.by_head(4))
    assert texts == plain
    drafted = [report for report in client.sequences[1].reports if report.num_drafted]
    assert drafted
    assert len(drafted) < len(client.sequences[1].reports) - 1


def test_other_tokenizers_are_refused_by_the_first_id_that_differs(folders: tuple[Path, Path], tmp_path: Path) -> None:
    target, other = Checkpoint.open(folders[0]), tiny_checkpoint(tmp_path / "other", num_masks=0, **SIZES)
    file = other / "tokenizer.json"
    check_tokenizer(Checkpoint.open(other), target)
    content = json.loads(file.read_text())
    vocabulary = content["model"]["vocab"]
    vocabulary["A"], vocabulary["B"] = vocabulary["B"], vocabulary["A"]
    file.write_text(json.dumps(content))
    with pytest.raises(InvalidSetting, match=r"another tokenizer than .*: id \d+ is 'B' there, and 'A' here"):
        check_tokenizer(Checkpoint.open(other), target)
    content["model"]["vocab"] = {token: id_ for token, id_ in vocabulary.items() if id_ < 30}
    file.write_text(json.dumps(content))
    with pytest.raises(InvalidSetting, match=r"30 tokens, and .* 100: these are other vocabularies"):
        check_tokenizer(Checkpoint.open(other), target)
    file.unlink()
    with pytest.raises(InvalidSetting, match=r"cannot be compared with .* has no tokenizer\.json"):
        check_tokenizer(Checkpoint.open(other), target)


def test_places_without_a_draft_model_are_named() -> None:
    check_place(torch.device("cpu"), 1)
    with pytest.raises(InvalidSetting, match="--draft-model runs on a CPU only, and the model is on cuda"):
        check_place(torch.device("cuda"), 1)
    with pytest.raises(InvalidSetting, match="leave it out, or --tensor-parallel 2"):
        check_place(torch.device("cpu"), 2)


def test_a_draft_model_with_recurrent_layers_is_refused(folders: tuple[Path, Path], tmp_path: Path) -> None:
    hybrid = tiny_checkpoint(tmp_path, "qwen3_next", num_masks=0)
    with pytest.raises(InvalidSetting, match="has recurrent layers, whose states cannot go back"):
        with_draft((folders[0], hybrid))


@pytest.mark.parametrize(
    "fields",
    [{"architectures": ["LlamaForCausalLMEagle3"]}, {"speculators_model_type": "eagle3"}],
    ids=lambda one: next(iter(one)),
)
def test_a_head_of_eagle_is_named_as_such(
    fields: dict[str, object], folders: tuple[Path, Path], tmp_path: Path
) -> None:
    head = tiny_checkpoint(tmp_path, num_masks=0, **SIZES)
    config = json.loads((head / "config.json").read_text())
    (head / "config.json").write_text(json.dumps(config | fields))
    with pytest.raises(InvalidSetting, match=r"is an EAGLE head .*, and no model"):
        with_draft((folders[0], head))
