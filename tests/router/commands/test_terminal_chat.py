"""`spaceserve chat`, part by part: what is sent, what is shown, what commands do, what is said when it goes wrong."""

import io
import json
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from space_router.commands import chat
from space_router.commands.chat import (
    COMPLETION_TOKENS,
    AnswerStatistics,
    ChatHistory,
    ChatSettings,
    painted_event,
    safe,
    wants_colour,
)
from space_router.commands.server_client import ChatError, ServerClient, own_key


class Terminal(io.StringIO):
    """A stream that says it is a terminal."""

    def isatty(self) -> bool:
        return True


def token_report(*tokens: tuple[str, int, bool], verified: int = 0, **more: Any) -> dict[str, Any]:
    """The `spaceserve` object of an event."""
    return {"tokens": [{"text": t, "step": s, "draft": d} for t, s, d in tokens], "verified": verified, **more}


def event(*tokens: tuple[str, int, bool], **more: Any) -> dict[str, Any]:
    return {"choices": [{"text": "".join(one[0] for one in tokens)}], "spaceserve": token_report(*tokens, **more)}


EVENTS = [
    event(("a", 0, False)),
    event(("b", 1, True), ("\nc", 1, False), verified=3),
    event(("d", 2, False), verified=2, seed=5, steps=2),
]


class Canned:
    """A server with one answer; keeps what it was asked."""

    def __init__(self, events: list[dict[str, Any]], *, then: BaseException | None = None) -> None:
        self.events = events
        self.then = then
        self.asked: list[dict[str, Any]] = []

    def stream(self, path: str, body: dict[str, Any]) -> Iterator[dict[str, Any]]:
        self.asked.append({"path": path, **body})
        yield from self.events
        if self.then is not None:
            raise self.then


def conversation(server: Any, *, colour: bool = False, **settings: Any) -> ChatHistory:
    out = Terminal() if colour else io.StringIO()
    return ChatHistory(server, ChatSettings(**settings), colour, out, io.StringIO())


# --- what is sent


def test_settings_that_are_not_given_are_the_servers_to_choose() -> None:
    path, body = ChatSettings().request("Hi")
    assert path == "/v1/chat/completions"
    assert body.keys() == {"stream", "stream_options", "messages"}
    path, body = ChatSettings(chat=False, speculation=0, seed=0, temperature=0.0).request("def f")
    assert path == "/v1/completions"
    assert (body["prompt"], body["speculation"], body["seed"], body["temperature"]) == ("def f", 0, 0, 0.0)
    assert body["max_tokens"] == COMPLETION_TOKENS
    assert ChatSettings(chat=False, max_tokens=9).request("")[1]["max_tokens"] == 9


def test_a_conversation_is_remembered_until_it_is_reset() -> None:
    server = Canned(EVENTS)
    talk = conversation(server, system="Be brief.")
    talk.ask("one")
    talk.ask("two")
    assert [(m["role"], m["content"]) for m in server.asked[1]["messages"]] == [
        ("system", "Be brief."), ("user", "one"), ("assistant", "ab\ncd"), ("user", "two"),
    ]  # fmt: skip
    talk.obey("/reset")
    talk.ask("three")
    assert [m["content"] for m in server.asked[2]["messages"]] == ["Be brief.", "three"]


def test_completions_remember_nothing() -> None:
    server = Canned(EVENTS)
    talk = conversation(server, chat=False)
    talk.ask("one")
    talk.ask("two")
    assert (server.asked[1]["path"], server.asked[1]["prompt"]) == ("/v1/completions", "two")


# --- what is shown


def test_without_colours_the_answer_is_the_text_alone() -> None:
    talk = conversation(Canned(EVENTS))
    assert talk.ask("x")
    assert talk.out.getvalue() == "ab\ncd\n"  # type: ignore[attr-defined]


def test_the_line_after_an_answer_counts_steps_drafts_and_the_seed() -> None:
    talk = conversation(Canned(EVENTS))
    talk.ask("x")
    line = talk.notes.getvalue()  # type: ignore[attr-defined]
    assert line.startswith("  4 tokens in 2 steps · 1.50 per step · ")
    assert line.endswith(" ms per token · 1 of 5 drafts accepted · seed 5\n")


def test_time_per_token_counts_from_the_first_tokens_on() -> None:
    statistics = AnswerStatistics()
    for second, one in zip((10.0, 10.5, 11.0), EVENTS, strict=True):
        statistics.add("", one["spaceserve"], second)
    assert " · 333.3 ms per token · " in statistics.line()  # three tokens in a second
    assert AnswerStatistics().line() == "no token"


def token(text: str, step: int, *, draft: bool) -> str:
    """One token as it is shown."""
    return painted_event(text, token_report((text, step, draft)))


def test_drafts_are_underlined_own_tokens_bold_and_neighbouring_steps_differ() -> None:
    assert token("x", 1, draft=True) == "\x1b[4;33mx\x1b[0m"
    assert token("x", 1, draft=False) == "\x1b[1;33mx\x1b[0m"
    assert all(token("x", n, draft=True) != token("x", n + 1, draft=True) for n in range(20))


def test_no_colour_reaches_over_the_end_of_a_line() -> None:
    assert token("a\n\nb", 0, draft=True) == "\x1b[4;34ma\x1b[0m\n\n\x1b[4;34mb\x1b[0m"


def test_text_whose_tokens_were_told_before_is_shown_too() -> None:
    assert painted_event("xyz", {"tokens": [{"text": "x", "step": 0, "draft": False}]}).endswith("yz")
    assert painted_event("xyz", None) == "xyz"


def test_an_answer_cannot_steer_the_terminal() -> None:
    assert safe("a\x1b[2Jb\r\x07\x9b\n\té漢") == "a\\x1b[2Jb\\x0d\\x07\\x9b\n\té漢"
    talk = conversation(Canned([event(("\x1b]0;title\x07", 0, False))]), colour=True)
    talk.ask("x")
    shown = talk.out.getvalue()  # type: ignore[attr-defined]
    assert "\\x1b]0;title\\x07" in shown
    assert "\x1b]" not in shown


@pytest.mark.parametrize(
    ("terminal", "environment", "painted"),
    [
        (True, {}, True),
        (True, {"NO_COLOR": ""}, True),  # empty counts as not set
        (True, {"NO_COLOR": "1"}, False),
        (True, {"TERM": "dumb"}, False),
        (False, {}, False),
    ],
)
def test_colours_are_for_terminals_that_want_them(terminal: bool, environment: dict[str, str], painted: bool) -> None:
    assert wants_colour(Terminal() if terminal else io.StringIO(), environment) is painted


# --- commands


@pytest.mark.parametrize(
    ("line", "changes"),
    [
        ("/off", {"speculation": "off"}),
        ("/auto", {"speculation": "auto"}),
        ("/k 3", {"speculation": 3}),
        ("/temperature 0.5", {"temperature": 0.5}),
        ("/temperature", {"temperature": None}),
        ("/seed 18446744073709551615", {"seed": 2**64 - 1}),
        ("/max 7", {"max_tokens": 7}),
        ("/system Be brief, please.", {"system": "Be brief, please."}),
        ("/model base:code", {"model": "base:code"}),
        ("/complete", {"chat": False}),
    ],
)
def test_a_command_changes_one_setting_and_says_what_is_set(line: str, changes: dict[str, Any]) -> None:
    talk = conversation(Canned([]), temperature=1.0)
    before = talk.settings
    assert talk.obey(line)
    assert talk.settings == replace(before, **changes)
    assert talk.notes.getvalue() == f"  {talk.settings.describe()}\n"  # type: ignore[attr-defined]


@pytest.mark.parametrize("line", ["/k", "/k many", "/k -1", "/seed 1.5", "/temperature warm", "/temperature nan"])
def test_a_command_that_makes_no_sense_names_what_it_takes_and_changes_nothing(line: str) -> None:
    talk = conversation(Canned([]))
    with pytest.raises(ChatError, match=rf"^{line.split()[0]} takes a"):
        talk.obey(line)
    assert talk.settings == ChatSettings()


def test_help_names_every_command_and_unknown_ones_are_said() -> None:
    talk = conversation(Canned([]))
    talk.obey("/help")
    text = talk.notes.getvalue()  # type: ignore[attr-defined]
    for name in ("/auto", "/off", "/k", "/temperature", "/seed", "/system", "/reset", "/quit", "Ctrl-C", "Ctrl-D"):
        assert name in text
    with pytest.raises(ChatError, match="There is no command /of; /help lists them"):
        talk.obey("/of")
    assert not talk.obey("/quit")


def test_ctrl_c_keeps_what_came_and_says_so() -> None:
    talk = conversation(Canned(EVENTS[:2], then=KeyboardInterrupt()))
    assert not talk.ask("x")
    assert talk.messages[-1] == {"role": "assistant", "content": "ab\nc"}
    assert talk.notes.getvalue().startswith("  stopped: 3 tokens in 1 step")  # type: ignore[attr-defined]


def test_ctrl_c_between_an_answer_and_the_next_line_leads_back_to_the_prompt(monkeypatch: pytest.MonkeyPatch) -> None:
    talk = conversation(Canned(EVENTS, then=ChatError("refused")))
    typed = iter(["first", "second", "/quit"])
    monkeypatch.setattr("builtins.input", lambda _prompt: next(typed))
    notes = talk.note
    interrupts = iter([KeyboardInterrupt()])

    def note(line: str) -> None:
        notes(line)
        for interrupt in interrupts:
            raise interrupt

    monkeypatch.setattr(talk, "note", note)
    assert talk.talk() == 0
    assert [asked["messages"][-1]["content"] for asked in talk.server.asked] == ["first", "second"]  # type: ignore[attr-defined]


# --- prompts and keys


def test_what_is_piped_in_comes_behind_the_prompt() -> None:
    assert chat._prompt("Explain", io.StringIO("x = 1\n")) == "Explain\n\nx = 1\n"
    assert chat._prompt(None, io.StringIO("x = 1\n")) == "x = 1\n"
    assert chat._prompt("Explain", io.StringIO("")) == "Explain"
    assert chat._prompt(None, Terminal("typed later")) is None
    with pytest.raises(ChatError, match="empty"):
        chat._prompt(None, io.StringIO(" \n"))


def test_the_key_is_the_files_first_word_or_the_variables(tmp_path: Path) -> None:
    file = tmp_path / "key"
    file.write_text("k3y another\n")
    assert own_key(file, {}) == "k3y"
    assert own_key(None, {"SPACESERVE_API_KEY": " k3y\n"}) == "k3y"
    assert own_key(None, {}) is None
    assert "k3y" not in repr(ServerClient("http://host", "k3y"))
    file.write_text("")
    with pytest.raises(ChatError, match="no key in it"):
        own_key(file, {})


# --- what goes wrong


@contextmanager
def answering(*answers: bytes, heads: list[bytes] | None = None) -> Iterator[str]:
    """A server on a real socket that sends these bytes, one connection after the other, whatever it is asked.

    `heads`: gets the head of each request.
    """
    with socket.create_server(("127.0.0.1", 0)) as listening:

        def serve() -> None:
            for answer in answers:
                connection, _ = listening.accept()
                with connection:
                    received = b""
                    while b"\r\n\r\n" not in received:
                        received += connection.recv(65536)
                    (heads if heads is not None else []).append(received)
                    connection.sendall(answer)
                    connection.shutdown(socket.SHUT_WR)
                    while connection.recv(65536):
                        pass

        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        yield f"http://127.0.0.1:{listening.getsockname()[1]}"
        thread.join(10)


def http(status: str, content: bytes, kind: str = "application/json") -> bytes:
    return f"HTTP/1.1 {status}\r\nContent-Type: {kind}\r\nConnection: close\r\n\r\n".encode() + content


def read(url: str) -> list[dict[str, Any]]:
    return list(ServerClient(url).stream("/v1/completions", {}))


def test_a_stream_is_read_up_to_done() -> None:
    with answering(http("200 OK", 'data: {"a": "é"}\n\n: comment\n\ndata: [DONE]\n\n'.encode())) as url:
        assert read(url) == [{"a": "é"}]


@pytest.mark.parametrize("cut", [b'data: {"a": 1}\n\n', b'data: {"a": 1}\n\ndata: {"a', b""])
def test_a_stream_that_ends_early_is_said_to(cut: bytes) -> None:
    with answering(http("200 OK", cut)) as url, pytest.raises(ChatError, match="in the middle"):
        read(url)


def test_an_error_in_a_stream_is_told_in_the_servers_words() -> None:
    refusal = json.dumps({"error": {"message": "The worker was lost."}}).encode()
    with (
        answering(http("200 OK", b"data: " + refusal + b"\n\n")) as url,
        pytest.raises(ChatError, match=r"^The worker was lost\.$"),
    ):
        read(url)


@pytest.mark.parametrize(
    ("status", "content", "message"),
    [
        ("400 Bad Request", b'{"error": {"message": "`n` must be at least 1."}}', r"^`n` must be at least 1\.$"),
        ("422 Unprocessable", b'{"error": "too long", "error_type": "validation"}', r"^too long$"),
        ("401 Unauthorized", b"{}", "--api-key-file FILE, or set SPACESERVE_API_KEY"),
        ("502 Bad Gateway", b"<html>", r"/v1/completions answered 502 Bad Gateway\.$"),
        ("500 Oops", b'{"error": 3}', "answered 500 Oops"),
    ],
)
def test_a_refusal_is_told_in_the_servers_words_and_a_missing_key_with_the_cure(
    status: str, content: bytes, message: str
) -> None:
    with answering(http(status, content)) as url, pytest.raises(ChatError, match=message):
        read(url)


def test_where_nobody_listens_the_cure_is_named() -> None:
    with socket.create_server(("127.0.0.1", 0)) as closed:
        port = closed.getsockname()[1]
    with pytest.raises(ChatError, match=rf"No server answers at http://127.0.0.1:{port} .*`spaceserve serve`.*--url"):
        ServerClient(f"http://127.0.0.1:{port}").info()


@pytest.mark.parametrize("url", ["127.0.0.1:8080", "ftp://host", "http://", "http://host:port"])
def test_a_url_that_is_none_is_refused(url: str) -> None:
    with pytest.raises(ChatError, match="must be like"):
        ServerClient(url)


def test_another_kind_of_server_is_recognised() -> None:
    with answering(http("200 OK", b'{"hello": 1}')) as url, pytest.raises(ChatError, match="is no spaceserve"):
        ServerClient(url).info()


def test_the_prefix_of_a_proxy_is_kept() -> None:
    heads: list[bytes] = []
    with answering(http("200 OK", b"{}"), heads=heads) as url, pytest.raises(ChatError, match="is no spaceserve"):
        ServerClient(f"{url}/models/a/").info()
    assert heads[0].startswith(b"GET /models/a/info HTTP/1.1\r\n")
