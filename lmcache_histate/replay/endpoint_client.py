"""A client of an OpenAI-compatible server: one streamed completion of token ids, with its times and its cached tokens."""

from __future__ import annotations

import asyncio
import contextlib
import os
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any

import aiohttp
import msgspec

API_KEY = "OPENAI_API_KEY"
"""Environment variable that holds the server's key, if it wants one."""


class EndpointError(RuntimeError):
    """The server is not there or cannot be used; the message says what to do."""


class RequestFailed(RuntimeError):
    """One request failed; others may succeed."""


class ConnectionLost(RequestFailed):
    """One request failed because the server could not be reached or hung up."""


@dataclass(frozen=True)
class ServedModel:
    """What a server says of its model.

    Attributes:
        name: To name in requests.
        max_model_len: Longest prompt and answer together, in tokens; None if it does not say.
    """

    name: str
    max_model_len: int | None


@dataclass(frozen=True)
class Answer:
    """One completion.

    Attributes:
        sent_at: `time.monotonic` when it was sent.
        ttft_s: Seconds to the first token.
        seconds: Seconds to the last token.
        prompt_tokens: As the server counts them.
        output_tokens: As the server counts them.
        cached_tokens: Prompt tokens that were not computed; None if the server does not say.
        text: The answer.
        token_times_s: Seconds from sending at which parts of the answer arrived; normally one a token.
    """

    sent_at: float
    ttft_s: float
    seconds: float
    prompt_tokens: int
    output_tokens: int
    cached_tokens: int | None
    text: str
    token_times_s: tuple[float, ...]


class _Details(msgspec.Struct):
    cached_tokens: int | None = None


class _Usage(msgspec.Struct):
    prompt_tokens: int = 0
    completion_tokens: int = 0
    prompt_tokens_details: _Details | None = None


class _Choice(msgspec.Struct):
    text: str = ""


class _Chunk(msgspec.Struct):
    choices: list[_Choice] = []
    usage: _Usage | None = None
    error: Any = None


@dataclass
class EndpointClient:
    """Sends completions to one server. Use as an asynchronous context manager.

    Attributes:
        url: `http://host:port`, with or without `/v1`.
        timeout_s: Longest silence of the server within one request.
    """

    url: str
    timeout_s: float = 600.0
    _session: aiohttp.ClientSession | None = field(default=None, init=False)

    def __post_init__(self) -> None:
        if not self.url.startswith(("http://", "https://")):
            raise EndpointError(f"{self.url!r} is not a URL: write it as http://localhost:8000")
        self.url = self.url.rstrip("/").removesuffix("/v1")

    async def __aenter__(self) -> EndpointClient:
        key = os.environ.get(API_KEY)
        self._session = aiohttp.ClientSession(
            headers={"Authorization": f"Bearer {key}"} if key else {},
            connector=aiohttp.TCPConnector(limit=0),  # the caller says how many requests run at once
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=10.0, sock_read=self.timeout_s),
        )
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._session is not None:
            await self._session.close()

    async def model(self, wanted: str | None = None) -> ServedModel:
        """The model that is served, or one of several.

        Args:
            wanted: Its name; the first that the server lists if None.

        Raises:
            EndpointError: No server, no such model, no permission.
        """
        try:
            async with self._http.get(f"{self.url}/v1/models") as response:
                if response.status in (401, 403):
                    raise EndpointError(f"{self.url} wants a key: set {API_KEY}")
                if response.status != 200:
                    raise EndpointError(
                        f"{self.url}/v1/models answers with status {response.status}: is this an OpenAI-compatible server?"
                    )
                listed = (await response.json(content_type=None))["data"]
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            reason = str(error) or type(error).__name__
            raise EndpointError(
                f"no server answers at {self.url} ({reason}). Start it and wait until it is ready, or name another with "
                "--endpoint"
            ) from None
        except (ValueError, KeyError, TypeError):
            raise EndpointError(
                f"{self.url}/v1/models gives no list of models: is this an OpenAI-compatible server?"
            ) from None
        models = {entry["id"]: entry for entry in listed}
        if wanted is not None and wanted not in models:
            raise EndpointError(f"{self.url} does not serve {wanted!r}; it serves {', '.join(models) or 'nothing'}")
        if not models:
            raise EndpointError(f"{self.url} serves no model")
        name = wanted or next(iter(models))
        length = models[name].get("max_model_len")
        return ServedModel(name, int(length) if length else None)

    async def complete(self, model: str, prompt: Sequence[int], output_tokens: int) -> Answer:
        """Send a prompt of token ids (greedy) and read the answer as it comes.

        Args:
            model: Name of the model.
            prompt: Token ids.
            output_tokens: Length of the answer; `ignore_eos` (vLLM, SGLang) keeps it from ending earlier.

        Raises:
            ConnectionLost: The server could not be reached, hung up or was silent for too long.
            RequestFailed: The server refused the request or broke off.
        """
        body = {
            "model": model,
            "prompt": prompt,
            "max_tokens": output_tokens,
            "temperature": 0.0,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        data = msgspec.json.encode(body)
        sent = time.monotonic()
        times: list[float] = []
        texts: list[str] = []
        usage = _Usage()
        try:
            async with self._http.post(
                f"{self.url}/v1/completions", data=data, headers={"Content-Type": "application/json"}
            ) as response:
                if response.status != 200:
                    raise RequestFailed(f"status {response.status}: {_message(await response.read())}")
                async for at, payload in _events(response.content):
                    chunk = _decode(payload)
                    if chunk.error is not None:
                        raise RequestFailed(_message(payload))
                    if chunk.choices:
                        times.append(at - sent)
                        texts.append(chunk.choices[0].text)
                    usage = chunk.usage or usage
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            raise ConnectionLost(f"{type(error).__name__}: {error}".rstrip(": ")) from None
        if not times:
            raise RequestFailed("the server ended the answer before its first token")
        details = usage.prompt_tokens_details
        return Answer(
            sent_at=sent,
            ttft_s=times[0],
            seconds=times[-1],
            prompt_tokens=usage.prompt_tokens or len(prompt),
            output_tokens=usage.completion_tokens or len(times),
            cached_tokens=details.cached_tokens if details is not None else None,
            text="".join(texts),
            token_times_s=tuple(times),
        )

    async def reset_prefix_cache(self) -> bool:
        """Empty vLLM's own prefix cache, not the tiers behind it; False where the server has no such request.

        vLLM has it only with `VLLM_SERVER_DEV_MODE=1`. It refuses while blocks are in use: tried for five seconds.
        """
        for _ in range(50):
            try:
                async with self._http.post(f"{self.url}/reset_prefix_cache") as response:
                    if response.status != 200:
                        return False
                    body = await response.read()
            except (aiohttp.ClientError, TimeoutError, OSError):
                return False
            with contextlib.suppress(msgspec.DecodeError):
                if msgspec.json.decode(body).get("success") is not False:
                    return True
            await asyncio.sleep(0.1)
        return False

    @property
    def _http(self) -> aiohttp.ClientSession:
        if self._session is None:
            raise RuntimeError("use EndpointClient as an asynchronous context manager")
        return self._session


async def _events(stream: aiohttp.StreamReader) -> AsyncIterator[tuple[float, bytes]]:
    """(Time of arrival, payload) of the `data:` lines of a stream of server-sent events."""
    rest = b""
    arrived = 0.0
    async for data in stream.iter_any():
        now = time.monotonic()
        if not rest:
            arrived = now  # a line that comes in parts has the time of its first
        *lines, rest = (rest + data).split(b"\n")
        for line in lines:
            payload = line.strip().removeprefix(b"data:").strip()
            if line.startswith(b"data:") and payload != b"[DONE]":
                yield arrived, payload
            arrived = now


def _decode(payload: bytes) -> _Chunk:
    try:
        return msgspec.json.decode(payload, type=_Chunk)
    except msgspec.MsgspecError as error:
        raise RequestFailed(f"the server sent something that is no completion: {error}") from None


def _message(body: bytes) -> str:
    """What an error body says, at most 500 characters."""
    try:
        value = msgspec.json.decode(body)
    except msgspec.DecodeError:
        return body.decode(errors="replace")[:500]
    error = value.get("error", value) if isinstance(value, dict) else value
    return str(error.get("message", error) if isinstance(error, dict) else error)[:500]
