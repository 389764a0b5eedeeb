"""``POST /histate/locate`` beside LMCache's own HTTP routes: `locate`, answered from this server's view of the directory.

    curl -s localhost:8080/histate/locate -d '{"model": "Qwen/Qwen3.5-9B", "token_ids": [1, 2, 3]}' \\
      -H 'content-type: application/json'

A router that asks a server needs no access to the directory, and waits for no round trip to it; the answer says how old it
is. It knows the models that this server serves.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Any

from fastapi import FastAPI, HTTPException
from pydantic import BaseModel, ConfigDict, Field

from lmcache_histate.backends.locate import MAX_TOKEN, LocateError, answer
from lmcache_histate.state_store.directory.protocol import Directory, NamespaceFacts

PATH = "/histate/locate"
MAX_TOKENS = 1 << 24
"""Tokens of a prompt that are read from a request."""


class LocateQuestion(BaseModel):
    """The body of a request. Give either ``token_ids`` or ``chunk_hashes``."""

    model_config = ConfigDict(extra="forbid")

    model: str = Field(description="As vLLM names it: what was given as --model.")
    token_ids: list[Annotated[int, Field(ge=0, le=MAX_TOKEN)]] | None = Field(
        default=None, max_length=MAX_TOKENS, description="The prompt's tokens."
    )
    chunk_hashes: list[str] | None = Field(
        default=None,
        max_length=MAX_TOKENS,
        description="LMCache's hashes of the prompt's whole chunks, in hexadecimal.",
    )
    cache_salt: str = Field(default="", description="Tenant of the request.")
    world_size: int | None = Field(default=None, description="Ranks that share a prompt's KV, if there is a choice.")


def hashes_from_hex(texts: Sequence[str]) -> list[bytes]:
    """Chunk hashes from hexadecimal.

    Raises:
        LocateError: Something that is none.
    """
    hashes = []
    for place, text in enumerate(texts):
        try:
            chunk_hash = bytes.fromhex(text)
        except ValueError:
            chunk_hash = b""
        if not 0 < len(chunk_hash) < 256:
            raise LocateError(f"{text!r}, number {place} of the chunk hashes, is not a hash in hexadecimal.")
        hashes.append(chunk_hash)
    return hashes


def add_routes(app: FastAPI, directory: Directory, known: Callable[[], Mapping[str, NamespaceFacts]]) -> None:
    """Have `app` answer ``POST /histate/locate``.

    Args:
        app: LMCache's.
        directory: Its view is read.
        known: Namespaces that this server takes part in.
    """

    # Not a coroutine: FastAPI runs it on a thread of its own, and hashing a long prompt takes milliseconds.
    def locate(question: LocateQuestion) -> dict[str, Any]:
        now, served = time.monotonic(), known()
        age = directory.age(now)
        if served and age == float("inf"):
            raise HTTPException(503, "the directory has not answered yet: see histate.directory_state in /status")
        try:
            hashes = hashes_from_hex(question.chunk_hashes) if question.chunk_hashes is not None else None
            return answer(
                {name: [facts] for name, facts in served.items()},
                lambda name, facts, chunk_hashes: directory.locate(name, chunk_hashes, now),
                question.model,
                question.token_ids,
                hashes,
                question.cache_salt,
                question.world_size,
                age,
            ).to_json()
        except LocateError as error:
            raise HTTPException(400, str(error)) from None

    app.add_api_route(PATH, locate, methods=["POST"], summary="Longest restorable prefix per instance and tier")


__all__ = ["PATH", "LocateQuestion", "add_routes", "hashes_from_hex"]
