"""The flags of `spaceserve bench simulate`."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from space_server.synthetic import NAMED

from space_eval.bench_limits import Limits, seconds_of
from space_eval.flag_values import whole
from space_eval.load_file import load_recorded
from space_eval.load_lengths import FORMS, LengthError, Lengths
from space_eval.prompts import PromptError
from space_eval.simulate_load import (
    Arrivals,
    AsRecorded,
    LoadFlagError,
    OnOff,
    Poisson,
    Prefixes,
    Shares,
    Streams,
    Work,
)
from space_eval.simulate_machine import PRESETS, Machine, MachineError, Ridge, measured
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
host time is not counted: its work for a simulated second is in `simulated in`. So these figures say what follows from
the numbers put in, and nothing about a machine that was not measured.
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
    if options.machine in PRESETS:
        return PRESETS[options.machine]
    if options.machine.endswith(".json"):
        try:
            return measured(Path(options.machine).expanduser())
        except MachineError as error:
            raise SettingsError(f"--machine: {error}") from None
    raise SettingsError(f"--machine is {options.machine!r}; give {', '.join(PRESETS)}, or a file of measured points.")


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
        type=_arms,
        default=("off", "auto"),
        metavar="WAY,…",
        help="what is compared, the first of them the base of ratios: auto, off, or drafts per step [off,auto]",
    )
    machine = parser.add_argument_group("machine")
    machine.add_argument(
        "--machine",
        default="h200-8b",
        metavar="NAME|FILE",
        help=f"{', '.join(PRESETS)} (computed from data sheets), or a server's ~/.cache/spaceserve/step-cost-*.json "
        "(measured) [h200-8b]",
    )
    machine.add_argument(
        "--step-ms",
        type=_ridge,
        metavar="BASE,PER_ROW[,RIDGE]",
        help="instead: milliseconds of a step, of each row, and the rows below which they are free",
    )
    machine.add_argument(
        "--cost-error",
        type=_error,
        default=0.0,
        metavar="SHARE",
        help="how wrong the worker is about each kind of step at its start; `exact`: it knows, and never learns [0]",
    )
    machine.add_argument("--jitter", type=_share, default=0.02, help="spread of a step's seconds, as a share [0.02]")
    machine.add_argument("--workers", type=whole, default=1, help="each with a machine of its own [1]")
    machine.add_argument("--num-blocks", type=whole, default=32768, help="pages of a worker [32768]")
    machine.add_argument("--block-size", type=whole, default=16, help="ids of a page [16]")
    machine.add_argument("--max-sequences", type=whole, default=64, help="running at once on a worker [64]")
    machine.add_argument("--window", type=whole, default=131072, help="most ids of one request [131072]")
    machine.add_argument(
        "--prefill-budget",
        type=lambda text: None if text == "off" else _duration(text),
        default=0.1,
        help="longest step that prompts may make while others decode; off: no bound [100ms]",
    )
    machine.add_argument("--max-prefill-rows", type=whole, default=512, help="prompt rows of a step [512]")
    machine.add_argument("--max-queue", type=whole, default=256, help="waiting requests; more are refused [256]")
    machine.add_argument("--link", type=_link, default=0.0002, help="from router to worker, and back: each way [200us]")
    text = parser.add_argument_group("drafts")
    text.add_argument(
        "--acceptance",
        type=_chances,
        default=NAMED[0.78],
        metavar="P",
        help=".78, .57, or chances by mask depth, that a draft comes true if those before it do [.78: .84 .81 .78 …]",
    )
    text.add_argument("--acceptance-spread", type=_spread, default=0.5, help="of texts around it, in log-odds [0.5]")
    text.add_argument("--masks", type=whole, default=5, help="per group, of the checkpoint [5]")
    load = parser.add_argument_group("load")
    shape = load.add_mutually_exclusive_group()
    shape.add_argument("--streams", type=whole, help="so many at once, each the next when it is done with one")
    shape.add_argument(
        "--swing", type=_swing, metavar="LOW:HIGH:PERIOD", help="two numbers of streams in turn: 1:64:5s"
    )
    shape.add_argument(
        "--trace", type=Path, metavar="FILE.jsonl", help="`prompt_tokens`, `output_tokens`, and `arrival` in seconds"
    )
    load.add_argument("--rate", type=_above_zero, help="requests a second, Poisson [20]")
    load.add_argument("--on-off", type=_on_off, metavar="ON:OFF", help="at that rate for ON, nobody for OFF: 2s:3s")
    load.add_argument(
        "--duration", type=_duration, help="of arrivals or streams, in virtual time [20s; swing: 4 halves]"
    )
    load.add_argument(
        "--prompt-tokens", type=_lengths, default="lognormal:256:0.8:16:4096", help=f"{FORMS} [%(default)s]"
    )
    load.add_argument(
        "--output-tokens", type=_lengths, default="lognormal:128:0.6:4:1024", help="the same, of answers [%(default)s]"
    )
    load.add_argument("--max-tokens", type=whole, help="that clients ask for; answers end before [just what they get]")
    load.add_argument(
        "--prefixes", type=_of(Prefixes.parse), metavar="N:LENGTH[:SHARE]", help="texts that prompts begin with"
    )
    load.add_argument(
        "--keys", type=_of(Shares.parse), default="", metavar="NAME=WEIGHT,…", help="whose requests they are"
    )
    load.add_argument(
        "--priorities", type=_numbers, default="0", metavar="N=WEIGHT,…", help="the lowest goes first [0]"
    )
    load.add_argument("--choices", type=_counts, default="1", metavar="N=WEIGHT,…", help="answers per request [1]")
    load.add_argument("--cancel", type=_share, default=0.0, help="share whose readers leave within the answer [0]")
    plan = parser.add_argument_group("capacity")
    plan.add_argument("--slo", type=_of(Limits.parse), metavar="LIMITS", help="ttft=500ms,itl=20ms; also gap, e2e")
    plan.add_argument(
        "--plan", action="store_true", help="find the most requests a second that one worker holds within --slo"
    )
    plan.add_argument(
        "--share", type=_share, default=0.95, help="of requests that must keep all limits, once warm [0.95]"
    )
    parser.add_argument("--seed", type=int, default=1, help="of arrivals, lengths, texts, jitter [1]")
    parser.add_argument("--out", type=Path, help="folder for simulate.json, simulate.md and figures [table only]")
    return parser


def _arms(text: str) -> tuple[Speculation, ...]:
    made: list[Speculation] = []
    for word in text.split(","):
        if word == "auto":
            made.append("auto")
        elif word == "off":
            made.append("off")
        else:
            made.append(whole(word))
    if len(set(made)) < len(made):
        raise argparse.ArgumentTypeError(f"names a way twice: {text!r}")
    return tuple(made)


def _ridge(text: str) -> Ridge:
    try:
        base, per_row, *ridge = (float(word) for word in text.split(","))
        made = Ridge(base / 1000, per_row / 1000, int(*ridge))
    except (ValueError, TypeError):
        made = Ridge(0.0, 0.0)
    if made.base <= 0 or made.per_row < 0 or made.ridge < 0:
        raise argparse.ArgumentTypeError(f"must be milliseconds BASE,PER_ROW[,RIDGE], such as 5,0.05,64; got {text!r}")
    return made


def _chances(text: str) -> tuple[float, ...]:
    try:
        chances = tuple(float(word) for word in text.split(","))
    except ValueError:
        chances = ()
    if len(chances) == 1:
        chances = NAMED.get(chances[0], chances)
    if not chances or not all(0.0 <= chance <= 1.0 for chance in chances):
        raise argparse.ArgumentTypeError(f"must be .78, .57, or chances p_1,p_2,… from 0 to 1; got {text!r}")
    return chances


def _error(text: str) -> float | None:
    return None if text == "exact" else _share(text)


def _share(text: str) -> float:
    value = _number(text)
    if not 0.0 <= value < 1.0:
        raise argparse.ArgumentTypeError(f"must be a share from 0 to below 1; got {text!r}")
    return value


def _spread(text: str) -> float:
    value = _number(text)
    if not 0.0 <= value <= 4.0:
        raise argparse.ArgumentTypeError(f"must be from 0 to 4; got {text!r}")
    return value


def _above_zero(text: str) -> float:
    value = _number(text)
    if not 0.0 < value < 1e6:
        raise argparse.ArgumentTypeError(f"must be above 0 and below a million; got {text!r}")
    return value


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        return -1.0


def _duration(text: str) -> float:
    try:
        return seconds_of(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def _link(text: str) -> float:
    return 0.0 if text == "0" else _duration(text)


def _swing(text: str) -> Streams:
    parts = text.split(":")
    if len(parts) != 3 or not (parts[0].isdecimal() and parts[1].isdecimal()) or not 0 < int(parts[0]) < int(parts[1]):
        raise argparse.ArgumentTypeError(f"must be LOW:HIGH:PERIOD, such as 1:64:5s; got {text!r}")
    return Streams(int(parts[1]), int(parts[0]), _duration(parts[2]))


def _on_off(text: str) -> tuple[float, float]:
    on, _, off = text.partition(":")
    return _duration(on), _duration(off)


def _lengths(text: str) -> Lengths:
    try:
        return Lengths.parse(text)
    except LengthError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def _of(read: Callable[[str], object]) -> Callable[[str], object]:
    def parsed(text: str) -> object:
        if not text:
            return Shares(("",), (1.0,))
        try:
            return read(text)
        except (LoadFlagError, ValueError) as error:
            raise argparse.ArgumentTypeError(str(error)) from None

    return parsed


def _numbers(text: str) -> Shares:
    made = _of(Shares.parse)(text)
    assert isinstance(made, Shares)
    if not all(value.lstrip("-").isdecimal() for value in made.values):
        raise argparse.ArgumentTypeError(f"must be whole numbers, such as 0=3,1=1; got {text!r}")
    return made


def _counts(text: str) -> Shares:
    made = _numbers(text)
    if not all(1 <= int(value) <= 64 for value in made.values):
        raise argparse.ArgumentTypeError(f"must be from 1 to 64; got {text!r}")
    return made
