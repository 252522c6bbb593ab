"""A tally reads as prometheus_client's own histogram."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry, Histogram, generate_latest
from space_router.metrics import FastHistogram

BOUNDS = (0.001, 0.5, 1, 2.5, 17)
values = st.one_of(st.sampled_from(BOUNDS), st.floats(0, 40, allow_subnormal=False))


def text(registry: CollectorRegistry) -> list[str]:
    return [line for line in generate_latest(registry).decode().splitlines() if "_created" not in line]


@given(st.lists(st.tuples(values, st.integers(1, 3))))
def test_every_line_is_that_of_a_histogram(observed: list[tuple[float, int]]) -> None:
    ours, theirs = CollectorRegistry(), CollectorRegistry()
    tally = FastHistogram("seconds", "What it takes", BOUNDS, ours)
    histogram = Histogram("seconds", "What it takes", buckets=BOUNDS, registry=theirs)
    for value, times in observed:
        tally.observe(value, times)
        for _ in range(times):
            histogram.observe(value)
    lines, expected = text(ours), text(theirs)
    assert [line.rsplit(" ", 1)[0] for line in lines] == [line.rsplit(" ", 1)[0] for line in expected]
    for line, other in zip(lines, expected, strict=True):
        if not line.startswith("#"):
            ours_is, theirs_is = float(line.rsplit(" ", 1)[1]), float(other.rsplit(" ", 1)[1])
            assert abs(ours_is - theirs_is) <= 1e-9 * max(1.0, theirs_is)
