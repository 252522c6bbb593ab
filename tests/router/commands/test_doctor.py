"""`spaceserve doctor`: facts and cures on one page, and an exit code that can be relied on."""

import json
import socket
from collections.abc import Sequence
from pathlib import Path

import pytest
from space_common.finding import Finding
from space_router.cli import main
from space_router.commands import doctor
from space_router.config import ServeConfig

HEALTHY = [Finding("gpu", "ok", "There is none."), Finding("memory", "ok", "There is enough.")]


def found(worker: Sequence[Finding] = HEALTHY, /, **flags: str) -> list[Finding]:
    def ask(config: ServeConfig) -> Sequence[Finding]:
        return worker

    return list(doctor.examine({"port": "0", "model": "demo", **flags}, {}, ask))


def failures(worker: Sequence[Finding] = HEALTHY, /, **flags: str) -> list[Finding]:
    return [finding for finding in found(worker, **flags) if finding.state == "fail"]


def test_where_all_is_well_the_server_would_start() -> None:
    reported = found()
    assert doctor.would_start(reported)
    assert {finding.part for finding in reported} >= {"settings", "model", "ports", "gpu", "memory"}
    assert doctor.report(reported).endswith("The server would start.")


def test_what_the_worker_found_decides_too() -> None:
    reported = found([Finding("gpu", "fail", "The driver is too old.", "Install driver 580.")])
    assert not doctor.would_start(reported)
    page = doctor.report(reported)
    assert "FAIL  The driver is too old." in page
    assert "→ Install driver 580." in page
    assert page.endswith("The server would not start: one thing marked FAIL.")


def test_the_gpus_of_several_workers_are_named_and_sharing_is_noted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("space_router.config.visible_gpus", lambda environment: ("0", "GPU-b", "3"))
    [one] = [finding for finding in found(workers="auto") if finding.part == "workers"]
    assert (one.state, one.fact) == ("ok", "3 workers, on GPU 0; GPU-b; 3")
    shared = [finding for finding in found(workers="4") if finding.part == "workers"]
    assert [finding.state for finding in shared] == ["ok", "note"]
    assert "4 workers share 3 GPUs" in shared[1].fact
    assert "--kv-memory" in shared[1].cure
    assert len([finding for finding in found(workers="4", kv_memory="1GiB") if finding.part == "workers"]) == 1


def test_a_note_keeps_nobody_from_starting() -> None:
    reported = found([Finding("memory", "note", "Shared memory is small.", "--shm-size 1g")])
    assert doctor.would_start(reported)
    assert "note  Shared memory is small." in doctor.report(reported)


def test_a_flag_that_cannot_be_used_is_the_only_thing_that_is_said() -> None:
    (reported,) = found(speculation="sometimes")
    assert (reported.part, reported.state) == ("settings", "fail")
    assert "--speculation='sometimes'" in reported.fact


def test_a_port_that_is_taken_is_named_with_the_way_to_find_who_has_it() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        (reported,) = failures(port=str(taken.getsockname()[1]))
    assert reported.part == "ports"
    assert "ss -ltnp" in reported.cure


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "unix:{}/s.sock"])
def test_a_place_that_this_machine_alone_reaches_needs_no_key(host: str, tmp_path: Path) -> None:
    reported = [finding for finding in found(host=host.format(tmp_path)) if finding.part == "ports"]
    assert [finding.state for finding in reported] == ["ok", "ok"]
    assert not list(tmp_path.iterdir())


def test_a_server_that_others_reach_and_that_asks_for_no_key_is_noted() -> None:
    (note,) = [finding for finding in found(host="0.0.0.0", grpc_port="0") if finding.state == "note"]
    assert note.fact == "Any client that reaches 0.0.0.0 may use the server: it asks for no key."
    assert "SPACESERVE_API_KEYS" in note.cure
    flags = {"port": "0", "host": "0.0.0.0", "model": "demo"}
    reported = doctor.examine(flags, {"SPACESERVE_API_KEYS": "sk-1"}, lambda config: HEALTHY)
    assert all(finding.state == "ok" for finding in reported)


def test_a_model_that_is_not_there_is_named() -> None:
    (reported,) = failures(model="/no/such/folder")
    assert "there is no such folder" in reported.fact


def test_workers_elsewhere_are_called_and_none_is_looked_for_here() -> None:
    with socket.create_server(("127.0.0.1", 0)) as worker:
        there = f"127.0.0.1:{worker.getsockname()[1]}"
        reported = found([Finding("gpu", "fail", "is not asked")], worker_address=there)
        assert doctor.would_start(reported)
        assert Finding("workers", "ok", f"{there} answers") in reported
    (gone,) = failures(worker_address=there)
    assert f"No worker answers at {there}" in gone.fact
    (nowhere,) = failures(worker_address="unix:/no/such/socket")
    assert "unix:/no/such/socket" in nowhere.fact


def test_a_worker_that_cannot_even_begin_is_quoted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "worker_command", lambda *_, **__: ["sh", "-c", "echo no torch here >&2; exit 1"])
    (reported,) = doctor._worker(ServeConfig())
    assert reported.state == "fail"
    assert "no torch here" in reported.fact


def test_programs_get_json_and_the_exit_code_says_it_too(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(doctor, "_worker", lambda config: HEALTHY)
    assert main(["doctor", "--json", "--port", "0"]) == 0
    assert json.loads(capsys.readouterr().out)["would_start"] is True
    assert main(["doctor", "--json", "--port", "0", "--model", "/no/such/folder"]) == 1
    reported = json.loads(capsys.readouterr().out)
    assert reported["would_start"] is False
    assert [one["part"] for one in reported["findings"] if one["state"] == "fail"] == ["model"]


def test_a_default_model_that_is_not_here_is_said_and_is_no_failure(tmp_path: Path) -> None:
    flags = {"port": "0", "download_folder": str(tmp_path)}
    asked: list[str] = []

    def ask(config: ServeConfig) -> Sequence[Finding]:
        asked.append(config.model)
        return HEALTHY

    reported = list(doctor.examine(flags, {}, ask))
    assert doctor.would_start(reported)
    assert "Tokenizer and chat template of smollm2 come with its weights." in {finding.fact for finding in reported}
    offline = list(doctor.examine({**flags, "offline": "on"}, {}, ask))
    assert doctor.would_start(offline)
    assert "As it is, demo would be served." in {finding.cure for finding in offline}
    assert asked == ["smollm2", "demo"]
    (named,) = failures(download_folder=str(tmp_path), offline="on", model="smollm2")
    assert "--offline on forbids to fetch them" in named.fact


def test_a_page_is_no_wider_than_a_terminal() -> None:
    long = Finding("energy", "ok", "word " * 60, "cure " * 60)
    assert max(map(len, doctor.report([long]).splitlines())) <= 120
