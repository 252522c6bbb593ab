"""Random tiny encoders as sentence-transformers saves them, and what it would make of texts: an oracle of its own."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tokenizers
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoConfig, AutoModel, AutoModelForSequenceClassification, PreTrainedTokenizerFast

from doubles.tokenizers import byte_level_encoder, unigram, wordpiece

WINDOW = 48

_SIZES = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}


@dataclass(frozen=True)
class Family:
    """An architecture, its tokenizer, and how its vectors are made."""

    config: Mapping[str, Any]
    tokenizer: Callable[[], tokenizers.Tokenizer]
    pad_token: str
    pooling: Mapping[str, Any]
    has_dense: bool = False
    is_normalised: bool = True


FAMILIES: Mapping[str, Family] = {
    "bert": Family(
        {"model_type": "bert", "type_vocab_size": 2, "max_position_embeddings": 64, **_SIZES},
        wordpiece,
        "[PAD]",
        {"pooling_mode_cls_token": False, "pooling_mode_mean_tokens": True},
    ),
    "xlm-roberta": Family(
        {"model_type": "xlm-roberta", "type_vocab_size": 1, "max_position_embeddings": WINDOW + 2, **_SIZES},
        unigram,
        "<pad>",
        {"pooling_mode_cls_token": True, "pooling_mode_mean_tokens": False},
    ),
    "modernbert": Family(
        {
            "model_type": "modernbert", "max_position_embeddings": 64, "local_attention": 8,
            "global_attn_every_n_layers": 2, "attn_implementation": "sdpa",
            **dict.fromkeys(("bos_token_id", "eos_token_id", "cls_token_id", "sep_token_id"), 0), **_SIZES,
        },
        lambda: byte_level_encoder("[CLS]", "[SEP]"),
        "[PAD]",
        {"pooling_mode": ["max", "mean_sqrt_len_tokens", "weightedmean"]},
        has_dense=True,
        is_normalised=False,
    ),
    "qwen3": Family(
        {
            "model_type": "qwen3", "max_position_embeddings": 64, "num_key_value_heads": 2, "head_dim": 8,
            "tie_word_embeddings": True, **_SIZES,
        },
        lambda: byte_level_encoder(None, "<|endoftext|>"),
        "<|endoftext|>",
        {"pooling_mode_lasttoken": True},
    ),
}  # fmt: skip


def write_encoder(folder: Path, name: str = "bert", *, seed: int = 0, num_labels: int | None = None) -> Path:
    """Write a random checkpoint with its tokenizer. `num_labels`: of a cross-encoder; None: it makes vectors."""
    family = FAMILIES[name]
    folder.mkdir(parents=True, exist_ok=True)
    inner = family.tokenizer()
    inner.enable_truncation(8)  # as published files have it, and as must not count
    inner.save(str(folder / "tokenizer.json"))
    names = {"pad_token": family.pad_token, "tokenizer_class": "PreTrainedTokenizerFast", "model_max_length": WINDOW}
    (folder / "tokenizer_config.json").write_text(json.dumps(names), encoding="utf-8")
    fields = {"vocab_size": inner.get_vocab_size(), **family.config}
    if family.pad_token in inner.get_vocab():
        fields["pad_token_id"] = inner.token_to_id(family.pad_token)
    more = {} if num_labels is None else {"num_labels": num_labels}
    config = AutoConfig.for_model(**fields, **more)
    torch.manual_seed(seed)
    kind = AutoModel if num_labels is None else AutoModelForSequenceClassification
    model = kind.from_config(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(0.0, 0.3)
    model.save_pretrained(folder)
    if num_labels is None:
        _write_modules(folder, family)
    return folder


def _write_modules(folder: Path, family: Family) -> None:
    kinds = ["Transformer", "Pooling", *["Dense"] * family.has_dense, *["Normalize"] * family.is_normalised]
    modules = [
        {"idx": place, "name": str(place), "type": f"sentence_transformers.models.{kind}",
         "path": "" if kind == "Transformer" else f"{place}_{kind}"}
        for place, kind in enumerate(kinds)
    ]  # fmt: skip
    (folder / "modules.json").write_text(json.dumps(modules), encoding="utf-8")
    (folder / "sentence_bert_config.json").write_text(json.dumps({"max_seq_length": WINDOW, "do_lower_case": False}))
    prompts = {"query": "query: ", "document": "text: "}
    (folder / "config_sentence_transformers.json").write_text(json.dumps({"prompts": prompts}), encoding="utf-8")
    (folder / "1_Pooling").mkdir(exist_ok=True)
    size = int(family.config["hidden_size"])
    pooling = {"word_embedding_dimension": size, **family.pooling}
    (folder / "1_Pooling/config.json").write_text(json.dumps(pooling), encoding="utf-8")
    if family.has_dense:
        width = 3 * size
        (folder / "2_Dense").mkdir(exist_ok=True)
        dense = {"in_features": width, "out_features": 16, "bias": True,
                 "activation_function": "torch.nn.modules.activation.Tanh"}  # fmt: skip
        (folder / "2_Dense/config.json").write_text(json.dumps(dense), encoding="utf-8")
        weights = {"linear.weight": torch.randn(16, width) * 0.2, "linear.bias": torch.randn(16) * 0.2}
        save_file(weights, str(folder / "2_Dense/model.safetensors"))


def tokenizer_of(folder: Path) -> PreTrainedTokenizerFast:
    """The tokenizer as transformers has it."""
    loaded = PreTrainedTokenizerFast.from_pretrained(folder)
    loaded.backend_tokenizer.no_truncation()
    return loaded


def expected_vectors(folder: Path, texts: Sequence[str], name: str) -> Tensor:
    """What sentence-transformers makes of texts: each alone, so that no padding comes in."""
    family, tokenizer = FAMILIES[name], tokenizer_of(folder)
    model = AutoModel.from_pretrained(folder, dtype=torch.float32).eval()
    found = []
    for text in texts:
        ids = torch.tensor([tokenizer(text, truncation=True, max_length=WINDOW)["input_ids"]])
        with torch.no_grad():
            hidden = model(ids).last_hidden_state[0]  # [N, D]
        found.append(_expected(folder, family, hidden))
    return torch.stack(found)


def _expected(folder: Path, family: Family, hidden: Tensor) -> Tensor:
    count = len(hidden)
    if family.pooling.get("pooling_mode_cls_token"):
        vector = hidden[0]
    elif family.pooling.get("pooling_mode_lasttoken"):
        vector = hidden[-1]
    elif family.pooling.get("pooling_mode_mean_tokens"):
        vector = hidden.mean(0)
    else:
        weights = torch.arange(1, count + 1, dtype=torch.float32)
        parts = [hidden.max(0).values, hidden.sum(0) / count**0.5, weights @ hidden / weights.sum()]
        vector = torch.cat(parts)
    if family.has_dense:
        dense = load_file(folder / "2_Dense/model.safetensors")
        vector = torch.tanh(dense["linear.weight"] @ vector + dense["linear.bias"])
    return vector / vector.norm() if family.is_normalised else vector


def expected_scores(folder: Path, pairs: Sequence[tuple[str, str]]) -> Tensor:
    """What its CrossEncoder makes of pairs: [pairs, labels], one label behind a sigmoid."""
    tokenizer = tokenizer_of(folder)
    model = AutoModelForSequenceClassification.from_pretrained(folder, dtype=torch.float32).eval()
    found = []
    for first, second in pairs:
        how = {"truncation": "longest_first", "max_length": WINDOW, "return_token_type_ids": True}
        inputs = tokenizer(first, second, return_tensors="pt", **how)
        if model.config.model_type != "bert":
            del inputs["token_type_ids"]
        with torch.no_grad():
            found.append(model(**inputs).logits[0])
    logits = torch.stack(found)
    return logits.sigmoid() if logits.shape[1] == 1 else logits
