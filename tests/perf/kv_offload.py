"""Long tool conversations in turn, on a KV cache too small for all of them: with and without host memory behind it.

Each conversation is an agent's: a task, and then calls of a tool and what it answered (lines of Python's own library),
a turn longer each time. The turns of all conversations alternate, so that each finds its prefix evicted where there is
no room for it. The texts must be the same in every arm.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import sysconfig
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from space_common.http_client import Endpoint, parsed, stream_events
from space_common.process import ServerProcess
from space_eval.flags import whole_from

from perf.harness import PerfError, Report, log, table, take_turns

FILES = ("argparse.py", "difflib.py", "inspect.py", "pickle.py", "tarfile.py", "typing.py", "zipfile.py", "doctest.py")
SYSTEM = (
    "You are a coding agent. Tools: read_lines(file, first, last) answers with lines of a file; edit(file, line, text) "
    "replaces one; run(command) answers with its output. Call one tool a turn, and say in a sentence why."
)


@dataclass
class Arm:
    """One way to start the server, and what was measured of it."""

    name: str
    flags: Sequence[str]
    firsts: dict[int, list[float]] = field(default_factory=dict)  # by turn: seconds until the first token
    rounds: list[float] = field(default_factory=list)  # seconds of each whole replay
    num_prompt: int = 0
    num_cached: int = 0
    texts: list[str] = field(default_factory=list)

    def first(self, turns: range) -> float:
        return statistics.median(seconds for turn in turns for seconds in self.firsts[turn])


def conversation(number: int, num_turns: int, num_lines: int) -> list[list[dict[str, str]]]:
    """The messages of each turn of a conversation; each turn begins with those of the turn before."""
    name = FILES[number % len(FILES)]
    lines = (Path(sysconfig.get_path("stdlib")) / name).read_text(encoding="utf-8").splitlines()
    if len(lines) < num_turns * num_lines:
        raise PerfError(f"{name} has {len(lines)} lines: too few for {num_turns} turns of {num_lines}.")
    messages = [
        {"role": "system", "content": SYSTEM},
        {"role": "user", "content": f"Read {name} and tell me which function is the hardest to test."},
    ]
    turns = [list(messages)]
    for turn in range(num_turns - 1):
        first = turn * num_lines
        call = {"name": "read_lines", "arguments": {"file": name, "first": first, "last": first + num_lines}}
        answer = "\n".join(lines[first : first + num_lines])
        messages.append({"role": "assistant", "content": f"I read on. <tool_call>{json.dumps(call)}</tool_call>"})
        messages.append({"role": "user", "content": f"<tool_response>{answer}</tool_response>"})
        turns.append(list(messages))
    return turns


async def ask(endpoint: Endpoint, messages: Sequence[Mapping[str, str]], max_tokens: int) -> tuple[float, str, Any]:
    """Seconds until the first token, the text, and the usage of one request."""
    body = {
        "model": "served",
        "messages": messages,
        "max_tokens": max_tokens,
        "temperature": 0,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    begun, first, text, usage = time.monotonic(), 0.0, "", None
    async for events in stream_events(endpoint, "/v1/chat/completions", body):
        for event in events:
            if event == b"[DONE]":
                continue
            answer = parsed(event)
            usage = answer.get("usage") or usage
            for choice in answer.get("choices", ()):
                text += choice["delta"].get("content") or ""
            first = first or (time.monotonic() - begun if text else 0.0)
    if usage is None or not text:
        raise PerfError(f"an answer without a token: {text!r}, usage {usage}")
    return first, text, usage


async def replay(arm: Arm, url: str, conversations: Sequence[Sequence[Any]], max_tokens: int) -> None:
    """One whole replay: turn after turn, in each turn one conversation after the other."""
    endpoint, texts, begun = Endpoint.parse(url), [], time.monotonic()
    for turn in range(len(conversations[0])):
        for turns in conversations:
            first, text, usage = await ask(endpoint, turns[turn], max_tokens)
            arm.firsts.setdefault(turn, []).append(first)
            arm.num_prompt += usage["prompt_tokens"]
            arm.num_cached += usage["prompt_tokens_details"]["cached_tokens"]
            texts.append(text)
    arm.rounds.append(time.monotonic() - begun)
    if arm.texts not in ([], texts):
        raise PerfError(f"{arm.name}: two replays gave different texts.")
    arm.texts = texts


def run(options: argparse.Namespace) -> Report:
    conversations = [conversation(n, options.turns, options.lines) for n in range(options.conversations)]
    common = ["--model", options.model, "--served-model-name", "served", "--max-model-len", str(options.window)]
    arms = [
        Arm(f"{options.kv_memory} of KV cache", [*common, "--kv-memory", options.kv_memory]),
        Arm(
            f"{options.kv_memory}, and {options.kv_offload} of host memory",
            [*common, "--kv-memory", options.kv_memory, "--kv-offload", options.kv_offload],
        ),
        Arm(f"{options.room} of KV cache", [*common, "--kv-memory", options.room]),
    ]

    def turn(arm: Arm, number: int) -> None:
        with ServerProcess(arm.flags) as server:
            asyncio.run(replay(arm, server.url, conversations, options.tokens))
        log(f"round {number + 1}: {arm.name}: {arm.rounds[-1]:.1f} s")

    take_turns(arms, options.rounds, turn)
    thirds = [range(i * options.turns // 3, (i + 1) * options.turns // 3) for i in range(3)]
    head = ("server", *(f"first token, turns {t.start + 1}-{t.stop}" for t in thirds), "replay", "prompt from cache")
    rows = [
        (
            arm.name,
            *(f"{arm.first(t):.3f} s" for t in thirds),
            f"{statistics.median(arm.rounds):.1f} s ({min(arm.rounds):.1f} to {max(arm.rounds):.1f})",
            f"{arm.num_cached / arm.num_prompt:.0%}",
        )
        for arm in arms
    ]
    failures = [f"{arm.name}: other texts than {arms[0].name}" for arm in arms[1:] if arm.texts != arms[0].texts]
    notes = (
        f"{options.model}; {options.conversations} conversations of {options.turns} turns in turn, {options.tokens} "
        f"new tokens a turn, greedy; {options.rounds} rounds, medians."
    )
    record = {"arms": [vars(arm) for arm in arms]}
    return Report("Prefixes kept in host memory", notes, [table(head, rows)], record, failures=failures)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add, number = parser.add_argument, whole_from(1)
    add("--model", default="smollm2", help="as of serve (smollm2)")
    add("--conversations", type=number, default=3, help="that take turns (3)")
    add("--turns", type=number, default=30, help="of each (30)")
    add("--lines", type=number, default=8, help="of source that a turn adds (8)")
    add("--tokens", type=number, default=8, help="new tokens a turn (8)")
    add("--window", type=number, default=6144, help="of the server (6144)")
    add("--kv-memory", default="150MiB", metavar="SIZE", help="too small for all conversations (150MiB)")
    add("--kv-offload", default="1GiB", metavar="SIZE", help="host memory behind it (1GiB)")
    add("--room", default="1GiB", metavar="SIZE", help="a KV cache that holds all of them (1GiB)")
    add("--rounds", type=number, default=3, help="(3)")
