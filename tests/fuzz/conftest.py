"""The `--times` option and the `fuzzer` fixture."""

from __future__ import annotations

import logging
import resource
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from fuzz.harness import Fuzzer

MEMORY = 16 * 1024**3  # bytes of address space that a test may add: an input that asks for more gets a MemoryError


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--times", type=int, default=1, help="try so many times as many hostile inputs as a unit test run")


@pytest.fixture
def fuzzer(
    request: pytest.FixtureRequest, tmp_path: Path, record_property: Callable[[str, object], None]
) -> Iterator[Fuzzer]:
    """Logging is off and memory bounded while it is used."""
    before = resource.getrlimit(resource.RLIMIT_AS)
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + MEMORY, before[1]))
    logging.disable(logging.CRITICAL)
    made = Fuzzer(request.config.getoption("--times", 1), tmp_path / "input.txt")
    yield made
    made.close()
    logging.disable(logging.NOTSET)
    resource.setrlimit(resource.RLIMIT_AS, before)
    record_property("outcomes", ", ".join(f"{count} {name}" for name, count in made.outcomes.most_common(8)))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    """Show what became of the inputs of each test."""
    if config.getoption("--times", 1) > 1:
        for report in terminalreporter.getreports(""):
            for _, outcomes in getattr(report, "user_properties", ()):
                terminalreporter.write_line(f"{report.nodeid.partition('::')[2]}: {outcomes}")
