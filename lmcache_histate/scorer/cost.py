"""What a recomputed token and a fetched byte cost, on one scale.

Costs are in *token equivalents*: with `unit="tokens"` every token counts 1, as in the paper; with `unit="ms"` the
estimated prefill time, divided by the time of a token at the start of a prompt, so that tau means the same in both.
"""

from __future__ import annotations

from typing import TypeVar

import numpy as np
import numpy.typing as npt

from lmcache_histate.state_store.objects import Tier

Floats = npt.NDArray[np.float64]
Real = TypeVar("Real", float, Floats)


class CostModel:
    """Prefill and restore times, calibrated online.

    Prefill of [start, end) takes `linear * n + quadratic * (end^2 - start^2) / 2` milliseconds: work per token, plus
    attention over all tokens before it. Both terms follow observed prefills by least squares with forgetting.

    Args:
        unit: `"tokens"` or `"ms"`.
        linear_ms: milliseconds per token before anything was observed.
        quadratic_ms: milliseconds per token and token of context before anything was observed.
        bytes_per_second: read bandwidth of each tier before anything was observed.
    """

    def __init__(
        self,
        unit: str = "tokens",
        linear_ms: float = 0.05,
        quadratic_ms: float = 2e-7,
        bytes_per_second: tuple[float, float, float] = (50e9, 5e9, 1e9),
    ) -> None:
        self.unit = unit
        self.linear_ms = linear_ms
        self.quadratic_ms = quadratic_ms
        self._ms_per_byte = [1e3 / rate for rate in bytes_per_second]
        # Normal equations of the fit, started with a weak pull to the initial values (in tokens and token^2 / 1e5).
        self._gram: Floats = np.zeros((2, 2))
        self._moment: Floats = np.zeros(2)
        self._learn(4096.0, 4096.0**2 / 2, self._prefill(0.0, 4096.0))
        self._learn(4096.0, 131072.0 * 4096.0, self._prefill(129024.0, 133120.0))
        self._gram *= 0.1
        self._moment *= 0.1

    def _prefill(self, start: Real, end: Real) -> Real:
        return self.linear_ms * (end - start) + self.quadratic_ms * (end * end - start * start) / 2

    def _learn(self, linear: float, quadratic: float, milliseconds: float) -> None:
        features = np.array([linear, quadratic / 1e5])
        # Relative errors: a long prefill must not drown the short ones.
        weight = 1.0 / max(milliseconds, 1e-9) ** 2
        self._gram = self._gram * 0.99 + weight * np.outer(features, features)
        self._moment = self._moment * 0.99 + weight * milliseconds * features

    def observe_prefill(self, start: float, end: float, milliseconds: float) -> None:
        """The engine prefilled positions [start, end) in `milliseconds`. Values that make no sense are ignored.

        O(1).
        """
        if end <= start or milliseconds <= 0:
            return
        self._learn(end - start, (end * end - start * start) / 2, milliseconds)

    def publish(self) -> None:
        """Make the fit the live prices."""
        gram = self._gram + np.eye(2) * 1e-9 * np.trace(self._gram)
        linear, quadratic = np.linalg.solve(gram, self._moment)
        if linear > 0 and quadratic >= 0:
            self.linear_ms, self.quadratic_ms = float(linear), float(quadratic) / 1e5
        elif linear > 0:
            # Attention's term drowned in noise: all of the time is per token then.
            self.linear_ms, self.quadratic_ms = float(self._moment[0] / gram[0, 0]), 0.0

    def observe_restore(self, tier: Tier, nbytes: float, milliseconds: float) -> None:
        """`nbytes` came back from `tier` in `milliseconds`: moving average of its time per byte. O(1)."""
        if nbytes > 0 and milliseconds > 0:
            self._ms_per_byte[tier] += 0.05 * (milliseconds / nbytes - self._ms_per_byte[tier])

    def follow(self, other: CostModel) -> None:
        """Know what `other` has learned; not live before `publish`. O(1)."""
        self._gram, self._moment = other._gram, other._moment
        self._ms_per_byte = list(other._ms_per_byte)

    def recompute(self, start: Real, end: Real) -> Real:
        """Token equivalents of prefilling [start, end) (tokens, scalars or arrays)."""
        if self.unit == "tokens":
            return end - start
        return self._prefill(start, end) / self.linear_ms

    def fetch(self, nbytes: Real, tier: Tier) -> Real:
        """Token equivalents of reading `nbytes` from `tier`."""
        return nbytes * (self._ms_per_byte[tier] / self.linear_ms)

    def stop(self, milliseconds: float) -> float:
        """Token equivalents of one extra scheduler step that costs `milliseconds`."""
        return milliseconds / self.linear_ms

    def dump(self) -> dict[str, object]:
        """The learned state as plain data."""
        return {
            "gram": self._gram.tolist(),
            "moment": self._moment.tolist(),
            "ms_per_byte": list(self._ms_per_byte),
        }

    def load(self, data: dict[str, object]) -> None:
        """Take back what `dump` gave, and publish it."""
        self._gram = np.asarray(data["gram"], dtype=np.float64)
        self._moment = np.asarray(data["moment"], dtype=np.float64)
        self._ms_per_byte = [float(value) for value in data["ms_per_byte"]]  # type: ignore[attr-defined]
        self.publish()
