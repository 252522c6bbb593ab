"""Every panel of the dashboard shows something when a server works, as a real Prometheus tells it."""

import json
import os
import re
import shutil
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml
from space_common.process import ServerProcess

SECONDS = float(os.environ.get("SPACESERVE_TEST_SECONDS", "25"))  # Of load, before anybody looks

FLAGS = ["--model", "demo", "--num-threads", "1", "--speculation", os.environ.get("SPACESERVE_TEST_SPECULATION", "3")]
"""Drafts in every step, also on a busy machine where the controller lays out none; the picture has its choice."""

WATTS = 35
INTERVAL = "15s"  # $__rate_interval, at a scrape each second


@dataclass(frozen=True)
class Watched:
    """What Prometheus knows of the server."""

    http: httpx.Client
    server: ServerProcess
    begun: float
    ended: float

    def ask(self, path: str, **parameters: Any) -> Any:
        answer = self.http.get(f"/api/v1/{path}", params=parameters)
        assert answer.status_code == 200, answer.text
        return answer.json()["data"]

    def values(self, expression: str) -> list[float]:
        """Of every series, all through the load; what is not a number is left out."""
        found = self.ask("query_range", query=expression, start=self.begun, end=self.ended, step=1)["result"]
        return [float(value) for series in found for _, value in series["values"] if value != "NaN"]


@pytest.fixture(scope="session")
def root() -> Path:
    return Path(__file__).parents[2]


@pytest.fixture(scope="session")
def dashboard(root: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((root / "docker/grafana/spaceserve.json").read_text(encoding="utf-8"))
    return found


@pytest.fixture(scope="session")
def watched(root: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Watched]:
    prometheus = shutil.which("prometheus")
    if prometheus is None:
        pytest.skip("there is no prometheus here (Debian, Ubuntu: apt-get install prometheus)")
    folder = tmp_path_factory.mktemp("watched")
    with ExitStack() as stack:
        powercap = folder / "powercap"
        stack.enter_context(_repeated(_counter(powercap), 0.1))
        server = stack.enter_context(ServerProcess([*FLAGS, "--powercap", str(powercap)]))
        http = stack.enter_context(_prometheus(prometheus, root, folder, server.url.removeprefix("http://")))
        begun = time.time()
        _load(server.url, SECONDS)
        yield Watched(http, server, begun + 5, time.time())


@contextmanager
def _repeated(act: Callable[[], None], seconds: float) -> Iterator[None]:
    """`act`, again and again, as long as the block lasts."""
    over = threading.Event()

    def run() -> None:
        while not over.wait(seconds):
            act()

    act()
    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


def _counter(powercap: Path) -> Callable[[], None]:
    """What the kernel shows of a processor that draws WATTS all the time."""
    zone = powercap / "intel-rapl:0"
    zone.mkdir(parents=True)
    (zone / "name").write_text("package-0\n")
    (zone / "max_energy_range_uj").write_text("262143328850\n")
    begun = time.monotonic()

    def count() -> None:
        fresh = zone / "fresh"
        fresh.write_text(f"{int((time.monotonic() - begun) * WATTS * 1e6)}\n")
        fresh.replace(zone / "energy_uj")  # nobody reads half a number

    return count


@contextmanager
def _prometheus(program: str, root: Path, folder: Path, target: str) -> Iterator[httpx.Client]:
    """Our own configuration and alerts; only the target is this server, and it is asked every second."""
    config = yaml.safe_load((root / "docker/prometheus.yml").read_text(encoding="utf-8"))
    config["global"] = {"scrape_interval": "1s", "evaluation_interval": "1s"}
    config["scrape_configs"][0]["static_configs"][0]["targets"] = [target]
    (folder / "prometheus.yml").write_text(yaml.safe_dump(config), encoding="utf-8")
    for name in config["rule_files"]:
        shutil.copy(root / "docker" / name, folder / name)
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    log = (folder / "log").open("wb")
    process = subprocess.Popen(
        [program, f"--config.file={folder / 'prometheus.yml'}", f"--storage.tsdb.path={folder / 'data'}",
         f"--web.listen-address=127.0.0.1:{port}"],
        stdout=log, stderr=log,
    )  # fmt: skip
    try:
        with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=60) as http:
            _until(lambda: _ready(http), lambda: (folder / "log").read_text())
            yield http
    finally:
        process.terminate()
        process.wait(60)
        log.close()


def _ready(http: httpx.Client) -> bool:
    try:
        return http.get("/-/ready").status_code == 200
    except httpx.TransportError:
        return False


def _until(true: Callable[[], bool], otherwise: Callable[[], str], seconds: float = 60) -> None:
    end = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < end, otherwise()
        time.sleep(0.1)


def _load(url: str, seconds: float) -> None:
    """Streams with a beginning in common, an object by schema, a known answer, a client that leaves, a refusal."""
    end = time.monotonic() + seconds
    failures: list[BaseException] = []

    def client(number: int) -> None:
        try:
            with httpx.Client(base_url=url, timeout=60) as http:
                turn = 0
                while time.monotonic() < end:
                    turn += 1
                    _ask(http, number, turn)
        except BaseException as error:
            failures.append(error)

    clients = [threading.Thread(target=client, args=(number,)) for number in range(6)]
    for thread in clients:
        thread.start()
    for thread in clients:
        thread.join()
    assert failures == []


def _ask(http: httpx.Client, number: int, turn: int) -> None:
    prompt = '"""Numbers and texts.\n\nEverything here is plain."""\n\nimport math\n\n\n'
    body: dict[str, Any] = {"prompt": f"{prompt}def add_{turn % 7}(first, second):\n", "max_tokens": 96, "seed": turn}
    body["temperature"] = 0 if turn % 2 else 0.8
    if number == 4:
        schema = {"type": "object", "properties": {"name": {"type": "string", "maxLength": 9}}, "required": ["name"]}
        body["response_format"] = {"type": "json_schema", "json_schema": {"name": "named", "schema": schema}}
    if number == 5:
        if turn % 5 == 0:
            assert http.post("/v1/completions", json={"prompt": "a", "max_tokens": -1}).status_code == 400
        with http.stream("POST", "/v1/completions", json={**body, "stream": True}) as answer:
            for _ in zip(range(4), answer.iter_lines(), strict=False):
                pass  # and leave
        return
    assert http.post("/v1/completions", json=body).status_code == 200


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
    reported = {
        re.sub(r"_(bucket|sum|count)$", "", name)
        for name in watched.ask("label/__name__/values")
        if name.startswith("spaceserve_")
    }
    drawn = " ".join(query for queries in expressions(dashboard, 0, 60).values() for query in queries)
    shown = {re.sub(r"_(bucket|sum|count)$", "", name) for name in re.findall(r"spaceserve_\w+", drawn)}
    assert shown <= reported
    unseen = {name for name in reported - shown if not name.startswith(("spaceserve_key_", "spaceserve_slow_"))}
    assert unseen == set()


def test_the_dashboard_is_drawn(watched: Any, root: Path, tmp_path: Path) -> None:
    """`make dashboard` keeps the picture."""
    out = Path(os.environ.get("SPACESERVE_TEST_PICTURE", tmp_path / "dashboard.png"))
    command = [sys.executable, str(root / "tests/dashboard/draw.py"), str(watched.http.base_url)]
    times = [f"{watched.begun:.0f}", f"{watched.ended:.0f}"]
    run = subprocess.run([*command, *times, str(out)], capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    assert out.read_bytes().startswith(b"\x89PNG")
