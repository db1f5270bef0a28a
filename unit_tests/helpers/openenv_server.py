"""Server that speaks OpenEnv's wire: guess a number."""

from __future__ import annotations

import asyncio
import json
from contextlib import asynccontextmanager

from aiohttp import web

from unit_tests.helpers.web_server import serve

TEXT = {"message": {"type": "string"}, "metadata": {"type": "object"}}


class Server:
    """Guess a number: every wrong guess earns 0.25, the right one 1."""

    def __init__(self, *, capacity=99, answer=None, at="step", fields=TEXT, schema=None):
        """answer: to each message of the kind `at`; "" for none."""
        self.capacity, self.answer, self.sessions, self.resets, self.steps = capacity, answer, 0, [], []
        self.at = at
        self.schema = schema or json.dumps({"action": {"properties": fields, "required": [*fields][:2]}})
        self.sockets = []

    async def show_schema(self, http):
        return web.Response(text=self.schema)

    async def serve(self, http):
        await (socket := web.WebSocketResponse()).prepare(http)
        if self.sessions >= self.capacity:
            await self.send(socket, "error", {"message": "all in use", "code": "CAPACITY_REACHED"})
            await socket.close()
            return socket
        self.sockets.append(socket)
        self.sessions += 1
        try:
            async for message in socket:
                given = json.loads(message.data)
                if given["type"] == "close":
                    break
                if self.answer is not None and given["type"] == self.at:
                    if self.answer:  # else without an answer
                        await socket.send_str(self.answer)
                elif given["type"] == "reset":
                    self.resets.append(given["data"])
                    await self.send(socket, "observation", {"observation": {"text": "7 7"}, "done": False})
                else:
                    self.steps.append(given["data"])
                    right = "3" in str(given["data"])
                    told = {"observation": {"prompt": "8"}, "reward": 1.0 if right else 0.25, "done": right}
                    await self.send(socket, "observation", told)
        finally:
            self.sessions -= 1
        return socket

    async def send(self, socket, kind, data):
        await asyncio.sleep(0.01)
        await socket.send_str(json.dumps({"type": kind, "data": data}))

    @asynccontextmanager
    async def running(self):
        app = web.Application()
        app.router.add_get("/schema", self.show_schema)
        app.router.add_get("/ws", self.serve)
        async with serve(app, cancels=True) as address:
            yield f"{address}/"
