"""A headless Chromium for tests, driven by its DevTools protocol through two pipes, without any other package."""

import base64
import fcntl
import json
import os
import shutil
import subprocess
import tempfile
import time
from pathlib import Path
from select import select


def chromium():
    """Return the path of the installed browser, or None."""
    return next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)


class Reloaded(Exception):
    """The page that was queried is gone, because it was reloaded."""


class Raised(AssertionError):
    """An expression raised an exception in the page."""


class Browser:
    """A page in a browser of its own; its requests and its console messages are recorded."""

    def __init__(self):
        self.folder = tempfile.mkdtemp()
        reads, theirs_w = os.pipe()
        theirs_r, self.writes = os.pipe()
        self.reads = reads
        high = [fcntl.fcntl(descriptor, fcntl.F_DUPFD, 20) for descriptor in (theirs_r, theirs_w)]
        self.process = subprocess.Popen(
            [
                chromium(), "--headless=new", "--remote-debugging-pipe", "--no-sandbox", "--disable-gpu",
                "--disable-dev-shm-usage", "--no-first-run", "--hide-scrollbars", f"--user-data-dir={self.folder}",
                "--disable-component-update", "--disable-background-networking", "--disable-sync", "about:blank",
            ],
            preexec_fn=lambda: (os.dup2(high[0], 3), os.dup2(high[1], 4)),
            pass_fds=(3, 4), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        )  # fmt: skip
        for descriptor in (theirs_r, theirs_w, *high):
            os.close(descriptor)
        self.buffer, self.number, self.events = b"", 0, []
        self.session = None
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self.session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")

    def close(self):
        self.process.kill()
        self.process.wait()
        os.close(self.reads)
        os.close(self.writes)
        shutil.rmtree(self.folder, ignore_errors=True)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.close()

    def call(self, method, **params):
        """Call a method of the protocol and wait for its result; events that arrive meanwhile are added to `events`."""
        self.number += 1
        message = {"id": self.number, "method": method, "params": params}
        if self.session:
            message["sessionId"] = self.session
        os.write(self.writes, json.dumps(message).encode() + b"\0")
        while True:
            reply = self._next(60)
            if reply.get("id") == self.number:
                if "context" in reply.get("error", {}).get("message", "") or "navigated" in str(reply.get("error")):
                    raise Reloaded(reply["error"])
                assert "error" not in reply, reply["error"]
                return reply["result"]
            self.events.append(reply)

    def open(self, path, width=1440, height=1000, scheme="light"):
        """Load a file and wait until it is complete."""
        self.resize(width, height)
        self.call("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])
        self.events.clear()
        self.call("Page.navigate", url=Path(path).resolve().as_uri())
        self.until("document.readyState === 'complete' && location.protocol === 'file:'")

    def resize(self, width, height):
        self.call(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=width < 600
        )

    def do(self, script):
        """Return the value of a JavaScript expression in the page."""
        reply = self.call("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)
        if "exceptionDetails" in reply:
            raise Raised(script, reply["exceptionDetails"])
        return reply["result"].get("value")

    def until(self, script, seconds=120):
        """Wait until an expression holds; in a page that is still loading it may raise an exception at first."""
        end = time.monotonic() + seconds
        while True:
            try:
                if outcome := self.do(script):
                    return
            except (Reloaded, Raised) as error:
                outcome = error
            assert time.monotonic() < end, (script, outcome)
            time.sleep(0.05)

    def draw_all(self):
        """Make the page draw every chart that is not hidden, as scrolling through it would."""
        self.resize(self.do("innerWidth"), self.do("document.documentElement.scrollHeight") + 100)
        shown = "[...document.querySelectorAll('.chart')].filter(each => each.offsetParent)"
        self.until(f"{shown}.every(each => each.querySelector('.main-svg'))")

    def picture(self, path):
        """Write the whole page as a PNG."""
        height = self.do("document.documentElement.scrollHeight")
        clip = {"x": 0, "y": 0, "width": self.do("innerWidth"), "height": height, "scale": 1}
        reply = self.call("Page.captureScreenshot", format="png", clip=clip, captureBeyondViewport=True)
        Path(path).write_bytes(base64.b64decode(reply["data"]))

    @property
    def complaints(self):
        """Messages of the console and the log, and exceptions."""
        messages = []
        for event in self.events:
            params = event.get("params", {})
            if event.get("method") == "Runtime.exceptionThrown":
                messages.append(
                    params["exceptionDetails"]["text"] + str(params["exceptionDetails"].get("exception", {}))
                )
            elif event.get("method") == "Log.entryAdded":
                messages.append(params["entry"]["text"])
            elif event.get("method") == "Runtime.consoleAPICalled":
                messages.append(str([argument.get("value") for argument in params["args"]]))
        return messages

    @property
    def requests(self):
        """The URLs that the page requested, except those embedded in it (data: and blob:)."""
        urls = [
            event["params"]["request"]["url"]
            for event in self.events
            if event.get("method") == "Network.requestWillBeSent"
        ]
        return [url for url in urls if not url.startswith(("data:", "blob:"))]

    def _next(self, seconds):
        end = time.monotonic() + seconds
        while b"\0" not in self.buffer:
            assert select([self.reads], [], [], max(0, end - time.monotonic()))[0], "the browser does not answer"
            part = os.read(self.reads, 1 << 20)
            assert part, "the browser has ended"
            self.buffer += part
        message, _, self.buffer = self.buffer.partition(b"\0")
        return json.loads(message)
