"""Whatever a chat template does, its memory, its time and what others wait are bounded."""

import asyncio
import logging
import os
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from space_router.errors import ConfigError, InvalidRequest, Overloaded
from space_router.text import template_process, text_pool
from space_router.text.chat_template import BUILT_IN, ChatTemplate
from space_router.text.template_messages import LIMITS, AnswerKind, TemplateAnswer, TemplateJob, TemplateLimits
from space_router.text.template_process import (
    PROCESSES,
    QUICK_MEMORY,
    SLOW_MEMORY,
    NotStarted,
    TemplateProcesses,
)
from space_router.text.text_pool import LONG_BODY, TextPool

USER = [{"role": "user", "content": "hi"}]
BRIEF = TemplateLimits(seconds=0.1, compile_seconds=0.2)
LONG = "{% set x = 'a' * 4000000 %}"
NESTED = "{% set ns = namespace(a=()) %}{% for i in range(60) %}{% set ns.a = (ns.a, ns.a) %}{% endfor %}"
FOREVER = "{% for i in range(99999) %}{% set x = range(99999) | list %}{% endfor %}"
ATTACKS = {
    "a width of a format": "{{ ('{:>' ~ 900000000 ~ '}').format(1) }}",
    "many formats": "{% for i in range(99999) %}{{ '%9999d' | format(1) }}{% endfor %}",
    "a list of long strings": LONG + "{{ ([x] * 4000000) | map('upper') | list | length }}",
    "translate": LONG + "{{ x.translate({97: 'b' * 4000}) | length }}",
    "lipsum": "{{ lipsum(4000000) | length }}",
    "wordwrap": LONG + "{{ x | wordwrap(1) | length }}",
    "wordwrap of words": "{{ ('ab ' * 1300000) | wordwrap(1) | length }}",
    "indent": "{% for i in range(99999) %}{% set x = ('\n' * 2000000) | indent(1) %}{% endfor %}",
    "products in a loop": "{% for i in range(99999) %}{% set x = 'a' * 4000000 %}{% endfor %}",
    "doubling": "{% set ns = namespace(s='x') %}{% for i in range(99) %}{% set ns.s = ns.s ~ ns.s %}{% endfor %}",
    "ranges": FOREVER,
    "join": LONG + "{{ ([x] * 4000) | join | length }}",
    "replace": "{% for i in range(99999) %}{% set x = ('a' * 2000) | replace('a', 'b' * 2000) %}{% endfor %}",
    "macros": "{% macro f(n) %}{% if n %}{{ f(n-1) }}{{ f(n-1) }}{% endif %}{% endmacro %}{{ f(60) }}",
    "slices": LONG + "{% for i in range(99999) %}{% set y = x[1:] %}{% endfor %}",
    "searches": LONG + "{% set y = 'a' * 2000000 ~ 'b' %}{% for i in range(99999) %}{{ y in x }}{% endfor %}",
    "one long operation": NESTED + "{{ {ns.a: 1} | length }}",
}
COMPILED = {
    "constants": "{{ " + " ~ ".join(["('a' | center(4000000))"] * 300) + " }}",
    "a long template": "{{ x }}" * 200_000,
    "brackets": "{{ " + "(" * 5000 + "1" + ")" * 5000 + " }}",
}


def peak_memory() -> int:
    """The most address space that a living process had, in bytes."""
    peaks = [0]
    for kind in (PROCESSES._quick, PROCESSES._slow):
        for process in kind._idle:
            lines = Path(f"/proc/{process.pid}/status").read_text().splitlines()
            peaks += [1024 * int(line.split()[1]) for line in lines if line.startswith("VmPeak:")]
    return max(peaks)


def own_memory() -> int:
    """This process's memory in bytes."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(1024 * int(line.split()[1]) for line in lines if line.startswith("VmRSS:"))


@pytest.mark.parametrize("name", ATTACKS)
def test_an_attack_ends_within_its_time_and_memory(name: str) -> None:
    template = ChatTemplate(ATTACKS[name], {}, limits=BRIEF)
    before, begun = own_memory(), time.monotonic()
    with pytest.raises(InvalidRequest, match=r"does not take these messages|give more than") as refused:
        template.render(USER)
    assert len(str(refused.value)) < 500
    assert time.monotonic() - begun < template_process.QUICK_PATIENCE + template_process.SLOW_PATIENCE + 3.0
    assert peak_memory() <= SLOW_MEMORY
    assert own_memory() - before < 32 * 1024**2
    assert ChatTemplate(BUILT_IN["chatml"], {}).render(USER).startswith("<|im_start|>user\nhi")


@pytest.mark.parametrize("name", COMPILED)
def test_a_template_that_takes_too_much_to_compile_stops_the_start(name: str) -> None:
    begun = time.monotonic()
    with pytest.raises(ConfigError, match="no valid Jinja template"):
        ChatTemplate(COMPILED[name], {}, limits=BRIEF)
    assert time.monotonic() - begun < template_process.QUICK_PATIENCE + template_process.SLOW_PATIENCE + 3.0


def test_the_processes_are_those_whose_memory_is_bounded() -> None:
    assert ChatTemplate("{{ 1 }}", {}).render(USER) == "1"
    process = PROCESSES._quick._idle[-1]
    limits = Path(f"/proc/{process.pid}/limits").read_text().splitlines()
    assert next(line.split()[3] for line in limits if line.startswith("Max address space")) == str(QUICK_MEMORY)


def test_slow_processes_give_way_and_have_the_bounds_of_the_page() -> None:
    assert (template_process.QUICK_SECONDS, LIMITS.seconds, LIMITS.compile_seconds) == (0.05, 5.0, 2.0)
    assert template_process._EVENT_LOOP_SECONDS == 0.05
    assert (template_process.SLOW_PATIENCE, QUICK_MEMORY, SLOW_MEMORY) == (8.0, 256 * 1024**2, 512 * 1024**2)
    processes = TemplateProcesses()
    try:
        kinds = (processes._quick, processes._slow)
        for kind in kinds:
            assert kind.ask(LIMITS, template_process.pack_job(TemplateJob("x", {}))).text == "x"
        quick, slow = (os.getpriority(os.PRIO_PROCESS, kind._idle[0].pid) for kind in kinds)
        assert slow == min(19, quick + 10)
    finally:
        processes.close()


def test_a_long_conversation_is_rendered_by_a_slow_process_where_a_quick_one_has_no_room() -> None:
    messages = [{"role": "user", "content": "\U0001f600" * 4_000_000}] * 4  # some 300 MB while it is rendered
    messages = [{**message, "content": message["content"] + str(i)} for i, message in enumerate(messages)]
    template = ChatTemplate("{% for m in messages %}{{ m.content }}{% endfor %}", {})
    assert template.render(messages) == "".join(message["content"] for message in messages)
    assert PROCESSES._slow._idle


def test_keys_and_tokens_in_the_environment_do_not_reach_a_template(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SPACESERVE_API_KEY", "secret")
    monkeypatch.setenv("HF_TOKEN", "secret")
    processes = TemplateProcesses()
    try:
        processes.ask(TemplateJob("x"), LIMITS)
        pid = processes._quick._idle[0].pid
        assert b"secret" not in Path(f"/proc/{pid}/environ").read_bytes()
    finally:
        processes.close()


def test_a_process_that_was_killed_is_replaced() -> None:
    processes = TemplateProcesses()
    try:
        assert processes.ask(TemplateJob("x", {}), LIMITS).text == "x"
        processes._quick._idle[0].close()
        assert processes.ask(TemplateJob("y", {}), LIMITS).text == "y"
    finally:
        processes.close()


def test_where_no_process_can_be_started_the_log_says_why(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(template_process, "module_command", lambda *words: ["/bin/false"])
    with caplog.at_level(logging.ERROR), pytest.raises(NotStarted):
        TemplateProcesses().ask(TemplateJob("x"), LIMITS)
    assert "cannot be started" in caplog.text


async def test_one_that_takes_long_leaves_the_event_loop_and_then_has_its_whole_time() -> None:
    pool = TextPool(1)
    words = " ".join(["word"] * 200_000)
    template = ChatTemplate("{{ messages[0].content | wordwrap(20) | length }}", {})
    longest: list[float] = []
    while len(longest) < 3 and min(longest, default=1.0) >= 1.0:  # a busy machine stops now and then
        pauses = asyncio.create_task(_longest_pause())
        await asyncio.sleep(0.01)
        rendered = await pool.run("", 1, template.render, [{"role": "user", "content": words}])
        pauses.cancel()
        assert int(rendered) > 900_000
        longest.append(await pauses)
    assert min(longest) < 1.0, longest


async def test_others_wait_less_than_a_second_while_a_client_renders_what_takes_long() -> None:
    source = "{% if messages[0].content == 'attack' %}" + FOREVER + "{% endif %}{{ messages[0].content }}"
    template = ChatTemplate(source, {}, limits=TemplateLimits(seconds=0.5))
    pool = TextPool(1)
    attack = [{"role": "user", "content": "attack"}]
    for _ in range(3):  # a busy machine stops now and then
        attacks = [asyncio.create_task(pool.run("attacker", 1, template.render, attack)) for _ in range(12)]
        pauses = asyncio.create_task(_longest_pause())
        await asyncio.sleep(0.3)
        begun = time.monotonic()
        assert await pool.run("other", 1, template.render, USER) == "hi"
        waited = time.monotonic() - begun
        refused = await asyncio.gather(*attacks, return_exceptions=True)
        pauses.cancel()
        assert all(isinstance(error, InvalidRequest | Overloaded) for error in refused)
        assert any(isinstance(error, InvalidRequest) for error in refused)
        assert any(isinstance(error, Overloaded) for error in refused), "no more than a few render at a time"
        if max(waited, *await asyncio.gather(pauses)) < 1.0:
            return
    pytest.fail(f"Another client waited {waited:.1f} s.")


def test_no_more_slow_ones_wait_than_there_is_room_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two run and two wait, by the page; a fifth is refused, and there is room again once they have ended."""
    processes, begun, end = TemplateProcesses(), threading.Semaphore(0), threading.Event()
    text = TemplateAnswer(2, AnswerKind.TEXT, "x")

    def out_of_time(*_: Any) -> TemplateAnswer:
        return TemplateAnswer(1, AnswerKind.NO_TIME)

    def take_long(*_: Any) -> TemplateAnswer:
        begun.release()
        end.wait(5.0)
        return text

    monkeypatch.setattr(processes._quick, "ask", out_of_time)
    monkeypatch.setattr(processes._slow, "ask", take_long)
    with ThreadPoolExecutor(4) as threads:
        four = [threads.submit(processes.ask, TemplateJob("x", {}), LIMITS) for _ in range(4)]
        assert all(begun.acquire(timeout=5.0) for _ in four)
        with pytest.raises(Overloaded, match="takes long for these messages, as it does for 4 other requests"):
            processes.ask(TemplateJob("x", {}), LIMITS)
        end.set()
        assert [one.result() for one in four] == [text] * 4
    assert processes.ask(TemplateJob("x", {}), LIMITS) == text


async def test_short_texts_take_no_more_of_the_event_loop_than_their_share(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = SimpleNamespace(now=0.0)
    monkeypatch.setattr(text_pool, "time", SimpleNamespace(monotonic=lambda: clock.now, thread_time=lambda: clock.now))
    pool = TextPool(1)

    def work() -> bool:
        clock.now += 0.04 if text_pool.is_on_event_loop() else 0.0  # the worst body of 16 KB
        return text_pool.is_on_event_loop()

    on_loop = sum([await pool.run("", LONG_BODY - 1, work) for _ in range(40)])
    assert on_loop * 0.04 <= text_pool.EVENT_LOOP_BURST + 0.04 + text_pool.EVENT_LOOP_SHARE * clock.now
    assert 3 <= on_loop <= 5
    clock.now += 1.0
    assert await pool.run("", LONG_BODY - 1, work)


async def _longest_pause() -> float:
    """The longest time for which the event loop did nothing else, in seconds, until it is cancelled."""
    longest, last = 0.0, time.monotonic()
    try:
        while True:
            await asyncio.sleep(0.002)
            longest, last = max(longest, time.monotonic() - last), time.monotonic()
    except asyncio.CancelledError:
        return max(longest, time.monotonic() - last)
