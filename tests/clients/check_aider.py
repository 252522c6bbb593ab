"""Aider, headless, over /v1/chat/completions: edits a file, runs the test, mends what it reported."""

import subprocess

from agents import FOLDER, RIGHT, TASK, run
from checks import check, leave, version

AIDER = FOLDER / "venv/bin/aider"
version(subprocess.run([AIDER, "--version"], capture_output=True, text=True, check=True).stdout.split()[-1])
MARK = "Attempt number"


def edit(number: int, before: str, after: str) -> str:
    """A change as aider's edit format `diff` has it."""
    block = (
        f"calc.py\n```python\n<<<<<<< SEARCH\n    return {before}\n=======\n    return {after}\n>>>>>>> REPLACE\n```\n"
    )
    return f"{MARK} {number}.\n\n{block}"


with check("edits a file, runs the test, and edits it again by what the test reported"):
    done = run(
        lambda work: [edit(1, "a - b", "a * b"), edit(2, "a * b", "a + b"), f"{MARK} 3: nothing is left to do."],
        lambda url: [
            str(AIDER), "--model", "openai/tiny", "--openai-api-base", f"{url}/v1", "--openai-api-key", "none",
            "--edit-format", "diff", "--yes-always", "--no-git", "--no-check-update", "--analytics-disable",
            "--no-show-model-warnings", "--no-show-release-notes", "--no-detect-urls", "--no-pretty",
            "--map-tokens", "0", "--auto-test", "--test-cmd", "python3 test_calc.py", "--message", TASK, "calc.py",
        ],
        marker=MARK,
        LITELLM_LOCAL_MODEL_COST_MAP=lambda url: "True",
    )  # fmt: skip
    assert done.status == 0, (done.stdout[-2000:], done.stderr[-2000:])
    assert done.program == RIGHT, (done.program, done.stdout[-3000:])

with check("the test's report is in the second request"):
    bodies = done.bodies("/v1/chat/completions")
    assert len(bodies) >= 2
    assert "AssertionError" in str(bodies[1]["messages"])

leave()
