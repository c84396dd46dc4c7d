"""A real browser, driven by its DevTools protocol over pipes: what it loads, says and shows."""

from __future__ import annotations

import base64
import json
import os
import select
import shutil
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest

NAMES = ("chromium", "chromium-browser", "google-chrome")
PATIENCE = 60.0  # seconds for one answer


def find() -> str:
    """The browser's program; the test is skipped where there is none."""
    found = next((path for name in NAMES if (path := shutil.which(name))), None)
    if found is None:
        pytest.skip("no chromium on this machine (Debian: apt-get install chromium)")
    return found


class Browser:
    """One page in a headless Chromium.

    Protocol: https://chromedevtools.github.io/devtools-protocol/, messages end with a zero byte.
    """

    def __init__(self, profile: Path):
        to_browser, self._out = os.pipe()
        self._in, from_browser = os.pipe()
        root = ["--no-sandbox"] if os.geteuid() == 0 else []  # Chromium's sandbox refuses root
        command = [
            find(), "--headless", "--disable-gpu", "--hide-scrollbars", "--remote-debugging-pipe", *root,
            "--no-first-run", "--disable-dev-shm-usage", f"--user-data-dir={profile}", "about:blank",
        ]  # fmt: skip

        def as_three_and_four() -> None:
            ends = os.dup(to_browser), os.dup(from_browser)  # either may be 3 or 4 itself
            os.dup2(ends[0], 3)
            os.dup2(ends[1], 4)

        # Safe here: the tests start no thread before, and nothing else is imported in the child.
        self._process = subprocess.Popen(
            command,
            close_fds=False,
            preexec_fn=as_three_and_four,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        for end in (to_browser, from_browser):
            os.close(end)
        self._number = 0
        self._buffer = b""
        self.events: list[dict[str, Any]] = []
        target = self._call("Target.createTarget", url="about:blank")["targetId"]
        self._session: str | None = None
        self._session = self._call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Network", "Runtime", "Log"):
            self._call(f"{domain}.enable")

    def close(self) -> None:
        """Ends the browser."""
        self._process.kill()
        self._process.wait()
        os.close(self._in)
        os.close(self._out)

    def open(self, file: Path, *, width: int = 1200, height: int = 900, dark: bool = False) -> None:
        """Loads a page and waits until it is there."""
        self.events.clear()
        self._call(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=1,
            mobile=False,
        )
        scheme = [{"name": "prefers-color-scheme", "value": "dark" if dark else "light"}]
        self._call("Emulation.setEmulatedMedia", features=scheme)
        self._call("Page.navigate", url=file.resolve().as_uri())
        self._until(lambda event: event["method"] == "Page.loadEventFired")

    def run(self, script: str) -> Any:
        """The value of an expression in the page."""
        done = self._call("Runtime.evaluate", expression=script, returnByValue=True)
        assert "exceptionDetails" not in done, done["exceptionDetails"]
        return done["result"].get("value")

    def point_at(self, x: float, y: float) -> None:
        """Moves the mouse."""
        self._call("Input.dispatchMouseEvent", type="mouseMoved", x=x, y=y)

    def press(self, key: str) -> None:
        """A key, on what has the focus."""
        for kind in ("keyDown", "keyUp"):
            self._call("Input.dispatchKeyEvent", type=kind, key=key, code=key)

    def picture(self, path: Path, *, whole: bool = False) -> Path:
        """A screenshot as PNG, of what is seen or of the whole page."""
        if whole:
            height = self.run("Math.ceil(document.documentElement.getBoundingClientRect().height)")
            self._call(
                "Emulation.setDeviceMetricsOverride",
                width=1200,
                height=height,
                deviceScaleFactor=1,
                mobile=False,
            )
        shot = self._call("Page.captureScreenshot", format="png")
        path.write_bytes(base64.b64decode(shot["data"]))
        return path

    def requests(self) -> list[str]:
        """Addresses that the page asked for, itself and data: aside."""
        asked = [
            e["params"]["request"]["url"] for e in self.events if e["method"] == "Network.requestWillBeSent"
        ]
        return [url for url in asked[1:] if not url.startswith("data:")]

    def complaints(self) -> list[str]:
        """What the console shows: errors, warnings, broken policies."""
        said = [
            event["params"]["entry"]["text"] for event in self.events if event["method"] == "Log.entryAdded"
        ]
        thrown = [
            str(event["params"]) for event in self.events if event["method"] == "Runtime.exceptionThrown"
        ]
        spoken = [
            str(event["params"]) for event in self.events if event["method"] == "Runtime.consoleAPICalled"
        ]
        return said + thrown + spoken

    def _call(self, method: str, **params: Any) -> dict[str, Any]:
        self._number += 1
        message: dict[str, Any] = {"id": self._number, "method": method, "params": params}
        if getattr(self, "_session", None):
            message["sessionId"] = self._session
        os.write(self._out, json.dumps(message).encode() + b"\0")
        answer = self._until(lambda event: event.get("id") == self._number)
        assert "error" not in answer, answer
        result: dict[str, Any] = answer["result"]
        return result

    def _until(self, wanted: Any) -> dict[str, Any]:
        end = time.monotonic() + PATIENCE
        while True:
            while b"\0" in self._buffer:
                text, self._buffer = self._buffer.split(b"\0", 1)
                message: dict[str, Any] = json.loads(text)
                if "method" in message:
                    self.events.append(message)
                if wanted({"method": "", **message}):
                    return message
            left = end - time.monotonic()
            if left <= 0 or not select.select([self._in], [], [], left)[0]:
                raise TimeoutError("the browser does not answer")
            more = os.read(self._in, 1 << 20)
            if not more:
                raise RuntimeError(f"the browser ended with code {self._process.wait()}")
            self._buffer += more
