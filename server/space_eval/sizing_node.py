"""Machines that a fleet is made of: what computes there, who asks, and what they expect."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from space_server.synthetic import NAMED

from space_eval.bench_limits import Limits
from space_eval.load_lengths import Lengths
from space_eval.simulate_load import Poisson, Work
from space_eval.simulate_machine import PRESETS, Roofline, named
from space_eval.simulate_router import RouterCost
from space_eval.simulate_run import Scenario
from space_eval.simulate_text import Acceptance
from space_eval.simulate_worker import WorkerSettings

BLOCK_SIZE = 16
MEMORY_SHARE = 0.9
"""Of a GPU's memory, for weights and pages: the server's own default."""

SPREAD = 0.5
"""Of texts around the mean acceptance, in log-odds."""


@dataclass(frozen=True)
class Node:
    """One machine, and the load it is sized for."""

    what: str
    machine: str  # of the simulator
    num_workers: int
    num_blocks: int  # pages of a worker
    max_sequences: int
    window: int
    chances: tuple[float, ...]  # that drafts come true
    prompt_tokens: str
    output_tokens: str
    temperature: float
    limits: str
    seconds: float  # of a trial

    def scenario(self, router: RouterCost, seed: int) -> Scenario:
        """One worker of it behind one router."""
        return Scenario(
            machine=named(self.machine),
            acceptance=Acceptance(self.chances, SPREAD),
            work=Work(
                Poisson(1.0),
                prompt_tokens=Lengths.parse(self.prompt_tokens),
                output_tokens=Lengths.parse(self.output_tokens),
                temperature=self.temperature,
                seed=seed,
            ),
            seconds=self.seconds,
            worker=WorkerSettings(
                num_blocks=self.num_blocks,
                block_size=BLOCK_SIZE,
                max_sequences=self.max_sequences,
                window=self.window,
            ),
            jitter=0.02,
            router=router,
            limits=Limits.parse(self.limits),
            seed=seed,
        )


def pages(memory: float, machine: Roofline) -> int:
    """Of a GPU with so many bytes, beside the weights."""
    left = MEMORY_SHARE * memory - machine.num_weights * machine.weight_bytes
    return int(left / (machine.kv_bytes * BLOCK_SIZE))


def _gpus(what: str, machine: str, memory: float) -> Node:
    return Node(
        what=what,
        machine=machine,
        num_workers=8,
        num_blocks=pages(memory, PRESETS[machine]),
        max_sequences=128,
        window=131072,
        chances=NAMED[0.78],
        prompt_tokens="lognormal:256:0.8:16:4096",
        output_tokens="lognormal:128:0.6:4:1024",
        temperature=1.0,
        limits="ttft=1s,itl=30ms",
        seconds=8.0,
    )


def _cores(what: str, machine: str, chances: float, limits: str, seconds: float) -> Node:
    return Node(
        what=what,
        machine=machine,
        num_workers=1,
        num_blocks=8192,
        max_sequences=64,
        window=1024,
        chances=NAMED[chances],
        prompt_tokens="lognormal:64:0.6:8:512",
        output_tokens="lognormal:64:0.5:4:256",
        temperature=0.0,
        limits=limits,
        seconds=seconds,
    )


NODES: Mapping[str, Node] = {
    "h200": _gpus("8 H200, an 8B model in bfloat16 on each (computed)", "h200-8b", 141e9),
    "h100": _gpus("8 H100, an 8B model in bfloat16 on each (computed)", "h100-8b", 80e9),
    "cpu-embedded": _cores(
        "2 cores, the embedded model (steps measured)", "cpu-embedded", 0.57, "ttft=1s,itl=50ms", 8.0
    ),
    "cpu-125m": _cores("2 cores, a Llama of 125 M (steps measured)", "cpu-125m", 0.78, "ttft=3s,itl=200ms", 40.0),
}
"""By name."""
