"""All policies by name."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from lmcache_histate.backends.limits import DISK_HEADROOM
from lmcache_histate.replay.simulator.policies.adaptive import HiStateCapture
from lmcache_histate.replay.simulator.policies.base import Capture, NoTiers, Site, Tiers
from lmcache_histate.replay.simulator.policies.capture import Grid, StepEnds, TurnEnds
from lmcache_histate.replay.simulator.policies.marconi import MarconiPolicy
from lmcache_histate.replay.simulator.policies.objects import LruTier, ObjectTier, ObjectTiers, UnboundedTier
from lmcache_histate.replay.simulator.policies.offline import Future, OfflineCapture, OfflineOrder, OfflineTiers
from lmcache_histate.replay.simulator.policies.orders import GdsfOrder, OrderedPolicy, S3FifoOrder, S3FifoPolicy
from lmcache_histate.replay.simulator.policies.split import SplitLruTier
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
        online: It decides from the past alone, and pays for the steps that its stops cut; False for bounds.
        split_pool: The GPU's pool is split half and half into KV and states.
    """

    description: str
    build: Callable[[Site], tuple[Capture, Tiers]]
    online: bool = True
    split_pool: bool = False


def _no_tiers(site: Site) -> tuple[Capture, Tiers]:
    return TurnEnds(site.geometry.block_tokens), NoTiers()


def _objects(site: Site, tier: type[ObjectTier] = LruTier, disk: bool = True) -> ObjectTiers:
    left = site.ledger.left
    tiers: list[ObjectTier] = [tier("cpu", site.cpu_bytes, left)] if site.cpu_bytes else []
    if disk and site.disk_bytes:
        tiers.append(tier("disk", site.disk_bytes, left))
    if site.remote_bytes:
        tiers.append(tier("remote", site.remote_bytes, left))
    return ObjectTiers(site, tiers)


def _grid(tokens: int | None = None, blocks: int | None = None) -> Callable[[Site], tuple[Capture, Tiers]]:
    def build(site: Site) -> tuple[Capture, Tiers]:
        block = site.geometry.block_tokens
        return Grid(block, tokens or (blocks or 1) * block), _objects(site)

    return build


def _unlimited(site: Site) -> tuple[Capture, Tiers]:
    return Grid(site.geometry.block_tokens, 1), ObjectTiers(
        site, [UnboundedTier("cpu", float("inf"), site.ledger.left)]
    )


def _capacities(site: Site) -> dict[Tier, float]:
    """What the keeper tells the core of the tiers."""
    capacities = {Tier.CPU: site.cpu_bytes}
    if site.disk_bytes:
        capacities[Tier.DISK] = site.disk_bytes * (1 - DISK_HEADROOM)
    return capacities


def _histate(
    settings: UnitSettings | None = None, paper: bool = False, **changes: Any
) -> Callable[[Site], tuple[Capture, Tiers]]:
    """HiState with these changes of `PolicySettings`."""

    def build(site: Site) -> tuple[Capture, Tiers]:
        chosen = PolicySettings(**changes)
        tiers = UnitTiers(site, CachePolicy(chosen, _capacities(site)), settings)
        return HiStateCapture(site, tiers, chosen.interval, paper), tiers

    return build


def _over_units(
    policy: Callable[[Site], CachePolicy], capture: Callable[[int], Capture]
) -> Callable[[Site], tuple[Capture, Tiers]]:
    """Another order over HiState's units: what has no room in CPU memory moves down, snapshots are not told apart."""

    def build(site: Site) -> tuple[Capture, Tiers]:
        return capture(site.geometry.block_tokens), UnitTiers(site, policy(site), UnitSettings(snapshots_to_disk=False))

    return build


def _junctions(block_tokens: int) -> Capture:
    return TurnEnds(block_tokens, all_tiers=True)


def _every_4k(block_tokens: int) -> Capture:
    return Grid(block_tokens, 4096)


def _offline(site: Site) -> tuple[Capture, Tiers]:
    future = Future(site.trace)
    numbers = {name: number for number, name in enumerate(site.trace.chunk_hashes())}
    policy = OrderedPolicy(LRU, lambda policy: OfflineOrder(policy, future, numbers))
    tiers = OfflineTiers(site, policy, future, UnitSettings())
    return OfflineCapture(site.trace, future, site.geometry.block_tokens), tiers


LRU = PolicySettings(eviction="lru")
"""Of the core where another order takes the place of the score."""


POLICIES: dict[str, Policy] = {
    "vllm": Policy("vLLM alone: snapshots at ends of turns and junctions, LRU in the GPU's pool", _no_tiers),
    "cpu": Policy(
        "the same and CPU memory, LRU over objects",
        lambda site: (TurnEnds(site.geometry.block_tokens), _objects(site, disk=False)),
    ),
    "cpu-disk": Policy(
        "the same with CPU memory and disk, written through, LRU over objects in each (LMCache)",
        lambda site: (TurnEnds(site.geometry.block_tokens), _objects(site)),
    ),
    "dense": Policy("a snapshot every block; CPU memory and disk, LRU", _grid(blocks=1)),
    "align-step-end": Policy(
        "a snapshot wherever a scheduler step ended; CPU memory and disk, LRU",
        lambda site: (StepEnds(site.geometry.block_tokens), _objects(site)),
    ),
    "fixed-1k": Policy("a snapshot every 1,024 tokens; CPU memory and disk, LRU", _grid(1024)),
    "fixed-4k": Policy("a snapshot every 4,096 tokens; CPU memory and disk, LRU", _grid(4096)),
    "fixed-8k": Policy("a snapshot every 8,192 tokens; CPU memory and disk, LRU", _grid(8192)),
    "every-32-blocks": Policy("a snapshot every 32 blocks; CPU memory and disk, LRU", _grid(blocks=32)),
    "hicache": Policy(
        "SGLang: every tier half KV, half states, LRU in each half, written through",
        lambda site: (TurnEnds(site.geometry.block_tokens, all_tiers=True), _objects(site, SplitLruTier)),
        split_pool=True,
    ),
    "junction-lru": Policy(
        "ends of turns and junctions with any tier; LRU over units",
        _over_units(lambda site: CachePolicy(LRU), _junctions),
    ),
    "lru-refresh-all": Policy(
        "a snapshot every 4,096 tokens; LRU over units, a hit refreshes all snapshots before it",
        _over_units(lambda site: CachePolicy(LRU), _every_4k),
    ),
    "lru-refresh-used": Policy(
        "a snapshot every 4,096 tokens; LRU over units, a hit refreshes the snapshot that it used",
        _over_units(lambda site: CachePolicy(PolicySettings(eviction="lru", refresh="used")), _every_4k),
    ),
    "marconi": Policy(
        "Marconi: ends of turns and junctions; recency and FLOP efficiency over units, alpha tuned once",
        _over_units(lambda site: MarconiPolicy(LRU, _capacities(site), site.times), _junctions),
    ),
    "gdsf": Policy(
        "ends of turns and junctions; Greedy-Dual-Size-Frequency over units",
        _over_units(lambda site: OrderedPolicy(LRU, GdsfOrder), _junctions),
    ),
    "s3fifo": Policy(
        "ends of turns and junctions; S3-FIFO over units",
        _over_units(lambda site: S3FifoPolicy(LRU, S3FifoOrder), _junctions),
    ),
    "histate-paper": Policy(
        "HiState as the paper has it: its interval, costs in tokens, tau of 60 s, refresh all",
        _histate(tau=60.0, cost_unit="tokens", paper=True),
    ),
    "histate": Policy("HiState with its default settings", _histate()),
    "histate-lru": Policy("HiState, evicting what was used longest ago", _histate(eviction="lru")),
    "histate-tau-60": Policy("HiState, tau fixed at 60 s", _histate(tau=60.0)),
    "histate-tau-600": Policy("HiState, tau fixed at 600 s", _histate(tau=600.0)),
    "histate-tau-3600": Policy("HiState, tau fixed at 3,600 s", _histate(tau=3600.0)),
    "histate-final-only": Policy("HiState, snapshots at ends of turns alone", _histate(interval="final-only")),
    "histate-fixed-1k": Policy("HiState, a snapshot every 1,024 tokens", _histate(interval=1024)),
    "histate-fixed-4k": Policy("HiState, a snapshot every 4,096 tokens", _histate(interval=4096)),
    "histate-no-disk-snapshots": Policy(
        "HiState, historical snapshots stay in CPU memory until something has to go",
        _histate(UnitSettings(snapshots_to_disk=False)),
    ),
    "histate-refresh-used": Policy("HiState, a hit refreshes the snapshot that it used", _histate(refresh="used")),
    "histate-tokens": Policy("HiState, every recomputed token costs the same", _histate(cost_unit="tokens")),
    "histate-histogram": Policy("HiState, hits expected where they were", _histate(placement="histogram")),
    "offline": Policy(
        "bound: knows the future; saves what will be used, evicts by next use and cost per byte", _offline, online=False
    ),
    "unlimited": Policy(
        "bound: CPU memory without limit, a snapshot at every block, no step cut for it", _unlimited, online=False
    ),
}
"""By name; the order is that of tables."""
