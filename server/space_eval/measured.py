"""The checkpoint and the prompts of a measurement, as flags name them, and the report it ends in."""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from space_model.checkpoint import Checkpoint
from space_model.load import load_model
from space_model.model_error import CheckpointNotFound, InvalidSetting
from space_model.space_model import SpaceModel
from tokenizers import Tokenizer
from transformers import AutoTokenizer

from space_eval.plots import PlotError
from space_eval.prompts import load_prompts


@dataclass(frozen=True)
class PromptSet:
    """The prompts of one file, as ids."""

    name: str
    prompts: list[list[int]]

    def __str__(self) -> str:
        lengths = [len(ids) for ids in self.prompts]
        return f"{self.name} ({len(lengths)} prompts, {statistics.fmean(lengths):.0f} tokens each)"


@dataclass(frozen=True)
class Measured:
    """A loaded checkpoint with its tokenizer."""

    model: SpaceModel
    tokenizer: Tokenizer

    @classmethod
    def load(cls, options: argparse.Namespace) -> Measured:
        """By the flags of `add_model_arguments`. Raises a ModelError that names the cause."""
        file = Checkpoint.open(options.model).folder / "tokenizer.json"
        if not file.is_file():
            raise CheckpointNotFound(f"{file.parent} has no tokenizer.json; prompts are text, and need one.")
        model = load_model(options.model, dtype=options.dtype, device=options.device, num_threads=options.num_threads)
        return cls(model, Tokenizer.from_file(str(file)))

    def prompt_set(
        self, path: Path, limit: int | None, max_tokens: int, *, name: str | None = None, chat: bool = False
    ) -> PromptSet:
        """The ends of the prompts, as far back as window and new tokens leave room.

        `chat`: each prompt is a user's turn, in the checkpoint's chat template.
        """
        longest = self.model.facts.window - max_tokens
        if longest < 1:
            raise InvalidSetting(
                f"--max-tokens {max_tokens} leaves no room for a prompt in the window of {self.model.facts.window}."
            )
        texts = [prompt.text for prompt in load_prompts(path, limit)]
        asked = [self._turn(text) for text in texts] if chat else [self.tokenizer.encode(text).ids for text in texts]
        return PromptSet(name or path.stem, [ids[-longest:] for ids in asked])

    def _turn(self, text: str) -> list[int]:
        """The template writes its own special tokens."""
        folder = Checkpoint.open(self.model.facts.name).folder
        template = AutoTokenizer.from_pretrained(str(folder), local_files_only=True)
        if not template.chat_template:
            raise InvalidSetting(f"{self.model.facts.name} has no chat template; leave out --chat.")
        rendered = template.apply_chat_template(
            [{"role": "user", "content": text}], tokenize=False, add_generation_prompt=True
        )
        ids: list[int] = self.tokenizer.encode(rendered, add_special_tokens=False).ids
        return ids

    def drafts_within(self, wanted: Sequence[int] | None) -> list[int]:
        """The k asked for, at most the masks there are; by default all of them. Ascending, without repetition."""
        most = self.model.facts.num_masks
        if most == 0:
            raise InvalidSetting(
                f"{self.model.facts.name} has no masks, so it drafts nothing. Give the folder of a SPACE checkpoint."
            )
        ks = sorted({min(k, most) for k in wanted or [most]})
        if ks[0] < 1:
            raise InvalidSetting(f"--k must be at least 1; got {min(wanted or [0])}.")
        return ks

    def decode(self, ids: Sequence[int]) -> str:
        """The text of the ids, special tokens too."""
        text: str = self.tokenizer.decode(list(ids), skip_special_tokens=False)
        return text

    def facts(self) -> dict[str, object]:
        """Which weights, in which arithmetic, where."""
        facts = self.model.facts
        return {
            "model": facts.name,
            "model hash": facts.model_hash[:12],
            "dtype": str(facts.dtype).removeprefix("torch."),
            "draft head": "yes" if facts.has_draft_head else "no",
            "machine": f"{facts.device.type}, {platform.machine()}, {torch.get_num_threads()} threads, "
            f"torch {torch.__version__}",
        }


def add_model_arguments(parser: argparse.ArgumentParser) -> None:
    """Which weights, and how they are held."""
    parser.add_argument("--model", default="demo", help="folder of a checkpoint, a hub id, or demo (default: demo)")
    parser.add_argument("--dtype", default="auto", help="auto, float32 or bfloat16 (default: auto)")
    parser.add_argument("--device", default="auto", help="auto, cpu, cuda, … (default: auto)")
    parser.add_argument("--num-threads", type=int, help="of a product on the CPU (default: as torch has it)")


def temperature(text: str) -> float:
    """For argparse."""
    value = float(text)
    if not 0.0 <= value <= 2.0:
        raise argparse.ArgumentTypeError(f"must lie in 0..2; got {text}")
    return value


def positive_temperature(text: str) -> float:
    """For argparse."""
    value = float(text)
    if not 0.0 < value <= 2.0:
        raise argparse.ArgumentTypeError(f"must lie above 0, at most 2; got {text}")
    return value


def positive_int(text: str) -> int:
    """For argparse."""
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1; got {text}")
    return value


def markdown_table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table; a nan is a dash."""
    lines = [f"| {' | '.join(cells)} |" for cells in [head, ["---"] * len(head), *rows]]
    return "\n".join(lines).replace("| nan ", "| – ") + "\n"


def markdown_facts(facts: dict[str, object]) -> str:
    """One fact per line."""
    return "".join(f"{name}: {value}  \n" for name, value in facts.items())


def write_report(folder: Path, name: str, markdown: str, record: dict[str, object]) -> None:
    """`name`.md and `name`.json in `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{name}.md").write_text(markdown, encoding="utf-8")
    (folder / f"{name}.json").write_text(json.dumps(record, indent=1), encoding="utf-8")


def draw_figures(draw: Callable[[], None]) -> None:
    """Draw, or say why there is no figure: the numbers are worth more than their picture."""
    try:
        draw()
    except PlotError as error:
        print(f"spaceserve eval: no figure: {error}", file=sys.stderr)


def progress(text: str, *, last: bool) -> None:
    """On one line of a terminal; elsewhere the last alone."""
    if sys.stderr.isatty() or last:
        print(f"\r{text}\x1b[K" if sys.stderr.isatty() else text, end="\n" if last else "", file=sys.stderr, flush=True)
