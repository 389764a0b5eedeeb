"""Marconi: recency and FLOP efficiency in one score, weighed by what a bootstrap window showed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from lmcache_histate.replay.simulator.hardware import StepTimes
from lmcache_histate.replay.simulator.policies.orders import OrderedPolicy, UnitOrder
from lmcache_histate.scorer.eviction import Victim
from lmcache_histate.scorer.policy import CachePolicy, Lookup
from lmcache_histate.scorer.settings import PolicySettings
from lmcache_histate.scorer.shadow import ShadowCache
from lmcache_histate.state_store.objects import Tier
from lmcache_histate.state_store.units import MANAGED, UnitKind


class MarconiOrder(UnitOrder):
    """Marconi (Pan et al., MLSys '25): lowest recency + alpha * FLOP efficiency, both scaled to [0, 1] over all units.

    The FLOP efficiency of a unit is the prefill that it saves beyond the restore point before it, over its bytes. With
    `T` the span of last accesses and `E` that of efficiencies, the order is that of `t + alpha * T / E * efficiency`: `T`
    and `E` are taken anew once in a while, so that a victim's share of that is O(1).

    Args:
        policy: Whose order it is.
        times: Prefill times, in place of FLOPs.
        alpha: Weight of the efficiency; 0 is least recently used.
    """

    def __init__(self, policy: CachePolicy, times: StepTimes, alpha: float = 0.0) -> None:
        super().__init__(policy)
        self.alpha = alpha
        self._times = times
        self._weight = 0.0
        self._victims_left = 0

    def efficiency(self, node: int, tier: Tier) -> float:
        """Seconds of prefill saved for each token of KV that goes. O(stretch)."""
        start, end = self.start_of(node), self.tree.position[node]
        saved = self._times.token_s * (end - start) + self._times.prefill(start, end)
        return saved / self.freed_tokens(node, tier)

    def value(self, node: int, tier: Tier) -> float:
        """Seconds."""
        accessed = self.tree.last_access[node] - 1e-6 * self.tree.position[node]
        return accessed + (self._weight * self.efficiency(node, tier) if self._weight else 0.0)

    def rescale(self) -> None:
        """Take the spans of last accesses and efficiencies anew. O(units)."""
        self._weight = 0.0
        if self.alpha:
            kinds = [np.frombuffer(self.tree.unit_kind[tier], dtype=np.uint8) for tier in MANAGED]
            units = [
                (int(node), tier)
                for tier in MANAGED
                for node in np.flatnonzero((kinds[tier] == UnitKind.SNAPSHOT) | (kinds[tier] == UnitKind.BUNDLE))
            ]
            if len(units) > 1:
                accessed = [self.tree.last_access[node] for node, _ in units]
                efficiency = [self.efficiency(node, tier) for node, tier in units]
                span = max(efficiency) - min(efficiency)
                if span > 0:
                    self._weight = self.alpha * (max(accessed) - min(accessed)) / span

    def next_victim(self, tier: Tier, now: float, spaces: Sequence[int] | None = None) -> Victim | None:
        """The lowest score, by spans that at most an eighth as many victims ago were exact."""
        if self.alpha and self._victims_left <= 0:
            self.reprice()
            self._victims_left = max(8, sum(self.queued(held) for held in MANAGED) // 8)
        self._victims_left -= 1
        return super().next_victim(tier, now, spaces)

    def reprice(self, tau: float | None = None) -> None:
        """Rescale, then price every unit."""
        self.settle()
        self.rescale()
        self._reprice_queues()


class MarconiPolicy(OrderedPolicy):
    """Marconi's eviction, its alpha chosen once.

    LRU until the first eviction; then requests are recorded until there are `BOOTSTRAP` times as many as came before it
    (and at most `MOST_RECORDED`) and replayed in shadow caches of the same capacities with each alpha. The one that
    recomputes least stays.

    Args:
        settings: `eviction` must be `"lru"`, so that nothing tunes tau.
        capacities: Bytes of the tiers, for the replay.
        times: Prefill times, in place of FLOPs.
        alpha: A fixed one; None to tune it.
    """

    ALPHAS = (0.0, 0.25, 0.5, 1.0, 2.0)
    BOOTSTRAP = 5
    MOST_RECORDED = 256

    order: MarconiOrder

    def __init__(
        self, settings: PolicySettings, capacities: Mapping[Tier, float], times: StepTimes, alpha: float | None = None
    ) -> None:
        super().__init__(settings, lambda policy: MarconiOrder(policy, times, alpha or 0.0))
        self._times = times
        self._limits = dict(capacities)
        self._recorded: list[tuple[str, Sequence[bytes], float]] | None = [] if alpha is None else None
        self._requests = 0
        self._quiet: int | None = None
        """Requests before the first eviction."""

    def lookup(self, namespace: str, hashes: Sequence[bytes], now: float) -> Lookup:
        """As ever; a bootstrap window records the request, and its last one chooses alpha."""
        self._requests += 1
        if self._recorded is not None and self._quiet is not None:
            self._recorded.append((namespace, hashes, now))
            if len(self._recorded) >= min(self.BOOTSTRAP * self._quiet, self.MOST_RECORDED):
                self.order.alpha = self._best_alpha(self._recorded)
                self._recorded = None
                self.order.reprice()
        return super().lookup(namespace, hashes, now)

    def next_victim(self, tier: Tier, now: float, namespaces: Sequence[str] | None = None) -> Victim | None:
        """As ever; the first one opens the bootstrap window."""
        if self._quiet is None:
            self._quiet = self._requests
        return super().next_victim(tier, now, namespaces)

    def _best_alpha(self, recorded: Sequence[tuple[str, Sequence[bytes], float]]) -> float:
        work = {}
        for alpha in self.ALPHAS:
            shadow = ShadowCache(MarconiPolicy(self.settings, {}, self._times, alpha), self.cost)
            for space in self.tree.namespaces:
                shadow.add_namespace(space.name, space.geometry)
            work[alpha] = sum(
                shadow.turn(name, hashes, len(hashes) * self.space(name).geometry.block_tokens, self._limits, now)
                for name, hashes, now in recorded
            )
        return min(work, key=lambda alpha: (work[alpha], alpha))
