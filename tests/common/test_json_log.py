"""With `--log-format json` every line on stderr is JSON, also of errors at start and of worker processes."""

import json
import logging
import os
import subprocess
import sys

import pytest
from space_common.process import JsonLines, forward_stderr, quieten_grpc, report_error
from space_router import cli


@pytest.fixture
def json_log(monkeypatch: pytest.MonkeyPatch) -> None:
    handler = logging.StreamHandler()
    handler.setFormatter(JsonLines())
    monkeypatch.setattr(logging.getLogger(), "handlers", [handler])


def test_a_workers_lines_are_json_with_its_name(json_log: None, capsys: pytest.CaptureFixture[str]) -> None:
    forward_stderr("worker 0", '{"level": "INFO", "message": "é"}')
    forward_stderr("worker 0", "terminate called")
    forward_stderr("worker 0", "12")
    own, plain, number = (json.loads(line) for line in capsys.readouterr().err.splitlines())
    assert own == {"level": "INFO", "message": "é", "process": "worker 0"}
    assert (plain["logger"], plain["message"], plain["level"]) == ("worker 0", "terminate called", "WARNING")
    assert number["message"] == "12"


def test_a_text_log_has_the_lines_as_they_are(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(logging.getLogger(), "handlers", [])
    forward_stderr("worker 0", '{"a": 1}')
    report_error("spaceserve", "--port is wrong.")
    assert capsys.readouterr().err.splitlines() == ['worker 0: {"a": 1}', "spaceserve: --port is wrong."]


def test_a_wrong_flag_is_reported_as_json(
    json_log: None, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("GRPC_VERBOSITY", raising=False)
    monkeypatch.delenv("GRPC_ENABLE_FORK_SUPPORT", raising=False)
    assert cli.main(["serve", "--log-format", "json", "--port", "x"]) == 2
    (line,) = (json.loads(line) for line in capsys.readouterr().err.splitlines())
    assert (line["level"], line["logger"]) == ("ERROR", "spaceserve")
    assert "--port" in line["message"]
    assert os.environ["GRPC_VERBOSITY"] == "NONE"  # read by gRPC's C++ part, which else writes lines of its own
    assert os.environ["GRPC_ENABLE_FORK_SUPPORT"] == "0"
    monkeypatch.setenv("GRPC_VERBOSITY", "DEBUG")
    quieten_grpc(logs_json=True)
    assert os.environ["GRPC_VERBOSITY"] == "DEBUG"  # as the operator has set it


def test_the_command_line_does_not_import_grpc_before_it_is_quiet() -> None:
    program = "import sys, space_router.cli; sys.exit('grpc' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0
