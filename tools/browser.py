"""A headless Chromium for tests and recordings of the run page, spoken to over two pipes; no driver package is needed.

The protocol is Chromium's own (DevTools): JSON messages that end in a zero byte, on file descriptors 3 and 4.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from pathlib import Path
from types import TracebackType
from typing import Any

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
MISSING = "no Chromium was found: `make browser` installs Debian's, where it may"
OPTIONS = (
    *("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--hide-scrollbars"),
    *("--no-first-run", "--disable-extensions", "--disable-background-networking", "--remote-debugging-pipe"),
)
"""No sandbox, because root may have none; the pages are our own."""


def find_browser() -> str | None:
    """Return the path of a Chromium; None where there is none."""
    return next((path for name in NAMES if (path := shutil.which(name))), None)


class Browser:
    """Browser with a page, as a context manager. `events` holds all events of the page."""

    def __init__(self, program: str, profile: Path, *, width: int = 1400, height: int = 1000) -> None:
        commands, self._commands = os.pipe()
        self._answers, answers = os.pipe()
        options = [*OPTIONS, f"--user-data-dir={profile}", f"--window-size={width},{height}", "about:blank"]
        self.process = subprocess.Popen(
            ["bash", "-c", f'exec "$@" 3<&{commands} 4>&{answers}', "bash", program, *options],
            pass_fds=(commands, answers),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        os.close(commands)
        os.close(answers)
        self.events: list[dict[str, Any]] = []
        self._rest = b""
        self._number = 0
        self._session: str | None = None
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Network", "Log"):
            self.call(f"{domain}.enable")

    def __enter__(self) -> Browser:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        os.close(self._commands)  # which ends it
        try:
            self.process.wait(20)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        os.close(self._answers)

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        """Call a method of the protocol; return the result. Raises RuntimeError for an error."""
        self._number += 1
        message: dict[str, Any] = {"id": self._number, "method": method, "params": parameters}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._commands, json.dumps(message).encode() + b"\0")
        while (answer := self._read()).get("id") != self._number:
            self.events.append(answer)
        if "error" in answer:
            raise RuntimeError(f"{method}: {answer['error']}")
        return answer["result"]

    def _read(self) -> dict[str, Any]:
        while b"\0" not in self._rest:
            got = os.read(self._answers, 1 << 20)
            if not got:
                raise RuntimeError("the browser has ended")
            self._rest += got
        message, self._rest = self._rest.split(b"\0", 1)
        return json.loads(message)

    def open(self, page: Path, where: str = "") -> None:
        """Open a page of this machine and wait until its script says that it is ready, or that it failed."""
        self._navigate("about:blank")  # the same file with another place would not be loaded again
        self._navigate(f"{page.absolute().as_uri()}{where}")
        self.wait_for("document.body.dataset.ready || document.body.dataset.failed")
        if failed := self.ask("document.body.dataset.failed || ''"):
            raise RuntimeError(f"the page failed: {failed}")

    def _navigate(self, address: str) -> None:
        seen = len(self.events)
        self.call("Page.navigate", url=address)
        while not any(event.get("method") == "Page.loadEventFired" for event in self.events[seen:]):
            self.events.append(self._read())

    def ask(self, expression: str) -> Any:
        """Return the value of a JavaScript expression; of a promise the value that it brings."""
        got = self.call("Runtime.evaluate", expression=expression, awaitPromise=True, returnByValue=True)
        if "exceptionDetails" in got:
            details = got["exceptionDetails"]
            raise RuntimeError(details.get("exception", {}).get("description") or details["text"])
        return got["result"].get("value")

    def wait_for(self, expression: str) -> Any:
        """Wait until an expression is true within the page; return the value."""
        return self.ask(
            f"new Promise((done) => {{ const look = () => {{ const x = {expression};"
            " x ? done(x) : setTimeout(look, 10); }; look(); })"
        )

    def click(self, selector: str, *, across: float = 0.5, down: float = 0.5) -> None:
        """Press and release the mouse on an element, at a part of the width and height."""
        box = self.ask(
            f"(() => {{ const e = document.querySelector({json.dumps(selector)});"
            " e.scrollIntoView({block: 'center'});"
            " const b = e.getBoundingClientRect(); return [b.x, b.y, b.width, b.height]; })()"
        )
        at = {"x": box[0] + across * box[2], "y": box[1] + down * box[3]}
        self.call("Input.dispatchMouseEvent", type="mouseMoved", **at)
        for kind in ("mousePressed", "mouseReleased"):
            self.call("Input.dispatchMouseEvent", type=kind, button="left", clickCount=1, **at)

    def complaints(self) -> list[str]:
        """Return errors that pages raised or that the browser logged, such as a request that was refused."""
        said: list[str] = []
        for event in self.events:
            parameters = event.get("params", {})
            if event.get("method") == "Runtime.exceptionThrown":
                details = parameters["exceptionDetails"]
                said.append(details.get("exception", {}).get("description") or details["text"])
            elif event.get("method") == "Log.entryAdded" and parameters["entry"]["level"] == "error":
                said.append(parameters["entry"]["text"])
        return said

    def requests(self) -> list[str]:
        """Return every address that a page asked for."""
        sent = [event for event in self.events if event.get("method") == "Network.requestWillBeSent"]
        return [event["params"]["request"]["url"] for event in sent]
