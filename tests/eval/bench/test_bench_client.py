"""The load generator's client against answers written out byte by byte."""

import asyncio
import json
import signal
import subprocess
import sys
import time

import psutil
import pytest
from doubles.scripted_http import Reply, ScriptedServer, event, jumping, openai_answer, tgi_answer
from doubles.tcp import tcp_server
from processes import free_port
from space_common.http_client import Endpoint, HttpError, get_json
from space_common.process import children
from space_eval.bench.arms import APIS, Arm, Exchange, LoadRequest, TokenEvent, find, shared, token_ids

HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"


def arm(url: str, api: str = "openai", **more: object) -> Arm:
    return Arm("a", Endpoint.parse(url, "k"), APIS[api], seed=7, **more)  # type: ignore[arg-type]


def tokens(text: str, ids: list[int], **more: object) -> bytes:
    return b"data: " + json.dumps({"choices": [{"text": text, "token_ids": ids}], **more}).encode() + b"\n\n"


def chunk(content: bytes) -> bytes:
    return b"%x\r\n%s\r\n" % (len(content), content)


async def answered(*pieces: bytes) -> tuple[Exchange | HttpError, bytes]:
    """What the client makes of an answer that comes in these pieces, and what it asked."""
    asked = b""

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal asked
        asked = await reader.readuntil(b"\r\n\r\n")
        for piece in pieces:
            writer.write(piece)
            await writer.drain()
            await asyncio.sleep(0)
        writer.close()

    async with tcp_server(answer) as address:
        exchange = Exchange()
        try:
            begun = asyncio.get_running_loop().time()
            await arm(f"http://{address}/v1").answer(LoadRequest(0, "x", 4), None, exchange, begun)
        except HttpError as error:
            return error, asked
        return exchange, asked


async def reported(script: Reply, api: str) -> tuple[Exchange, list[tuple[str, object]]]:
    """The exchange with a server that answers `script` to everything."""
    server, exchange = ScriptedServer(lambda path, body: script), Exchange()
    async with server.serving():
        await arm(server.url, api).answer(LoadRequest(2, "x", 4), None, exchange, 0.0)
    return exchange, server.asked


def test_events_are_read_whatever_the_chunks() -> None:
    body = tokens("a", [1]) + tokens("", []) + tokens("bc", [2, 3], spaceserve={"steps": 1}) + b"data: [DONE]\n\n"
    for size in (1, 7, 30, len(body)):
        chunks = [chunk(body[start : start + size]) for start in range(0, len(body), size)]
        made, asked = asyncio.run(answered(HEAD, *chunks, b"0\r\n\r\n"))
        assert isinstance(made, Exchange)
        assert (made.text, made.token_ids, made.statistics) == ("abc", (1, 2, 3), {"steps": 1})
        assert len(made.events) == 2
        assert made.finished
        assert b"\r\nAuthorization: Bearer k\r\n" in asked
        assert asked.startswith(b"POST /v1/completions HTTP/1.1\r\n")


def test_comments_and_other_line_ends_are_read_over() -> None:
    body = b": keep-alive\r\n\r\nevent: x\r\ndata: " + json.dumps({"choices": [{"text": "a"}]}).encode() + b"\r\n\r\n"
    made, _ = asyncio.run(answered(HEAD, chunk(body + b"data: [DONE]\r\n\r\n"), b"0\r\n\r\n"))
    assert isinstance(made, Exchange)
    assert made.text == "a"


@pytest.mark.parametrize(
    ("pieces", "words", "status"),
    [
        ([b"HTTP/1.1 429 Too Many\r\nContent-Length: 4\r\n\r\nfull"], "answered with 429: full", 429),
        ([HEAD, chunk(tokens("a", [1]))], "broke off its answer", None),
        ([HEAD, chunk(tokens("a", [1])), b"0\r\n\r\n"], "ended without its last event", None),
        ([HEAD, chunk(b'data: {"error": {"message": "worker lost"}}\n\n'), b"0\r\n\r\n"], "worker lost", None),
        ([HEAD, chunk(b"data: 7\n\n"), b"0\r\n\r\n"], "An event is no JSON object: '7'", None),
        ([b"220 mail\r\n\r\n"], "no HTTP/1.x answer", None),
        ([b""], "no HTTP/1.x answer", None),
    ],
)
def test_whatever_is_not_a_whole_answer_is_an_error_with_the_servers_words(
    pieces: list[bytes], words: str, status: int | None
) -> None:
    made, _ = asyncio.run(answered(*pieces))
    assert isinstance(made, HttpError)
    assert words in str(made)
    assert made.status == status


def test_a_server_that_is_not_there_is_named() -> None:
    with pytest.raises(HttpError, match=r"No connection to 127\.0\.0\.1:9"):
        asyncio.run(get_json(Endpoint("127.0.0.1", 9), "/info"))


@pytest.mark.parametrize("url", ["127.0.0.1:8080", "ftp://x", "http://", "http://x:y"])
def test_an_address_that_is_none_is_refused(url: str) -> None:
    with pytest.raises(HttpError, match="is no server address"):
        Endpoint.parse(url)


def test_tokens_without_ids_are_counted_by_usage_and_shared_by_their_characters() -> None:
    script = openai_answer([(0.5, 2), (0.25, 4), (0.25, 2)], usage={"prompt_tokens": 9, "completion_tokens": 8})
    made, asked = jumping(reported(script, "openai"))
    assert [(piece.seconds, piece.num_tokens) for piece in made.events] == [(0.5, 2), (0.75, 4), (1.0, 2)]
    assert (made.num_prompt_tokens, made.num_tokens, made.seconds) == (9, 8, 1.0)
    body = asked[0][1]
    assert isinstance(body, dict)
    assert body["stream_options"] == {"include_usage": True}
    assert body["seed"] == 9
    assert not {"return_token_ids", "speculation", "cache_salt"} & body.keys()


def test_without_ids_and_usage_an_event_is_a_token() -> None:
    made, _ = jumping(reported(openai_answer([(0.5, 2), (0.25, 4)]), "openai"))
    assert made.num_tokens == 2
    assert made.token_gaps == [0.25]


def test_a_chat_is_read_by_its_deltas() -> None:
    deltas = [{"role": "assistant", "content": ""}, {"content": "he"}, {"content": "llo"}, {}]
    pieces = [(0.5, event({"choices": [{"delta": delta}]})) for delta in deltas]
    made, asked = jumping(reported(Reply([*pieces, (0.0, event(b"[DONE]"))]), "chat"))
    assert (made.text, made.first_token_seconds, made.token_gaps) == ("hello", 1.0, [0.5])
    assert asked[0][0] == "/v1/chat/completions"
    assert isinstance(asked[0][1], dict)
    assert asked[0][1]["messages"] == [{"role": "user", "content": "x"}]


def test_tgis_events_that_come_together_are_one_burst() -> None:
    made, asked = jumping(reported(tgi_answer([(1.0, 1), (0.5, 2), (0.5, 1)]), "tgi"))
    assert [(piece.seconds, piece.token_ids) for piece in made.events] == [(1.0, (1,)), (1.5, (2, 3)), (2.0, (4,))]
    assert made.token_gaps == [0.25, 0.25, 0.5]
    assert made.event_gaps == [0.5, 0.5]
    assert (made.num_prompt_tokens, made.num_counted, made.finished) == (3, 4, True)
    assert asked[0] == ("/generate_stream", {"inputs": "x", "parameters": {"max_new_tokens": 4, "details": True}})


def test_what_was_counted_is_shared_in_whole_tokens() -> None:
    assert shared(8, [2, 4, 2]) == [2, 4, 2]
    assert shared(10, [1, 1, 1]) == [3, 3, 4]
    assert shared(2, [5, 5, 5]) == [1, 1, 0]
    assert shared(5, [0, 0]) == [2, 3]
    for total in range(1, 40):
        assert sum(shared(total, [3, 1, 4, 1, 5])) == total


def test_the_mean_per_token_leaves_the_first_event_out() -> None:
    made = Exchange(events=[TokenEvent(1.0, 3), TokenEvent(2.0, 2), TokenEvent(3.0, 2)])
    assert made.seconds_per_token == 0.5
    assert Exchange(events=[TokenEvent(1.0, 3)]).seconds_per_token == 0.0


def refuses_usage(path: str, body: object) -> Reply:
    if path == "/v1/models":
        return Reply.json({"data": [{"id": "m"}]})
    if path == "/info":
        return Reply.json({}, 404)
    if isinstance(body, dict) and "stream_options" in body:
        return Reply.json({"error": "unknown field stream_options"}, 422)
    return openai_answer([(0.1, 1)])


async def found(script: object) -> Arm:
    server = ScriptedServer(script)  # type: ignore[arg-type]
    async with server.serving():
        return (await find(arm(server.url)))[0]


def test_a_foreign_server_is_asked_for_its_model_and_only_for_what_it_takes() -> None:
    made = jumping(found(refuses_usage))
    assert (made.model, made.usage, made.is_spaceserve, made.window) == ("m", False, False, None)


def test_a_server_of_ours_is_known_by_its_info() -> None:
    made = jumping(found(lambda path, body: Reply.json({"router": "spaceserve", "max_total_tokens": 64})))
    assert (made.is_spaceserve, made.window) == (True, 64)
    with pytest.raises(HttpError, match="is not ready"):
        jumping(found(lambda path, body: Reply.json({"router": "spaceserve", "max_total_tokens": None})))


def test_our_fields_go_to_our_servers_only() -> None:
    ask, ours = LoadRequest(0, (1, 2), 10), {"is_spaceserve": True, "window": 64, "speculation": 2}
    body = arm("http://x", **ours).body(ask, "salt")
    assert body["prompt"] == (1, 2)
    assert (body["cache_salt"], body["speculation"], body["truncate_prompt_tokens"]) == ("salt", 2, 54)
    assert body["ignore_eos"]
    assert body["return_token_ids"]
    tgi = arm("http://x", "tgi", **ours, fields={"parameters": {"top_k": 3}}).body(ask, None)["parameters"]
    assert tgi == {"max_new_tokens": 10, "details": True, "speculation": 2, "truncate": 54, "top_k": 3}


@pytest.mark.parametrize(
    ("answer", "ids"),
    [({"tokens": [5, 6]}, [5, 6]), ([{"id": 5, "text": "a"}, {"id": 6, "text": "b"}], [5, 6]), ({"detail": "?"}, None)],
)
def test_a_server_that_tokenizes_is_asked_for_ids(answer: object, ids: list[int] | None) -> None:
    async def asked() -> list[int] | None:
        async with ScriptedServer(lambda path, body: Reply.json(answer)).serving() as server:
            return await token_ids(Endpoint.parse(server.url), "ab")

    assert jumping(asked()) == ids


BENCHMARK = """
import sys, time
from space_common.process import ServerProcess, exit_on_sigterm

class Sleeper(ServerProcess):
    def start(self):
        self._command = [sys.executable, "-c", "import time; time.sleep(600)"]
        super().start()

exit_on_sigterm()
with Sleeper([], wait_ready=False) as server:
    print(server.pid, flush=True)
    {inside}
"""
INSIDE = ("time.sleep(600)", "import asyncio; asyncio.run(asyncio.sleep(600))")


def test_a_benchmark_that_is_told_to_end_leaves_no_server_behind() -> None:
    for inside in INSIDE:
        benchmark = subprocess.Popen(
            [sys.executable, "-c", BENCHMARK.format(inside=inside)], stdout=subprocess.PIPE, text=True
        )
        with benchmark:
            assert benchmark.stdout is not None
            server = int(benchmark.stdout.readline())
            assert children(benchmark.pid) == [server]
            benchmark.send_signal(signal.SIGTERM)
            assert benchmark.wait(60) == 128 + signal.SIGTERM
        assert subprocess.run(["kill", "-0", str(server)], check=False, capture_output=True).returncode != 0


HURRIED = """
import os, signal, subprocess, sys
from space_common import process as server_process

class Popen(subprocess.Popen):
    def __init__(self, command, **settings):
        super().__init__([sys.executable, "-c", "import time; time.sleep(600)"], **settings)
        print(self.pid, flush=True)
        os.kill(os.getpid(), signal.SIGTERM)

server_process.exit_on_sigterm()
server_process.subprocess.Popen = Popen
with server_process.ServerProcess([], wait_ready=False) as server:
    print("not to be reached", flush=True)
"""


def test_a_benchmark_that_is_told_to_end_while_it_starts_a_server_leaves_none_behind() -> None:
    done = subprocess.run([sys.executable, "-c", HURRIED], stdout=subprocess.PIPE, text=True, timeout=60, check=False)
    assert done.returncode == 128 + signal.SIGTERM
    (server,) = done.stdout.split()
    assert not psutil.pid_exists(int(server))


@pytest.mark.parametrize("program", [["space_eval.bench"], ["chaos", "crowd"]], ids=" ".join)
def test_programs_unwind_when_they_are_told_to_end(program: list[str]) -> None:
    started = subprocess.Popen([sys.executable, "-m", *program], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    with started:
        end = time.monotonic() + 60
        while not (servers := children(started.pid)):
            assert started.poll() is None
            assert time.monotonic() < end
            time.sleep(0.05)
        started.send_signal(signal.SIGTERM)
        assert started.wait(60) == 128 + signal.SIGTERM
    assert not any(map(psutil.pid_exists, servers))


def test_two_who_ask_for_a_port_before_either_takes_it_get_two() -> None:
    assert free_port() != free_port()
