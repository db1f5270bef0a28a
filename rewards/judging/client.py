"""HTTP client of a judge, or another server: chat completions with a limit of requests in flight, and retries."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from email.utils import parsedate_to_datetime
from typing import TYPE_CHECKING, Any

from core.errors import UserError, name_error, shorten
from core.text.json_text import decode_json
from core.text.secrets import HIDDEN, hide_secrets
from rewards import RunJudge
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
COMPLETIONS = "/chat/completions"
FIRST_WAIT_S, LONGEST_WAIT_S = 0.5, 30.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Server:
    """Server of chat completions: one address, or that of each engine of the run's judge."""

    name: str
    """Name in the hash of a request, which a resumed run must repeat."""
    urls: tuple[str, ...]
    key: str | None = field(repr=False)
    who: str = "the judge"
    """Subject of the sentences of errors."""
    mistakes: Mapping[int, str] = field(default_factory=lambda: MISTAKES)
    """Clauses, by status code, about mistakes in the recipe."""


def find_server(settings: JudgeSettings, judge: RunJudge | None) -> Server:
    """Return the server of the settings, or of the judge of the run. Raises UserError without either, or a key."""
    if settings.base_url is not None:
        url = settings.base_url.rstrip("/") + COMPLETIONS
        return Server(name=url, urls=(url,), key=settings.read_key())
    if judge is None:
        raise UserError(
            "reward.settings.base_url is missing: set it and model, or set judge.model for a judge that the run serves"
        )
    urls = tuple(url + COMPLETIONS for url in judge.urls)
    return Server(name=f"judge.model={judge.model}", urls=urls, key=judge.key or None)


class JudgeClient:
    """Client of a judge. Requests carry the key, which appears in no text that is returned or raised."""

    def __init__(self, settings: JudgeSettings, at_once: int, server: Server) -> None:
        """at_once: maximum requests in flight."""
        self.settings, self.server = settings, server
        self._key = server.key
        self._gate = asyncio.Semaphore(at_once)
        self._in_flight = dict.fromkeys(server.urls, 0)
        self._http: httpx.AsyncClient | None = None

    async def ask(self, body: dict[str, Any]) -> tuple[dict[str, Any], int]:
        """Return the server's answer and the number of retries.

        Raises Failed if the server refuses the request or takes none for `outage_s`, and UserError for a wrong key,
        address or model.
        """
        give_up = time.monotonic() + self.settings.outage_s
        retries, url = 0, ""
        while True:
            async with self._gate:
                url = self._choose_url(besides=url)
                found = await self._post_counted(url, body)
            if isinstance(found, dict):
                return found, retries
            problem, wait = found
            if wait is None:
                # full jitter: clients that failed together do not return together
                wait = min(LONGEST_WAIT_S, FIRST_WAIT_S * 2**retries) * random.random()
            if time.monotonic() + wait > give_up:
                raise Failed(f"{self.server.who} took no request for outage_s={self.settings.outage_s:g}: {problem}")
            retries += 1
            await asyncio.sleep(wait)

    def _choose_url(self, besides: str) -> str:
        """Return the least busy address. besides: that of a failed attempt, only if there is no other."""
        urls = [url for url in self._in_flight if url != besides] or [besides]
        return min(urls, key=self._in_flight.__getitem__)

    async def _post_counted(self, url: str, body: dict[str, Any]) -> dict[str, Any] | tuple[str, float | None]:
        self._in_flight[url] += 1
        try:
            return await self._post(url, body)
        finally:
            self._in_flight[url] -= 1

    async def _post(self, url: str, body: dict[str, Any]) -> dict[str, Any] | tuple[str, float | None]:
        """Return the answer, or a passing problem with the seconds after which the server wants to be asked again."""
        import httpx  # here: whoever lists the rewards imports this file, and calls no server

        if self._http is None:
            headers = {} if self._key is None else {"Authorization": f"Bearer {self._key}"}
            # httpx's own default has limits; max_concurrency is ours
            self._http = httpx.AsyncClient(headers=headers, limits=httpx.Limits(), timeout=None)
        try:
            async with asyncio.timeout(self.settings.timeout_s):
                response = await self._http.post(url, json=body)
        except TimeoutError:
            return f"no answer within timeout_s={self.settings.timeout_s:g}", None
        except httpx.TransportError as error:
            return self._clean(name_error(error)), None
        status = response.status_code
        who = self.server.who
        if why := self.server.mistakes.get(status):
            raise UserError(f"{who} at {url} answered {status}: {why}{self._quote(response)}")
        if status in RETRIED or status >= 500:
            wait = read_wait(response.headers.get("Retry-After"), now=response.headers.get("Date"))
            return f"status {status}{self._quote(response)}", wait
        if status != 200:
            raise Failed(f"{who} refused the request with status {status}{self._quote(response)}")
        try:
            found = decode_json(response.text)
        except ValueError:
            found = None
        return found if isinstance(found, dict) else (f"no JSON{self._quote(response)}", None)

    async def close(self) -> None:
        """Close the connections."""
        if self._http is not None:
            await self._http.aclose()

    def _quote(self, response: httpx.Response) -> str:
        said = " ".join(response.text.split())
        return f": {self._clean(shorten(said))}" if said else ""

    def clean(self, text: str) -> str:
        """Return a text without the key."""
        return text if self._key is None else text.replace(self._key, HIDDEN)

    def _clean(self, text: str) -> str:
        return hide_secrets(self.clean(text))


def read_wait(header: str | None, *, now: str | None) -> float | None:
    """Return the seconds of a header Retry-After, a number or a date; None without a readable one.

    now: header Date. The clock of this machine may differ from the server's by hours.

    >>> read_wait("0.5", now=None), read_wait("soon", now=None)
    (0.5, None)
    >>> read_wait("Wed, 21 Oct 2015 07:28:00 GMT", now="Wed, 21 Oct 2015 07:27:50 GMT")
    10.0
    """
    if header is None:
        return None
    try:
        return max(0.0, float(header))
    except ValueError:
        pass
    try:
        return max(0.0, (parsedate_to_datetime(header) - parsedate_to_datetime(now or "")).total_seconds())
    except (TypeError, ValueError):
        return None
