"""A real browser without a window, where there is one: which it is, and one page driven over the pipe of its DevTools protocol."""

import base64
import fcntl
import json
import os
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

BROWSERS = ("chromium", "chromium-headless-shell", "google-chrome", "chrome")
PATIENCE_S = 120.0
AS_3_AND_4 = "import os, sys; os.dup2(int(sys.argv[1]), 3); os.dup2(int(sys.argv[2]), 4); os.execv(sys.argv[3], sys.argv[3:])"
"""The numbers that the protocol's pipes have."""


def browser() -> str:
    """Its program; skips the test where there is none."""
    found = os.environ.get("CHROMIUM") or next(filter(None, map(shutil.which, BROWSERS)), None)
    if found is None:
        pytest.skip(f"none of {', '.join(BROWSERS)} is installed, and CHROMIUM names none")
    return found


PHONE = (390, 844)
"""Width and height of a phone's window, in CSS pixels."""


class Page:
    """A tab: `run` is JavaScript in it, `asked` are all addresses that it asked for, `complaints` the console's errors and warnings."""

    def __init__(self, commands: Any, answers: Any) -> None:
        """Two ends of pipes, binary."""
        self._commands, self._answers, self._number = commands, answers, 0
        self._session: str | None = None
        self.asked: list[str] = []
        self.complaints: list[str] = []
        target = self._call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self._call("Target.attachToTarget", targetId=target, flatten=True)[
            "sessionId"
        ]
        self._call("Network.enable")
        self._call("Page.enable")
        self._call("Runtime.enable")
        self._call("Log.enable")

    def open(self, address: str) -> None:
        self._call("Page.navigate", url=address)
        self.wait("document.readyState === 'complete' && location.href !== 'about:blank'")

    def resize(self, width: int, height: int, scale: float = 1.0) -> None:
        """Give the window this size in CSS pixels. scale: pixels of a screenshot for each of them."""
        self._call(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=scale,
            mobile=width <= PHONE[0],
        )

    def prefer(self, scheme: str) -> None:
        """Let the system ask for `light` or `dark` pages."""
        feature = {"name": "prefers-color-scheme", "value": scheme}
        self._call("Emulation.setEmulatedMedia", features=[feature])

    def picture(self) -> bytes:
        """The window as a PNG file."""
        return base64.b64decode(self._call("Page.captureScreenshot", format="png")["data"])

    def type(self, text: str) -> None:
        """Into what has the focus, as a keyboard does."""
        self._call("Input.insertText", text=text)

    def run(self, script: str) -> Any:
        found = self._call(
            "Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True
        )
        assert "exceptionDetails" not in found, found
        return found["result"].get("value")

    def wait(self, condition: str) -> None:
        end = time.monotonic() + PATIENCE_S
        while not self.run(condition):
            assert time.monotonic() < end, f"{condition} has not come about"
            time.sleep(0.05)

    def _call(self, method: str, **values: Any) -> Any:
        self._number += 1
        message = {"id": self._number, "method": method, "params": values}
        if self._session:
            message["sessionId"] = self._session
        self._commands.write(json.dumps(message).encode() + b"\0")
        self._commands.flush()
        while (found := self._read()).get("id") != self._number:
            self._note(found.get("method"), found.get("params"))
        assert "error" not in found, found
        return found["result"]

    def _note(self, event: str | None, about: Any) -> None:
        """Keep what the tab asked for, and what its console complained about."""
        if event == "Network.requestWillBeSent":
            self.asked.append(about["request"]["url"])
        elif event == "Runtime.exceptionThrown":
            self.complaints.append(json.dumps(about["exceptionDetails"]))
        elif event == "Log.entryAdded" and about["entry"]["level"] in ("error", "warning"):
            self.complaints.append(about["entry"]["text"])
        elif event == "Runtime.consoleAPICalled" and about["type"] in ("error", "warning"):
            self.complaints.append(json.dumps(about["args"]))

    def _read(self) -> dict[str, Any]:
        found = bytearray()
        while (byte := self._answers.read(1)) != b"\0":
            assert byte, "the browser has ended"
            found += byte
        message: dict[str, Any] = json.loads(found)
        return message


@contextmanager
def page(directory: Path) -> Iterator[Page]:
    """An empty one; the browser's own files go into the directory."""
    program = browser()
    (commanded, commanding), (answering, answered) = os.pipe(), os.pipe()
    ends = [fcntl.fcntl(end, fcntl.F_DUPFD, 10) for end in (commanded, answered)]
    command = [
        program, "--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={directory / 'profile'}", "--remote-debugging-pipe",
        "--disable-background-networking", "--disable-component-update",
    ]  # fmt: skip
    process = subprocess.Popen(
        [sys.executable, "-ISc", AS_3_AND_4, *map(str, ends), *command],
        pass_fds=ends,
        stderr=subprocess.DEVNULL,
    )
    for end in (commanded, answered, *ends):
        os.close(end)
    hangs = threading.Timer(3 * PATIENCE_S, process.kill)
    hangs.start()
    try:
        with os.fdopen(commanding, "wb") as commands, os.fdopen(answering, "rb") as answers:
            yield Page(commands, answers)
    finally:
        hangs.cancel()
        process.kill()
        process.wait()


@contextmanager
def opened(path: Path, tab: Page) -> Iterator[Page]:
    """The page after its scripts have run. At the end it has asked for nothing else, and its console has no complaint."""
    tab.asked.clear()
    tab.complaints.clear()
    tab.resize(1100, 900)
    tab.prefer("light")
    tab.open(path.as_uri())
    yield tab
    assert tab.asked == [path.as_uri()]
    assert tab.complaints == []


def shown(tab: Page, selector: str) -> bool:
    """True if the first such element has an area within the width of the window."""
    return bool(
        tab.run(
            f"(() => {{ const box = document.querySelector({selector!r}).getBoundingClientRect(); "
            "return box.width > 0 && box.height > 0 && box.left >= 0 && box.right <= innerWidth + 1 })()"
        )
    )


def fits(tab: Page) -> bool:
    """True if the page can be read without scrolling sideways."""
    return bool(tab.run("document.documentElement.scrollWidth <= innerWidth"))
