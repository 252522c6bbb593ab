"""Every panel of the dashboard shows something when a server works, as a real Prometheus tells it."""

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytestmark = [pytest.mark.slow, pytest.mark.e2e, pytest.mark.timeout(900)]

CARBON = "400"


def expressions(dashboard: dict[str, Any], begun: float, ended: float) -> dict[str, list[str]]:
    """The queries of each panel, as Grafana would send them."""
    known = {"$__rate_interval": "15s", "$__range": f"{int(ended - begun)}s", "$instance": ".*", "$carbon": CARBON}
    found: dict[str, list[str]] = {}
    for panel in dashboard["panels"]:
        for target in panel.get("targets", []):
            text = target["expr"]
            for name, value in known.items():
                text = text.replace(name, value)
            found.setdefault(panel["title"], []).append(text)
    return found


def test_every_query_of_every_panel_returns_data(watched: Any, dashboard: dict[str, Any]) -> None:
    asked = expressions(dashboard, watched.begun, watched.ended)
    assert len(asked) >= 25
    silent = {
        title: query for title, queries in asked.items() for query in queries if not watched.values(query)
    }  # fmt: skip
    assert silent == {}


def test_the_figures_are_those_of_the_load(watched: Any, dashboard: dict[str, Any]) -> None:
    asked = expressions(dashboard, watched.begun, watched.ended)

    def last(title: str) -> float:
        value: float = watched.values(asked[title][0])[-1]
        return value

    assert 1 <= last("Tokens per step") <= 6
    assert max(watched.values(asked["Requests"][0])) >= 4
    assert last("Workers up") == 1
    assert max(watched.values(asked["Refused per second"][0])) > 0
    assert max(watched.values(asked["Prefix hits"][0])) > 0.2
    assert 25 < last("Power") < 45  # the counter says 35 W
    assert last("Energy per token") == pytest.approx(last("Power") / last("Tokens per second"), rel=0.2)
    assert last("CO2e per million tokens") == pytest.approx(last("Energy per token") * float(CARBON) / 3.6, rel=0.01)


def test_prometheus_reads_the_rules_and_no_alert_wakes_anybody_while_all_is_well(watched: Any) -> None:
    (group,) = watched.ask("rules")["groups"]
    assert len(group["rules"]) >= 10
    assert [rule["name"] for rule in group["rules"] if rule["health"] != "ok"] == []
    firing = [alert["labels"] for alert in watched.ask("alerts")["alerts"] if alert["state"] == "firing"]
    assert [labels["alertname"] for labels in firing if labels["severity"] == "page"] == []


def test_every_series_of_the_server_has_a_place_on_the_dashboard_or_is_known_to_have_none(
    watched: Any, dashboard: dict[str, Any]
) -> None:
    told = {
        re.sub(r"_(bucket|sum|count)$", "", name)
        for name in watched.ask("label/__name__/values")
        if name.startswith("spaceserve_")
    }
    drawn = " ".join(query for queries in expressions(dashboard, 0, 60).values() for query in queries)
    shown = {re.sub(r"_(bucket|sum|count)$", "", name) for name in re.findall(r"spaceserve_\w+", drawn)}
    assert shown <= told
    unseen = {name for name in told - shown if not name.startswith(("spaceserve_key_", "spaceserve_slow_"))}
    assert unseen == set()


def test_the_dashboard_is_drawn(watched: Any, root: Path, tmp_path: Path) -> None:
    """`make dashboard` keeps the picture."""
    out = Path(os.environ.get("SPACESERVE_TEST_PICTURE", tmp_path / "dashboard.png"))
    command = [sys.executable, str(root / "tests/dashboard/draw.py"), str(watched.http.base_url)]
    times = [f"{watched.begun:.0f}", f"{watched.ended:.0f}"]
    run = subprocess.run([*command, *times, str(out)], capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    assert out.read_bytes().startswith(b"\x89PNG")
