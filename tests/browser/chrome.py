"""A driver of headless Chromium: DevTools messages over a pipe, nothing but the standard library.

Invariant: a browser made here sees no other profile, and is gone, with its folder, when its `with` ends. What a page
asks the network for, logs or throws is kept (`Page.requests`, `Page.problems`): a test can ask for it at any time.
"""

from __future__ import annotations

import base64
import contextlib
import fcntl
import itertools
import json
import os
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any

from tests import apt

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
FLAGS = (
    "--headless=new",
    "--disable-gpu",
    "--disable-quic",
    "--disable-sync",
    "--disable-extensions",
    "--disable-dev-shm-usage",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-default-apps",
    "--no-first-run",
    "--no-default-browser-check",
    "--disable-ipc-flooding-protection",  # Chromium drops navigations beyond 200 in 10 seconds
    "--hide-scrollbars",
    "--force-color-profile=srgb",
    "--remote-debugging-pipe",
)
_AS_PIPES = (
    "import os, sys; r, w = map(int, sys.argv[1:3]); os.dup2(r, 3); os.dup2(w, 4); os.execv(sys.argv[3], sys.argv[3:])"
)
"""Chromium reads messages from descriptor 3 and writes them to 4."""
KEYS: dict[str, tuple[str, int]] = {
    "Enter": ("Enter", 13),
    "Escape": ("Escape", 27),
    "Tab": ("Tab", 9),
    "Backspace": ("Backspace", 8),
    "Delete": ("Delete", 46),
    "ArrowLeft": ("ArrowLeft", 37),
    "ArrowUp": ("ArrowUp", 38),
    "ArrowRight": ("ArrowRight", 39),
    "ArrowDown": ("ArrowDown", 40),
    "Home": ("Home", 36),
    "End": ("End", 35),
    "PageUp": ("PageUp", 33),
    "PageDown": ("PageDown", 34),
}


class BrowserError(RuntimeError):
    """The browser is missing, died, did not answer, or a script of a test threw."""


def find() -> str:
    """Where Chromium is: named by CHROMIUM, on PATH, or installed if `ROLLBOOK_TEST_APT=1` asks for it."""
    named = os.environ.get("CHROMIUM")
    if named:
        return named
    program = next(filter(None, map(shutil.which, NAMES)), None)
    if program is None:
        failure = apt.install("chromium")
        program = shutil.which("chromium")
    if program is None:
        raise BrowserError(f"the browser tests need Chromium: install it, or name it in CHROMIUM ({failure})")
    return program


class NavigatedError(BrowserError):
    """The page navigated while a script ran in it."""


class Chrome:
    """A browser of its own; `page()` opens a tab."""

    def __init__(self, *flags: str, timeout: float = 60.0) -> None:
        self.timeout = timeout
        self.folder = tempfile.mkdtemp(prefix="rollbook-chrome-")
        self._numbers = itertools.count(1)
        self._replies: dict[int, dict[str, Any]] = {}
        self._pages: dict[str, Page] = {}
        self._changed = threading.Condition()
        self._ended = False
        theirs_read, ours_write = _pipe()
        ours_read, theirs_write = _pipe()
        more = ["--no-sandbox"] if os.geteuid() == 0 else []
        command = [find(), *FLAGS, *more, *flags, f"--user-data-dir={self.folder}", "about:blank"]
        self._process = subprocess.Popen(
            [sys.executable, "-c", _AS_PIPES, str(theirs_read), str(theirs_write), *command],
            pass_fds=(theirs_read, theirs_write),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        os.close(theirs_read)
        os.close(theirs_write)
        self._to, self._from = ours_write, ours_read
        self._writing = threading.Lock()
        threading.Thread(target=self._read, daemon=True).start()

    def __enter__(self) -> Chrome:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        """End the browser and remove its profile."""
        if self._process.poll() is None:
            self._process.terminate()
            try:
                self._process.wait(5)
            except subprocess.TimeoutExpired:
                os.killpg(self._process.pid, 9)
                self._process.wait(5)
        os.close(self._to)
        shutil.rmtree(self.folder, ignore_errors=True)

    def page(self, width: int = 1440, height: int = 900, *, dark: bool = False) -> Page:
        """A new tab of its own context: it shares no cookies with others."""
        context = self.call("Target.createBrowserContext")["browserContextId"]
        target = self.call("Target.createTarget", url="about:blank", browserContextId=context)["targetId"]
        session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        page = self._pages[session] = Page(self, session, context)
        for domain in ("Page", "Runtime", "Network", "Log"):
            page.call(f"{domain}.enable")
        page.viewport(width, height)
        page.media(dark=dark)
        return page

    def call(self, method: str, *, session: str | None = None, **parameters: Any) -> dict[str, Any]:
        """Send one message and wait for its reply."""
        number = next(self._numbers)
        message: dict[str, Any] = {"id": number, "method": method, "params": parameters}
        if session is not None:
            message["sessionId"] = session
        data = json.dumps(message).encode() + b"\0"
        with self._writing:
            while data:
                data = data[os.write(self._to, data) :]
        with self._changed:
            if not self._changed.wait_for(lambda: number in self._replies or self._ended, self.timeout):
                raise BrowserError(f"{method}: the browser did not answer")
            if number not in self._replies:
                raise BrowserError(f"{method}: the browser has ended, with status {self._process.poll()}")
            reply = self._replies.pop(number)
        if "error" in reply:
            text = str(reply["error"].get("message"))
            navigated = "navigated" in text or "context was destroyed" in text
            raise (NavigatedError if navigated else BrowserError)(f"{method}: {text}")
        result: dict[str, Any] = reply["result"]
        return result

    def _read(self) -> None:
        rest = b""
        while True:
            data = os.read(self._from, 1 << 20)
            if not data:
                os.close(self._from)
                break
            *messages, rest = (rest + data).split(b"\0")
            for text in messages:
                message = json.loads(text)
                with self._changed:
                    if "id" in message:
                        self._replies[message["id"]] = message
                    elif message.get("sessionId") in self._pages:
                        self._pages[message["sessionId"]].heard(message["method"], message["params"])
                    self._changed.notify_all()
        with self._changed:
            self._ended = True
            self._changed.notify_all()

    def wait_for(self, ready: Callable[[], bool], event: str) -> None:
        """Wait until messages have made something true."""
        with self._changed:
            if not self._changed.wait_for(lambda: ready() or self._ended, self.timeout) or not ready():
                raise BrowserError(f"{event}: did not happen")


class Page:
    """A tab."""

    def __init__(self, chrome: Chrome, session: str, context: str) -> None:
        self.chrome, self._session, self._context = chrome, session, context
        self.requests: list[str] = []
        """The address of everything that was asked for, `data:` and `blob:` too."""
        self.problems: list[str] = []
        """Errors that scripts threw, and what the browser and scripts logged as errors."""
        self.dialogs = 0
        self._loads = 0
        self._pending: set[str] = set()

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        """One DevTools message to this tab."""
        return self.chrome.call(method, session=self._session, **parameters)

    def heard(self, method: str, params: dict[str, Any]) -> None:
        """What the browser tells of its own accord."""
        if method == "Network.requestWillBeSent":
            self.requests.append(params["request"]["url"])
            if params.get("type") != "EventSource":
                self._pending.add(params["requestId"])
        elif method in ("Network.loadingFinished", "Network.loadingFailed"):
            self._pending.discard(params["requestId"])
        elif method == "Page.frameNavigated":
            self._pending.clear()
        elif method == "Runtime.exceptionThrown":
            details = params["exceptionDetails"]
            self.problems.append(details.get("exception", {}).get("description") or details.get("text", ""))
        elif method == "Log.entryAdded" and params["entry"]["level"] == "error":
            self.problems.append(f"{params['entry']['text']} {params['entry'].get('url', '')}")
        elif method == "Runtime.consoleAPICalled" and params["type"] in ("error", "assert"):
            self.problems.append(
                " ".join(str(argument.get("value", argument.get("description"))) for argument in params["args"])
            )
        elif method == "Page.loadEventFired":
            self._loads += 1
        elif method == "Page.javascriptDialogOpening":
            self.dialogs += 1

    def goto(self, url: str) -> None:
        """Open an address and wait until it is loaded; a change of the hash alone loads nothing."""
        loads = self._loads
        if "loaderId" in self.call("Page.navigate", url=url):
            self.chrome.wait_for(lambda: self._loads > loads, f"loading {url}")

    def reload(self) -> None:
        """Load the page again."""
        loads = self._loads
        self.call("Page.reload")
        self.chrome.wait_for(lambda: self._loads > loads, "loading again")

    def eval(self, script: str) -> Any:
        """The value of an expression (or of the promise it is); an error if it throws."""
        reply = self.call(
            "Runtime.evaluate", expression=script, awaitPromise=True, returnByValue=True, userGesture=True
        )
        if "exceptionDetails" in reply:
            details = reply["exceptionDetails"]
            raise BrowserError(
                f"{details.get('exception', {}).get('description') or details.get('text')}\nin: {script}"
            )
        return reply["result"].get("value")

    def wait(self, script: str, timeout: float = 20.0) -> Any:
        """The expression's value, once it is true."""
        end = time.monotonic() + timeout
        while True:
            with contextlib.suppress(NavigatedError):
                value = self.eval(script)
                if value:
                    return value
            if time.monotonic() > end:
                raise BrowserError(f"never true: {script}\nthe page: {self.text()[:2000]}\nproblems: {self.problems}")
            time.sleep(0.02)

    def wait_until_idle(self) -> None:
        """Wait until every request but event streams has ended; what the browser logs of them is in `problems` then."""
        self.chrome.wait_for(lambda: not self._pending, f"the end of requests of {self.hash()}")

    def text(self, selector: str = "body") -> str:
        """What a reader sees of an element."""
        return str(self.eval(f"document.querySelector({json.dumps(selector)})?.innerText ?? ''"))

    def texts(self, selector: str) -> list[str]:
        """What a reader sees of each element that fits."""
        texts: list[str] = self.eval(f"[...document.querySelectorAll({json.dumps(selector)})].map(e => e.innerText)")
        return texts

    def count(self, selector: str) -> int:
        """How many elements fit."""
        return int(self.eval(f"document.querySelectorAll({json.dumps(selector)}).length"))

    def hash(self) -> str:
        """The address after `#`, with it."""
        return str(self.eval("location.hash"))

    def box(self, selector: str) -> dict[str, float]:
        """Where an element is in the window: x, y, width, height; it is scrolled into view first."""
        box: dict[str, float] | None = self.eval(
            f"(() => {{ const e = document.querySelector({json.dumps(selector)}); if (!e) return null;"
            "const seen = e.getBoundingClientRect();"
            "if (seen.top < 0 || seen.left < 0 || seen.bottom > innerHeight || seen.right > innerWidth)"
            " e.scrollIntoView({block: 'center', inline: 'center', behavior: 'instant'});"
            "const r = e.getBoundingClientRect(); return {x: r.x, y: r.y, width: r.width, height: r.height}; })()"
        )
        if box is None:
            raise BrowserError(f"no element fits {selector}")
        return box

    def mouse(self, kind: str, x: float, y: float, *, button: str = "none", clicks: int = 0, buttons: int = 0) -> None:
        """One event of the mouse: `mouseMoved`, `mousePressed`, `mouseReleased`."""
        self.call("Input.dispatchMouseEvent", type=kind, x=x, y=y, button=button, clickCount=clicks, buttons=buttons)

    def click_at(self, x: float, y: float) -> None:
        """Press and let go at a point of the window."""
        self.mouse("mouseMoved", x, y)
        self.mouse("mousePressed", x, y, button="left", clicks=1, buttons=1)
        self.mouse("mouseReleased", x, y, button="left", clicks=1)

    def click(self, selector: str) -> None:
        """Click the middle of an element with the mouse."""
        box = self.box(selector)
        self.click_at(box["x"] + box["width"] / 2, box["y"] + box["height"] / 2)

    def hover(self, selector: str) -> None:
        """Move the mouse to the middle of an element."""
        box = self.box(selector)
        self.mouse("mouseMoved", box["x"] + box["width"] / 2, box["y"] + box["height"] / 2)

    def drag(self, start: tuple[float, float], stop: tuple[float, float]) -> None:
        """Press at one point, move, let go at another."""
        self.mouse("mouseMoved", *start)
        self.mouse("mousePressed", *start, button="left", clicks=1, buttons=1)
        for i in (1, 2, 3, 4):
            at = (start[0] + (stop[0] - start[0]) * i / 4, start[1] + (stop[1] - start[1]) * i / 4)
            self.mouse("mouseMoved", *at, button="left", buttons=1)
        self.mouse("mouseReleased", *stop, button="left", clicks=1)

    def key(self, *keys: str) -> None:
        """Press keys one after the other: a character, or a name such as `Enter`; `Shift+Tab`, `Control+a`."""
        for combination in keys:
            *modifiers, name = combination.split("+") if len(combination) > 1 else [combination]
            bits = sum({"Alt": 1, "Control": 2, "Meta": 4, "Shift": 8}[modifier] for modifier in modifiers)
            key, code = KEYS.get(name, (name, ord(name.upper()[0])))
            event: dict[str, Any] = {"key": key, "windowsVirtualKeyCode": code, "modifiers": bits}
            text = "\r" if name == "Enter" else name if len(name) == 1 and not bits & 7 else ""
            self.call("Input.dispatchKeyEvent", type="keyDown" if text else "rawKeyDown", text=text, **event)
            self.call("Input.dispatchKeyEvent", type="keyUp", **event)

    def type(self, text: str) -> None:
        """Put text into what has the focus."""
        self.call("Input.insertText", text=text)

    def viewport(self, width: int, height: int, scale: float = 1) -> None:
        """Set the window's size."""
        self.call(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=scale, mobile=False
        )

    def media(self, *, dark: bool = False, **features: str) -> None:
        """Set what the system prefers: dark or light, and such as `prefers_reduced_motion="reduce"`."""
        settings = {"prefers-color-scheme": "dark" if dark else "light"}
        settings |= {name.replace("_", "-"): value for name, value in features.items()}
        self.call("Emulation.setEmulatedMedia", features=[{"name": k, "value": v} for k, v in settings.items()])

    def offline(self) -> None:
        """Cut the tab off from every network."""
        self.call("Network.emulateNetworkConditions", offline=True, latency=0, downloadThroughput=0, uploadThroughput=0)

    def screenshot(self, path: str | os.PathLike[str], *, full_page: bool = False) -> Path:
        """A picture of the window, or of the whole page, as PNG."""
        data = self.call("Page.captureScreenshot", format="png", captureBeyondViewport=full_page)["data"]
        Path(path).write_bytes(base64.b64decode(data))
        return Path(path)

    def close(self) -> None:
        """Close the tab, and forget its cookies."""
        self.chrome.call("Target.disposeBrowserContext", browserContextId=self._context)


def _pipe() -> tuple[int, int]:
    """A pipe whose ends are above the descriptors that Chromium wants for itself."""
    ends = os.pipe()
    moved = tuple(fcntl.fcntl(end, fcntl.F_DUPFD_CLOEXEC, 10) for end in ends)
    for end in ends:
        os.close(end)
    return moved[0], moved[1]
