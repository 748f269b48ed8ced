"""Headless browser for tests of HTML pages, driven by the DevTools protocol over a pipe."""

from __future__ import annotations

import base64
import fcntl
import json
import os
import select
import shutil
import subprocess
import tempfile
from pathlib import Path
from typing import Any

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")
VARIABLE = "BROWSER_BINARY"
FLAGS = (
    "--headless=new", "--remote-debugging-pipe", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage",
    "--no-first-run", "--disable-extensions", "--disable-background-networking",
)  # fmt: skip
PATIENCE = 120.0
"""Seconds to wait for one message of the browser, or for its end."""
KEYS = {"ArrowDown": 40, "ArrowRight": 39, "Home": 36, "Backspace": 8}
"""Name of a key -> its Windows virtual key code, which the protocol requires."""


def executable() -> str | None:
    """Return the browser that `VARIABLE` names, or else the first of `NAMES` on PATH; None without one."""
    return os.environ.get(VARIABLE) or next(filter(None, map(shutil.which, NAMES)), None)


class Browser:
    """One page of a browser. ``problems`` collects console errors and opened dialogs."""

    def __init__(self, path: str, width: int, height: int = 900) -> None:
        self._folder = tempfile.TemporaryDirectory(ignore_cleanup_errors=True)
        command_reader, self._write = os.pipe()
        self._read, reply_writer = os.pipe()
        # The browser reads commands from descriptor 3 and writes replies to 4. Duplicates above 10 keep both
        # free until bash redirects them.
        inherited = [fcntl.fcntl(end, fcntl.F_DUPFD, 10) for end in (command_reader, reply_writer)]

        os.close(command_reader)
        os.close(reply_writer)
        # bash moves the pipes to the descriptors that the browser expects.
        self._process = subprocess.Popen(
            ["bash", "-c", 'exec "$0" "$@" 3<&{} 4>&{}'.format(*inherited), path, *FLAGS,
             f"--user-data-dir={self._folder.name}", f"--window-size={width},{height}"],
            pass_fds=inherited, stderr=subprocess.DEVNULL, start_new_session=True,
        )  # fmt: skip

        for end in inherited:
            os.close(end)

        # Open a page and attach to it; later commands carry the session's identifier.
        self._buffer = b""
        self._number = 0
        self._session = {}
        self.problems: list[str] = []
        target = self.send("Target.createTarget", url="about:blank")["targetId"]
        attached = self.send("Target.attachToTarget", targetId=target, flatten=True)
        self._session = {"sessionId": attached["sessionId"]}

        for domain in ("Page", "Runtime", "Log"):
            self.send(f"{domain}.enable")
        self.resize(width, height)

    def __enter__(self) -> Browser:
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self._write)  # the browser exits when its command pipe closes
        try:
            self._process.wait(PATIENCE)
        finally:
            self._process.kill()
            os.close(self._read)
            self._folder.cleanup()

    def send(self, method: str, **parameters: Any) -> dict[str, Any]:
        """Send a command and return its result.

        Events that arrive before the result are only searched for problems.
        """
        self._number += 1
        command = {
            "id": self._number,
            "method": method,
            "params": parameters,
            **self._session,
        }
        os.write(self._write, json.dumps(command).encode() + b"\0")

        while (message := self._message()).get("id") != self._number:
            pass

        if "error" in message:
            raise RuntimeError(f"{method}: {message['error']}")
        return message["result"]

    def _message(self) -> dict[str, Any]:
        """Return the next message of the browser, and record it if it reports a problem."""
        # Messages end with a zero byte.

        while b"\0" not in self._buffer:
            if not select.select([self._read], [], [], PATIENCE)[0]:
                raise TimeoutError(f"no message from the browser within {PATIENCE} s")
            block = os.read(self._read, 1 << 20)
            if not block:
                raise EOFError("the browser closed its pipe")
            self._buffer += block

        text, _, self._buffer = self._buffer.partition(b"\0")
        message = json.loads(text)
        method = message.get("method", "")
        values = message.get("params", {})

        if (
            method in ("Runtime.exceptionThrown", "Page.javascriptDialogOpening")
            or (method == "Log.entryAdded" and values["entry"]["level"] in ("error", "warning"))
            or (method == "Runtime.consoleAPICalled" and values["type"] in ("error", "warning", "assert"))
        ):
            self.problems.append(f"{method}: {json.dumps(values)[:500]}")
        return message

    def open(self, file: Path, fragment: str = "") -> None:
        """Load a file, whose address ends with ``#fragment``, and wait for its load event."""
        address = file.resolve().as_uri()
        if fragment:
            # From an empty page: another fragment of the same file would load nothing.
            self._navigate("about:blank")
            address += f"#{fragment}"
        self._navigate(address)

    def _navigate(self, address: str) -> None:
        """Open an address and wait for its load event."""
        self.send("Page.navigate", url=address)
        while self._message().get("method") != "Page.loadEventFired":
            pass

    def resize(self, width: int, height: int = 900) -> None:
        """Set the size of the screen in pixels; a width below 600 emulates a phone."""
        self.send(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=1,
            mobile=width < 600,
        )

    def value(self, expression: str) -> Any:
        """Evaluate a JavaScript expression in the page and return its value."""
        result = self.send("Runtime.evaluate", expression=expression, returnByValue=True)
        if "exceptionDetails" in result:
            raise RuntimeError(f"{expression}: {result['exceptionDetails']}")
        return result["result"].get("value")

    def texts(self, selector: str) -> list[str]:
        """Return the rendered text of each element that matches a CSS selector."""
        return self.value(f"[...document.querySelectorAll({json.dumps(selector)})].map(e => e.innerText)")

    def click(self, selector: str) -> None:
        """Click on the middle of an element."""
        x, y = self.value(
            f"(() => {{ const e = document.querySelector({json.dumps(selector)}); e.scrollIntoView();"
            "const b = e.getBoundingClientRect(); return [b.x + b.width / 2, b.y + b.height / 2]; })()"
        )

        for kind in ("mousePressed", "mouseReleased"):
            self.send(
                "Input.dispatchMouseEvent",
                type=kind,
                x=x,
                y=y,
                button="left",
                clickCount=1,
            )

    def drag(self, selector: str, first: float, last: float) -> None:
        """Drag the mouse over the middle of an element, from ``first`` to ``last`` as shares of its width.

        Equal positions only move it there.
        """
        x, y, width = self.value(
            f"(() => {{ const e = document.querySelector({json.dumps(selector)}); e.scrollIntoView();"
            "const b = e.getBoundingClientRect(); return [b.x, b.y + b.height / 2, b.width]; })()"
        )
        moves = [("mouseMoved", first, "none")]
        if first != last:
            moves += [("mousePressed", first, "left"), ("mouseMoved", last, "left")]
            moves += [("mouseReleased", last, "left")]
        for kind, share, button in moves:
            self.send(
                "Input.dispatchMouseEvent",
                type=kind,
                x=x + share * width,
                y=y,
                button=button,
                buttons=int(button == "left"),
                clickCount=int(button == "left"),
            )

    def press(self, key: str, **options: Any) -> None:
        """Press and release a key on the focused element."""
        code = KEYS[key]
        self.send(
            "Input.dispatchKeyEvent",
            type="rawKeyDown",
            key=key,
            windowsVirtualKeyCode=code,
            **options,
        )

        self.send(
            "Input.dispatchKeyEvent",
            type="keyUp",
            key=key,
            windowsVirtualKeyCode=code,
        )

    def fill(self, selector: str, text: str) -> None:
        """Replace the text of an input field by typing."""
        self.click(selector)
        self.press("Home", commands=["selectAll"])
        self.press("Backspace")
        if text:
            self.send("Input.insertText", text=text)

    def choose(self, selector: str, index: int) -> None:
        """Select the option at ``index`` of a select element, with the keyboard."""
        self.value(f"document.querySelector({json.dumps(selector)}).focus()")
        for key in ("Home", *["ArrowDown"] * index):
            self.press(key)

    def picture(self, file: Path) -> None:
        """Save a screenshot of the whole page as PNG."""
        size = self.send("Page.getLayoutMetrics")["cssContentSize"]
        # The whole page, not only the visible part.
        clip = {
            "x": 0,
            "y": 0,
            "width": size["width"],
            "height": size["height"],
            "scale": 1,
        }
        shot = self.send("Page.captureScreenshot", clip=clip, captureBeyondViewport=True)
        file.write_bytes(base64.b64decode(shot["data"]))
