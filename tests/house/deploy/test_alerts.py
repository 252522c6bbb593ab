"""Each alert is tried with figures at which it fires and some at which it does not, and says what to do."""

import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml
from space_router.config import settings
from space_router.metrics import Metrics


def alerts(root: Path) -> dict[str, dict[str, Any]]:
    rules = yaml.safe_load((root / "docker/alerts.yml").read_text(encoding="utf-8"))
    return {rule["alert"]: rule for group in rules["groups"] for rule in group["rules"]}


def promtool(root: Path, *words: str) -> str:
    """What it says; it must be content."""
    program = shutil.which("promtool")
    if program is None:
        pytest.skip("there is no promtool here (Debian, Ubuntu: apt-get install prometheus)")
    run = subprocess.run([program, *words], cwd=root, capture_output=True, text=True)
    assert run.returncode == 0, run.stdout + run.stderr
    return run.stdout


def test_promtool_takes_the_rules_and_the_configuration(root: Path) -> None:
    assert f"{len(alerts(root))} rules found" in promtool(root, "check", "rules", "docker/alerts.yml")
    assert "1 rule files found" in promtool(root, "check", "config", "docker/prometheus.yml")


def test_alerts_fire_at_the_figures_at_which_they_must_and_at_no_others(root: Path) -> None:
    assert "SUCCESS" in promtool(root, "test", "rules", "docker/alerts_test.yml")


def test_every_alert_is_tried_with_figures_of_more_than_one_server(root: Path) -> None:
    tried = {}
    for one in yaml.safe_load((root / "docker/alerts_test.yml").read_text(encoding="utf-8"))["tests"]:
        servers = {re.search(r'instance="(\w+)"', series["series"])[1] for series in one["input_series"]}
        fired = {told["exp_labels"]["instance"] for rule in one["alert_rule_test"] for told in rule["exp_alerts"]}
        assert fired < servers, one["name"]  # at least one fires, at least one does not
        assert fired, one["name"]
        tried.update(dict.fromkeys(rule["alertname"] for rule in one["alert_rule_test"]))
    assert tried.keys() == alerts(root).keys()


def test_every_alert_has_its_paragraph_of_what_to_do_and_no_paragraph_is_of_none(root: Path) -> None:
    text = (root / "docker/README.md").read_text(encoding="utf-8")
    paragraphs = dict(re.findall(r"^### (Spaceserve\w+)\n\n(.+?)\n\n?(?=#|\Z)", text, flags=re.MULTILINE | re.DOTALL))
    assert paragraphs.keys() == alerts(root).keys()
    assert min(map(len, paragraphs.values())) > 200
    for name, rule in alerts(root).items():
        assert rule["annotations"]["runbook"] == f"docker/README.md#{name.lower()}"
        assert rule["labels"]["severity"] in {"page", "warn"}


def test_alerts_ask_only_for_series_and_labels_that_there_are(root: Path) -> None:
    rendered = Metrics().render().decode()
    present = set(re.findall(r"^(spaceserve_\w+)", rendered, flags=re.MULTILINE))
    for name, rule in alerts(root).items():
        asked = set(re.findall(r"spaceserve_\w+", rule["expr"]))
        assert asked <= present, name
        for label in re.findall(r'(?:outcome|reason)="\w+"', rule["expr"]):
            assert label in rendered, name


def test_what_a_paragraph_names_exists(root: Path) -> None:
    """Panels in italics, flags of the server."""
    text = (root / "docker/README.md").read_text(encoding="utf-8").partition("## Alerts")[2]
    board = (root / "docker/grafana/spaceserve.json").read_text(encoding="utf-8")
    names = {name.replace("\n", " ") for name in re.findall(r"\*([A-Z][^*]+)\*", text)}
    assert {name for name in names if name not in board and name not in alerts(root)} == set()
    flags = {flag.replace("-", "_") for flag in re.findall(r"`--([a-z-]+)", text)}
    assert flags <= settings().keys()
