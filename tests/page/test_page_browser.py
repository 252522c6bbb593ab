"""The page in headless Chromium, in front of a real server with the embedded model.

pytest tests/page -m browser       (Debian: apt-get install chromium; SPACESERVE_PICTURES=FOLDER keeps pictures)
"""

import json
from collections.abc import Callable
from contextlib import AbstractContextManager
from itertools import pairwise
from pathlib import Path
from typing import Any

import httpx
import pytest
from space_common.process import ServerProcess
from tiny_checkpoints import tiny_checkpoint

pytestmark = [pytest.mark.browser, pytest.mark.slow]

CTRL, SHIFT = 2, 8
IDLE = "document.getElementById('stop').disabled"
Serve = Callable[..., AbstractContextManager[ServerProcess]]


def ready(page: Any) -> Any:
    """The page, once it knows its server."""
    page.wait("document.getElementById('facts').textContent.includes('window')")
    return page


def run(page: Any, **fields: str) -> None:
    """Fill in fields, press Ctrl+Enter and wait for the end."""
    for name, value in fields.items():
        page.fill(f"#{name}", value)
    page.press("Enter", CTRL)
    page.wait(IDLE)


def tokens(page: Any, pane: int) -> list[dict[str, Any]]:
    """Text and classes of every token of a pane."""
    found: list[dict[str, Any]] = page.js(
        f"[...document.querySelectorAll('.pane')[{pane}].querySelectorAll('.token')]"
        ".map((token) => ({text: token.textContent, draft: token.classList.contains('draft'), "
        "first: token.classList.contains('first'), colour: token.className.match(/c\\d/)[0]}))"
    )
    return found


def contrast(page: Any, selector: str) -> float:
    """WCAG's contrast between an element's colour and what is painted behind it."""
    value: float = page.js(
        """(() => {
        const paint = document.createElement("canvas").getContext("2d", {willReadFrequently: true});
        const rgb = (colour) => { paint.clearRect(0, 0, 1, 1); paint.fillStyle = colour; paint.fillRect(0, 0, 1, 1);
            return [...paint.getImageData(0, 0, 1, 1).data]; };
        const light = (colour) => rgb(colour).slice(0, 3).map((v) => v / 255)
            .map((v) => (v <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4))
            .reduce((sum, v, place) => sum + v * [0.2126, 0.7152, 0.0722][place], 0);
        const element = document.querySelector(SELECTOR);
        let behind = element;
        while (rgb(getComputedStyle(behind).backgroundColor)[3] < 255) behind = behind.parentElement;
        const pair = [light(getComputedStyle(element).color), light(getComputedStyle(behind).backgroundColor)];
        return (Math.max(...pair) + 0.05) / (Math.min(...pair) + 0.05);
        })()""".replace("SELECTOR", json.dumps(selector))
    )
    return value


def test_both_ways_give_the_same_text_in_the_colours_of_their_steps(
    browser: Any, server: ServerProcess, pictures: Path
) -> None:
    page = ready(browser.open(f"{server.url}/", height=930))
    run(page, max_tokens="64", seed="1")
    assert "The two texts are equal, all 64 tokens." in page.text("#verdict")
    assert "times the speed of plain decoding" in page.text("#verdict")
    plain, drafted = tokens(page, 0), tokens(page, 1)
    assert [one["text"] for one in plain] == [one["text"] for one in drafted]
    assert len(plain) == 64
    assert not any(one["draft"] for one in plain)
    assert any(one["draft"] for one in drafted)
    assert all(one["first"] for one in plain)  # every token is a step of its own
    for before, one in pairwise(drafted):
        assert (before["colour"] != one["colour"]) == one["first"]
    asked = {"prompt": page.js("document.getElementById('prompt').value"), "max_tokens": 64, "seed": 1}
    whole = httpx.post(f"{server.url}/v1/completions", json={**asked, "temperature": 0.6}, timeout=60).json()
    assert "".join(one["text"] for one in drafted) == whole["choices"][0]["text"]
    figures = page.js("[...document.querySelectorAll('.pane')].map((pane) => pane.querySelectorAll('dd')[1].innerText)")
    assert figures[0] == "1.00"
    assert float(figures[1]) > 1
    assert page.js("[...document.querySelectorAll('.curve')].every((curve) => curve.getAttribute('d').length > 20)")
    assert page.js("document.querySelector('.chart .block').getAttribute('d').length") > 20
    shown = max(place for place, one in enumerate(drafted[:-16]) if one["draft"])  # one that is in sight at the end
    page.point(f'.pane:last-child [data-token="{shown}"]')
    assert f"token {shown + 1} of 64" in page.text("#inspector")
    assert "an accepted draft" in page.text("#inspector")
    page.picture(pictures / "page.png")
    page.click("#replay")
    page.wait(f"!{IDLE}")
    page.wait(IDLE)
    assert "equal, all 64 tokens" in page.text("#verdict")
    assert [one["text"] for one in tokens(page, 1)] == [one["text"] for one in plain]
    assert page.complaints == []
    assert {url[: len(server.url)] for url in page.asked} == {server.url}  # nothing from anywhere else


def test_everything_can_be_done_with_the_keyboard_alone(browser: Any, server: ServerProcess) -> None:
    page = ready(browser.open(f"{server.url}/"))
    reached = []
    for _ in range(40):
        page.press("Tab")
        reached.append(page.js("document.activeElement.id || document.activeElement.tagName"))
        outline = "getComputedStyle(document.activeElement)"
        hidden = page.js("document.activeElement.type === 'radio'")  # its label shows the focus
        assert hidden or page.js(f"{outline}.outlineStyle") != "none", reached[-1]
        if reached[-1] == "prompt":
            break
    assert reached[-1] == "prompt"
    page.press("a", CTRL)
    page.type("x = [1, 2, 3, 4,")
    while page.js("document.activeElement.id") != "max_tokens":
        page.press("Tab")
    page.press("a", CTRL)
    page.type("24")
    page.press("Enter", CTRL)
    page.wait(IDLE)
    assert "equal" in page.text("#verdict")
    while not page.js("document.activeElement.classList.contains('text')"):
        page.press("Tab")
    page.press("ArrowRight")
    assert "token 1 of 24" in page.text("#inspector")
    page.press("ArrowRight")
    assert "token 2 of 24" in page.text("#inspector")
    assert "step 1" in page.text("#inspector")
    page.press("ArrowDown")
    assert "step 2" in page.text("#inspector")
    page.press("ArrowUp")
    assert "step 1" in page.text("#inspector")
    page.press("End")
    assert "token 24 of 24" in page.text("#inspector")
    assert page.js("document.querySelectorAll('.token.now').length") == 2  # here, and at its place in the other text
    assert page.complaints == []


@pytest.mark.parametrize("how", ["Esc", "button"])
def test_stop_ends_the_answer_here_and_at_the_server(browser: Any, server: ServerProcess, how: str) -> None:
    page = ready(browser.open(f"{server.url}/"))
    page.fill("#prompt", "x = [\n    1,\n    1,\n")
    page.fill("#temperature", "0")
    page.fill("#max_tokens", "900")
    page.press("Enter", CTRL)
    page.wait("document.querySelectorAll('.pane .token').length > 8")
    if how == "Esc":
        page.press("Escape")
    else:
        page.click("#stop")
    page.wait(IDLE)
    assert "stopped by you" in page.text(".pane")
    assert page.text("#error") == ""
    count = page.js("document.querySelectorAll('.pane .token').length")
    assert count < 900
    load = {"num_running": 1}
    while load["num_running"]:
        load = httpx.get(f"{server.url}/load").json()
    run(page, max_tokens="8")  # and it goes on from there
    assert "all 8 tokens" in page.text("#verdict")


def test_a_chat_is_answered_and_log_probabilities_are_shown(browser: Any, server: ServerProcess) -> None:
    page = ready(browser.open(f"{server.url}/"))
    page.click("[value=chat]")
    page.click("#beside")
    page.click("#logprobs")
    page.fill("#system", "You write Python.")
    run(page, prompt="Write a class for a stack.", max_tokens="12", seed="3")
    assert "tokens in" in page.text("#verdict")
    page.point(".pane .token")
    assert "logprob -" in page.text("#inspector")
    assert " %" in page.text("#inspector")
    curl = page.text("#curl")
    assert "/v1/chat/completions" in curl
    assert '"seed":3' in curl
    answer = "".join(one["text"] for one in tokens(page, 0))
    page.click("#reply")
    assert page.js("document.activeElement.id") == "prompt"
    run(page, prompt="Shorter.", max_tokens="4")
    body = json.loads(page.text("#curl").partition("-d '")[2][:-1].replace("'\\''", "'"))
    said = [(message["role"], message["content"]) for message in body["messages"]]
    assert said == [
        ("system", "You write Python."),
        ("user", "Write a class for a stack."),
        ("assistant", answer),
        ("user", "Shorter."),
    ]
    page.click("#thread button")
    assert page.js("document.getElementById('thread').hidden")
    assert "Shorter" in page.text("#curl")
    assert "stack" not in page.text("#curl")
    assert page.complaints == []


def test_a_refusal_is_shown_in_the_servers_words_at_its_field(browser: Any, server: ServerProcess) -> None:
    page = ready(browser.open(f"{server.url}/"))
    run(page, temperature="9")
    assert "temperature" in page.text("#error")
    assert page.js("document.activeElement.id") == "temperature"
    assert page.js("document.activeElement.getAttribute('aria-invalid')") == "true"
    run(page, temperature="warm")
    assert page.text("#error") == '`temperature` is "warm"; it must be a number.'
    run(page, temperature="0", max_tokens="4")
    assert page.js("document.getElementById('error').hidden")
    assert page.js("document.querySelector('[aria-invalid]') === null")


def test_it_is_dark_where_the_system_is_and_where_it_is_told_to_be(
    browser: Any, server: ServerProcess, pictures: Path
) -> None:
    paper = "getComputedStyle(document.body).backgroundColor"
    page = ready(browser.open(f"{server.url}/", height=960, dark=True))
    dark = page.js(paper)
    run(page, max_tokens="64", seed="1")
    page.picture(pictures / "page-dark.png")
    readable = (".facts", ".token.draft", ".pane.plain .token", ".text .prompt", ".verdict .yes", "#run", "label")
    assert {name: contrast(page, name) for name in readable if contrast(page, name) < 4.5} == {}
    page.click("#theme")
    assert page.text("#theme") == "Theme: light"
    assert page.js(paper) != dark
    assert {name: contrast(page, name) for name in readable if contrast(page, name) < 4.5} == {}
    page.go(f"{server.url}/")
    assert page.text("#theme") == "Theme: light"  # remembered
    page.click("#theme")
    page.shape(1280, 900, dark=False)
    assert (page.text("#theme"), page.js(paper)) == ("Theme: dark", dark)
    page.click("#theme")
    assert page.js(paper) != dark


def test_nothing_is_wider_than_a_phone(browser: Any, server: ServerProcess, pictures: Path) -> None:
    page = ready(browser.open(f"{server.url}/", width=360, height=740, scale=2))
    fits = "document.documentElement.scrollWidth <= 360"
    assert page.js(fits)
    for box in ("#key-box", "#curl-box"):
        page.click(f"{box} summary")
    page.fill("#prompt", "a_name_that_is_longer_than_any_line_of_a_phone_" * 3)
    run(page, max_tokens="48", seed="1")
    assert page.js(fits)
    assert page.js("document.getElementById('output').getBoundingClientRect().top < innerHeight")  # it is in sight
    page.picture(pictures / "page-phone.png")
    assert page.complaints == []


def test_a_server_with_keys_is_asked_with_the_one_that_is_typed_in(browser: Any, serve: Serve, tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.write_text("k3y-of-a-test\n")
    with serve("--api-key-file", str(keys)) as server:
        page = browser.open(f"{server.url}/")
        page.wait("document.getElementById('facts').textContent.includes('API key')")
        assert page.js("document.getElementById('key-box').open")
        run(page, max_tokens="8")
        assert "key" in page.text("#error")
        assert page.js("document.activeElement.id") == "key"
        page.type("k3y-of-a-test")
        page.press("Tab")
        ready(page)
        run(page, max_tokens="8")
        assert "all 8 tokens" in page.text("#verdict")
        assert "k3y" not in page.js("JSON.stringify(localStorage)") + page.text("#curl") + page.js("location.href")
        assert "k3y" in page.js("JSON.stringify(sessionStorage)")


def test_a_stream_that_breaks_is_said_to_have_broken(browser: Any, serve: Serve) -> None:
    with serve() as server:
        page = ready(browser.open(f"{server.url}/"))
        page.fill("#prompt", "x = [\n    1,\n    1,\n")
        page.fill("#temperature", "0")
        page.fill("#max_tokens", "900")
        page.press("Enter", CTRL)
        page.wait("document.querySelectorAll('.pane .token').length > 8")
        server.kill()
        page.wait(IDLE)
        assert "The stream broke after " in page.text("#error")
        assert "broken off" in page.text(".pane")
        run(page, max_tokens="4")
        assert "The server cannot be reached" in page.text("#error")


def test_a_chat_model_is_asked_in_a_chat_until_the_user_chooses(browser: Any, serve: Serve, tmp_path: Path) -> None:
    with serve("--model", str(tiny_checkpoint(tmp_path / "tiny", vocab_size=300))) as server:
        page = ready(browser.open(f"{server.url}/"))
        assert page.js("document.forms.ask.elements.mode.value") == "chat"
        assert page.js("document.getElementById('prompt').value") == "Why is the sky blue?"
        run(page, max_tokens="4")
        assert "all 4 tokens" in page.text("#verdict")
        page.js("document.querySelector('[value=completion]').click()")
        assert page.js("document.forms.ask.elements.mode.value") == "completion"


def test_what_is_served_in_place_of_the_default_model_is_said(browser: Any, tmp_path: Path) -> None:
    nowhere = {"SPACESERVE_MODEL": "", "SPACESERVE_OFFLINE": "on", "HF_HOME": str(tmp_path)}
    with ServerProcess(["--num-threads", "1"], environment=nowhere) as server:
        page = ready(browser.open(f"{server.url}/"))
        assert "demo is served in place of smollm2" in page.text("#fallback")
        assert not page.js("document.getElementById('fallback').hidden")
        assert page.js("document.forms.ask.elements.mode.value") == "completion"
