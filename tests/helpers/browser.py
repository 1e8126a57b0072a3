"""Headless Chromium, driven over its DevTools pipe: it opens pages, clicks, types, and keeps what the console says."""

import base64
import json
import os
import shutil
import subprocess
import tempfile
import time

import pytest

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
needs_chromium = pytest.mark.skipif(CHROMIUM is None, reason="Chromium is not installed")
FLAGS = (
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-sync",
    "--disable-background-networking", "--disable-component-update", "--disable-dev-shm-usage",
    "--remote-debugging-pipe",
)  # fmt: skip


class Browser:
    """A context with one tab."""

    def __init__(self, width=1200, height=900):
        self.problems, self._count, self._left = [], 0, b""
        self._home = tempfile.TemporaryDirectory(ignore_cleanup_errors=True)
        read, self._to = os.pipe()
        self._from, write = os.pipe()
        command = [
            CHROMIUM,
            *FLAGS,
            f"--user-data-dir={self._home.name}",
            f"--window-size={width},{height}",
            "about:blank",
        ]

        def connect():  # Chromium reads from 3 and writes to 4
            first, second = os.dup(read), os.dup(write)
            os.dup2(first, 3)
            os.dup2(second, 4)

        self._process = subprocess.Popen(
            command, close_fds=False, preexec_fn=connect, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        os.close(read), os.close(write)
        self._session = None
        target = self.send("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.send("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.send(f"{domain}.enable")

    def __enter__(self):
        return self

    def __exit__(self, *error):
        self._process.kill()
        self._process.wait()
        os.close(self._to), os.close(self._from)
        self._home.cleanup()

    def send(self, method, **params):
        """Call a method of the protocol; what the console says meanwhile is kept in ``problems``."""
        self._count += 1
        message = {"id": self._count, "method": method, "params": params}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._to, json.dumps(message).encode() + b"\0")
        while True:
            found = self._read()
            if found.get("id") == self._count:
                assert "error" not in found, found["error"]
                return found["result"]

    def _read(self):
        while b"\0" not in self._left:
            self._left += os.read(self._from, 2**16) or pytest.fail("Chromium has ended")
        line, _, self._left = self._left.partition(b"\0")
        found = json.loads(line)
        if found.get("method") in ("Runtime.exceptionThrown", "Log.entryAdded"):
            self.problems.append(json.dumps(found["params"]))
        if found.get("method") == "Runtime.consoleAPICalled" and found["params"]["type"] in ("error", "warning"):
            self.problems.append(json.dumps(found["params"]))
        if found.get("method") == "Network.requestWillBeSent":
            url = found["params"]["request"]["url"]
            if not url.startswith(("file://", "http://127.0.0.1", "about:", "data:")):
                self.problems.append(f"request to {url}")
        return found

    def open(self, url):
        self.send("Page.navigate", url=url)
        self.wait("document.readyState === 'complete' && location.href !== 'about:blank'")

    def run(self, script):
        """Value of a JavaScript expression."""
        found = self.send("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in found, found["exceptionDetails"]
        return found["result"].get("value")

    def wait(self, script, seconds=30):
        """Wait until an expression is true."""
        end = time.monotonic() + seconds
        while not self.run(f"Boolean({script})"):
            assert time.monotonic() < end, f"still not: {script}"
            time.sleep(0.02)

    def click(self, selector, place=0):
        """Click on an element where it is, as a mouse does."""
        where = f"document.querySelectorAll({json.dumps(selector)})[{place}]"
        self.run(f"{where}.scrollIntoView({{block: 'center', behavior: 'instant'}})")
        box = self.run(
            f"(({{x, y, width, height}}) => [x + width / 2, y + height / 2])({where}.getBoundingClientRect())"
        )
        for kind in ("mouseMoved", "mousePressed", "mouseReleased"):
            button = "none" if kind == "mouseMoved" else "left"
            self.send("Input.dispatchMouseEvent", type=kind, x=box[0], y=box[1], button=button, clickCount=1)

    def type(self, text):
        """Type characters into what has the focus."""
        for character in text:
            self.send("Input.dispatchKeyEvent", type="keyDown", text=character, key=character)
            self.send("Input.dispatchKeyEvent", type="keyUp", key=character)

    def press(self, key, code):
        """Press a key without a character, such as Enter (13)."""
        for kind in ("rawKeyDown", "char", "keyUp"):
            text = {"text": "\r"} if kind == "char" and key == "Enter" else {}
            self.send("Input.dispatchKeyEvent", type=kind, key=key, windowsVirtualKeyCode=code, **text)

    def picture(self, path):
        """Save a picture of what is shown."""
        data = self.send("Page.captureScreenshot", format="png", captureBeyondViewport=True)["data"]
        path.write_bytes(base64.b64decode(data))

    def printed(self):
        """The page as printed, PDF."""
        return base64.b64decode(self.send("Page.printToPDF")["data"])
