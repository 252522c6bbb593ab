"""`spaceserve eval quality`: HumanEval pass@k, ROUGE-L of summaries, bits per byte, of a model and against its base."""

from __future__ import annotations

import argparse
import hashlib
import json
import sys
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path

from space_common.worker.completion import CompletionFailed
from space_model.checkpoint.checkpoint import Checkpoint
from space_model.model_error import ModelError
from tqdm import tqdm

from space_eval.acceptance.generation import torch_facts
from space_eval.flags import EvalError, FlagError, JournalError, given
from space_eval.quality import humaneval
from space_eval.quality.humaneval import REFUSAL, ExecutionResult
from space_eval.quality.model import QualityModel, WritingSettings
from space_eval.quality.scores import draw, generation_facts, rows_of, to_markdown
from space_eval.quality.tasks import Answer, HumanEval, Perplexity, Summarise, open_answers
from space_eval.report import check_settings, publish

QualityTask = HumanEval | Summarise | Perplexity


def run(options: argparse.Namespace) -> int:
    """Print the table. Return 0, 1 if the self-check or a sequence fails, or 2 for unusable settings or data."""
    try:
        return _self_check(options) if options.self_check else _measure(options)
    except (EvalError, ModelError, CompletionFailed) as error:
        print(f"spaceserve eval quality: {error}", file=sys.stderr)
        return 1 if isinstance(error, CompletionFailed) else 2
    except OSError as error:
        kept = "" if options.out is None else f" Finished answers are kept in {options.out}."
        print(f"spaceserve eval quality: {error}.{kept}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("\ninterrupted; with --out the same command goes on where it was", file=sys.stderr)
        return 130


def _measure(options: argparse.Namespace) -> int:
    if options.tasks is None:
        raise FlagError("There is nothing to measure: give --tasks, such as humaneval=PATH,perplexity=PATH.")
    if "humaneval" in options.tasks and not options.allow_code_execution:
        raise FlagError(REFUSAL)
    temperature = options.temperature
    if temperature is None:
        temperature = 0.0 if options.samples == 1 else 0.8
    if temperature == 0.0 and options.samples > 1:
        raise FlagError(
            f"--temperature 0 gives the same text {options.samples} times. Give --temperature 0.8, or --samples 1."
        )
    for flag, value in (("--base-weights", options.base_weights), ("--base-kv-dtype", options.base_kv_dtype)):
        if value and not options.base:
            raise FlagError(f"{flag} does nothing without --base.")
    weights = {"model": options.weights, "base": options.base_weights or options.weights}
    kv_dtypes = {"model": options.kv_dtype, "base": options.base_kv_dtype or options.kv_dtype}
    tasks = [_load(name, source, options) for name, source in options.tasks.items()]
    paths = {"model": options.model} | ({"base": options.base} if options.base else {})
    settings: dict[str, object] = {
        **{label: _fingerprint(path) for label, path in paths.items()},
        **{f"data of {name}": _digest(source) for name, source in options.tasks.items()},
        "temperature": temperature,
        **given(options, "top_p", "max_tokens", "chat", "seed", "seconds", "memory"),
        **given(options, "dtype", "layout", "window", "stride"),
        **{f"weights of {label}": weights[label] for label in paths},
        **{f"keys and values of {label}": kv_dtypes[label] for label in paths},
    }
    if options.out is not None:
        _open_folder(options.out, settings)

    found: dict[str, dict[str, list[Answer]]] = {task.name: {} for task in tasks}
    facts: dict[str, object] = {}
    for label, path in paths.items():
        chosen = given(options, "dtype", "num_threads", "device")
        model = QualityModel(label, path, weights=weights[label], kv_dtype=kv_dtypes[label], **chosen)
        speculate = label == "model" and model.model.facts.most_masks > 0
        on_cpu = model.model.facts.device.type == "cpu"
        writing = WritingSettings(
            **given(options, "samples", "top_p", "max_tokens", "seed", "chat", "layout"),
            temperature=temperature,
            speculate=speculate,
            batch=options.batch or (1 if speculate and options.layout == "full" and on_cpu else 8),
        )
        for task in tasks:
            file = None if options.out is None else options.out / f"{label}.{task.name}.jsonl"
            answers = open_answers(file)
            if isinstance(task, Perplexity):
                model.read(task, answers, length=options.window, stride=options.stride)
                keys = set(task.texts)
            else:
                model.write(task, answers, writing)
                keys = set(task.keys)
            kept = [a for a in answers.lines if a["record"] in keys and a["sample"] < options.samples]
            found[task.name][label] = sorted(kept, key=lambda answer: int(answer["sample"]))
        known = model.model.facts
        how = f"SPACE, k={known.most_masks}, layout {options.layout}" if speculate else "plain decoding"
        facts[label] = f"{known.name} ({known.model_hash[:12]}), {known.number_format}, {how}"
        del model
    facts["texts"] = (
        f"{options.samples} per record, temperature {temperature:g}, top-p {options.top_p:g}, at most "
        f"{options.max_tokens} new tokens, {'chat template' if options.chat else 'prompt alone'}, seed {options.seed}"
    )
    facts["data"] = ", ".join(f"{name} {Path(source).name}" for name, source in options.tasks.items())
    facts["machine"] = torch_facts()

    rows = []
    details: dict[str, Mapping[str, Mapping[str, object]]] = {}
    for task in tasks:
        sides = found[task.name]
        scores = {label: task.scores(answers) for label, answers in sides.items()}
        rows += rows_of(task.name, scores["model"], scores.get("base"))
        details[task.name] = {label: generation_facts(answers) for label, answers in sides.items()}
    page = to_markdown(facts, rows, details)
    record = {"facts": facts, "rows": [asdict(row) for row in rows], "details": details}
    publish("quality", options.out, page, record, lambda: [draw(options.out / "quality.png", rows)])
    return 0


def _load(name: str, source: str, options: argparse.Namespace) -> QualityTask:
    if name == "humaneval":
        memory = options.memory << 20
        return HumanEval.load(source, options.limit, chat=options.chat, seconds=options.seconds, memory=memory)
    if name == "summarise":
        return Summarise.load(source, options.limit, chat=options.chat)
    return Perplexity.load(source, options.limit)


def _self_check(options: argparse.Namespace) -> int:
    if options.data is None:
        raise FlagError("--self-check needs --data: a JSONL file of HumanEval records with canonical_solution.")
    if not options.allow_code_execution:
        raise FlagError(REFUSAL)
    problems = humaneval.load_problems(options.data, options.limit)
    total = len(problems) * (1 + len(humaneval.BROKEN))
    with tqdm(total=total, unit="program", file=sys.stderr, disable=None) as progress:

        def checked(kind: str, problem: humaneval.CodingProblem, outcome: ExecutionResult) -> None:
            progress.set_description(kind)
            progress.update()

        checks = humaneval.self_check(problems, seconds=options.seconds, memory=options.memory << 20, checked=checked)
    print("| completion | passed | wanted | ended |\n|---|---|---|---|")
    for check in checks:
        wanted = check.num_problems if check.kind == "canonical" else 0
        ends = ", ".join(f"{end} {number}" for end, number in sorted(check.ends.items()))
        print(f"| {check.kind} | {len(check.passed)}/{check.num_problems} | {wanted} | {ends} |")
    wrong = [check for check in checks if not check.holds]
    for check in wrong:
        print(f"spaceserve eval quality: {check.kind} passed {len(check.passed)}: not as it must be", file=sys.stderr)
    return 1 if wrong else 0


def _open_folder(folder: Path, settings: Mapping[str, object]) -> None:
    """Create the folder, or check that its answers have the same settings. Raises JournalError."""
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / "settings.json"
    if not file.exists():
        file.write_text(json.dumps(settings, indent=1), encoding="utf-8")
        return
    try:
        known = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise JournalError(f"{file} is not JSON: {error}. Give another --out, or delete the folder.") from error
    check_settings(known, settings, folder)


def _fingerprint(path: str) -> dict[str, object]:
    """Return facts that distinguish checkpoints of the same name, without reading weights."""
    checkpoint = Checkpoint.open(path)
    files = sorted({*checkpoint.folder.glob("*.safetensors"), *checkpoint.weights})
    stats = [[file.name, file.stat().st_size, file.stat().st_mtime_ns] for file in files]
    return {"model": path, "hash": checkpoint.model_hash(), "files": stats}


def _digest(source: str) -> str:
    """Return an identity of the data: a file's hash, a folder's file names and sizes, or a hub id."""
    path = Path(source).expanduser()
    if path.is_file():
        return hashlib.sha256(path.read_bytes()).hexdigest()
    if path.is_dir():
        files = [file for file in sorted(path.rglob("*")) if file.is_file()]
        names = "\n".join(f"{file.relative_to(path)} {file.stat().st_size}" for file in files)
        return hashlib.sha256(names.encode()).hexdigest()
    return source
