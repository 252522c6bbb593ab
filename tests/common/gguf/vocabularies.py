"""Small vocabularies that show every cut, and the files that llama.cpp reads them from."""

import io
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import gguf
import sentencepiece
import tokenizers
from tokenizers import models, pre_tokenizers, trainers

NORMAL, CONTROL, USER_DEFINED = 1, 3, 4


def byte_level(lines: Sequence[str], size: int) -> dict[str, Any]:
    """Metadata of a byte-level BPE that was trained on whole lines: its merges reach over every boundary of words."""
    tokenizer = tokenizers.Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = trainers.BpeTrainer(vocab_size=size, initial_alphabet=alphabet, show_progress=False, max_token_length=24)
    tokenizer.train_from_iterator(lines, trainer)
    model = json.loads(tokenizer.to_str())["model"]
    tokens = sorted(model["vocab"], key=model["vocab"].get)
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.tokens": [*tokens, "<|begin|>", "<|stop|>", "<tag>"],
        "tokenizer.ggml.token_type": [NORMAL] * len(tokens) + [CONTROL, CONTROL, USER_DEFINED],
        "tokenizer.ggml.merges": [" ".join(pair) for pair in model["merges"]],
        "tokenizer.ggml.bos_token_id": len(tokens),
        "tokenizer.ggml.eos_token_id": len(tokens) + 1,
    }


def sentence_piece(lines: Sequence[str], size: int) -> dict[str, Any]:
    """Metadata of a SentencePiece BPE with bytes for characters that it does not know."""
    written = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(lines), model_writer=written, vocab_size=size, model_type="bpe", byte_fallback=True,
        normalization_rule_name="identity", remove_extra_whitespaces=False, split_digits=True,
        character_coverage=0.98, allow_whitespace_only_pieces=True, user_defined_symbols=["<tag>"], num_threads=1,
        minloglevel=2,
    )  # fmt: skip
    model = sentencepiece.SentencePieceProcessor(model_proto=written.getvalue())
    ids = range(model.vocab_size())
    kinds = ((model.is_unknown, 2), (model.is_control, CONTROL), (model.is_byte, 6), (model.is_unused, 5))
    types = [next((type_ for holds, type_ in kinds if holds(id_)), NORMAL) for id_ in ids]
    types[model.piece_to_id("<tag>")] = USER_DEFINED
    return {
        "tokenizer.ggml.model": "llama", "tokenizer.ggml.tokens": [model.id_to_piece(id_) for id_ in ids],
        "tokenizer.ggml.token_type": types, "tokenizer.ggml.scores": [model.get_score(id_) for id_ in ids],
        "tokenizer.ggml.bos_token_id": model.bos_id(), "tokenizer.ggml.eos_token_id": model.eos_id(),
        "tokenizer.ggml.unknown_token_id": model.unk_id(),
    }  # fmt: skip


def write(file: Path, metadata: Mapping[str, Any]) -> None:
    """A file without weights, which llama.cpp loads as a vocabulary only."""
    writer = gguf.GGUFWriter(file, "llama")
    for add, value in (
        (writer.add_context_length, 64), (writer.add_embedding_length, 8), (writer.add_block_count, 1),
        (writer.add_feed_forward_length, 8), (writer.add_head_count, 1),
        (writer.add_vocab_size, len(metadata["tokenizer.ggml.tokens"])), (writer.add_layer_norm_rms_eps, 1e-5),
    ):  # fmt: skip
        add(value)
    for key, value in metadata.items():
        if isinstance(value, list):
            writer.add_array(key, value)
        elif isinstance(value, bool):
            writer.add_bool(key, value)
        elif isinstance(value, int):
            writer.add_uint32(key, value)
        else:
            writer.add_string(key, value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
