"""`spaceserve bench simulate`: the real scheduler and controller in virtual time, at any scale, in seconds."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from tqdm import tqdm

from space_eval.plots import PlotError
from space_eval.simulate_figures import Figures
from space_eval.simulate_options import Planning, Settings, SettingsError, parse
from space_eval.simulate_plan import Capacity, plan
from space_eval.simulate_report import TITLE, capacity_table, cost_of_simulating, draw, facts, table, write
from space_eval.simulate_run import Simulation


def main(argv: Sequence[str] | None = None) -> int:
    """The exit code: 0 after a simulation, 1 where its report cannot be written, 2 for unusable flags."""
    try:
        settings = parse(sys.argv[1:] if argv is None else list(argv))
    except SettingsError as error:
        _say(str(error))
        return 2
    known = facts(settings.scenario)
    print(f"{TITLE}\nmachine: {known['machine']}\ndrafts come true: {known['acceptance']}\nload: {known['load']}\n")
    runs: list[Figures] = []
    found: list[Capacity] = []
    if settings.planning is not None:
        found = _plan(settings, settings.planning)
        runs = [one.at_rate for one in found if one.at_rate is not None]
        tables = [capacity_table(found, settings.planning.share, settings.planning.rate)]
    else:
        runs = _compare(settings)
        tables = [table(runs, has_limits=settings.scenario.limits is not None), cost_of_simulating(runs)]
    print("\n".join(tables))
    if settings.out is None:
        return 0
    note = f"{known['machine']}; {known['load']}; commit {known['commit']}"
    pictures: list[str] = []
    try:
        try:
            pictures = draw(settings.out, runs, note) if runs else []
        except PlotError as error:
            _say(f"no figures: {error}")
        for file in write(settings.out, known, tables, runs, found, pictures):
            _say(f"wrote {file}")
    except OSError as error:
        _say(f"{settings.out} cannot be written: {error.strerror or error}.")
        return 1
    return 0


def _compare(settings: Settings) -> list[Figures]:
    runs = []
    scenario = settings.scenario
    for arm in settings.arms:
        bar = "{desc}: {percentage:3.0f}%|{bar}| {n:.3g}/{total:g} virtual s [{elapsed}<{remaining}]"
        with tqdm(total=scenario.seconds, desc=str(arm), bar_format=bar, file=sys.stderr, disable=None) as progress:
            simulation = Simulation(scenario.arm(arm), progress=lambda now, bar=progress: bar.update(now - bar.n))  # type: ignore[misc]
            runs.append(simulation.run())
        simulation.check()
    return runs


def _plan(settings: Settings, planning: Planning) -> list[Capacity]:
    return [plan(settings.scenario, arm, planning.share, planning.rate, _say) for arm in settings.arms]


def _say(line: str) -> None:
    print(f"bench simulate: {line}", file=sys.stderr)


if __name__ == "__main__":
    sys.exit(main())
