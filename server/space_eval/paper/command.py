"""`spaceserve eval paper`: the paper's Table 1, the published figures beside ours."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from space_common import default_model
from space_model.loading.load import load_model
from tqdm import tqdm

from space_eval.acceptance.generation import environment_facts, load_tokenizer
from space_eval.acceptance.paired_decoding import PairedDecoder
from space_eval.flags import FlagError, RecordError, given
from space_eval.paper import table
from space_eval.paper.protocol import (
    MeasuredQuestion,
    PaperProtocol,
    PromptedModel,
    open_journal,
    run_task,
    template_of,
    weights_digest,
)
from space_eval.paper.table import PaperRow
from space_eval.paper.tasks import (
    FAMILIES,
    PUBLISHED,
    TASKS,
    TEMPLATE,
    PaperTask,
    PromptFamily,
    family_of,
    load_questions,
    place_and_split,
    published_for,
)
from space_eval.quality.humaneval import REFUSAL, CodingProblem, load_problems
from space_eval.report import publish


@dataclass(frozen=True)
class Amounts:
    """A default number for all tasks, with overrides for some."""

    by_task: Mapping[str, int]  # "": for all others

    @classmethod
    def parse(cls, text: str | None, flag: str) -> Amounts:
        """Parse `1024,cip=512`."""
        by_task = {}
        for part in filter(None, (text or "").split(",")):
            name, equals, number = part.rpartition("=")
            if not number.isdigit() or int(number) < 1 or (equals and name not in TASKS):
                raise FlagError(f"{flag} is {text!r}; it must read N or N,TASK=N with N of at least 1.")
            by_task[name] = int(number)
        return cls(by_task)

    def of(self, task: PaperTask) -> int | None:
        return self.by_task.get(task.name, self.by_task.get(""))


def run(options: argparse.Namespace) -> int:
    """Print the table and write the report. Return exit status 0, 1 if a text differs, 130 if interrupted."""
    tasks = parse_tasks(options.tasks)
    sources = parse_sources(options.data, tasks)
    max_tokens = Amounts.parse(options.max_tokens, "--max-tokens")
    limits = Amounts.parse(options.limit, "--limit")
    for flag, value in (("--rounds", options.rounds), ("--k", options.k), ("--pass-at", options.pass_at)):
        if value < 1:
            raise FlagError(f"{flag} is {value}; it must be at least 1.")
    questions = {task.name: load_questions(task, sources[task.name], limits.of(task)) for task in tasks}
    scored = [task for task in tasks if task.quality == "pass" and not options.no_execution]
    if scored and not options.allow_code_execution:
        raise FlagError(f"{REFUSAL} Or leave out pass@K with --no-execution.")
    problems = {task.name: _problems(task, sources[task.name]) for task in scored}
    protocol, facts = _prepare(options)
    family = protocol.model.family
    published = PUBLISHED[options.published] if options.published else published_for(family.name, options.model)
    settings = {name: facts.get(name) for name in ("weights", "base weights", "family", "k", "layout", "temperature")}
    # The report names a model by the hash that the other commands show; the journal also compares its weights.
    facts = {name: value for name, value in facts.items() if name not in {"weights", "base weights"}}
    settings |= {"seed": options.seed, "rounds": options.rounds, "dtype": facts["dtype"]}

    journal = open_journal(options.out / "answers.jsonl", settings)
    rows: list[PaperRow] = []
    status = 0
    for task in tasks:
        asked = questions[task.name]
        amount = max_tokens.of(task) or 1024
        results = run_task(protocol, task, asked, journal, max_tokens=amount, most_new=options.stop_after)
        measured: list[MeasuredQuestion] = []
        interrupted = False
        try:
            bar = tqdm(results, total=len(asked), desc=task.title, unit="question", file=sys.stderr, disable=None)
            for one in bar:
                measured.append(one)
        except KeyboardInterrupt:
            interrupted = True
        if measured:
            quality = table.quality_by_reference(task, measured)
            if own := problems.get(task.name):
                with tqdm(total=len(measured), desc="tests", unit="problem", file=sys.stderr, disable=None) as bar:
                    how = {"chat": family.is_chat, "k": options.pass_at, "progress": bar.update}
                    quality = table.pass_quality(measured, own, **how)
            rows.append(table.summarise(task, measured, len(asked), quality, published))
        if interrupted:
            _print("interrupted; the same command goes on where it was")
            status = 130
            break
    facts["new tokens"] = options.max_tokens
    if rows:
        page, record = table.to_markdown(rows, facts, published), table.record(rows, facts, published)
        publish("paper", options.out, page, record, lambda: table.draw(options.out, rows, facts, published))
    differing = sum(row.num_answers - row.num_identical for row in rows)
    if differing:
        _print(f"{differing} answers differ between SPACE and plain decoding: on a CPU that is a fault, on a GPU a tie")
    return status or int(differing > 0)


def _prepare(options: argparse.Namespace) -> tuple[PaperProtocol, dict[str, object]]:
    """Load and warm up the models. Return the protocol and the environment facts."""
    chosen = given(options, "dtype", "device", "mask_ids", "num_masks", "num_threads")
    model = load_model(options.model, weights="auto", **chosen)
    if model.facts.num_masks < options.k:
        raise FlagError(
            f"--k is {options.k}; {options.model} has {model.facts.num_masks} masks. Give --k of at most that, or a "
            "checkpoint with masks: spaceserve train makes one, --mask-ids and --num-masks declare a published one's."
        )
    family = _family(options.family, options.model)
    decoder = PairedDecoder(model, [options.k], layout=options.layout)
    prompted = PromptedModel(decoder, load_tokenizer(options.model), family)
    base: PromptedModel | None = None
    if options.base is not None and options.base != options.model:
        loaded = load_model(options.base, weights="auto", dtype=options.dtype, device=options.device)
        base = PromptedModel(PairedDecoder(loaded, []), load_tokenizer(options.base), family)
    for one in (prompted, base):
        if one is not None:
            one.decoder.warm_up(one.tokenizer.encode("def add(a, b):").ids)
    num_samples = options.pass_at if options.pass_at > 1 and not options.no_execution else 0
    protocol = PaperProtocol(prompted, options.k, options.rounds, options.temperature, options.seed, base, num_samples)
    facts: dict[str, object] = {
        "model": options.model,
        "model hash": model.facts.model_hash[:12],
        "weights": weights_digest(options.model),
        "base": options.base or "the model itself",
        **({} if base is None else {"base hash": base.decoder.model.facts.model_hash[:12]}),
        "base weights": None if base is None else weights_digest(options.base),
        "family": family.name,
        "batch": 1,
        **given(options, "k", "temperature", "rounds", "layout"),
    }
    return protocol, facts | environment_facts(model)


def _family(asked: str, model: str) -> PromptFamily:
    """Return the prompt format: of the paper where the model's name is one of its families, else the model's own."""
    if asked not in {"auto", TEMPLATE}:
        return FAMILIES[asked]
    named = family_of(model)
    # The tiny embedded model completes code; its chat template is a makeshift.
    if asked == "auto" and (named.is_chat or model == default_model.FALLBACK):
        return named
    own = template_of(model)
    if own is None and asked == TEMPLATE:
        raise FlagError(f"{model} has no chat template. Give another --family.")
    return own or named


def _problems(task: PaperTask, source: str) -> dict[str, CodingProblem]:
    try:
        return {problem.task_id: problem for problem in load_problems(place_and_split(source)[0])}
    except RecordError as error:
        raise FlagError(f"{task.title}: {error} Or leave out pass@K with --no-execution.") from error


def parse_tasks(text: str) -> list[PaperTask]:
    """Parse `xsum,human_eval`, without duplicates; `mt-bench` is read as `mt_bench`."""
    names = [name.strip().replace("-", "_") for name in text.split(",") if name.strip()]
    unknown = [name for name in names if name not in TASKS]
    if unknown or not names:
        raise FlagError(f"--tasks is {text!r}; it must name some of {', '.join(TASKS)}.")
    return [TASKS[name] for name in dict.fromkeys(names)]


def parse_sources(texts: Sequence[str], tasks: Sequence[PaperTask]) -> dict[str, str]:
    """Parse one or several `xsum=PATH,cip=OWNER/NAME`; the other tasks are read from the hub."""
    sources = {task.name: task.hub_id for task in tasks}
    for text in texts:
        for part in text.split(","):
            name, equals, source = part.partition("=")
            name = name.strip().replace("-", "_")
            if not equals or not source or name not in TASKS:
                raise FlagError(f"--data is {text!r}; it must read TASK=SOURCE with a task of {', '.join(TASKS)}.")
            sources[name] = source
    return sources


def _print(line: str) -> None:
    print(f"spaceserve eval paper: {line}", file=sys.stderr)
