"""A real HTTP server with OpenAI's completions interface that behaves, or misbehaves, as a test tells it."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any, TypeVar

from aiohttp import web

T = TypeVar("T")


@dataclass
class OpenAiServer:
    """Answers at once. It caches whole blocks of prompts for ever, if it may.

    Attributes:
        max_model_len: What `/v1/models` says; None for nothing.
        report_cached: Whether usage has prompt_tokens_details.
        block: Tokens of a block.
        token_s: Seconds of a prompt's token that is not cached.
        refuse: Called with every request's body; a text becomes an error of status 400.
        hang_up_after: Requests after which connections are cut; None for never.
        resets: Whether `/reset_prefix_cache` is there.
    """

    max_model_len: int | None = 4096
    report_cached: bool = True
    block: int = 4
    token_s: float = 0.0
    refuse: Callable[[dict[str, Any]], str] = lambda body: ""
    hang_up_after: int | None = None
    resets: bool = False
    bodies: list[dict[str, Any]] = field(default_factory=list)
    at_once: int = 0
    most_at_once: int = 0
    _cached: set[tuple[int, ...]] = field(default_factory=set)

    def app(self) -> web.Application:
        app = web.Application(client_max_size=1 << 26)
        app.router.add_get("/v1/models", self._models)
        app.router.add_post("/v1/completions", self._completions)
        if self.resets:
            app.router.add_post("/reset_prefix_cache", self._reset)
        return app

    async def _models(self, request: web.Request) -> web.Response:
        entry = {"id": "tiny", "object": "model"}
        if self.max_model_len is not None:
            entry["max_model_len"] = self.max_model_len
        return web.json_response({"object": "list", "data": [entry]})

    async def _reset(self, request: web.Request) -> web.Response:
        self._cached.clear()
        return web.json_response({"success": True})

    async def _completions(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        self.bodies.append(body)
        if self.hang_up_after is not None and len(self.bodies) > self.hang_up_after:
            request.transport.close()
            return web.Response()
        if problem := self.refuse(body):
            return web.json_response({"error": {"message": problem}}, status=400)
        prompt = body["prompt"]
        blocks = [tuple(prompt[: end + self.block]) for end in range(0, len(prompt) - self.block + 1, self.block)]
        hit = 0
        for prefix in blocks[: (len(prompt) - 1) // self.block]:
            if prefix not in self._cached:
                break
            hit += self.block
        self._cached.update(blocks)
        self.at_once += 1
        self.most_at_once = max(self.most_at_once, self.at_once)
        await asyncio.sleep(0.002 + self.token_s * (len(prompt) - hit))
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        for number in range(body["max_tokens"]):
            await self._event(response, {"choices": [{"text": f"{prompt[0]}.{number} ", "index": 0}]})
            await asyncio.sleep(0.0005)
        usage: dict[str, Any] = {"prompt_tokens": len(prompt), "completion_tokens": body["max_tokens"]}
        if self.report_cached:
            usage["prompt_tokens_details"] = {"cached_tokens": hit}
        await self._event(response, {"choices": [], "usage": usage})
        await response.write(b"data: [DONE]\n\n")
        self.at_once -= 1
        return response

    @staticmethod
    async def _event(response: web.StreamResponse, value: dict[str, Any]) -> None:
        await response.write(b"data: " + json.dumps(value).encode() + b"\n\n")


def with_server(server: OpenAiServer, use: Callable[[str], Awaitable[T]]) -> T:
    """Run `use` with the URL of the running server."""

    async def main() -> T:
        runner = web.AppRunner(server.app())
        await runner.setup()
        try:
            site = web.TCPSite(runner, "127.0.0.1", 0)
            await site.start()
            port = runner.addresses[0][1]
            return await use(f"http://127.0.0.1:{port}")
        finally:
            await runner.cleanup()

    return asyncio.run(main())
