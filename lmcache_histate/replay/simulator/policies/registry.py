"""All policies by name."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from lmcache_histate.replay.simulator.policies.adaptive import HiStateCapture
from lmcache_histate.replay.simulator.policies.base import Capture, NoTiers, Site, Tiers
from lmcache_histate.replay.simulator.policies.capture import Grid, StepEnds, TurnEnds
from lmcache_histate.replay.simulator.policies.objects import LruTier, ObjectTier, ObjectTiers, UnboundedTier
from lmcache_histate.replay.simulator.policies.units import UnitSettings, UnitTiers
from lmcache_histate.scorer.policy import CachePolicy
from lmcache_histate.scorer.settings import PolicySettings
from lmcache_histate.state_store.objects import Tier


@dataclass(frozen=True, slots=True)
class Policy:
    """A policy that can be simulated.

    Attributes:
        description: One line, for tables and help.
        build: Makes its two halves for a site.
        online: It decides from the past alone; False for bounds.
    """

    description: str
    build: Callable[[Site], tuple[Capture, Tiers]]
    online: bool = True


def _no_tiers(site: Site) -> tuple[Capture, Tiers]:
    return TurnEnds(site.geometry.block_tokens), NoTiers()


def _lru(site: Site, disk: bool = True) -> ObjectTiers:
    left = site.ledger.left
    tiers: list[ObjectTier] = [LruTier("cpu", site.cpu_bytes, left)] if site.cpu_bytes else []
    if disk and site.disk_bytes:
        tiers.append(LruTier("disk", site.disk_bytes, left))
    if site.remote_bytes:
        tiers.append(LruTier("remote", site.remote_bytes, left))
    return ObjectTiers(site, tiers)


def _grid(tokens: int | None = None, blocks: int | None = None) -> Callable[[Site], tuple[Capture, Tiers]]:
    def build(site: Site) -> tuple[Capture, Tiers]:
        block = site.geometry.block_tokens
        return Grid(block, tokens or (blocks or 1) * block), _lru(site)

    return build


def _unlimited(site: Site) -> tuple[Capture, Tiers]:
    return Grid(site.geometry.block_tokens, 1), ObjectTiers(
        site, [UnboundedTier("cpu", float("inf"), site.ledger.left)]
    )


def _histate(settings: UnitSettings | None = None, **changes: object) -> Callable[[Site], tuple[Capture, Tiers]]:
    def build(site: Site) -> tuple[Capture, Tiers]:
        chosen = replace(PolicySettings(), **changes)  # type: ignore[arg-type]
        capacities = {Tier.CPU: site.cpu_bytes}
        if site.disk_bytes:
            capacities[Tier.DISK] = site.disk_bytes * 0.95
        tiers = UnitTiers(site, CachePolicy(chosen, capacities), settings)
        return HiStateCapture(site, tiers, chosen.interval), tiers

    return build


POLICIES: dict[str, Policy] = {
    "vllm": Policy("vLLM alone: snapshots at ends of turns and junctions, LRU in the GPU's pool", _no_tiers),
    "cpu": Policy(
        "the same and CPU memory, LRU over objects",
        lambda site: (TurnEnds(site.geometry.block_tokens), _lru(site, disk=False)),
    ),
    "cpu-disk": Policy(
        "the same with CPU memory and disk, written through, LRU over objects in each (LMCache)",
        lambda site: (TurnEnds(site.geometry.block_tokens), _lru(site)),
    ),
    "dense": Policy("a snapshot every block; CPU memory and disk, LRU", _grid(blocks=1)),
    "align-step-end": Policy(
        "a snapshot wherever a scheduler step ended; CPU memory and disk, LRU",
        lambda site: (StepEnds(site.geometry.block_tokens), _lru(site)),
    ),
    "fixed-1k": Policy("a snapshot every 1,024 tokens; CPU memory and disk, LRU", _grid(1024)),
    "fixed-4k": Policy("a snapshot every 4,096 tokens; CPU memory and disk, LRU", _grid(4096)),
    "fixed-8k": Policy("a snapshot every 8,192 tokens; CPU memory and disk, LRU", _grid(8192)),
    "every-32-blocks": Policy("a snapshot every 32 blocks; CPU memory and disk, LRU", _grid(blocks=32)),
    "histate": Policy("HiState with its default settings", _histate()),
    "histate-tau-600": Policy("tau 600", _histate(tau=600.0)),
    "histate-lru": Policy("HiState, evicting what was used longest ago", _histate(eviction="lru")),
    "unlimited": Policy(
        "bound: CPU memory without limit, a snapshot at every block, no step cut for it", _unlimited, online=False
    ),
}
"""By name; the order is that of tables."""
