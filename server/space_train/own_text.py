"""Text the model wrote itself: masks learn most from what they will draft for (the idea: BiTA, arXiv 2402.12522)."""

from __future__ import annotations

import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from transformers import LlamaForCausalLM

from space_train.export import export
from space_train.network import Network
from space_train.packed_tokens import PackedTokens
from space_train.tokenizer import SPECIAL_TOKENS


@dataclass(frozen=True)
class OwnTextPlan:
    """How much the model writes: batches of sequences that each start with a real prompt."""

    seed: int = 0
    num_batches: int = 8
    batch_size: int = 128
    prompt_length: int = 64
    length: int = 256
    temperatures: tuple[float, ...] = (0.4, 0.7, 1.0)


def continued(model: LlamaForCausalLM, prompts: Tensor, length: int, temperature: float, seed: int) -> Tensor:
    """`prompts` [B, P] sampled on to [B, length]. End of text does not stop a sequence: another document follows it."""
    generator, ids, cache, rows = torch.Generator().manual_seed(seed), prompts, None, prompts
    with torch.inference_mode():
        while ids.shape[1] < length:
            output = model(input_ids=rows, past_key_values=cache, use_cache=True, logits_to_keep=1)
            cache, logits = output.past_key_values, output.logits[:, -1].float() / temperature
            logits[:, 1 : len(SPECIAL_TOKENS)] = -torch.inf
            rows = torch.multinomial(logits.softmax(-1), 1, generator=generator)
            ids = torch.cat((ids, rows), dim=1)
    return ids


def write_own_text(network: Network, prompts: PackedTokens, tokenizer: Path, path: Path, plan: OwnTextPlan) -> None:
    """Write `plan.num_batches` batches to `path` as uint16 ids; batches a killed run has left are kept."""
    partial = path.with_suffix(".partial")
    batch_bytes = plan.batch_size * plan.length * 2
    num_done = partial.stat().st_size // batch_bytes if partial.exists() else 0
    with tempfile.TemporaryDirectory() as folder:
        export(network, None, tokenizer, Path(folder), num_masks=0, dtype=torch.float32)
        model = LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    with partial.open("ab") as stream:
        stream.truncate(num_done * batch_bytes)
        started = time.monotonic()
        for batch in range(num_done, plan.num_batches):
            drawn = batch * plan.batch_size * plan.prompt_length
            starts = prompts.windows(drawn, plan.batch_size, plan.prompt_length)
            temperature = plan.temperatures[batch % len(plan.temperatures)]
            ids = continued(model, starts, plan.length, temperature, plan.seed * plan.num_batches + batch)
            stream.write(ids.numpy().astype(np.uint16).tobytes())
            stream.flush()
            minutes = (time.monotonic() - started) / (batch + 1 - num_done) * (plan.num_batches - batch - 1) / 60
            print(f"own text: batch {batch + 1} of {plan.num_batches}  ETA {minutes:.0f} min", flush=True)
    partial.replace(path)
