"""``histate replay``: sends a trace to a live server, closed loop, and records what it measured for every request."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import xxhash

from lmcache_histate.replay.comparison import CACHED_TOKENS_REPORTED
from lmcache_histate.replay.endpoint_client import (
    ConnectionLost,
    EndpointClient,
    EndpointError,
    RequestFailed,
    ServedModel,
)
from lmcache_histate.replay.results import RequestResult, Run, RunFacts
from lmcache_histate.replay.traces.model import BlockHashes, Trace, TraceRequest

LOST_IN_A_ROW = 8
"""Requests that may fail one after another because the server cannot be reached; then the run ends."""


@dataclass(frozen=True)
class EndpointSettings:
    """How a trace is sent.

    Attributes:
        name: Of the server in reports.
        scale: Lengths of prompts and answers are multiplied by this.
        speedup: Think times are divided by this.
        sessions: Sessions at the same time; their own streams and sub-agents run beside each other.
        token_ids: Lowest and highest token id in prompts (every vocabulary has the default ones).
        seed: Other seeds give other tokens, so that a server's cache of an earlier run is of no use.
        capacities: Bytes per tier of the server, as far as the user says, to stand beside simulated runs.
    """

    name: str = "live"
    scale: float = 1.0
    speedup: float = 1.0
    sessions: int = 8
    token_ids: tuple[int, int] = (260, 500)
    seed: int = 0
    capacities: dict[str, float] = field(default_factory=dict)


class Prompts:
    """Token ids for the prompts of a trace: equal prefixes in the trace are equal tokens, and nothing else is.

    A block's tokens are fixed by its hash, so they name its whole prefix. Tokens behind the last whole block are the
    request's own. Answers of the server do not enter later prompts: every run sends the same tokens.
    """

    def __init__(self, block_tokens: int, settings: EndpointSettings) -> None:
        """Prompts with blocks of `block_tokens` tokens of the trace."""
        self._trace_block = block_tokens
        self._scale = settings.scale
        self.block_tokens = max(1, round(block_tokens * settings.scale))
        """Tokens of a block as it is sent."""
        low, high = settings.token_ids
        self._low, self._count = low, high - low + 1
        self._salt = np.uint64(xxhash.xxh3_64_intdigest(str(settings.seed).encode()))

    def length(self, request: TraceRequest) -> int:
        """Tokens of a request's prompt as it is sent; at least 1."""
        return max(1, len(request.hashes) * self.block_tokens + self._tail_tokens(request))

    def output_tokens(self, request: TraceRequest) -> int:
        """Tokens of a request's answer; at least 1."""
        return max(1, round(request.output_tokens * self._scale))

    def tokens(self, request: TraceRequest, number: int) -> list[int]:
        """The prompt.

        Args:
            request: Of the trace.
            number: Its number within its stream.
        """
        own = np.array([xxhash.xxh3_64_intdigest(f"{request.stream}/{number}".encode())], np.uint64)
        tail = self.length(request) - len(request.hashes) * self.block_tokens
        parts = (self._draw(request.hashes, self.block_tokens), self._draw(own, tail))
        found: list[int] = np.concatenate(parts).tolist()
        return found

    def _tail_tokens(self, request: TraceRequest) -> int:
        return round((request.prompt_tokens - len(request.hashes) * self._trace_block) * self._scale)

    def _draw(self, names: BlockHashes, count: int) -> npt.NDArray[np.int64]:
        """`count` token ids for every name, one after the other (splitmix64 of name and position)."""
        step = np.uint64(0x9E3779B97F4A7C15)
        state = (names.astype(np.uint64) ^ self._salt)[:, None] + (np.arange(1, count + 1, dtype=np.uint64) * step)[
            None
        ]
        state = (state ^ (state >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        state = (state ^ (state >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        state ^= state >> np.uint64(31)
        ids: npt.NDArray[np.int64] = (state % np.uint64(self._count)).astype(np.int64).ravel() + self._low
        return ids


@dataclass(frozen=True)
class Fitting:
    """What of a trace fits a server's longest sequence.

    Attributes:
        requests: How many are sent.
        streams_cut: Streams that end early because a request of theirs is too long.
        left_out: Requests that are not sent for that reason.
        longest: Tokens of the longest prompt and answer of the whole trace.
    """

    requests: int
    streams_cut: int
    left_out: int
    longest: int


def fit(trace: Trace, prompts: Prompts, max_model_len: int | None) -> tuple[Fitting, frozenset[int]]:
    """Find the requests that can be sent: a stream ends before its first request that is too long, and a stream that
    would start after one that is not sent does not start.

    Returns:
        The counts, and the indices of the requests that are sent.
    """
    sent: set[int] = set()
    ended: set[str] = set()
    cut: set[str] = set()
    longest = 0
    for index, request in enumerate(trace.requests):
        length = prompts.length(request) + prompts.output_tokens(request)
        longest = max(longest, length)
        after = trace.streams[request.stream].after
        if request.stream in ended:
            continue
        if max_model_len is not None and length > max_model_len:
            ended.add(request.stream)
            cut.add(request.stream)
        elif after is not None and after not in sent:
            ended.add(request.stream)
        else:
            sent.add(index)
    return Fitting(len(sent), len(cut), len(trace.requests) - len(sent), longest), frozenset(sent)


class Replay:
    """Sends one trace to one server; `run` once."""

    def __init__(
        self,
        trace: Trace,
        client: EndpointClient,
        model: ServedModel,
        settings: EndpointSettings,
        on_result: Callable[[RequestResult], object] | None = None,
    ) -> None:
        """Prepare a replay.

        Args:
            trace: What to send.
            client: Open.
            model: From `EndpointClient.model`.
            settings: How to send it.
            on_result: Called after each request.

        Raises:
            EndpointError: Not one request fits the server's longest sequence.
        """
        self._trace = trace
        self._client = client
        self._model = model
        self._settings = settings
        self._on_result = on_result
        self._prompts = Prompts(trace.block_tokens, settings)
        self.fitting, self._sent = fit(trace, self._prompts, model.max_model_len)
        if not self.fitting.requests:
            raise EndpointError(
                f"no request of {trace.name} fits the server's {model.max_model_len} tokens (--max-model-len): the longest "
                f"has {self.fitting.longest:,}. Send shorter ones with a smaller --scale"
            )
        self._done = {index: asyncio.Event() for index in self._sent}
        self._seen: set[int] = set()
        self._results: dict[int, RequestResult] = {}
        self._details_seen = False
        self._lost = 0
        self._started = 0.0

    async def run(self) -> Run:
        """Send everything.

        Raises:
            EndpointError: The server cannot be reached any more; `result` has what was measured.
        """
        self._started = time.monotonic()
        streams: dict[str, list[int]] = {}
        for index in sorted(self._sent):
            streams.setdefault(self._trace.requests[index].stream, []).append(index)
        sessions: dict[str, list[str]] = {}
        for stream in streams:
            sessions.setdefault(self._trace.streams[stream].session, []).append(stream)
        turn = asyncio.Semaphore(self._settings.sessions)

        async def session(members: list[str]) -> None:
            async with turn, asyncio.TaskGroup() as group:
                for stream in members:
                    group.create_task(self._stream(stream, streams[stream]))

        try:
            async with asyncio.TaskGroup() as group:
                for members in sessions.values():
                    group.create_task(session(members))
        except* EndpointError as errors:
            raise _first(errors) from None
        return self.result()

    def result(self) -> Run:
        """What was measured so far."""
        settings = self._settings
        name = self._trace.name if settings.scale == 1 else f"{self._trace.name} x{settings.scale:.4g}"
        facts = RunFacts(
            policy=settings.name,
            trace=name,
            simulated=False,
            seed=settings.seed,
            capacities=dict(settings.capacities),
            settings={
                "model": self._model.name,
                "max_model_len": self._model.max_model_len,
                "scale": settings.scale,
                "speedup": settings.speedup,
                "sessions": settings.sessions,
                "streams_cut": self.fitting.streams_cut,
                "requests_left_out": self.fitting.left_out,
                "requests_not_reached": self.fitting.requests - len(self._results),
                CACHED_TOKENS_REPORTED: self._details_seen,
            },
            seconds=time.monotonic() - self._started,
        )
        return Run(facts, sorted(self._results.values(), key=lambda result: result.sent_s))

    async def _stream(self, key: str, members: list[int]) -> None:
        stream = self._trace.streams[key]
        if stream.after is not None:
            await self._done[stream.after].wait()
        for number, index in enumerate(members):
            request = self._trace.requests[index]
            wait = stream.start_s if number == 0 and stream.after is None else request.think_s
            await asyncio.sleep(wait / self._settings.speedup)
            await self._send(index, request, number)
            self._done[index].set()

    async def _send(self, index: int, request: TraceRequest, number: int) -> None:
        prompts = self._prompts
        tokens = prompts.tokens(request, number)
        reusable = self._reusable(request)
        self._seen.update(request.hashes.tolist())
        session = self._trace.streams[request.stream].session
        sent_s = time.monotonic() - self._started
        try:
            answer = await self._client.complete(self._model.name, tokens, prompts.output_tokens(request))
        except RequestFailed as error:
            result = RequestResult(
                request.stream, session, sent_s, 0.0, time.monotonic() - self._started - sent_s, len(tokens), 0, 0, 0,
                error=str(error),
            )  # fmt: skip
            self._lost = self._lost + 1 if isinstance(error, ConnectionLost) else 0
        else:
            self._lost = 0
            self._details_seen |= answer.cached_tokens is not None
            hit = answer.cached_tokens or 0
            reusable = max(reusable, hit)  # the server may know more: it was not empty
            result = RequestResult(
                request.stream,
                session,
                answer.sent_at - self._started,
                answer.ttft_s,
                answer.seconds,
                len(tokens),
                answer.output_tokens,
                hit,
                reusable,
                recomputed_unknown=reusable - hit,
                answer=answer.text,
            )
        self._results[index] = result
        if self._on_result is not None:
            self._on_result(result)
        if self._lost >= LOST_IN_A_ROW:
            raise EndpointError(
                f"the server at {self._client.url} is gone: {self._lost} requests in a row did not reach it "
                f"(the last: {result.error})"
            )

    def _reusable(self, request: TraceRequest) -> int:
        """Tokens of the longest prefix in whole blocks that was sent before; what one of them names, names all before."""
        blocks = 0
        for name in request.hashes.tolist():
            if name not in self._seen:
                break
            blocks += 1
        return blocks * self._prompts.block_tokens


def _first(errors: BaseExceptionGroup[EndpointError]) -> EndpointError:
    error: BaseException = errors
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    assert isinstance(error, EndpointError)
    return error
