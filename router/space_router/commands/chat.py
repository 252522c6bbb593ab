"""`spaceserve chat`: talk to a running server from a terminal, its tokens in the colours of their steps."""

from __future__ import annotations

import argparse
import contextlib
import io
import math
import os
import re
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TextIO

from space_router.commands.server_client import CACERT, KEY_VARIABLE, URL, ChatError, ServerClient, own_key

COMPLETION_TOKENS = 256  # most tokens of a continued text if nothing else is set: a text seldom says where it ends
RETRY_SECONDS = 1.0  # between two questions to a server that is still starting
COLOURS = (34, 33, 35, 32, 36)  # of steps, in turn, from the terminal's theme: blue, yellow, magenta, green, cyan
DRAFT, OWN, QUIET = "4", "1", "2"  # underlined: accepted draft; bold: the step's own token; dim: not the answer

_DESCRIPTION = """\
Talks to a running server. Each colour is one step of the model: underlined are the drafts accepted in it, bold is
the token it added itself. The line after an answer says how many tokens a step brought and what one of them took.
Without a chat template, or with --complete, the server continues the text instead.
"""
_EPILOG = """\
examples:
  spaceserve chat                                      talk; /help lists what else can be typed
  spaceserve chat "Write a function that sorts a list" one answer, then the shell again
  spaceserve chat --complete 'def fibonacci(n):' --max-tokens 64 --temperature 0
  git diff | spaceserve chat "Review this change"      what is piped in comes behind the prompt
  spaceserve chat --url https://host:8443 --api-key-file ~/.spaceserve-key
  spaceserve chat --speculation off                    plain decoding: the same text, one token per step

Into a pipe or a file goes the answer alone, without colours; NO_COLOR=1 leaves them out of a terminal too.
"""
_HELP = """\
  /auto /off /k N          drafts per step: as many as pay, none, always N; the text stays the same
  /temperature X           0 is greedy; without X: as the server has it
  /seed N                  the same seed gives the same text; without N: a new one each time
  /max N                   most tokens of an answer; without N: as the server has it
  /system TEXT             the system message; without TEXT: none
  /model NAME              the model, or an adapter that drafts for it
  /chat /complete          have a conversation, or have each text continued
  /settings                what is set
  /reset                   forget the conversation
  /quit                    or Ctrl-D: leave. Ctrl-C stops an answer
A line that ends with \\ goes on in the next one. A text that begins with / is written with //.
"""


@dataclass(frozen=True)
class ChatSettings:
    """Fields of every request; None leaves the choice to the server."""

    chat: bool = True
    model: str | None = None
    max_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    seed: int | None = None
    speculation: str | int | None = None
    system: str | None = None

    def request(self, text: str, before: Sequence[Mapping[str, str]] = ()) -> tuple[str, dict[str, Any]]:
        """Path and body that ask for an answer to `text`, in a conversation after the messages `before`."""
        body = {name: value for name, value in self._given().items() if name != "system"}
        body |= {"stream": True, "stream_options": {"include_usage": True, "include_steps": True}}
        if not self.chat:
            return "/v1/completions", {"max_tokens": COMPLETION_TOKENS, **body, "prompt": text}
        system = [{"role": "system", "content": self.system}] if self.system else []
        return "/v1/chat/completions", {**body, "messages": [*system, *before, {"role": "user", "content": text}]}

    def describe(self) -> str:
        given = [f"{name} {value}" for name, value in self._given().items()]
        return ", ".join(["chat" if self.chat else "completion", *given])

    def _given(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name != "chat" and value is not None}


@dataclass
class AnswerStatistics:
    """Tokens, steps and times of one answer, from its events. Times are seconds of one clock."""

    text: str = ""
    num_tokens: int = 0
    num_accepted: int = 0
    num_drafted: int = 0
    steps: set[int] = field(default_factory=set)  # decode steps; the prompt's own is none
    first: tuple[float, int] | None = None  # when the first tokens came, and how many they were
    last: float = 0.0
    seed: int | None = None

    def add(self, text: str, spaceserve: Mapping[str, Any] | None, now: float) -> None:
        fields = spaceserve or {}
        tokens = fields.get("tokens", [])
        self.text += text
        self.num_tokens += len(tokens)
        self.num_accepted += sum(one["draft"] for one in tokens)
        self.num_drafted += fields.get("verified", 0)
        self.steps |= {one["step"] for one in tokens} - {0}
        self.seed = fields.get("seed", self.seed)
        if tokens:
            self.first = self.first or (now, len(tokens))
            self.last = now

    def line(self) -> str:
        """The line after an answer."""
        if self.first is None:
            return "no token"
        parts = [f"{self.num_tokens} token{'s' * (self.num_tokens != 1)}"]
        if num_steps := len(self.steps):
            parts[0] += f" in {num_steps} step{'s' * (num_steps != 1)}"
            parts.append(f"{(self.num_tokens - 1) / num_steps:.2f} per step")  # the first token is the prompt's
        if (later := self.num_tokens - self.first[1]) > 0:
            parts.append(f"{1000 * (self.last - self.first[0]) / later:.1f} ms per token")
        if self.num_drafted:
            parts.append(f"{self.num_accepted} of {self.num_drafted} drafts accepted")
        if self.seed is not None:
            parts.append(f"seed {self.seed}")
        return " · ".join(parts)


def wants_colour(stream: TextIO, environment: Mapping[str, str]) -> bool:
    """Whether to paint: on a terminal that can, unless NO_COLOR is set (no-color.org)."""
    return stream.isatty() and not environment.get("NO_COLOR") and environment.get("TERM") != "dumb"


def painted(text: str, codes: str) -> str:
    """`text` in a style, line by line: a colour over the end of a line would reach to the terminal's edge."""
    return "\n".join(f"\x1b[{codes}m{line}\x1b[0m" if line else "" for line in text.split("\n"))


def painted_event(text: str, spaceserve: Mapping[str, Any] | None) -> str:
    """The text of an event, its tokens in the colours of their steps; what has no tokens stays plain."""
    shown, length = "", 0
    for token in (spaceserve or {}).get("tokens", []):
        codes = f"{DRAFT if token['draft'] else OWN};{COLOURS[token['step'] % len(COLOURS)]}"
        shown += painted(safe(token["text"]), codes)
        length += len(token["text"])
    return shown + safe(text[length:])


def safe(text: str) -> str:
    """Text whose control characters cannot steer the terminal: a model may write anything."""
    return re.sub(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]", lambda found: f"\\x{ord(found[0]):02x}", text)


@dataclass
class ChatHistory:
    """One terminal's talk with one server."""

    server: ServerClient
    settings: ChatSettings
    colour: bool
    out: TextIO  # answers
    notes: TextIO  # everything else
    messages: list[dict[str, str]] = field(default_factory=list)

    def ask(self, text: str) -> bool:
        """Have an answer written, to its end or to Ctrl-C, and report its cost; False if it was stopped.

        Raises ChatError.
        """
        statistics = AnswerStatistics()
        stopped = False
        try:
            with contextlib.closing(self.server.stream(*self.settings.request(text, self.messages))) as events:
                for event in events:
                    self._show(event, statistics)
        except KeyboardInterrupt:
            stopped = True
        finally:
            if statistics.text and not statistics.text.endswith("\n"):
                self.out.write("\n")
            self.out.flush()
        if self.settings.chat and statistics.text:
            self.messages += [{"role": "user", "content": text}, {"role": "assistant", "content": statistics.text}]
        self.note(f"  {'stopped: ' if stopped else ''}{statistics.line()}")
        return not stopped

    def _show(self, event: Mapping[str, Any], statistics: AnswerStatistics) -> None:
        choice = event["choices"][0] if event["choices"] else {}
        text = choice.get("text") or choice.get("delta", {}).get("content") or ""
        statistics.add(text, event.get("spaceserve") if choice else None, time.monotonic())
        if self.colour:
            text = painted_event(text, event.get("spaceserve"))
        elif self.out.isatty():
            text = safe(text)
        self.out.write(text)
        self.out.flush()

    def note(self, line: str) -> None:
        self.notes.write((painted(line, QUIET) if self.colour and self.notes.isatty() else line) + "\n")
        self.notes.flush()

    def obey(self, line: str) -> bool:
        """Run a line with a command; False: leave. Raises ChatError for one that makes no sense."""
        name, _, value = line[1:].partition(" ")
        value = value.strip()
        changes: dict[str, Any] = {}
        match name:
            case "quit" | "exit":
                return False
            case "help":
                self.note(_HELP.rstrip())
            case "settings":
                self.note(f"  {self.settings.describe()}")
            case "reset":
                self.messages.clear()
                self.note("  The conversation is forgotten.")
            case "auto" | "off":
                changes = {"speculation": name}
            case "k":
                changes = {"speculation": _whole("/k", value)}
            case "temperature":
                changes = {"temperature": _number(value) if value else None}
            case "seed" | "max":
                changes = {"max_tokens" if name == "max" else name: _whole(f"/{name}", value) if value else None}
            case "system" | "model":
                changes = {name: value or None}
            case "chat" | "complete":
                changes = {"chat": name == "chat"}
            case _:
                raise ChatError(f"There is no command /{name}; /help lists them. For a text that begins so: //{name}.")
        if (changed := replace(self.settings, **changes)) != self.settings:
            self.settings = changed
            self.note(f"  {changed.describe()}")
        return True

    def talk(self) -> int:
        """Line by line until Ctrl-D; the exit code."""
        with contextlib.suppress(ImportError):
            import readline  # noqa: F401  input() has a history and an editable line then

        going = True
        while going:
            try:
                line = input("› ")
                while line.endswith("\\"):
                    line = line.removesuffix("\\") + "\n" + input("… ")
                try:
                    if line.startswith("/") and not line.startswith("//"):
                        going = self.obey(line.rstrip())
                    elif line.strip():
                        self.ask(line[1:] if line.startswith("//") else line)
                except ChatError as error:
                    self.note(f"  {error}")
            except KeyboardInterrupt:  # between an answer and the next line, or within either: back to the prompt
                self.out.write("\n")
            except EOFError:
                self.out.write("\n")
                going = False
        return 0


def _whole(name: str, text: str) -> int:
    if not text.isascii() or not text.isdigit():
        raise ChatError(f"{name} takes a whole number from 0 on; got {text!r}.")
    return int(text)


def _number(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        raise ChatError(f"/temperature takes a number; got {text!r}.") from None
    if not math.isfinite(value):
        raise ChatError(f"/temperature takes a finite number; got {text!r}.")
    return value


def main(argv: Sequence[str] | None = None) -> int:
    """Return the exit code: 0 after a normal end, 1 after a failure, 2 for unusable flags, 130 after Ctrl-C."""
    given = _parser().parse_args(argv)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")  # a terminal need not know every character
    try:
        server = ServerClient(given.url, own_key(given.api_key_file, os.environ), given.cacert)
        prompt = _prompt(given.prompt, sys.stdin)
        settings = _settings(given)
        colour = not given.no_color and wants_colour(sys.stdout, os.environ)
        return _run(ChatHistory(server, settings, colour, sys.stdout, sys.stderr), given.complete, prompt)
    except ChatError as error:
        sys.stderr.write(f"spaceserve chat: {error}\n")
        return 1
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:  # the reader of the answer has left
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1


def _run(conversation: ChatHistory, complete: bool, prompt: str | None) -> int:
    is_waiting = False
    while not (info := conversation.server.info())["ready"]:
        if not is_waiting:
            conversation.note("the server is starting; waiting for its model (Ctrl-C gives up)")
        is_waiting = True
        time.sleep(RETRY_SECONDS)
    can_chat = bool(info["chat_template"])
    conversation.settings = replace(conversation.settings, chat=can_chat and not complete)
    if prompt is not None:
        return 0 if conversation.ask(prompt) else 130
    most = info["speculation"]["max_draft_length"]
    drafts = f"up to {most} drafts per step" if most else "plain decoding only"
    kind = "chat" if conversation.settings.chat else "each text is continued"
    if not can_chat and not complete:
        kind = "no chat template, so each text is continued"
    conversation.notes = conversation.out
    conversation.note(f"{info['model_id']} on {info['model_device_type']}, {drafts}; {kind}")
    conversation.note("/help lists the commands, Ctrl-C stops an answer, Ctrl-D ends")
    return conversation.talk()


def _prompt(given: str | None, stdin: TextIO) -> str | None:
    """One text to answer, from the command line, from a pipe, or both; None: a person will type."""
    if stdin.isatty():
        return given
    piped = stdin.read()
    text = piped if given is None else f"{given}\n\n{piped}" if piped.strip() else given
    if not text.strip():
        raise ChatError("What was piped in is empty, and no prompt was given.")
    return text


def _settings(given: argparse.Namespace) -> ChatSettings:
    speculation: str | int | None = given.speculation
    if speculation is not None and speculation not in ("auto", "off"):
        speculation = _whole("--speculation", given.speculation)
    names = ("model", "max_tokens", "temperature", "top_p", "seed", "system")
    return ChatSettings(speculation=speculation, **{name: getattr(given, name) for name in names})


def _parser() -> argparse.ArgumentParser:
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(
        prog="spaceserve chat", description=_DESCRIPTION, epilog=_EPILOG, formatter_class=raw, allow_abbrev=False
    )
    parser.add_argument("prompt", nargs="?", help="answer this and end; without it, and without a pipe, talk")
    parser.add_argument("--url", default=URL, help=f"where the server is [default: {URL}]")
    file = f"file whose first word is the key [else: {KEY_VARIABLE}]"
    parser.add_argument("--api-key-file", type=Path, metavar="FILE", help=file)
    parser.add_argument("--cacert", type=Path, metavar="FILE", help=CACERT)
    parser.add_argument("--complete", action="store_true", help="continue the text instead of answering it")
    parser.add_argument("--model", metavar="NAME", help="the model, or an adapter that drafts for it")
    parser.add_argument("--system", metavar="TEXT", help="the system message of a conversation")
    parser.add_argument("--max-tokens", type=int, metavar="N", help="most tokens of an answer")
    parser.add_argument("--temperature", type=float, metavar="X", help="0 is greedy")
    parser.add_argument("--top-p", type=float, metavar="P", help="least probability mass that is sampled from")
    parser.add_argument("--seed", type=int, metavar="N", help="the same seed gives the same text")
    parser.add_argument("--speculation", metavar="auto|off|K", help="drafts per step; the text is the same with each")
    parser.add_argument("--no-color", action="store_true", help="no colours, as with NO_COLOR=1")
    return parser


if __name__ == "__main__":
    sys.exit(main())
