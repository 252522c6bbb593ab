"""Explain which drafts stand: by position, entropy of the base, token class and repetition."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from space_model.model_error import InvalidSetting
from space_proto import worker_pb2 as pb
from space_server.controller import FixedLayout
from space_server.worker import Worker

from space_eval.explain_drafts import judged_drafts
from space_eval.explain_reading import Portrait
from space_eval.explain_report import draw_explanation, explain_markdown, explain_record
from space_eval.generation import Generation, generate
from space_eval.measured import (
    Measured,
    PromptSet,
    add_model_arguments,
    draw_figures,
    markdown_facts,
    positive_int,
    progress,
    temperature,
    write_report,
)
from space_eval.text_statistics import is_looping

DESCRIPTION = """\
Decodes sets of prompts with k drafts per step and tells which drafts stood, and where: by position in the chain, by the
entropy of the base's own law, by class of the base's token, and by whether it repeats. With several sets it takes the
difference between them apart: how much comes of other places (more certain ones, more whitespace, …) and how much is
left at equal places. The paragraph is written from the numbers: other numbers, other sentences.

  spaceserve eval explain --model demo --prompts code=humaneval.jsonl chat=mt_bench.jsonl --chat chat
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags of `spaceserve eval explain`."""
    add_model_arguments(parser)
    parser.add_argument(
        "--prompts", nargs="+", required=True, metavar="[NAME=]FILE", help="sets of prompts: JSONL or text files"
    )
    parser.add_argument(
        "--chat", nargs="+", default=[], metavar="NAME", help="sets whose prompts are user turns, for the chat template"
    )
    parser.add_argument("--limit", type=positive_int, help="only so many prompts of each set (default: all)")
    parser.add_argument("--max-tokens", type=positive_int, default=128, help="new tokens per prompt (default: 128)")
    parser.add_argument("--k", type=positive_int, help="drafts per step (default: as many as there are masks)")
    parser.add_argument(
        "--temperature", type=temperature, nargs="+", default=[0.0, 0.8], help="0 is greedy (default: 0 and 0.8)"
    )
    parser.add_argument("--seed", type=int, default=0, help="of the first prompt; each has its own (default: 0)")
    parser.add_argument("--out", type=Path, help="folder for explain.md, explain.json and the figures")


def run(options: argparse.Namespace) -> int:
    """Print paragraph and tables; exit status 0."""
    files = _named_files(options.prompts)
    unknown = sorted(set(options.chat) - set(files))
    if unknown:
        raise InvalidSetting(f"--chat {unknown[0]} is no set of --prompts; there are {', '.join(files)}.")
    measured = Measured.load(options)
    (k,) = measured.drafts_within([options.k] if options.k else None)
    sets = [
        measured.prompt_set(path, options.limit, options.max_tokens, name=name, chat=name in options.chat)
        for name, path in files.items()
    ]
    portraits = [
        portrait
        for heat in dict.fromkeys(options.temperature)
        for prompts in sets
        for portrait in _portraits(measured, prompts, _decode(measured, prompts, heat, k, options), heat)
    ]
    facts = measured.facts() | {
        "prompts": "; ".join(map(str, sets)),
        "drafts per step": f"{k}, (k+1)² rows, batch 1",
        "new tokens": str(options.max_tokens),
    }
    markdown = markdown_facts(facts) + "\n" + explain_markdown(portraits, k)
    print(markdown)
    if options.out is not None:
        write_report(options.out, "explain", markdown, {"facts": facts, "portraits": explain_record(portraits, k)})
        draw_figures(lambda: draw_explanation(options.out, portraits, k))
    return 0


def _named_files(arguments: Sequence[str]) -> dict[str, Path]:
    """`code=he.jsonl` is the set `code`; without a name the file's own."""
    files: dict[str, Path] = {}
    for argument in arguments:
        name, equals, path = argument.partition("=")
        file = Path(path if equals else argument)
        key = name if equals else file.stem
        if key in files:
            raise InvalidSetting(f"Two sets of --prompts are called {key}. Name them: NAME=FILE.")
        files[key] = file
    return files


def _decode(
    measured: Measured, prompts: PromptSet, heat: float, k: int, options: argparse.Namespace
) -> list[Generation]:
    """Each prompt alone in the batch, all drafts and all groups laid out."""
    facts = measured.model.facts
    worker = Worker(
        measured.model,
        num_blocks=-(-(facts.window + facts.num_masks + 1) // 16),
        max_sequences=1,
        max_draft_length=k,
        controller=FixedLayout.full(k),
    )
    texts: list[Generation] = []
    for number, ids in enumerate(prompts.prompts):
        texts += generate(
            worker,
            [ids],
            sampling=pb.Sampling(seed=options.seed + number, temperature=heat),
            max_tokens=options.max_tokens,
            max_draft_length=k,
            eos_ids=facts.eos_ids,
        )
        last = number + 1 == len(prompts.prompts)
        progress(f"T={heat:g} {prompts.name}: prompt {number + 1} of {len(prompts.prompts)}", last=last)
    return texts


def _portraits(
    measured: Measured, prompts: PromptSet, texts: Sequence[Generation], heat: float
) -> tuple[Portrait, Portrait]:
    """Outputs that do not loop, and those that do."""

    def portrait(looping: bool) -> Portrait:
        chosen = [text for text in texts if is_looping(text.tokens) is looping]
        return Portrait(
            name=prompts.name,
            temperature=heat,
            looping=looping,
            num_texts=len(chosen),
            num_all_texts=len(texts),
            num_tokens=sum(text.num_decoded for text in chosen),
            num_steps=sum(len(text.steps) for text in chosen),
            drafts=[draft for text in chosen for draft in judged_drafts(measured, text)],
        )

    return portrait(False), portrait(True)
