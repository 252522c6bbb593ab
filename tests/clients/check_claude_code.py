"""Claude Code, headless, over /v1/messages: reads a file, edits it, runs the test, answers."""

import json

from agents import ANSWER, FOLDER, RIGHT, TASK, run, tool_call
from checks import check, leave, version

PACKAGE = FOLDER / "node_modules/@anthropic-ai/claude-code"
version(json.loads((PACKAGE / "package.json").read_text())["version"])

with check("reads a file, edits it, runs the test, answers"):
    done = run(
        lambda work: [
            "I look at it first." + tool_call("Read", file_path=str(work / "calc.py")),
            tool_call("Edit", file_path=str(work / "calc.py"), old_string="a - b", new_string="a + b"),
            tool_call("Bash", command="python3 test_calc.py", description="Run the test"),
            ANSWER,
        ],
        lambda url: [
            "node", str(PACKAGE / "cli-wrapper.cjs"), "-p", TASK, "--model", "tiny", "--output-format", "json",
            "--allowedTools", "Read,Edit,Bash",
        ],
        ANTHROPIC_BASE_URL=str,
        ANTHROPIC_API_KEY=lambda url: "sk-none",
        CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC=lambda url: "1",
        DISABLE_AUTOUPDATER=lambda url: "1",
    )  # fmt: skip
    assert done.status == 0, (done.stdout[-2000:], done.stderr[-2000:])
    assert done.program == RIGHT
    result = json.loads(done.stdout)
    assert result["result"] == ANSWER
    assert not result["is_error"]

with check("each turn takes up the last: thinking, tools and results come back as they were sent"):
    bodies = done.bodies("/v1/messages")
    assert len(bodies) >= 4
    last = bodies[-1]
    results = [
        part
        for message in last["messages"]
        if isinstance(message["content"], list)
        for part in message["content"]
        if part["type"] == "tool_result"
    ]
    assert len(results) == 3
    assert "all passed" in json.dumps(results[-1])
    assert last["stream"] is True

leave()
