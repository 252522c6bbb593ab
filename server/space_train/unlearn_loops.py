"""Teach a small model to leave its own loops: it writes greedily, and the 4-grams that it repeats become unlikely.

Sequence-level unlikelihood (arXiv 1908.04319): a token that closes a 4-gram which the text already holds costs
-log(1 - p). The next-token loss goes on beside it, so that the model forgets nothing else.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from space_train.export import llama_config, llama_weights
from space_train.network import Network
from space_train.optimiser import Optimiser
from space_train.packed_tokens import PackedTokens
from space_train.pretrain import autocast, draw, next_token_loss
from space_train.schedule import Budget, LearningRate
from space_train.stage import DEFAULT_PACE, Counters, Measures, Pace, Stateful, run_stage
from space_train.tokenizer import END_OF_TEXT_ID, PAD_ID, SPECIAL_TOKENS

GRAM = 4
"""Ids of a repetition: the measure of looping outputs counts the same."""


@dataclass(frozen=True)
class UnlearnPlan:
    """What the stage does, apart from its budget."""

    seed: int = 0
    texts: int = 32  # written anew for every `updates_each` updates
    updates_each: int = 2
    prompt: int = 48
    written: int = 112
    tokens_per_step: int = 4096  # of the next-token loss
    weight: float = 1.0
    muon_rate: float = 0.003
    adam_rate: float = 5e-4
    learning_rate: LearningRate = field(default_factory=lambda: LearningRate(warmup=0.03, decay_from=0.3))
    autocast: bool = True


def greedy_texts(network: Network, prompts: Tensor, num_new: int) -> Tensor:
    """`prompts` [B, P] continued greedily, [B, P + up to num_new]; behind an end of text stands padding."""
    model = LlamaForCausalLM(LlamaConfig(**_sizes(network)))
    model.load_state_dict(llama_weights(network, torch.float32), strict=False)
    model.eval()
    banned = [[number] for number in range(1, len(SPECIAL_TOKENS))]
    with torch.inference_mode():
        texts = model.generate(
            prompts,
            attention_mask=torch.ones_like(prompts),
            max_new_tokens=num_new,
            do_sample=False,
            bad_words_ids=banned,
            eos_token_id=END_OF_TEXT_ID,
            pad_token_id=PAD_ID,
        )
    return torch.as_tensor(texts).clone()


def repeats(texts: Tensor, num_prompt: int) -> Tensor:
    """[B, L] bool: the id closes a 4-gram that what was written before, behind the prompt, already holds."""
    closed = torch.zeros_like(texts, dtype=torch.bool)
    for row, text in enumerate(texts.tolist()):
        seen: set[tuple[int, ...]] = set()
        for end in range(num_prompt + GRAM, len(text) + 1):
            if text[end - 1] == PAD_ID:
                break
            gram = tuple(text[end - GRAM : end])
            closed[row, end - 1] = gram in seen
            seen.add(gram)
    return closed


def unlikelihood(network: Network, texts: Tensor, closed: Tensor) -> Tensor:
    """-log(1 - p), averaged over the ids of `texts` [B, L] that close a repetition (0 where none does)."""
    logits = network.logits(network(texts)[:, :-1]).float()
    chance = logits.log_softmax(-1).gather(2, texts[:, 1:, None])[..., 0].exp()
    losses = -torch.log1p(-chance.clamp(max=1 - 1e-4)) * closed[:, 1:]
    return losses.sum() / closed.sum().clamp(min=1)


def unlearn_loops(
    network: Network,
    streams: Mapping[str, PackedTokens],
    evaluate: Callable[[], Measures],
    plan: UnlearnPlan,
    budget: Budget,
    checkpoint: Path,
    *,
    pace: Pace = DEFAULT_PACE,
) -> Counters:
    """Train `network` in place; resumed from `checkpoint`. `repeats` is the share of written ids that repeat."""
    optimiser = Optimiser.of([network], muon_rate=plan.muon_rate, adam_rate=plan.adam_rate)
    texts = closed = torch.empty(0)

    def step(counters: Counters, progress: float) -> Measures:
        nonlocal texts, closed
        if counters.step % plan.updates_each == 0 or not len(texts):
            prompts = draw(streams, counters, plan.prompt, plan.texts * plan.prompt, 0.7)
            texts = greedy_texts(network, prompts, plan.written)
            closed = repeats(texts, plan.prompt)
        ids = draw(streams, counters, 256, plan.tokens_per_step, 0.5)
        with autocast(plan.autocast):
            loss = next_token_loss(network, ids)
            repeated = unlikelihood(network, texts, closed)
        (loss + plan.weight * repeated).backward()  # type: ignore[no-untyped-call]
        optimiser.step(plan.learning_rate.at(progress))
        counters.num_tokens += ids.numel() + texts.numel()
        share = float(closed.sum()) / max(1, int((texts[:, plan.prompt :] != PAD_ID).sum()))
        return {"loss": float(loss.detach()), "unlikelihood": float(repeated.detach()), "repeats": share}

    parts: dict[str, Stateful] = {"network": network, "optimiser": optimiser}
    return run_stage("unlearn-loops", budget, parts, step, evaluate, checkpoint, pace=pace)


def _sizes(network: Network) -> dict[str, object]:
    config = llama_config(network, torch.float32)
    return {name: value for name, value in config.items() if name not in {"architectures", "model_type", "torch_dtype"}}
