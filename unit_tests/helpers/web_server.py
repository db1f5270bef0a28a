"""Server of a web application on a free port of this machine."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager

from aiohttp import web

from core.timing.deadlines import SERVER_CLOSE_GRACE_S


@asynccontextmanager
async def serve(app: web.Application, *, cancels: bool = False) -> AsyncGenerator[str]:
    """Yield the address. cancels: a handler whose client has hung up is cancelled."""
    runner = web.AppRunner(app, shutdown_timeout=SERVER_CLOSE_GRACE_S, handler_cancellation=cancels)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    try:
        yield f"http://127.0.0.1:{runner.addresses[0][1]}"
    finally:
        await runner.cleanup()
