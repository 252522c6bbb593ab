"""The flags of `spaceserve bench simulate`."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from space_server.synthetic import NAMED

from space_eval import simulate_flags as read
from space_eval.bench_limits import Limits
from space_eval.flag_values import whole
from space_eval.load_file import load_recorded
from space_eval.load_lengths import FORMS
from space_eval.prompts import PromptError
from space_eval.simulate_load import (
    Arrivals,
    AsRecorded,
    OnOff,
    Poisson,
    Prefixes,
    Shares,
    Streams,
    Work,
)
from space_eval.simulate_machine import MEASURED, PRESETS, Machine, MachineError, measured, named
from space_eval.simulate_router import NOTHING
from space_eval.simulate_run import Scenario
from space_eval.simulate_text import Acceptance
from space_eval.simulate_worker import Speculation, WorkerSettings

EXAMPLES = """\
examples:
  spaceserve bench simulate                                     an H200 with an 8B model: auto against off at 20/s
  spaceserve bench simulate --streams 64 --speculation auto,off,1,3,5 --out sim
                                                                64 streams; table, JSON, Markdown and figures
  spaceserve bench simulate --machine ~/.cache/spaceserve/step-cost-….json --swing 1:64:5s
                                                                the machine that a server here has measured
  spaceserve bench simulate --step-ms 8,0.05,64 --rate 30       8 ms a step, 0.05 ms for each row above 64
  spaceserve bench simulate --plan --slo ttft=500ms,itl=20ms --rate 200
                                                                most requests a second one worker holds, and workers
                                                                for 200 of them
  spaceserve bench simulate --rate 10000 --workers 64 --num-blocks 1048576 --duration 1s --max-queue 100000 \\
      --prompt-tokens 128 --output-tokens 32                    a fleet
  spaceserve bench simulate --trace requests.jsonl              lengths and arrivals as a file has them

What is real: the router's engine (queue, fairness, prefix sharing, pages, preemption), the worker's admission, step
planning, prefill budget, cost model and controller, and the messages between them. What is made up: the seconds of a
forward pass, from the machine's cost; whether drafts come true, from a law of chances; texts; time. The router's own
host time counts only as far as --router-cost says. So these figures say what follows from the numbers put in, and
nothing about a machine that was not measured.
"""


@dataclass(frozen=True)
class Planning:
    """A search for the highest rate within limits."""

    share: float  # of the requests that must keep every limit
    rate: float | None  # that a number of workers is wanted for


@dataclass(frozen=True)
class Settings:
    """What is simulated."""

    scenario: Scenario
    arms: tuple[Speculation, ...]
    planning: Planning | None
    out: Path | None


class SettingsError(ValueError):
    """Flags that make no sense together; the message names flag, value and cure."""


def parse(argv: Sequence[str]) -> Settings:
    """Raises SettingsError; exits with 2 where a flag cannot be read."""
    options = _parser().parse_args(argv)
    if options.plan and options.slo is None:
        raise SettingsError("--plan looks for the highest rate within limits: give --slo, such as ttft=500ms,itl=20ms.")
    if options.plan and (options.streams or options.swing or options.trace):
        raise SettingsError("--plan varies the rate of Poisson arrivals; leave out --streams, --swing and --trace.")
    if options.on_off and (options.streams or options.swing or options.trace):
        raise SettingsError("--on-off goes with --rate; leave out --streams, --swing and --trace.")
    if options.max_sequences > options.num_blocks:
        raise SettingsError(
            f"--num-blocks is {options.num_blocks}; {options.max_sequences} sequences need one each at least."
        )
    scenario = Scenario(
        machine=_machine(options),
        acceptance=Acceptance(options.acceptance, options.acceptance_spread),
        work=_work(options),
        seconds=options.duration or (20.0 if not options.swing else 4 * options.swing.period),
        num_workers=options.workers,
        worker=WorkerSettings(
            num_masks=options.masks,
            num_blocks=options.num_blocks,
            block_size=options.block_size,
            max_sequences=options.max_sequences,
            window=options.window,
            prefill_budget=options.prefill_budget,
        ),
        cost_error=options.cost_error,
        jitter=options.jitter,
        link=options.link,
        router=options.router_cost,
        max_prefill_rows=options.max_prefill_rows,
        max_queue=options.max_queue,
        limits=options.slo,
        seed=options.seed,
    )
    planning = Planning(options.share, options.rate) if options.plan else None
    return Settings(scenario, options.speculation, planning, options.out)


def _machine(options: argparse.Namespace) -> Machine:
    if options.step_ms is not None:
        made: Machine = options.step_ms
        return made
    if options.machine in {**PRESETS, **MEASURED}:
        return named(options.machine)
    if options.machine.endswith(".json"):
        try:
            return measured(Path(options.machine).expanduser())
        except MachineError as error:
            raise SettingsError(f"--machine: {error}") from None
    raise SettingsError(
        f"--machine is {options.machine!r}; give {', '.join((*PRESETS, *MEASURED))}, or a file of measured points."
    )


def _work(options: argparse.Namespace) -> Work:
    recorded = []
    rate = options.rate or 20.0
    arrivals: Arrivals | Streams = Poisson(rate)
    if options.on_off:
        arrivals = OnOff(rate, *options.on_off)
    if options.streams:
        arrivals = Streams(options.streams)
    if options.swing:
        arrivals = options.swing
    if options.trace:
        try:
            recorded = load_recorded(options.trace)
        except (PromptError, OSError) as error:
            raise SettingsError(f"--trace: {error}") from None
        if any(one.prompt_tokens is None for one in recorded):
            raise SettingsError(f"--trace: {options.trace} has texts; a simulation needs `prompt_tokens` on each line.")
        if recorded[0].arrival is not None and not options.rate:
            arrivals = AsRecorded(tuple(one.arrival or 0.0 for one in recorded))
    return Work(
        arrivals=arrivals,
        prompt_tokens=options.prompt_tokens,
        output_tokens=options.output_tokens,
        max_tokens=options.max_tokens,
        prefixes=options.prefixes,
        priorities=options.priorities,
        keys=options.keys,
        choices=options.choices,
        cancelled=options.cancel,
        recorded=recorded,
        temperature=options.temperature,
        seed=options.seed,
    )


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="spaceserve bench simulate",
        description="Run the real router and the real worker in virtual time against a cost model: no model, no GPU, "
        "seconds instead of hours. Compares ways to speculate on the same arrivals, and plans capacity.",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--speculation",
        type=read.arms,
        default=("off", "auto"),
        metavar="WAY,…",
        help="what is compared, the first of them the base of ratios: auto, off, or drafts per step [off,auto]",
    )
    machine = parser.add_argument_group("machine")
    machine.add_argument(
        "--machine",
        default="h200-8b",
        metavar="NAME|FILE",
        help=f"{', '.join(PRESETS)} (computed from data sheets); {', '.join(MEASURED)} (measured on two cores), or a "
        "server's ~/.cache/spaceserve/step-cost-*.json (measured) [h200-8b]",
    )
    machine.add_argument(
        "--step-ms",
        type=read.ridge,
        metavar="BASE,PER_ROW[,RIDGE]",
        help="instead: milliseconds of a step, of each row, and the rows below which they are free",
    )
    machine.add_argument(
        "--cost-error",
        type=read.error,
        default=0.0,
        metavar="SHARE",
        help="how wrong the worker is about each kind of step at its start; `exact`: it knows, and never learns [0]",
    )
    machine.add_argument(
        "--jitter", type=read.share, default=0.02, help="spread of a step's seconds, as a share [0.02]"
    )
    machine.add_argument("--workers", type=whole, default=1, help="each with a machine of its own [1]")
    machine.add_argument("--num-blocks", type=whole, default=32768, help="pages of a worker [32768]")
    machine.add_argument("--block-size", type=whole, default=16, help="ids of a page [16]")
    machine.add_argument("--max-sequences", type=whole, default=64, help="running at once on a worker [64]")
    machine.add_argument("--window", type=whole, default=131072, help="most ids of one request [131072]")
    machine.add_argument(
        "--prefill-budget",
        type=lambda text: None if text == "off" else read.duration(text),
        default=0.1,
        help="longest step that prompts may make while others decode; off: no bound [100ms]",
    )
    machine.add_argument("--max-prefill-rows", type=whole, default=512, help="prompt rows of a step [512]")
    machine.add_argument("--max-queue", type=whole, default=256, help="waiting requests; more are refused [256]")
    machine.add_argument(
        "--link", type=read.link, default=0.0002, help="from router to worker, and back: each way [200us]"
    )
    machine.add_argument(
        "--router-cost",
        type=read.router_cost,
        default=NOTHING,
        metavar="REQUEST,PIECE",
        help="processor time of a request and of each piece of its answer: 3ms,75us, as `bench streams` says [nothing]",
    )
    text = parser.add_argument_group("drafts")
    text.add_argument(
        "--acceptance",
        type=read.chances,
        default=NAMED[0.78],
        metavar="P",
        help=".78, .57, or chances by mask depth, that a draft comes true if those before it do [.78: .84 .81 .78 …]",
    )
    text.add_argument(
        "--acceptance-spread", type=read.spread, default=0.5, help="of texts around it, in log-odds [0.5]"
    )
    text.add_argument("--masks", type=whole, default=5, help="per group, of the checkpoint [5]")
    load = parser.add_argument_group("load")
    shape = load.add_mutually_exclusive_group()
    shape.add_argument("--streams", type=whole, help="so many at once, each the next when it is done with one")
    shape.add_argument(
        "--swing", type=read.swing, metavar="LOW:HIGH:PERIOD", help="two numbers of streams in turn: 1:64:5s"
    )
    shape.add_argument(
        "--trace", type=Path, metavar="FILE.jsonl", help="`prompt_tokens`, `output_tokens`, and `arrival` in seconds"
    )
    load.add_argument("--rate", type=read.above_zero, help="requests a second, Poisson [20]")
    load.add_argument("--on-off", type=read.on_off, metavar="ON:OFF", help="at that rate for ON, nobody for OFF: 2s:3s")
    load.add_argument(
        "--duration", type=read.duration, help="of arrivals or streams, in virtual time [20s; swing: 4 halves]"
    )
    load.add_argument(
        "--prompt-tokens", type=read.lengths, default="lognormal:256:0.8:16:4096", help=f"{FORMS} [%(default)s]"
    )
    load.add_argument(
        "--output-tokens",
        type=read.lengths,
        default="lognormal:128:0.6:4:1024",
        help="the same, of answers [%(default)s]",
    )
    load.add_argument("--max-tokens", type=whole, help="that clients ask for; answers end before [just what they get]")
    load.add_argument(
        "--prefixes", type=read.of(Prefixes.parse), metavar="N:LENGTH[:SHARE]", help="texts that prompts begin with"
    )
    load.add_argument(
        "--keys", type=read.of(Shares.parse), default="", metavar="NAME=WEIGHT,…", help="whose requests they are"
    )
    load.add_argument(
        "--priorities", type=read.numbers, default="0", metavar="N=WEIGHT,…", help="the lowest goes first [0]"
    )
    load.add_argument("--choices", type=read.counts, default="1", metavar="N=WEIGHT,…", help="answers per request [1]")
    load.add_argument("--cancel", type=read.share, default=0.0, help="share whose readers leave within the answer [0]")
    load.add_argument(
        "--temperature", type=read.temperature, default=1.0, help="0: greedy, whose steps draw no noise [1]"
    )
    plan = parser.add_argument_group("capacity")
    plan.add_argument("--slo", type=read.of(Limits.parse), metavar="LIMITS", help="ttft=500ms,itl=20ms; also gap, e2e")
    plan.add_argument(
        "--plan", action="store_true", help="find the most requests a second that one worker holds within --slo"
    )
    plan.add_argument(
        "--share", type=read.share, default=0.95, help="of requests that must keep all limits, once warm [0.95]"
    )
    parser.add_argument("--seed", type=int, default=1, help="of arrivals, lengths, texts, jitter [1]")
    parser.add_argument("--out", type=Path, help="folder for simulate.json, simulate.md and figures [table only]")
    return parser
