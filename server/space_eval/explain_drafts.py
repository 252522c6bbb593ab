"""The drafts that were judged, and what is known of the places where they stood or fell."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from space_model.forward_batch import ForwardBatch, Segment
from space_model.space_model import SpaceModel

from space_eval.generation import Generation
from space_eval.measured import Measured
from space_eval.token_class import TokenClass, pieces_of, token_classes

BLOCK_SIZE = 16
ROWS_AT_ONCE = 256
PROMPT_TAIL = 16
"""Ids of the prompt decoded with the output: the first token's class depends on what stands before it."""


@dataclass(frozen=True, slots=True)
class JudgedDraft:
    """A draft all of whose predecessors stood, and the token the base chose at its place."""

    position: int  # in its chain, from 1
    stood: bool
    entropy: float  # nats, of the base's next-token law at temperature 1
    token_class: TokenClass  # of the base's token
    repeats: bool  # that token closes a 4-gram that occurs earlier in prompt or output


def judged_drafts(measured: Measured, generation: Generation) -> list[JudgedDraft]:
    """Of every decode step the drafts up to the first that fell, in order."""
    ids = [*generation.prompt_ids, *generation.tokens]
    num_prompt = len(generation.prompt_ids)
    entropies = next_token_entropies(measured.model, ids, num_prompt)
    tail = max(0, num_prompt - PROMPT_TAIL)
    specials = {token.content for token in measured.tokenizer.get_added_tokens_decoder().values() if token.special}
    classes = token_classes(pieces_of(measured.decode, ids[tail:]), specials=specials)[num_prompt - tail :]
    repeated = repeats(ids, num_prompt)
    drafts = []
    begin = len(generation.first)
    for step in generation.steps:
        for i in range(min(step.num_drafted, len(step.tokens))):  # the last run may be cut: what is cut is not known
            at = begin + i
            drafts.append(JudgedDraft(i + 1, i < step.num_accepted, entropies[at], classes[at], repeated[at]))
        begin += len(step.tokens)
    return drafts


def repeats(ids: Sequence[int], first: int, n: int = 4) -> list[bool]:
    """For each id from `first` on: whether the n ids that it closes occur earlier."""
    seen: set[tuple[int, ...]] = set()
    found = []
    for at in range(len(ids)):
        gram = tuple(ids[at - n + 1 : at + 1]) if at >= n - 1 else None
        if at >= first:
            found.append(gram in seen)
        if gram is not None:
            seen.add(gram)
    return found


def next_token_entropies(model: SpaceModel, ids: Sequence[int], first: int) -> list[float]:
    """Nats of the law from which each id from `first` on was chosen: raw logits, masks banned, temperature 1."""
    kv = model.allocate_kv(-(-len(ids) // BLOCK_SIZE), BLOCK_SIZE)
    pages = list(range(kv.num_blocks))
    entropies: list[float] = []
    for start in range(0, len(ids), ROWS_AT_ONCE):
        chunk = list(ids[start : start + ROWS_AT_ONCE])
        batch = ForwardBatch.build(
            [Segment(chunk, start, pages)],
            block_size=BLOCK_SIZE,
            mask_ids=model.facts.mask_ids,
            device=model.facts.device,
        )
        hidden = model.forward(batch, kv)[: len(chunk)]
        wanted = hidden[max(0, first - 1 - start) :]  # row i chooses id i+1
        if len(wanted):
            logits = model.logits(wanted).clone()  # what inference mode made is not to be written to
            logits[:, list(model.facts.mask_ids)] = -torch.inf
            logp = torch.log_softmax(logits.float(), dim=1)
            entropies += torch.special.entr(logp.exp()).sum(dim=1).tolist()
    return entropies[: len(ids) - first]
