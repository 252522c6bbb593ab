"""A server with a draft model: the text of plain decoding, and what it says of its drafts."""

from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest
from e2e.conftest import Live
from eagle_heads import DenseHead, HeadShape, dense_base
from space_common.process import ServerProcess
from tiny_checkpoints import add_mtp_layer, perturbed, tiny_checkpoint

PROMPT = "a prompt that fills more than one page of keys"


@pytest.fixture(scope="module")
def served(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    draft = perturbed(checkpoint, tmp_path_factory.mktemp("draft"))
    model = ["--model", str(checkpoint), "--draft-model", str(draft), "--num-threads", "1", "--num-blocks", "512"]
    flags = ["--dtype", "float32", "--block-size", "8", "--speculation-method", "head"]
    with ServerProcess([*model, *flags]) as server, closing(Live(server)) as ready:
        yield ready


def assert_drafts_change_no_text(live: Live, source: str, most: int) -> None:
    """Texts are the same with drafts off, chosen and commanded; of those of `source` some are accepted, not all."""
    for fields in ({}, {"temperature": 0.8, "seed": 7}):
        plain = live.ids(PROMPT, speculation="off", **fields)
        assert live.ids(PROMPT, **fields) == plain
        assert live.ids(PROMPT, speculation=3, **fields) == plain
        assert live.ids(PROMPT, speculation=most, **fields) == plain
    found = live.metrics()
    drafted = found[f"spaceserve_drafted_tokens_by_source_total{{source={source}}}"]
    assert 0 < found[f"spaceserve_accepted_tokens_by_source_total{{source={source}}}"] < drafted


def test_the_text_is_the_same_off_by_choice_and_with_three_drafts_a_step(served: Live) -> None:
    assert_drafts_change_no_text(served, "model", 8)


def test_the_server_says_what_drafts(served: Live) -> None:
    speculation = served.get("/info")["speculation"]
    assert (speculation["head"], speculation["head_drafts"], speculation["max_request"]) == ("model", 8, 8)
    refused = served.http.post("/v1/completions", json={"prompt": PROMPT, "speculation": 9})
    assert refused.status_code == 400
    assert "at most 8 drafts per step can be asked for here" in refused.json()["error"]["message"]


def test_an_eagle_head_drafts_for_the_model_that_it_was_trained_for(tmp_path: Path) -> None:
    folder = tiny_checkpoint(tmp_path / "model", num_masks=0, num_layers=4, hidden_size=32, vocab_size=300, seed=1)
    base = dense_base(folder)
    head = DenseHead(base, HeadShape(draft_ids=tuple(range(10, 290))), (2, 2, 1)).train_on(base, steps=60)
    model = ["--model", str(folder), "--draft-head", str(head.save(tmp_path / "head")), "--num-threads", "1"]
    with ServerProcess([*model, "--num-blocks", "512", "--dtype", "float32"]) as server, closing(Live(server)) as ready:
        speculation = ready.get("/info")["speculation"]
        assert (speculation["head"], speculation["head_drafts"], speculation["max_request"]) == ("eagle", 5, 5)
        assert_drafts_change_no_text(ready, "eagle", 5)


def test_the_mtp_layer_of_a_checkpoint_drafts_for_it(tmp_path: Path) -> None:
    sizes = {"num_layers": 1, "vocab_size": 300, "seed": 2}
    folder = tiny_checkpoint(
        tmp_path, "glm4_moe", num_masks=0, tie_word_embeddings=False, num_nextn_predict_layers=1, **sizes
    )
    model = ["--model", str(add_mtp_layer(folder)), "--draft-model", "mtp", "--num-threads", "1", "--num-blocks", "512"]
    with ServerProcess([*model, "--dtype", "float32"]) as server, closing(Live(server)) as ready:
        assert ready.get("/info")["speculation"]["head"] == "mtp"
        for fields in ({}, {"temperature": 0.8, "seed": 7}):
            plain = ready.ids(PROMPT, speculation="off", **fields)
            assert ready.ids(PROMPT, **fields) == plain
            assert ready.ids(PROMPT, speculation=3, **fields) == plain
        found = ready.metrics()
        assert found["spaceserve_drafted_tokens_by_source_total{source=mtp}"] > 0
