"""HTTP client of a judge: chat completions with a limit of requests in flight, and retries."""

from __future__ import annotations

import asyncio
import random
import time
from email.utils import parsedate_to_datetime
from typing import TYPE_CHECKING, Any

from core.errors import UserError, name_error, shorten
from core.text.secrets import HIDDEN, hide_secrets
from rewards.judging.settings import JudgeSettings
from rewards.scored import Failed

if TYPE_CHECKING:
    import httpx

RETRIED = (408, 409, 425, 429)
"""Status codes of requests that may succeed later, besides 500 and above."""
MISTAKES = {
    401: "the server does not accept the key: correct the variable of reward.settings.api_key_env",
    403: "the key may not use this model: correct the variable of reward.settings.api_key_env",
    404: "the server knows no such address or model: correct reward.settings.base_url or model",
}
FIRST_WAIT_S, LONGEST_WAIT_S = 0.5, 30.0


class JudgeClient:
    """Client of one server. Its requests carry the key, which appears in no text that it returns or raises."""

    def __init__(self, settings: JudgeSettings, at_once: int) -> None:
        """at_once: maximum requests in flight. Raises UserError if the key is not set."""
        self.settings = settings
        self.url = settings.base_url.rstrip("/") + "/chat/completions"
        self._key = settings.read_key()
        self._gate = asyncio.Semaphore(at_once)
        self._http: httpx.AsyncClient | None = None

    async def ask(self, body: dict[str, Any]) -> tuple[dict[str, Any], int]:
        """Return the server's answer and the number of retries.

        Raises Failed if the server refuses the request or takes none for `outage_s`, and UserError for a wrong key,
        address or model.
        """
        give_up = time.monotonic() + self.settings.outage_s
        retries = 0
        while True:
            async with self._gate:
                found = await self._post(body)
            if isinstance(found, dict):
                return found, retries
            problem, wait = found
            if wait is None:
                # full jitter: clients that failed together do not return together
                wait = min(LONGEST_WAIT_S, FIRST_WAIT_S * 2**retries) * random.random()
            if time.monotonic() + wait > give_up:
                raise Failed(f"the judge took no request for outage_s={self.settings.outage_s:g}: {problem}")
            retries += 1
            await asyncio.sleep(wait)

    async def _post(self, body: dict[str, Any]) -> dict[str, Any] | tuple[str, float | None]:
        """Return the answer, or a passing problem with the seconds after which the server wants to be asked again."""
        import httpx  # here: whoever lists the rewards imports this file, and calls no server

        if self._http is None:
            headers = {} if self._key is None else {"Authorization": f"Bearer {self._key}"}
            limits = httpx.Limits(max_connections=None, max_keepalive_connections=None)
            self._http = httpx.AsyncClient(headers=headers, limits=limits, timeout=None)
        try:
            async with asyncio.timeout(self.settings.timeout_s):
                response = await self._http.post(self.url, json=body)
        except TimeoutError:
            return f"no answer within timeout_s={self.settings.timeout_s:g}", None
        except httpx.TransportError as error:
            return self._clean(name_error(error)), None
        status = response.status_code
        if status in MISTAKES:
            raise UserError(f"the judge at {self.url} answered {status}: {MISTAKES[status]}{self._quote(response)}")
        if status in RETRIED or status >= 500:
            return f"status {status}{self._quote(response)}", read_wait(response.headers.get("Retry-After"))
        if status != 200:
            raise Failed(f"the judge refused the request with status {status}{self._quote(response)}")
        try:
            found = response.json()
        except ValueError:
            found = None
        return found if isinstance(found, dict) else (f"no JSON{self._quote(response)}", None)

    def _quote(self, response: httpx.Response) -> str:
        said = " ".join(response.text.split())
        return f": {self._clean(shorten(said))}" if said else ""

    def clean(self, text: str) -> str:
        """Return a text without the key."""
        return text if self._key is None else text.replace(self._key, HIDDEN)

    def _clean(self, text: str) -> str:
        return hide_secrets(self.clean(text))


def read_wait(header: str | None) -> float | None:
    """Return the seconds of a header Retry-After, a number or a date; None without a readable one.

    >>> read_wait("0.5"), read_wait("soon"), read_wait("Wed, 21 Oct 2015 07:28:00 GMT")
    (0.5, None, 0.0)
    """
    if header is None:
        return None
    try:
        return max(0.0, float(header))
    except ValueError:
        pass
    try:
        return max(0.0, parsedate_to_datetime(header).timestamp() - time.time())
    except (TypeError, ValueError):
        return None
