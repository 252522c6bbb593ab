"""Requests made from the OpenAPI document, right and wrong ones, against a real server with the embedded model.

No answer may be a 500, have a status or a body that the document does not describe, or take what the document forbids.
"""

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from space_common.process import ServerProcess

CONFIG = Path(__file__).with_name("schemathesis.toml")
HOOKS = Path(__file__).with_name("served_bodies.py")
SEED = 20240218
UNSAID = "positive_data_acceptance"
"""What a document cannot say: that a text fits the window, that fields go together, which ids there are. So what it
allows may be refused; but what it forbids must be, and every answer must be as it says.
"""

SMALL = ["--model", "demo", "--num-threads", "1", "--max-model-len", "96", "--max-choices", "2"]
"""A window that no answer takes long to fill."""

EXAMPLES = int(os.environ.get("SPACESERVE_TEST_EXAMPLES", "40"))
"""Random requests for each operation, beside those that cover the schema one by one."""


def schemathesis(url: str, flags: Sequence[str]) -> None:
    command = [sys.executable, "-c", "from schemathesis.cli import schemathesis; schemathesis()", "--no-color"]
    command += ["--config-file", str(CONFIG), "run", f"{url}/openapi.json", "--checks", "all"]
    command += ["--exclude-checks", UNSAID]
    command += ["--max-examples", str(EXAMPLES), "--seed", str(SEED), "--generation-database", "none"]
    command += [
        "--continue-on-failure",
        "--request-timeout",
        "120",
        "--max-response-time",
        "10",
        "--suppress-health-check",
        "all",
        *flags,
    ]
    with TemporaryDirectory() as folder:  # it leaves files where it runs
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True, errors="replace", timeout=3000)
    assert done.returncode == 0, (done.stdout + done.stderr)[-20_000:]


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("phases", ["coverage", "fuzzing"])
def test_every_answer_is_documented_and_none_is_a_500(phases: str) -> None:
    with ServerProcess(SMALL) as server:
        schemathesis(server.url, ["--phases", phases])


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_a_server_with_keys_lets_nobody_in_without_one() -> None:
    with ServerProcess(SMALL, environment={"SPACESERVE_API_KEYS": "secret"}) as server:
        flags = ["-H", "Authorization: Bearer secret", "--phases", "coverage", "--max-examples", "5"]
        schemathesis(server.url, flags)
