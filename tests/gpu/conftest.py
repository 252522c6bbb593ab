"""Options, limits and the `notes` fixture of the GPU check's stages."""

from __future__ import annotations

import datetime
from collections.abc import Generator
from pathlib import Path

import pytest
import torch

from gpu.peers import PEERS
from gpu.report import CHECK, Notes, Record, Report
from gpu.side_by_side import SIDE_BY_SIDE
from gpu.stages import ALL_STAGES, PEER_STAGES, Slice

OUT = Path("runs/gpu-check")
MARGIN = 60.0  # seconds after which a stage that its check has not ended fails by itself, with pytest-timeout

collect_ignore = [stage.file for stage in ALL_STAGES.values() if stage.file and stage.missing()]


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("gpu")
    group.addoption("--dry", action="store_true", help="tiny sizes on the CPU: figures mean nothing")
    group.addoption("--out", type=Path, default=OUT, help="folder of the report")
    group.addoption("--seconds", type=float, help="limit of a stage")
    group.addoption("--slice", default="1/1", help="of the stage: number and count")
    group.addoption("--commit", help="of a copy that is no checkout")
    group.addoption("--peer", action="append", default=[], help=f"NAME=PYTHON that has it: {', '.join(PEERS)}")
    group.addoption("--shape", default="8b", help="of the weights that engines are compared on")
    group.addoption("--weights", type=Path, help="folder of those weights")


def _stage(item: pytest.Item) -> str:
    return item.name.removeprefix("test_").replace("_", "-")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    for item in items:
        if "notes" in getattr(item, "fixturenames", ()):
            item.add_marker(pytest.mark.timeout(ALL_STAGES[_stage(item)].seconds + MARGIN))
            item.add_marker(pytest.mark.filterwarnings("default"))  # of libraries, whose versions are the machine's
            if not torch.cuda.is_available() and not config.getoption("--dry", False):
                item.add_marker(pytest.mark.skip(reason="needs a GPU, or --dry"))


@pytest.fixture(scope="session")
def report(request: pytest.FixtureRequest) -> Generator[Report]:
    """Written when the last stage has ended."""
    option = request.config.getoption
    is_of_peers = any(_stage(item) in PEER_STAGES for item in request.session.items)
    made = Report(
        option("--out", OUT).resolve(), dry=option("--dry", False), commit_given=option("--commit", None),
        catalogue=SIDE_BY_SIDE if is_of_peers else CHECK,
    )  # fmt: skip
    made.folder.mkdir(parents=True, exist_ok=True)
    yield made
    made.write()


@pytest.fixture
def notes(request: pytest.FixtureRequest, report: Report) -> Notes:
    """Where a stage writes its results."""
    name = _stage(request.node)
    date = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    seconds = request.config.getoption("--seconds", None) or ALL_STAGES[name].seconds
    one = Slice(name, *map(int, request.config.getoption("--slice", "1/1").split("/")))
    return Notes(Record(str(one), report.dry, report.machine, date), report.folder / f"{one}.json", seconds, one)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    notes = getattr(item, "funcargs", {}).get("notes")
    if isinstance(notes, Notes) and call.when == "call":
        outcome = {"passed": "passed", "skipped": "not run"}.get(report.outcome, "failed")
        error = call.excinfo.value if call.excinfo else None
        is_own = isinstance(error, AssertionError | pytest.fail.Exception | pytest.skip.Exception)
        why = "" if error is None else str(error) if is_own else f"{type(error).__name__}: {error}"
        notes.close(outcome, why[:600], call.duration)
    return report
