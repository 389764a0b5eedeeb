"""Settings of the policy. Every part can be switched off alone, so that each can be measured."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

TAUS = (0.0, 60.0)
"""Values of tau in seconds that `tau="auto"` chooses from; 0 is plain LRU over units. Larger ones win where nearly everything
fits and lose far more where it does not (docs/model.md)."""
AUTO_START = 60.0
"""Where `tau="auto"` begins."""


@dataclass(frozen=True, slots=True)
class PolicySettings:
    """What a user can choose.

    Attributes:
        eviction: `"cost"` ranks by H = t + tau*C/M, `"lru"` by last access alone.
        refresh: which snapshots a hit refreshes: none, the one it resumed from, or all earlier ones on the prefix too.
        interval: distance of snapshots: `"adaptive"`, `"final-only"` or a number of tokens.
        tau: seconds, or `"auto"` to follow the best of `taus` and 0 in a sampled shadow cache.
        cost_unit: price work in estimated `"ms"`, or in `"tokens"` (the paper).
        placement: `"uniform"` grid (the paper) or `"histogram"` of observed hit distances, for values and for placement.
        end_prior: probability that a path's end is hit, before anything was seen.
        orphan_s: seconds that bytes which nothing can be restored from may wait for what they lack.
        offer_again_s: seconds until a victim that was offered and is still there is offered again.
        pending_s: seconds that a chunk stays known which was looked up and never stored.
        taus: candidates of the tuner, besides 0.
        shadow_chunks: chunks that each shadow may hold; sampling gets sparser to stay below it.
    """

    eviction: Literal["cost", "lru"] = "cost"
    refresh: Literal["none", "used", "all"] = "all"
    interval: Literal["adaptive", "final-only"] | int = "adaptive"
    tau: float | Literal["auto"] = "auto"
    cost_unit: Literal["tokens", "ms"] = "ms"
    placement: Literal["uniform", "histogram"] = "uniform"
    end_prior: float = 0.5
    orphan_s: float = 60.0
    offer_again_s: float = 2.0
    pending_s: float = 60.0
    taus: tuple[float, ...] = TAUS
    shadow_chunks: int = 16_384

    def __post_init__(self) -> None:
        if self.eviction not in ("cost", "lru"):
            raise ValueError(f"eviction must be 'cost' or 'lru', got {self.eviction!r}")
        if self.refresh not in ("none", "used", "all"):
            raise ValueError(f"refresh must be 'none', 'used' or 'all', got {self.refresh!r}")
        if self.interval not in ("adaptive", "final-only") and not (
            isinstance(self.interval, int) and self.interval > 0
        ):
            raise ValueError(f"interval must be 'adaptive', 'final-only' or tokens above 0, got {self.interval!r}")
        if self.tau != "auto" and not (isinstance(self.tau, int | float) and self.tau >= 0):
            raise ValueError(f"tau must be 'auto' or seconds of at least 0, got {self.tau!r}")
        if self.cost_unit not in ("tokens", "ms"):
            raise ValueError(f"cost_unit must be 'tokens' or 'ms', got {self.cost_unit!r}")
        if self.placement not in ("uniform", "histogram"):
            raise ValueError(f"placement must be 'uniform' or 'histogram', got {self.placement!r}")
        if not 0 < self.end_prior < 1:
            raise ValueError(f"end_prior must lie between 0 and 1, got {self.end_prior}")
        if not self.taus or min(self.taus) < 0:
            raise ValueError(f"taus must be one or more values of at least 0, got {self.taus}")

    @property
    def initial_tau(self) -> float:
        """Tau before the tuner has seen anything."""
        if self.eviction == "lru":
            return 0.0
        return AUTO_START if self.tau == "auto" else float(self.tau)
