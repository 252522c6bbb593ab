"""Headless Chromium over its DevTools pipe, and servers for it to look at. Nothing but a `chromium` is needed."""

import base64
import fcntl
import itertools
import json
import os
import shutil
import subprocess
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any

import pytest
from space_common.process import ServerProcess

SECONDS = 60.0  # Longest wait for anything: far beyond what a busy machine needs

FLAGS = (
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-sync",
    "--disable-background-networking", "--disable-component-update", "--hide-scrollbars", "--remote-debugging-pipe",
)  # fmt: skip
KEYS = {
    "Enter": (13, "\r"), "Escape": (27, ""), "Tab": (9, ""), " ": (32, " "), "Home": (36, ""), "End": (35, ""),
    "ArrowLeft": (37, ""), "ArrowUp": (38, ""), "ArrowRight": (39, ""), "ArrowDown": (40, ""), "a": (65, "a"),
}  # fmt: skip
CTRL, SHIFT = 2, 8


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "browser: drives headless Chromium; skipped where there is none")


class Browser:
    """One Chromium. `with Browser(executable, folder) as browser: page = browser.open(url)`."""

    def __init__(self, executable: str, profile: Path) -> None:
        self._command = [executable, *FLAGS, f"--user-data-dir={profile}", "about:blank"]
        self._numbers = itertools.count(1)
        self._answers: dict[int, dict[str, Any]] = {}
        self._news = threading.Condition()
        self._pages: dict[str, Page] = {}
        self._over = False

    def __enter__(self) -> "Browser":
        # Chromium reads commands at descriptor 3 and writes answers at 4.
        pairs = [os.pipe() for _ in range(2)]
        (read_here, write_there), (read_there, write_here) = pairs
        theirs = [fcntl.fcntl(end, fcntl.F_DUPFD, 10) for end in (read_there, write_there)]

        def wire() -> None:
            os.dup2(theirs[0], 3)
            os.dup2(theirs[1], 4)

        self._process = subprocess.Popen(
            self._command, preexec_fn=wire, pass_fds=(3, 4), stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL, start_new_session=True,
        )  # fmt: skip
        for end in (read_there, write_there, *theirs):
            os.close(end)
        self._to, self._from = os.fdopen(write_here, "wb", 0), os.fdopen(read_here, "rb")
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        try:
            self.call("Browser.close")
            self._process.wait(SECONDS)
        finally:
            if self._process.poll() is None:
                self._process.kill()
                self._process.wait()
            self._reader.join(SECONDS)
            self._to.close()
            self._from.close()

    def _read(self) -> None:
        rest = b""
        while content := os.read(self._from.fileno(), 1 << 20):
            *whole, rest = (rest + content).split(b"\0")
            for message in whole:
                self._take(json.loads(message))
        with self._news:
            self._over = True
            self._news.notify_all()

    def _take(self, message: dict[str, Any]) -> None:
        with self._news:
            if "id" in message:
                self._answers[message["id"]] = message
            elif page := self._pages.get(message.get("sessionId", "")):
                page.happened(message["method"], message["params"])
            self._news.notify_all()

    def call(self, method: str, session: str | None = None, **params: Any) -> dict[str, Any]:
        """One DevTools command, answered."""
        number = next(self._numbers)
        message = {"id": number, "method": method, "params": params, **({"sessionId": session} if session else {})}
        self._to.write(json.dumps(message).encode() + b"\0")
        with self._news:
            there = self._news.wait_for(lambda: number in self._answers or self._over, SECONDS)
            assert there, f"{method}: no answer within {SECONDS:g} s"
            if method == "Browser.close":
                return {}
            answer = self._answers.pop(number)
        assert "error" not in answer, f"{method}: {answer['error']}"
        result: dict[str, Any] = answer["result"]
        return result

    def wait_for(self, holds: Callable[[], Any], what: str) -> None:
        with self._news:
            assert self._news.wait_for(holds, SECONDS), f"{what}: not within {SECONDS:g} s"

    def open(self, url: str, *, width: int = 1280, height: int = 900, dark: bool = False, scale: float = 1) -> "Page":
        """A page in a context of its own: no storage is shared with others."""
        context = self.call("Target.createBrowserContext")["browserContextId"]
        target = self.call("Target.createTarget", url="about:blank", browserContextId=context)["targetId"]
        session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        page = self._pages[session] = Page(self, session)
        for domain in ("Page", "Runtime", "Log", "Network"):
            page.call(f"{domain}.enable")
        page.shape(width, height, dark=dark, scale=scale)
        page.go(url)
        return page


class Page:
    """One tab, as a test uses it."""

    def __init__(self, browser: Browser, session: str) -> None:
        self._browser = browser
        self._session = session
        self.complaints: list[str] = []  # errors and warnings of the console, exceptions
        self.asked: list[str] = []  # every URL that was asked for
        self._loads = 0

    def happened(self, method: str, params: dict[str, Any]) -> None:
        """What Chromium reports; runs in the reading thread."""
        if method == "Runtime.exceptionThrown":
            details = params["exceptionDetails"]
            self.complaints.append(details.get("exception", {}).get("description") or details["text"])
        elif method == "Runtime.consoleAPICalled" and params["type"] in ("error", "warning", "assert"):
            self.complaints.append(" ".join(str(one.get("value")) for one in params["args"]))
        elif method == "Log.entryAdded" and params["entry"]["level"] in ("error", "warning"):
            self.complaints.append(f"{params['entry']['text']} {params['entry'].get('url', '')}")
        elif method == "Network.requestWillBeSent":
            self.asked.append(params["request"]["url"])
        elif method == "Page.loadEventFired":
            self._loads += 1

    def call(self, method: str, **params: Any) -> dict[str, Any]:
        return self._browser.call(method, self._session, **params)

    def shape(self, width: int, height: int, *, dark: bool = False, scale: float = 1) -> None:
        """The window, and what the system prefers."""
        self.call(
            "Emulation.setDeviceMetricsOverride",
            width=width, height=height, deviceScaleFactor=scale, mobile=width < 600,
        )  # fmt: skip
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.call("Emulation.setEmulatedMedia", features=[scheme])

    def go(self, url: str) -> None:
        before = self._loads
        self.call("Page.navigate", url=url)
        self._browser.wait_for(lambda: self._loads > before, f"{url} loaded")

    def js(self, expression: str) -> Any:
        """The value of an expression, as JSON; a promise is awaited."""
        answer = self.call("Runtime.evaluate", expression=expression, awaitPromise=True, returnByValue=True)
        assert "exceptionDetails" not in answer, answer["exceptionDetails"]
        return answer["result"].get("value")

    def wait(self, expression: str) -> None:
        """Until an expression is true in the page."""
        found = self.js(
            f"new Promise((done) => {{ const end = performance.now() + {1000 * SECONDS:g}; const look = () => "
            f"({expression}) ? done(true) : performance.now() > end ? done(false) : setTimeout(look, 10); look(); }})"
        )
        shown = self.js("document.body.innerText.slice(0, 4000)")
        assert found, f"{expression}: not within {SECONDS:g} s; the page shows:\n{shown}"

    def text(self, selector: str) -> str:
        value: str = self.js(f"document.querySelector({json.dumps(selector)}).textContent")
        return value

    def press(self, key: str, modifiers: int = 0) -> None:
        """One key, as a keyboard sends it."""
        number, text = KEYS[key]
        code = {" ": "Space", "a": "KeyA"}.get(key, key)
        common = {"key": key, "code": code, "windowsVirtualKeyCode": number, "modifiers": modifiers}
        written = {} if modifiers & CTRL or not text else {"text": text}
        commands = {"commands": ["selectAll"]} if (key, modifiers) == ("a", CTRL) else {}
        self.call("Input.dispatchKeyEvent", type="keyDown", **common, **written, **commands)
        self.call("Input.dispatchKeyEvent", type="keyUp", **common)

    def type(self, text: str) -> None:
        """Text into whatever has the focus."""
        self.call("Input.insertText", text=text)

    def fill(self, selector: str, text: str) -> None:
        """Replace what a field holds."""
        self.js(f"document.querySelector({json.dumps(selector)}).focus()")
        self.press("a", CTRL)
        self.type(text)

    def click(self, selector: str) -> None:
        self.js(f"document.querySelector({json.dumps(selector)}).click()")

    def point(self, selector: str) -> None:
        """Move the mouse to the middle of an element, which is brought into sight."""
        place = self.js(
            f"(() => {{ const element = document.querySelector({json.dumps(selector)}); "
            "element.scrollIntoView({block: 'nearest'}); const box = element.getClientRects()[0]; "
            "return {x: box.x + box.width / 2, y: box.y + box.height / 2}; })()"
        )
        self.call("Input.dispatchMouseEvent", type="mouseMoved", **place)

    def picture(self, path: Path, *, whole: bool = False) -> None:
        """A PNG of the window, or of the whole page."""
        answer = self.call("Page.captureScreenshot", format="png", captureBeyondViewport=whole, **self._clip(whole))
        path.write_bytes(base64.b64decode(answer["data"]))

    def _clip(self, whole: bool) -> dict[str, Any]:
        if not whole:
            return {}
        size = self.call("Page.getLayoutMetrics")["cssContentSize"]
        return {"clip": {"x": 0, "y": 0, "width": size["width"], "height": size["height"], "scale": 1}}


@pytest.fixture(scope="session")
def chromium() -> str:
    """The executable."""
    for name in ("chromium", "chromium-browser", "google-chrome"):
        if found := shutil.which(name):
            return found
    pytest.skip("there is no Chromium; on Debian: apt-get install chromium")


@pytest.fixture(scope="session")
def browser(chromium: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    with Browser(chromium, tmp_path_factory.mktemp("profile")) as running:
        yield running


@pytest.fixture(scope="session")
def server() -> Iterator[ServerProcess]:
    """The embedded model, on a free port."""
    with ServerProcess(["--model", "demo", "--num-threads", "1"]) as running:
        yield running


@pytest.fixture
def serve() -> Callable[..., AbstractContextManager[ServerProcess]]:
    """A server of one's own: `with serve(*flags, environment=...) as server`."""

    @contextmanager
    def start(*flags: str, **options: Any) -> Iterator[ServerProcess]:
        with ServerProcess(["--model", "demo", "--num-threads", "1", *flags], **options) as running:
            yield running

    return start


@pytest.fixture
def pictures(tmp_path: Path, request: pytest.FixtureRequest) -> Path:
    """Where pictures go: the folder in SPACESERVE_PICTURES, to be looked at, or one that pytest cleans up."""
    folder = Path(os.environ.get("SPACESERVE_PICTURES", tmp_path))
    folder.mkdir(parents=True, exist_ok=True)
    return folder
