"""What a server takes in memory with SPACE, and with a draft model beside the model: arithmetic on shapes."""

from __future__ import annotations

from dataclasses import dataclass

from space_train.costs.model_shape import ModelShape

DRAFT_MODELS = {
    "tinyllama-1.1b": ModelShape("TinyLlama 1.1B", 32000, 2048, 22, 32, 4, 64, 5632, tied=False),
    "llama-160m": ModelShape("Llama 160M", 32000, 768, 12, 12, 12, 64, 3072, tied=False),
    "llama-68m": ModelShape("Llama 68M", 32000, 768, 2, 12, 12, 64, 3072, tied=False),
}
"""Small models that people draft with."""


@dataclass(frozen=True)
class Serving:
    """How a model is held, and for whom."""

    num_sequences: int
    num_tokens: int  # known of each
    num_drafts: int  # k: in flight, each in a slot of its own
    rank: int  # of the adapter
    head_hidden: int  # of the draft head
    itemsize: int = 2  # bytes of a number
    on_cpu: bool = False  # the output head lies packed beside its rows


@dataclass(frozen=True)
class Side:
    """One server's bytes."""

    name: str
    weights: int  # of the model that writes the text
    drafting: int  # of what drafts: adapter, mask embeddings and draft head, or a second model
    keys_values: int  # of all tokens
    reserved: int  # of the k+1 slots of each sequence that are written ahead
    drafting_keys_values: int  # of the second model

    @property
    def total(self) -> int:
        return self.weights + self.drafting + self.keys_values + self.reserved + self.drafting_keys_values

    @property
    def for_drafts(self) -> int:
        """What plain decoding would not need; it writes one slot ahead."""
        return self.drafting + self.reserved + self.drafting_keys_values


def held(shape: ModelShape, serving: Serving) -> int:
    """Bytes of a model's weights."""
    packed = shape.output if serving.on_cpu else 0
    return (shape.num_parameters + packed) * serving.itemsize


def slot(shape: ModelShape, serving: Serving) -> int:
    """Bytes of keys and values of one token."""
    return 2 * shape.num_layers * shape.num_kv_heads * shape.head_dim * serving.itemsize


def adapter(shape: ModelShape, serving: Serving) -> int:
    """Bytes of a gated adapter on every product, of the masks' embeddings, and of the draft head (an MLP)."""
    masks = serving.num_drafts * shape.hidden_size
    head = 3 * shape.hidden_size * serving.head_hidden
    return (shape.adapters(serving.rank) + masks + head) * serving.itemsize


def with_space(shape: ModelShape, serving: Serving) -> Side:
    """The model drafts for itself."""
    each, ahead = slot(shape, serving), serving.num_drafts + 1
    return Side(
        "SPACE",
        held(shape, serving),
        adapter(shape, serving),
        serving.num_sequences * serving.num_tokens * each,
        serving.num_sequences * ahead * each,
        0,
    )


def with_draft_model(shape: ModelShape, draft: ModelShape, serving: Serving) -> Side:
    """A second model drafts: it has weights, and keys and values of the same tokens, of its own."""
    each, ahead = slot(shape, serving), serving.num_drafts + 1
    its = slot(draft, serving)
    return Side(
        f"draft model {draft.name}",
        held(shape, serving),
        held(draft, serving),
        serving.num_sequences * serving.num_tokens * each,
        serving.num_sequences * ahead * each,
        serving.num_sequences * (serving.num_tokens + ahead) * its,
    )
