"""The embedded model is found inside the installed package, and is what its card says."""

import json
from importlib.resources import files

from safetensors import safe_open

MOST_BYTES = 32 * 1024 * 1024
FILES = ("config.json", "generation_config.json", "model.safetensors", "draft_head.safetensors", "README.md")
FILES += ("tokenizer.json", "tokenizer_config.json")


def test_every_file_is_found_through_importlib_resources_within_32_mb() -> None:
    sizes = [len((files("space_demo") / name).read_bytes()) for name in FILES]
    assert min(sizes) > 0
    assert sum(sizes) <= MOST_BYTES


def test_it_is_a_space_checkpoint_with_five_masks_and_a_draft_head() -> None:
    config = json.loads((files("space_demo") / "config.json").read_text())
    assert config["vocab_size"] >= 4096
    space = config["space"]
    assert (space["num_masks"], len(set(space["mask_token_ids"])), space["adapter"]) == (5, 5, None)
    hidden, width = config["hidden_size"], space["draft_head"]["hidden"]
    with safe_open(str(files("space_demo") / space["draft_head"]["file"]), "pt") as head:
        assert head.get_slice("draft_head.w1.weight").get_shape() == [width, 2 * hidden]
        assert head.get_slice("draft_head.w2.weight").get_shape() == [hidden, width]


def test_the_card_states_at_least_three_characters_per_token_and_the_acceptance_of_each_draft() -> None:
    card = " ".join((files("space_demo") / "README.md").read_text().split())
    before, _ = card.split(" characters per token")
    assert float(before.split()[-1]) >= 3.0
    assert "| with the draft head |" in card
    assert "python -m space_train.demo" in card
