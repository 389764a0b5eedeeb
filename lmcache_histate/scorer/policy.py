"""The one object that a server or a simulator drives.

Report what happens (`lookup`, `hit`, `stored`, `removed`, `end_turn`); ask what to do (`place`, `next_victim`,
`worth_moving`). Time is always an argument in seconds, from any clock that all calls share; there is no thread and no
input or output in here, and equal calls give equal answers. The caller serialises calls.

A request, in order:

1. `lookup(path)`: what is cached, and the order of the chunks becomes known.
2. `hit(path, matched, resumed)`, if anything was reused.
3. `place(start, end)`: where the new part should get snapshots.
4. `stored(...)`, `removed(...)` as objects come and go, in any order.
5. `end_turn(path)`: where the turn ended.
6. `tune()`, as often as it says that more is waiting and there is time: `tau="auto"` learns.

When a tier is short: `next_victim(tier)`, then copy its objects down (`worth_moving` says whether) or delete them, and
report either with `moved` or `discard`, or object by object with `stored` and `removed`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple, TypedDict

import numpy as np

from lmcache_histate.geometry import CacheGeometry
from lmcache_histate.scorer.access import AccessModel, PathRecord
from lmcache_histate.scorer.cost import CostModel
from lmcache_histate.scorer.eviction import EvictionOrder, Victim
from lmcache_histate.scorer.interval import choose_interval, grid
from lmcache_histate.scorer.placement import best_places
from lmcache_histate.scorer.reach import PathReach
from lmcache_histate.scorer.settings import PolicySettings
from lmcache_histate.scorer.shadow import ShadowCache
from lmcache_histate.scorer.tuner import TauTuner, Turn
from lmcache_histate.state_store.directory.protocol import Statistics
from lmcache_histate.state_store.objects import CacheObject, Tier
from lmcache_histate.state_store.plain import PlainNamespace, dump_namespace, load_namespace
from lmcache_histate.state_store.tree import NO_NODE, Namespace
from lmcache_histate.state_store.units import MANAGED, UnitTree

MIN_EVENTS_TO_PUBLISH = 256


class Lookup(NamedTuple):
    """What the cache holds of a path, in tokens from its start."""

    kv_tokens: int
    """Longest prefix whose KV is complete in all ranks."""
    resume_tokens: int
    """Last snapshot inside it: what a request can really skip. 0 if none."""


class PolicyStats(NamedTuple):
    """Where the policy stands."""

    chunks: int
    """Chunks known."""
    paths: int
    """Paths that can be resumed from."""
    tier_bytes: tuple[int, ...]
    """Bytes per tier (CPU, DISK, REMOTE)."""
    units: tuple[int, ...]
    """Units that can be evicted, per managed tier (CPU, DISK), as of the last question."""
    tau: float
    """The live tau in seconds."""
    end_probability: float
    """Learned probability that a hit is at a path's end."""
    kv_residence_s: float | None
    """T_KV in seconds, None before anything left."""
    snapshot_residence_s: float | None
    """T_state in seconds."""
    sampling_rate: float | None
    """Share of the sessions that the tuner replays; None without a tuner."""
    recomputed_by_tau: dict[float, float]
    """Recent recomputed work of each candidate tau, token equivalents of sampled turns."""


class PlainPolicy(TypedDict):
    """A policy's whole state as plain data."""

    version: int
    tau: float
    namespaces: list[PlainNamespace]
    paths: list[tuple[str, bytes, float, int, int]]
    """(namespace, hash of the last restorable chunk, end in tokens, hits, end hits) of every path."""
    access: dict[str, object]
    cost: dict[str, object]
    kv_residence: dict[str, float]
    snapshot_residence: dict[str, float]


PLAIN_VERSION = 1


class CachePolicy:
    """Prefix tree, access model, interval choice and eviction order behind one interface.

    Args:
        settings: what the user chose.
        capacities: bytes of the tiers that are evicted from here. Only the tuner of `tau="auto"` needs them, to scale
            its shadow; without them tau stays where it starts.
    """

    def __init__(self, settings: PolicySettings | None = None, capacities: Mapping[Tier, float] | None = None) -> None:
        self.settings = settings or PolicySettings()
        self.capacities = {tier: nbytes for tier, nbytes in (capacities or {}).items() if tier in MANAGED}
        self.tree = UnitTree(self.settings.pending_s)
        self.access = AccessModel(self.settings.placement, self.settings.end_prior)
        self.cost = CostModel(self.settings.cost_unit)
        self.reach = PathReach(self.tree, self.access)
        self.order = EvictionOrder(
            self.tree,
            self.reach,
            self.cost,
            self.settings.initial_tau,
            self.settings.orphan_s,
            self.settings.offer_again_s,
        )
        self.tree.watcher = self.order
        self._spaces: dict[str, Namespace] = {}
        self._stop_ms: float | None = None
        self._events = 0
        self._publish_chunks = 0
        self.tuner: TauTuner | None = None
        if self.settings.eviction == "cost" and self.settings.tau == "auto" and self.capacities:
            self.tuner = TauTuner(self.settings.taus, self.order.tau, self._shadow, self.settings.shadow_chunks)

    def _shadow(self, tau: float) -> ShadowCache:
        return ShadowCache(CachePolicy(replace(self.settings, tau=tau)), self.cost)

    @property
    def tau(self) -> float:
        """The live tau in seconds."""
        return self.order.tau

    def add_namespace(self, name: str, geometry: CacheGeometry) -> Namespace:
        """Register a namespace (one model, layout fingerprint and salt). Doing so again changes nothing.

        Returns:
            What the tree knows it by.

        Raises:
            ValueError: it is registered with another geometry.
        """
        self._spaces[name] = self.tree.add_namespace(name, geometry)
        if self.tuner is not None:
            self.tuner.add_namespace(name, geometry)
        return self._spaces[name]

    def space(self, name: str) -> Namespace:
        """What the tree knows a registered namespace by. O(1).

        Raises:
            KeyError: it is not registered.
        """
        return self._spaces[name]

    # -- what happened --------------------------------------------------------------------------------------------

    def lookup(self, namespace: str, hashes: Sequence[bytes], now: float) -> Lookup:
        """A request asks for a path: `hashes` are its whole chunks from the first one, in order.

        Teaches the tree the order of the chunks, and the tuner what is asked for. Refreshes nothing: that is what `hit`
        is for. O(path). With `tau="auto"`, `tune` has work to do afterwards.

        Raises:
            KeyError: the namespace is not registered.
            ValueError: a hash is known below another parent.
        """
        space = self._spaces[namespace]
        self.tree.expire(now)
        match = self.tree.visit(space, hashes, now)
        block = space.geometry.block_tokens
        if self.tuner is not None and match.nodes:
            lineage = self.tree.lineage[match.nodes[-1]]
            self.tuner.offer(Turn(lineage, namespace, hashes, len(match.nodes) * block, now))
        return Lookup(match.whole * block, match.restorable * block)

    def tune(self) -> bool:
        """Do one piece of the tuner's work, whenever there is time; tau stands still for those who never call it.

        O(path + objects evicted) of one request in a shadow; when the live tau changes, which is rare, O(n).

        Returns:
            Whether more is waiting.
        """
        if self.tuner is None or not self.tuner.waiting:
            return False
        tau = self.tuner.step(self.capacities)
        if tau is not None:
            self.publish(tau)
        return self.tuner.waiting > 0

    def link(self, namespace: str, after: bytes | None, hashes: Sequence[bytes], now: float) -> None:
        """`hashes` follow the chunk `after` (None: the start), in order. For callers that learn paths in pieces.

        O(path).
        """
        self.tree.extend(self._spaces[namespace], hashes, now, after)

    def stored(self, namespace: str, objects: Iterable[CacheObject], now: float) -> None:
        """Objects are in a tier. Repeats are ignored; the chunks need not be known yet. O(1) each, amortised."""
        self.tree.store(self._spaces[namespace], objects, now)

    def removed(self, namespace: str, objects: Iterable[CacheObject], now: float) -> None:
        """Objects left a tier, whoever removed them. Unknown ones and repeats are ignored. O(1) each, amortised."""
        self.tree.remove(self._spaces[namespace], objects, now)

    def hit(self, namespace: str, hashes: Sequence[bytes], matched: int, resumed: int, now: float) -> None:
        """A request reused a prefix. O(path).

        Args:
            hashes: the path, at least up to `matched`.
            matched: tokens that the request shares with what was cached; where it left the cached path.
            resumed: tokens that it skipped: position of the snapshot it resumed from.
        """
        space = self._spaces[namespace]
        block = space.geometry.block_tokens
        nodes = self.tree.match(space, hashes[: matched // block]).nodes
        if not nodes:
            return
        end = self.reach.path_of(nodes[-1])
        if end != NO_NODE:
            position = float(len(nodes) * block)
            self.reach.update(end, lambda record: self.access.observe(record, position, block))
        self._refresh(nodes[: resumed // block], now, geometry=space.geometry)
        self._count_event()

    def _refresh(self, nodes: list[int], now: float, geometry: CacheGeometry) -> None:
        """KV that was read is used; which snapshots count as used is a setting."""
        if not nodes or self.settings.refresh == "none":
            return
        used = np.array(nodes, dtype=np.int64)
        if self.settings.refresh == "used" and geometry.snapshot_bytes:
            snapshots = np.frombuffer(self.tree.restorable.marked, dtype=np.uint8)[used] != 0
            snapshots[-1] = False
            used = used[~snapshots]
        accessed = np.frombuffer(self.tree.last_access, dtype=np.float64)
        accessed[used] = np.maximum(accessed[used], now)

    def end_turn(self, namespace: str, hashes: Sequence[bytes], tokens: int, now: float) -> None:
        """A turn ended at position `tokens` of the path `hashes`: that is where its next append will hit. O(path).

        Without it, a path is taken to end at its last snapshot.
        """
        space = self._spaces[namespace]
        nodes = self.tree.match(space, hashes).nodes
        last = nodes[-1] if nodes else NO_NODE
        while last != NO_NODE and not self.tree.restorable.alive(last):
            last = self.tree.parent[last]
        if last in self.reach.records:

            def move_end(record: PathRecord) -> None:
                record.end = float(tokens)

            self.reach.update(last, move_end)
        self._count_event()

    def session_moved(self, namespace: str, end: bytes, was_ours: bool = True) -> bool:
        """Another instance served the last turn of the session whose path ends at the chunk `end`. O(path), once.

        The path loses value by as much as such sessions do not come back (learned). A hit here makes it this cache's again.

        Args:
            namespace: where it belongs.
            end: last chunk of the path.
            was_ours: whether it was served here before; of others nothing is learned.

        Returns:
            Whether a path ends there and was not known to have moved.
        """
        node = self._spaces[namespace].nodes.get(end, NO_NODE)
        record = self.reach.records.get(node)
        if record is None or record.moved:
            return False
        self.reach.update(node, lambda path: self.access.observe_move(path, was_ours))
        self._count_event()
        return True

    def statistics(self, now: float) -> Statistics:
        """What this cache itself has seen, for others to begin with. O(1)."""
        hits, end_hits, distances = self.access.own_counters()
        return Statistics(
            hits,
            end_hits,
            tuple(distances.tolist()),
            *self.tree.kv_residence.counters(now),
            *self.tree.snapshot_residence.counters(now),
        )

    def seed(self, statistics: Statistics) -> None:
        """Begin with what others have seen, before anything was seen here. O(n) once, to re-price what is there."""
        self.access.seed(statistics.hits, statistics.end_hits, np.asarray(statistics.distances, dtype=np.float64))
        self.tree.kv_residence.seed(statistics.kv_exposure, statistics.kv_departures)
        self.tree.snapshot_residence.seed(statistics.snapshot_exposure, statistics.snapshot_departures)
        self.publish()

    def observe_prefill(self, start: float, end: float, milliseconds: float) -> None:
        """The engine prefilled positions [start, end) in `milliseconds`. O(1)."""
        self.cost.observe_prefill(start, end, milliseconds)

    def observe_restore(self, tier: Tier, nbytes: float, milliseconds: float) -> None:
        """`nbytes` came back from `tier` in `milliseconds`. O(1)."""
        self.cost.observe_restore(tier, nbytes, milliseconds)

    def observe_stop(self, milliseconds: float) -> None:
        """An extra scheduler step for a snapshot cost `milliseconds`: moving average. O(1)."""
        former = self._stop_ms
        self._stop_ms = milliseconds if former is None else former + 0.05 * (milliseconds - former)

    # -- what to do -----------------------------------------------------------------------------------------------

    def interval(self, namespace: str, length: int, now: float) -> int:
        """Distance of snapshots, in tokens, for a new segment of `length` tokens. O(1)."""
        geometry = self._spaces[namespace].geometry
        block = geometry.block_tokens
        if self.settings.interval == "final-only":
            return max(length, block)
        if self.settings.interval != "adaptive":
            return max(block, geometry.align(self.settings.interval))
        stop = self.cost.stop(self._stop_ms) if self._stop_ms else 0.0
        return choose_interval(length, geometry.snapshot_tokens, block, self.residence_ratio(now), stop)

    def place(self, namespace: str, start: int, end: int, now: float) -> list[int]:
        """Positions that should get a snapshot on the new segment [start, end), ascending block multiples.

        `start` is where the request resumes (or 0) and has its snapshot. The last block boundary at or before `end` is
        always among them, unless it is not after `start`. O(1), or about 3 ms with `placement="histogram"`.
        """
        geometry = self._spaces[namespace].geometry
        block = geometry.block_tokens
        places = grid(start, end, self.interval(namespace, end - start, now), block)
        if self.settings.placement == "uniform" or len(places) < 2:
            return places
        first, last = geometry.align(start), places[-1]
        weights = self.access.hit_weights(first, last, block)
        return [first + block * place for place in best_places(weights, len(places) - 1)] + [last]

    def next_victim(self, tier: Tier, now: float, namespaces: Sequence[str] | None = None) -> Victim | None:
        """The unit that should leave `tier` first (CPU or DISK), None if nothing can. O(log n + objects), amortised.

        With `namespaces`, only what is in them is considered, in the same order; each is asked on its own.

        It stays in the tree until `discard`, `moved` or `removed` says otherwise. Whether or not it is taken, it is not
        offered again for `offer_again_s`: a caller that finds it locked just asks for the next one. None does not mean
        that the tier is empty: what is being stored right now (a fresh orphan) is kept while victims that were offered
        are still there. Ask again once their removal was reported, or after `offer_again_s`.
        """
        return self.order.next_victim(tier, now, self._numbers(namespaces))

    def lowest_value(self, tier: Tier, namespaces: Sequence[str] | None = None) -> float:
        """H of the next victim of `tier` that is no orphan, in seconds; infinite without one. O(log n) amortised."""
        return self.order.lowest_value(tier, self._numbers(namespaces))

    def held_bytes(self, namespace: str, tier: Tier) -> int:
        """Bytes of a namespace's objects in `tier`; 0 when it is not registered. O(1)."""
        space = self._spaces.get(namespace)
        return 0 if space is None else self.tree.space_bytes[space.number][tier]

    def _numbers(self, namespaces: Sequence[str] | None) -> list[int] | None:
        if namespaces is None:
            return None
        return [self._spaces[name].number for name in namespaces if name in self._spaces]

    def discard(self, victim: Victim, now: float) -> None:
        """The victim's objects, and those it strands, are deleted. Later `removed` events for them change nothing."""
        self.removed(victim.namespace, [*victim.objects, *victim.stranded], now)

    def moved(self, victim: Victim, to: Tier, now: float) -> None:
        """The victim's objects are in `to` now and no longer in its tier. Refreshes nothing."""
        self.stored(victim.namespace, [obj._replace(tier=to) for obj in victim.objects], now)
        self.removed(victim.namespace, victim.objects, now)

    def worth_moving(self, victim: Victim, to: Tier, free_bytes: float) -> bool:
        """Whether `victim` deserves room in `to`: it fits in what is free there, or outranks what would have to go.

        Orphans and what has a copy elsewhere do not. O(log n) amortised.
        """
        if victim.backed or victim.value == -np.inf:
            return False
        return victim.nbytes <= free_bytes or victim.value > self.order.lowest_value(to)

    def residence_ratio(self, now: float) -> float:
        """T_KV / T_state: how long KV stays against how long snapshots stay. 1 until both were evicted. O(1)."""
        kv, state = self.tree.kv_residence.mean(now), self.tree.snapshot_residence.mean(now)
        return kv / state if kv and state else 1.0

    def _count_event(self) -> None:
        """Let what was learned go live once the events since the last time have paid for re-pricing everything."""
        self._events += 1
        if self._events * 4 >= max(4 * MIN_EVENTS_TO_PUBLISH, len(self.tree), self._publish_chunks):
            self.publish()

    def publish(self, tau: float | None = None) -> None:
        """Make what was learned (end hits, distances, prices) the live model and re-price every unit.

        O(n + sum of path lengths). Called by itself once in a quarter as many events (and at least 256), so that an
        event's share is O(1).
        """
        self._events = 0
        self.access.publish()
        self.cost.publish()
        self._publish_chunks = self.reach.rebuild()
        self.order.reprice(tau)

    def stats(self, now: float) -> PolicyStats:
        """Figures for metrics and reports. O(1)."""
        tree = self.tree
        return PolicyStats(
            chunks=len(tree),
            paths=len(self.reach.records),
            tier_bytes=tuple(tree.tier_bytes),
            units=tuple(self.order.queued(tier) for tier in MANAGED),
            tau=self.tau,
            end_probability=self.access.observed_end_probability,
            kv_residence_s=tree.kv_residence.mean(now),
            snapshot_residence_s=tree.snapshot_residence.mean(now),
            sampling_rate=self.tuner.rate if self.tuner is not None else None,
            recomputed_by_tau=self.tuner.work if self.tuner is not None else {},
        )

    # -- plain data -----------------------------------------------------------------------------------------------

    def dump(self) -> PlainPolicy:
        """Everything but the settings, the tuner's shadows and what other instances said, as plain data. O(n)."""
        tree = self.tree
        return PlainPolicy(
            version=PLAIN_VERSION,
            tau=self.tau,
            namespaces=[dump_namespace(tree, space) for space in tree.namespaces],
            paths=sorted(
                (tree.namespaces[tree.space[node]].name, tree.hashes[node], rec.end, rec.hits, rec.end_hits)
                for node, rec in self.reach.records.items()
            ),
            access=self.access.dump(),
            cost=self.cost.dump(),
            kv_residence=self.tree.kv_residence.dump(),
            snapshot_residence=self.tree.snapshot_residence.dump(),
        )

    def load(self, data: PlainPolicy, now: float) -> None:
        """Take back what `dump` gave, into a new policy. Paths that are no longer whole are left out. O(n).

        Raises:
            ValueError: another version, or data that contradict themselves.
        """
        if data["version"] != PLAIN_VERSION:
            raise ValueError(f"plain data of version {data['version']}, this code reads {PLAIN_VERSION}")
        for plain in data["namespaces"]:
            space = load_namespace(self.tree, plain, now)
            self.add_namespace(space.name, space.geometry)
        for name, chunk_hash, end, hits, end_hits in data["paths"]:
            record = self.reach.records.get(self._spaces[name].nodes.get(chunk_hash, NO_NODE))
            if record is not None:
                record.end, record.hits, record.end_hits = end, hits, end_hits
        self.access.load(data["access"])
        self.cost.load(data["cost"])
        self.tree.kv_residence.load(data["kv_residence"])
        self.tree.snapshot_residence.load(data["snapshot_residence"])
        tau = data["tau"] if self.settings.eviction == "cost" and self.settings.tau == "auto" else None
        if tau is not None and self.tuner is not None and tau in self.tuner.taus:
            self.tuner.live = tau
        self.publish(tau)
