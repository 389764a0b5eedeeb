"""``histate calibrate``: measures what prefill, decoding and hits cost on a live server, and fits the simulator's cost model.

Three kinds of requests are sent, one at a time unless said otherwise:

- cold prompts of growing length, which no cache has: TTFT = fixed + token_s * n + attention_s * n^2 / 2;
- the same prompts again with a new end: TTFT of a hit, linear in what was restored;
- long answers, alone with a short and a long prompt, and several at once: the time of a decode step.
"""

from __future__ import annotations

import asyncio
import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

import numpy as np

from lmcache_histate.replay.cost_model import CostModel
from lmcache_histate.replay.endpoint_client import EndpointClient, EndpointError, RequestFailed, ServedModel
from lmcache_histate.replay.simulator.hardware import StepTimes

DECODE_TOKENS = 64
"""Length of an answer whose steps are timed."""
DECODE_BATCH = 4
"""Answers at once, to see what one more costs."""
NEW_TOKENS = 16
"""Tokens behind a prompt that is sent again: a hit computes them."""


@dataclass(frozen=True)
class Measurement:
    """One median.

    Attributes:
        tokens: Length of the prompt.
        seconds: What was measured.
        fitted: What the fit gives there.
        cached_tokens: Tokens that the server had, as it says; None if it does not say.
    """

    tokens: int
    seconds: float
    fitted: float = math.nan
    cached_tokens: int | None = None


@dataclass(frozen=True)
class Fit:
    """Non-negative coefficients of 1, n and n^2 that fit best in relative terms.

    Attributes:
        coefficients: Fixed, linear, quadratic; 0 where least squares would go below.
        error: Mean of |fitted / measured - 1|.
    """

    coefficients: tuple[float, float, float]
    error: float

    def at(self, tokens: float) -> float:
        """The fitted seconds."""
        fixed, linear, quadratic = self.coefficients
        return fixed + linear * tokens + quadratic * tokens * tokens


def fit_seconds(tokens: Sequence[int], seconds: Sequence[float], degree: int) -> Fit:
    """Least squares of relative errors with coefficients that are not negative.

    The fit over each subset of terms is tried (at most seven) and the best one taken whose coefficients are all
    positive: exact for so few terms.

    Args:
        tokens: At least two different lengths.
        seconds: Measured, positive.
        degree: 1 or 2.

    Raises:
        ValueError: Fewer than two lengths.
    """
    if len(set(tokens)) < 2:
        raise ValueError("a fit needs at least two different lengths")
    lengths, measured = np.array(tokens, np.float64), np.array(seconds, np.float64)
    terms = np.stack([lengths**power for power in range(degree + 1)], axis=1) / measured[:, None]
    best, least = np.zeros(degree + 1), math.inf
    for subset in range(1, 1 << (degree + 1)):
        chosen = [power for power in range(degree + 1) if subset >> power & 1]
        found, *_ = np.linalg.lstsq(terms[:, chosen], np.ones(len(measured)), rcond=None)
        loss = float(((terms[:, chosen] @ found - 1.0) ** 2).sum())
        # A further term must earn its place: with as many terms as lengths anything fits.
        if (found >= 0).all() and loss < least * 0.999 - 1e-15:
            least = loss
            best = np.zeros(degree + 1)
            best[chosen] = found
    fixed, linear, quadratic = [*best.tolist(), 0.0, 0.0][:3]
    errors = np.abs((fixed + linear * lengths + quadratic * lengths**2) / measured - 1.0)
    return Fit((fixed, linear, quadratic), float(errors.mean()))


@dataclass(frozen=True)
class Calibration:
    """Everything that was measured.

    Attributes:
        model: The cost model.
        prefill: Cold prompts.
        prefill_fit: Over them.
        hits: Prompts sent again; empty if the server did not hit.
        hits_fit: Over their cached tokens.
        hits_from: Where the hits came from, in words.
        decode: Seconds of a decode step after prompts of two lengths.
        decode_batch_s: Seconds of a decode step of `DECODE_BATCH` answers at once, with the shorter prompt.
        notes: What a reader should know.
    """

    model: CostModel
    prefill: list[Measurement]
    prefill_fit: Fit
    hits: list[Measurement]
    hits_fit: Fit | None
    hits_from: str
    decode: list[Measurement]
    decode_batch_s: float
    notes: list[str]


def ladder(shortest: int, longest: int, count: int) -> list[int]:
    """Lengths from `shortest` to `longest`, each as much longer than the one before.

    Raises:
        ValueError: `longest` is less than twice `shortest`.
    """
    if longest < 2 * shortest:
        raise ValueError(f"the longest prompt ({longest}) must be at least twice the shortest ({shortest})")
    return sorted({round(shortest * (longest / shortest) ** (step / (count - 1))) for step in range(count)})


async def calibrate(
    client: EndpointClient,
    model: ServedModel,
    lengths: Sequence[int],
    repeats: int = 3,
    token_ids: tuple[int, int] = (260, 500),
    seed: int | None = None,
    on_request: Callable[[], object] | None = None,
) -> Calibration:
    """Measure a server that serves nobody else meanwhile.

    Args:
        client: Open.
        model: From `EndpointClient.model`.
        lengths: Of cold prompts, ascending, at least three.
        repeats: Of every measurement; medians are taken.
        token_ids: Lowest and highest token id in prompts.
        seed: Of the prompts; a random one if None, so that no cache of an earlier run knows them.
        on_request: Called after each request; there are `request_count` of them.

    Raises:
        EndpointError: The server refused a request or went away.
    """
    return await _Calibrator(client, model, lengths, repeats, token_ids, seed, on_request).run()


def request_count(lengths: Sequence[int], repeats: int) -> int:
    """Requests that `calibrate` sends: a warm-up, cold prompts, hits, and decoding alone, with a long prompt, together."""
    return 1 + 2 * len(lengths) * repeats + 2 * repeats + DECODE_BATCH


class _Calibrator:
    def __init__(
        self,
        client: EndpointClient,
        model: ServedModel,
        lengths: Sequence[int],
        repeats: int,
        token_ids: tuple[int, int],
        seed: int | None,
        on_request: Callable[[], object] | None,
    ) -> None:
        self._client = client
        self._model = model
        self._lengths = lengths
        self._repeats = repeats
        self._token_ids = token_ids
        self._random = random.Random(seed)
        self._on_request = on_request
        self._notes: list[str] = []
        self._restored = False

    async def run(self) -> Calibration:
        await self._send(self._prompt(self._lengths[0]), 4)  # an engine's first step sets up its kernels
        prompts = {length: [self._prompt(length) for _ in range(self._repeats)] for length in self._lengths}
        prefill = await self._cold(prompts)
        prefill_fit = fit_seconds([m.tokens for m in prefill], [m.seconds for m in prefill], 2)
        prefill = [_with_fit(m, prefill_fit.at(m.tokens)) for m in prefill]
        hits, hits_from = await self._hits(prompts)
        hits_fit = None
        if len({m.cached_tokens for m in hits}) >= 2:
            hits_fit = fit_seconds([m.cached_tokens or 0 for m in hits], [m.seconds for m in hits], 1)
            hits = [_with_fit(m, hits_fit.at(m.cached_tokens or 0)) for m in hits]
        short, long = self._lengths[0], self._lengths[-1]
        decode = [await self._decode(length) for length in (short, long)]
        together = await asyncio.gather(*(self._steps(self._prompt(short), DECODE_TOKENS) for _ in range(DECODE_BATCH)))
        batch_s = median(step for steps in together for step in steps)
        times = step_times(prefill_fit, decode, batch_s)
        restore = hits_fit.coefficients if hits_fit and self._restored else None
        cost = CostModel(
            times,
            restore[1] if restore else None,
            restore[0] if restore else None,
            f"{self._model.name} at {self._client.url}",
        )
        return Calibration(cost, prefill, prefill_fit, hits, hits_fit, hits_from, decode, batch_s, self._notes)

    async def _cold(self, prompts: dict[int, list[list[int]]]) -> list[Measurement]:
        found = []
        for length, copies in prompts.items():
            answers = [await self._send(prompt, 1) for prompt in copies]
            if any(answer.cached_tokens for answer in answers):
                self._notes.append(f"Cold prompts of {length:,} tokens were not cold: the server had a part of them.")
            found.append(Measurement(length, median(answer.ttft_s for answer in answers), cached_tokens=0))
        return found

    async def _hits(self, prompts: dict[int, list[list[int]]]) -> tuple[list[Measurement], str]:
        found, emptied = [], True
        for copies in prompts.values():
            times, cached = [], []
            for prompt in copies:
                emptied = await self._client.reset_prefix_cache() and emptied
                answer = await self._send([*prompt, *self._prompt(NEW_TOKENS)], 1)
                times.append(answer.ttft_s)
                cached.append(answer.cached_tokens)
            known = [count for count in cached if count is not None]
            if len(known) < len(cached):
                self._notes.append(
                    "The server does not report cached tokens, so hits were not measured: start vLLM with "
                    "--enable-prompt-tokens-details."
                )
                return [], ""
            if min(known) > 0:
                found.append(
                    Measurement(len(copies[0]) + NEW_TOKENS, median(times), cached_tokens=round(median(known)))
                )
        if not found:
            self._notes.append(
                "No prompt that was sent again hit: is prefix caching on, and is there room for one prompt?"
            )
        self._restored = emptied
        where = "the tiers behind vLLM's own cache, which was emptied before each" if emptied else "vLLM's own cache"
        if not emptied and found:
            self._notes.append(
                "Hits came from vLLM's own cache, which restores nothing. To measure the tiers behind it start vLLM with "
                "VLLM_SERVER_DEV_MODE=1, so that its cache can be emptied."
            )
        return found, where

    async def _decode(self, length: int) -> Measurement:
        steps = [step for _ in range(self._repeats) for step in await self._steps(self._prompt(length), DECODE_TOKENS)]
        return Measurement(length, median(steps))

    async def _steps(self, prompt: list[int], count: int) -> list[float]:
        for _ in range(3):
            answer = await self._send(prompt, count)
            times = answer.token_times_s
            if len(times) > count // 2:
                break  # a server that was kept from sending puts many tokens into one part
        if len(times) < 2:
            raise EndpointError(f"the server sends an answer of {count} tokens at once: its steps cannot be timed")
        return [(times[-1] - times[0]) / max(1, answer.output_tokens - 1)]

    async def _send(self, prompt: list[int], count: int) -> Any:
        try:
            answer = await self._client.complete(self._model.name, prompt, count)
        except RequestFailed as error:
            raise EndpointError(f"the server did not answer a prompt of {len(prompt):,} tokens: {error}") from None
        if self._on_request is not None:
            self._on_request()
        return answer

    def _prompt(self, length: int) -> list[int]:
        low, high = self._token_ids
        return [self._random.randint(low, high) for _ in range(length)]


def step_times(prefill: Fit, decode: Sequence[Measurement], batch_s: float) -> StepTimes:
    """The simulator's figures from what can be seen from outside.

    Prefill of n tokens takes step_s + n * token_s + attention_s * n^2 / 2. A decode step of one answer after a context of
    n takes step_s + max(weights_s, token_s) + state_s + n * context_s, and of k answers k times the last two.

    Args:
        prefill: Over cold prompts.
        decode: Seconds of a step with a short and with a long context.
        batch_s: Seconds of a step of `DECODE_BATCH` answers with the short context.
    """
    fixed, linear, quadratic = prefill.coefficients
    short, long = decode
    context_s = max(0.0, (long.seconds - short.seconds) / (long.tokens - short.tokens))
    one_more = max(0.0, (batch_s - short.seconds) / (DECODE_BATCH - 1))
    state_s = max(0.0, one_more - short.tokens * context_s)
    alone = short.seconds - short.tokens * context_s - state_s
    # What decoding takes in any case bounds the fixed part, which a fit over long prompts hardly sees.
    step_s = min(fixed, alone) if fixed > 0 else alone / 2
    return StepTimes(
        step_s=max(0.0, step_s),
        weights_s=max(0.0, alone - step_s),
        token_s=linear,
        attention_s=2.0 * quadratic,
        context_s=context_s,
        state_s=state_s,
    )


def _with_fit(measurement: Measurement, fitted: float) -> Measurement:
    return Measurement(measurement.tokens, measurement.seconds, fitted, measurement.cached_tokens)
