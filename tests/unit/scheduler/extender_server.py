"""An extender as one of kube-scheduler's is: a small HTTP server that filters and scores nodes."""

from __future__ import annotations

import asyncio
import threading
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from aiohttp import web

if TYPE_CHECKING:
    from collections.abc import Iterator


class ExtenderServer:
    """Refuses the nodes of ``refused``, and scores by ``scores``; ``silent`` ones never answer."""

    def __init__(self, *, lower_case: bool = False) -> None:
        self.refused: dict[str, str] = {}
        self.scores: dict[str, int] = {}
        self.error = ""
        self.silent = False
        self.calls: list[tuple[str, dict[str, Any]]] = []
        self.url = ""
        self._lower_case = lower_case
        self._runner: web.AppRunner | None = None

    async def start(self) -> None:
        app = web.Application()
        app.router.add_post("/scheduler/{verb}", self._answer)
        self._runner = web.AppRunner(app, shutdown_timeout=0.1)
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", 0).start()
        host, port = self._runner.addresses[0][:2]
        self.url = f"http://{host}:{port}/scheduler"

    async def stop(self) -> None:
        if self._runner is not None:
            await self._runner.cleanup()

    async def _answer(self, request: web.Request) -> web.Response:
        verb, args = request.match_info["verb"], await request.json()
        self.calls.append((verb, args))
        if self.silent:
            await asyncio.Event().wait()
        if self.error:
            return web.json_response({"Error": self.error})
        nodes = args["Nodes"]["items"] if args["Nodes"] else None
        names = args["NodeNames"] or [node["metadata"]["name"] for node in nodes or ()]
        if verb == "prioritize":
            scores = [{"Host": n, "Score": self.scores.get(n, 0)} for n in names]
            return web.json_response([self._cased(one) for one in scores])
        kept = [name for name in names if name not in self.refused]
        result: dict[str, Any] = {
            "FailedNodes": {n: why for n, why in self.refused.items() if n in names and why},
            "NodeNames": None if nodes is not None else kept,
            "Nodes": None,
            "Error": "",
        }
        if nodes is not None:
            items = [node for node in nodes if node["metadata"]["name"] in kept]
            result["Nodes"] = {"items": items}
        return web.json_response(self._cased(result))

    def _cased(self, value: dict[str, Any]) -> dict[str, Any]:
        return {k.lower(): v for k, v in value.items()} if self._lower_case else value


@contextmanager
def serve_in_thread() -> Iterator[ExtenderServer]:
    """An extender with an event loop of its own."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, name="extender")
    thread.start()
    server = ExtenderServer()
    try:
        asyncio.run_coroutine_threadsafe(server.start(), loop).result(20)
        yield server
    finally:
        asyncio.run_coroutine_threadsafe(server.stop(), loop).result(20)
        loop.call_soon_threadsafe(loop.stop)
        thread.join(20)
        loop.close()
