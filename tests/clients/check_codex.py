"""Codex, headless, over /v1/responses: reads a file, edits it, runs the test, answers."""

import json

from agents import ANSWER, FOLDER, RIGHT, TASK, run, tool_call
from checks import check, leave, version

PACKAGE = FOLDER / "node_modules/@openai/codex"
version(json.loads((PACKAGE / "package.json").read_text())["version"])


def command(url: str) -> list[str]:
    provider = f'{{name="spaceserve", base_url="{url}/v1", wire_api="responses", env_key="SPACESERVE_KEY"}}'
    settings = {"model_provider": '"spaceserve"', "model_providers.spaceserve": provider}
    return [
        "node", str(PACKAGE / "bin/codex.js"), "exec", "--skip-git-repo-check",
        "--dangerously-bypass-approvals-and-sandbox", "--json", "-m", "tiny",
        *(word for name, value in settings.items() for word in ("-c", f"{name}={value}")), TASK,
    ]  # fmt: skip


with check("reads a file, edits it, runs the test, answers"):
    done = run(
        lambda work: [
            "I look at it first." + tool_call("exec_command", cmd="cat calc.py"),
            tool_call("exec_command", cmd="sed -i 's/a - b/a + b/' calc.py"),
            tool_call("exec_command", cmd="python3 test_calc.py"),
            ANSWER,
        ],
        command,
    )
    assert done.status == 0, (done.stdout[-2000:], done.stderr[-2000:])
    assert done.program == RIGHT
    events = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    answers = [event["item"]["text"] for event in events if event.get("item", {}).get("type") == "agent_message"]
    assert answers[-1] == ANSWER

with check("each turn takes up the last: calls and their results come back as they were sent"):
    bodies = done.bodies("/v1/responses")
    assert len(bodies) == 4
    results = [item for item in bodies[-1]["input"] if item["type"] == "function_call_output"]
    assert len(results) == 3
    assert "all passed" in json.dumps(results[-1])

leave()
