"""A real encoder: its vectors are those of sentence-transformers' recipe, and texts that mean the same are near."""

from __future__ import annotations

from pathlib import Path

import torch
from space_model.checkpoint.checkpoint import Checkpoint
from space_model.encoder.text_encoder import TextIds, load_encoder
from space_router.config import ServeConfig
from space_router.text.encoder_text import EncoderText
from transformers import AutoModel, AutoTokenizer

TEXTS = [
    "A man is eating food.",
    "A man eats something.",
    "The girl is carrying a baby.",
    "Paris is the capital of France. " * 30,
    "Привет, мир! 🌊",
    "a",
]


def expected(folder: Path, texts: list[str]) -> torch.Tensor:
    """The mean of each text's hidden states, of length 1: each text alone, cut at 256 ids as its files say."""
    tokenizer, model = AutoTokenizer.from_pretrained(folder), AutoModel.from_pretrained(folder).eval()
    found = []
    for text in texts:
        with torch.no_grad():
            hidden = model(**tokenizer(text, truncation=True, max_length=256, return_tensors="pt")).last_hidden_state
        found.append(torch.nn.functional.normalize(hidden[0].mean(0), dim=0))
    return torch.stack(found)


def test_vectors_are_those_of_sentence_transformers(minilm_folder: Path) -> None:
    encoder = load_encoder(Checkpoint.open(str(minilm_folder)))
    text = EncoderText.load(ServeConfig(embedding_model=str(minilm_folder)))
    assert text is not None
    assert (encoder.facts.window, encoder.facts.num_values, encoder.facts.is_normalised) == (256, 384, True)
    made = text.encode(TEXTS, encoder.facts.window, prompt="", special=True, truncate=encoder.facts.window)
    vectors = encoder.encode([TextIds(ids, types) for ids, types in made])
    torch.testing.assert_close(vectors, expected(minilm_folder, TEXTS), rtol=0, atol=1e-5)
    near, far = vectors[0] @ vectors[1], vectors[0] @ vectors[2]
    assert near > 0.6 > 0.3 > far
