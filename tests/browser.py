"""A real browser without a window, spoken to by the DevTools protocol over a pipe."""

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
KEYS = {"ArrowDown": 40, "Home": 36, "Backspace": 8}


def executable() -> str | None:
    """Return the browser that `VARIABLE` names or that stands on the path."""
    return os.environ.get(VARIABLE) or next(filter(None, map(shutil.which, NAMES)), None)


class Browser:
    """Hold one page of a browser; ``problems`` collects errors of its console, and dialogs that opened."""

    def __init__(self, path: str, width: int, height: int = 900) -> None:
        self._folder = tempfile.TemporaryDirectory(ignore_cleanup_errors=True)
        heard, self._write = os.pipe()
        self._read, said = os.pipe()
        # It reads from 3 and writes to 4, which no other must be yet.
        high = [fcntl.fcntl(end, fcntl.F_DUPFD, 10) for end in (heard, said)]

        os.close(heard)
        os.close(said)
        self._process = subprocess.Popen(
            ["bash", "-c", 'exec "$0" "$@" 3<&{} 4>&{}'.format(*high), path, *FLAGS,
             f"--user-data-dir={self._folder.name}", f"--window-size={width},{height}"],
            pass_fds=high, stderr=subprocess.DEVNULL, start_new_session=True,
        )  # fmt: skip

        for end in high:
            os.close(end)

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
        os.close(self._write)  # which ends it
        try:
            self._process.wait(PATIENCE)
        finally:
            self._process.kill()
            os.close(self._read)
            self._folder.cleanup()

    def send(self, method: str, **parameters: Any) -> dict[str, Any]:
        """Send a command and return its result."""
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
        while b"\0" not in self._buffer:
            if not select.select([self._read], [], [], PATIENCE)[0]:
                raise TimeoutError("the browser says nothing")
            block = os.read(self._read, 1 << 20)
            if not block:
                raise EOFError("the browser has ended")
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

    def open(self, file: Path) -> None:
        """Load a file and wait until all of it is there."""
        self.send("Page.navigate", url=file.resolve().as_uri())
        while self._message().get("method") != "Page.loadEventFired":
            pass

    def resize(self, width: int, height: int = 900) -> None:
        """Take the size of a screen, a narrow one as a phone's."""
        self.send(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=1,
            mobile=width < 600,
        )

    def value(self, expression: str) -> Any:
        """Return what an expression is."""
        result = self.send("Runtime.evaluate", expression=expression, returnByValue=True)
        if "exceptionDetails" in result:
            raise RuntimeError(f"{expression}: {result['exceptionDetails']}")
        return result["result"].get("value")

    def texts(self, selector: str) -> list[str]:
        """Return the shown texts of the elements."""
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

    def press(self, key: str, **more: Any) -> None:
        """Press a key where the focus is."""
        code = KEYS[key]
        self.send(
            "Input.dispatchKeyEvent",
            type="rawKeyDown",
            key=key,
            windowsVirtualKeyCode=code,
            **more,
        )

        self.send(
            "Input.dispatchKeyEvent",
            type="keyUp",
            key=key,
            windowsVirtualKeyCode=code,
        )

    def fill(self, selector: str, text: str) -> None:
        """Type into a field, in place of what it holds."""
        self.click(selector)
        self.press("Home", commands=["selectAll"])
        self.press("Backspace")
        if text:
            self.send("Input.insertText", text=text)

    def choose(self, selector: str, place: int) -> None:
        """Choose the option of a list at a place, with the keyboard."""
        self.value(f"document.querySelector({json.dumps(selector)}).focus()")
        for key in ("Home", *["ArrowDown"] * place):
            self.press(key)

    def picture(self, file: Path) -> None:
        """Save what the whole page looks like, as PNG."""
        size = self.send("Page.getLayoutMetrics")["cssContentSize"]
        clip = {
            "x": 0,
            "y": 0,
            "width": size["width"],
            "height": size["height"],
            "scale": 1,
        }
        shot = self.send("Page.captureScreenshot", clip=clip, captureBeyondViewport=True)
        file.write_bytes(base64.b64decode(shot["data"]))
