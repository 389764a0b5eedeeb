"""Tiers that HiState's own core manages: `CachePolicy` decides, this carries out what the server's keeper does.

The rules are those of `backends.keeper`, `backends.mover` and `backends.room`: everything that is computed goes to CPU
memory; a snapshot that a later one overtook moves to disk; above the high watermark the least valuable units move down
if they deserve the place, else they go; KV that was read back stays in CPU memory.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from lmcache_histate.backends.limits import CRITICAL, DISK_HEADROOM, IN_FLIGHT_SHARE, PAUSE_SECONDS, SETTLE_SECONDS
from lmcache_histate.backends.segments import SegmentStatistics
from lmcache_histate.protocol import PlacementFacts
from lmcache_histate.replay.simulator.objects import KV, SNAPSHOT, kind_of, node_of
from lmcache_histate.replay.simulator.policies.base import Load, Match, Occupancy, Site, Tiers
from lmcache_histate.replay.simulator.policies.objects import LruTier
from lmcache_histate.replay.simulator.prompts import Prompt
from lmcache_histate.scorer.eviction import Victim
from lmcache_histate.scorer.policy import CachePolicy
from lmcache_histate.state_store.objects import CacheObject, Kind, Tier
from lmcache_histate.state_store.tree import NO_NODE
from lmcache_histate.state_store.units import UnitKind

NAMESPACE = "simulated"
NAMES = {Tier.CPU: "cpu", Tier.DISK: "disk", Tier.REMOTE: "remote"}


@dataclass(frozen=True, slots=True)
class UnitSettings:
    """What the keeper is configured with, besides the policy's own settings.

    Attributes:
        snapshots_to_disk: Historical snapshots move to disk.
        high, low: Watermarks of CPU memory.
    """

    snapshots_to_disk: bool = True
    high: float = 0.9
    low: float = 0.8


class UnitTiers(Tiers):
    """CPU memory and disk under one `CachePolicy`.

    Args:
        site: What it runs on.
        policy: Who goes first.
        settings: Watermarks and switches.
    """

    def __init__(self, site: Site, policy: CachePolicy, settings: UnitSettings | None = None) -> None:
        self.site = site
        self.policy = policy
        self.settings = settings or UnitSettings()
        self.segments = SegmentStatistics()
        self._space = policy.add_namespace(NAMESPACE, site.geometry)
        self._tree = policy.tree
        self._names = site.trace.chunk_hashes()
        self._numbers = {name: number for number, name in enumerate(self._names)}
        self._block = site.geometry.block_tokens
        self._kv_bytes = int(site.geometry.chunk_bytes)
        self._snapshot_bytes = int(site.geometry.snapshot_bytes)
        self._has_disk = site.disk_bytes > 0
        self._disk_limit = site.disk_bytes * (1 - DISK_HEADROOM)
        self._evicted = {Tier.CPU: False, Tier.DISK: False}
        self._overtaken: deque[tuple[float, bytes]] = deque(maxlen=100_000)
        self._waiting = False
        self._now = 0.0
        self._moving: dict[CacheObject, None] = {}
        self._moving_bytes = 0
        self._paused_until = float("-inf")
        self._by_kind = {tier: [0.0, 0.0] for tier in NAMES}
        self._links = site.links
        self._remote = LruTier("remote", site.remote_bytes, self._left_remote) if site.remote_bytes else None

    # -- what the placement asks ------------------------------------------------------------------------------------

    def facts(self, now: float) -> PlacementFacts:
        """What the server tells the connector (`Keeper._describe`)."""
        return PlacementFacts(
            residence_ratio=self.policy.residence_ratio(now),
            snapshot_tokens=self.site.geometry.snapshot_tokens,
            pressure=self._pressure(),
            internal_hits_per_token=self.segments.internal_hits_per_token,
        )

    def _pressure(self) -> float:
        tier = Tier.DISK if self._has_disk else Tier.CPU
        if self._evicted[tier]:
            return 1.0
        if self._has_disk:
            return min(1.0, self._held(Tier.DISK) / self._disk_limit)
        return min(1.0, self._held(Tier.CPU) / (self.settings.high * self.site.cpu_bytes))

    def _held(self, tier: Tier) -> int:
        return self._tree.tier_bytes[tier]

    # -- requests -----------------------------------------------------------------------------------------------------

    def lookup(self, prompt: Prompt, path: Sequence[int], now: float) -> Match:
        """As the server's prefetch policy reports a lookup to the keeper."""
        self._now = now
        hashes = [self._names[node] for node in path]
        policy, block = self.policy, self._block
        found = policy.lookup(NAMESPACE, hashes, now)
        kv, resume = found.kv_tokens // block, found.resume_tokens // block
        self.segments.looked_up((len(hashes) - resume) * block, self._goes_on(hashes, kv))
        if kv:
            policy.hit(NAMESPACE, hashes, found.kv_tokens, found.resume_tokens, now)
        while policy.tune():
            pass
        return Match(kv, resume)

    def _goes_on(self, hashes: Sequence[bytes], kv: int) -> bool:
        tree = self._tree
        node = self._space.nodes.get(hashes[kv - 1], NO_NODE) if kv else NO_NODE
        return node != NO_NODE and any(tree.is_whole(child) for child in tree.children(node))

    def load(self, prompt: Prompt, path: Sequence[int], start: int, end: int, now: float) -> Load:
        """Make room, read what only the disk has, keep the KV of it in CPU memory."""
        nodes, tree = self._space.nodes, self._tree
        names = [self._names[node] for node in path[start:end]]
        blocks, nbytes = [0, 0, 0], [0, 0, 0]
        below = []
        for name in names:
            where = next(tier for tier in Tier if tree.size(nodes[name], Kind.KV, tier))
            blocks[where] += 1
            nbytes[where] += self._kv_bytes
            if where is not Tier.CPU:
                below.append(name)
        where = next(tier for tier in Tier if tree.size(nodes[names[-1]], Kind.SNAPSHOT, tier))
        nbytes[where] += self._snapshot_bytes
        ready = self._links.disk_read.transfer(nbytes[Tier.DISK], now)
        ready = max(ready, self._links.remote_read.transfer(nbytes[Tier.REMOTE], now))
        if below:
            self._make_room_for(nbytes[Tier.DISK] + nbytes[Tier.REMOTE], now)
            room = max(0, int(self.site.cpu_bytes - self._held(Tier.CPU))) // self._kv_bytes
            # Those that room was made with are gone: only what still lies below can be kept.
            kept = [name for name in below[:room] if name in nodes and self._tree.complete(nodes[name], Kind.KV)]
            self._add([CacheObject(name, Kind.KV, 0, Tier.CPU, self._kv_bytes) for name in kept], now)
            self._make_room(now)
        ready = max(ready, self._links.to_gpu.transfer(sum(nbytes), now))
        return Load(ready, blocks[Tier.DISK], blocks[Tier.REMOTE])

    def store(
        self, prompt: Prompt, path: Sequence[int], start: int, end: int, snapshots: Sequence[int], now: float
    ) -> None:
        """Everything goes to CPU memory, if it has room; the snapshots before are overtaken then."""
        self._now = now
        names = self._names
        objects = [CacheObject(names[node], Kind.KV, 0, Tier.CPU, self._kv_bytes) for node in path[start:end]]
        for place in snapshots:
            objects.append(CacheObject(names[path[place - 1]], Kind.SNAPSHOT, 0, Tier.CPU, self._snapshot_bytes))
        fresh = self._fresh(objects)
        room = self.site.cpu_bytes - self._held(Tier.CPU)
        if sum(entry.nbytes for entry in fresh) > room:
            self._make_room(now, urgent=True)
            room = self.site.cpu_bytes - self._held(Tier.CPU)
        stored = []
        for entry in fresh:
            if entry.nbytes <= room:
                stored.append(entry)
                room -= entry.nbytes
        if start < end:
            self._time_prefill(start * self._block, end * self._block)
            after = names[path[start - 1]] if start else None
            self.policy.link(NAMESPACE, after, [names[node] for node in path[start:end]], now)
        self._add(stored, now)
        self._store_remote(stored, now)
        if self.settings.snapshots_to_disk and self._has_disk:
            for entry in stored:
                if entry.kind == Kind.SNAPSHOT:
                    self._note_overtaken(entry.chunk_hash, now)
        self._make_room(now)

    def _time_prefill(self, start: int, end: int) -> None:
        """What the connector tells of a step that was one prompt's."""
        times = self.site.times
        seconds = times.token_s * (end - start) + times.prefill(start, end)
        self.policy.observe_prefill(start, end, 1e3 * seconds)

    def _fresh(self, objects: list[CacheObject]) -> list[CacheObject]:
        nodes, tree = self._space.nodes, self._tree
        return [
            entry
            for entry in objects
            if entry.chunk_hash not in nodes or not tree.size(nodes[entry.chunk_hash], entry.kind, entry.tier)
        ]

    def _store_remote(self, objects: Sequence[CacheObject], now: float) -> None:
        """A remote tier gets what is newly stored, and keeps order by itself (`HiStateStorePolicy`)."""
        if self._remote is None:
            return
        for entry in objects:
            if self._remote.add(self._key(entry), entry.nbytes, now):
                self._links.remote_write.transfer(entry.nbytes, now)
                self._add([entry._replace(tier=Tier.REMOTE)], now)

    def _left_remote(self, tier: str, key: int, nbytes: float) -> None:
        kind = Kind.SNAPSHOT if kind_of(key) == SNAPSHOT else Kind.KV
        gone = CacheObject(self._names[node_of(key)], kind, 0, Tier.REMOTE, int(nbytes))
        self._take([gone], self._now)
        self.site.ledger.left(tier, key, nbytes)

    def _key(self, entry: CacheObject) -> int:
        return 2 * self._numbers[entry.chunk_hash] + entry.kind

    def finished(self, prompt: Prompt, path: Sequence[int], resumed: int, now: float) -> None:
        """The keeper hears nothing of a request's end."""

    def holds(self, key: int) -> bool:
        """Whether the tree has it in any tier."""
        node = self._space.nodes.get(self._names[node_of(key)], NO_NODE)
        if node == NO_NODE:
            return False
        kind = Kind.SNAPSHOT if kind_of(key) == SNAPSHOT else Kind.KV
        return any(self._tree.size(node, kind, tier) for tier in Tier)

    def occupancy(self) -> Occupancy:
        """Bytes by tier and kind, of the tiers that exist."""
        tiers = [Tier.CPU]
        tiers += [Tier.DISK] if self._has_disk else []
        tiers += [Tier.REMOTE] if self._remote is not None else []
        return Occupancy(
            {NAMES[tier]: self._by_kind[tier][KV] for tier in tiers},
            {NAMES[tier]: self._by_kind[tier][SNAPSHOT] for tier in tiers},
        )

    # -- bookkeeping --------------------------------------------------------------------------------------------------

    def _add(self, objects: Sequence[CacheObject], now: float) -> None:
        for entry in self._fresh(list(objects)):
            self._by_kind[entry.tier][entry.kind] += entry.nbytes
        self.policy.stored(NAMESPACE, objects, now)

    def _take(self, objects: Sequence[CacheObject], now: float) -> list[CacheObject]:
        """Remove objects; those that were there."""
        nodes, tree = self._space.nodes, self._tree
        there = [
            entry
            for entry in objects
            if entry.chunk_hash in nodes and tree.size(nodes[entry.chunk_hash], entry.kind, entry.tier)
        ]
        for entry in there:
            self._by_kind[entry.tier][entry.kind] -= entry.nbytes
        self.policy.removed(NAMESPACE, there, now)
        return there

    def _delete(self, objects: Sequence[CacheObject], now: float) -> None:
        """Remove objects for good, and tell the ledger."""
        for entry in self._take(objects, now):
            key = self._key(entry)
            if entry.tier is Tier.REMOTE and self._remote is not None:
                self._remote.discard(key)
            self.site.ledger.left(NAMES[entry.tier], key, entry.nbytes)

    # -- moving down (`backends.mover`) -------------------------------------------------------------------------------

    def _may_move(self, nbytes: int, now: float) -> bool:
        limit = self.site.cpu_bytes // IN_FLIGHT_SHARE
        return now >= self._paused_until and (not self._moving or self._moving_bytes + nbytes <= limit)

    def _move(self, objects: Sequence[CacheObject], now: float) -> int:
        """Start writing objects to disk; returns the bytes that will leave CPU memory."""
        fresh = [entry for entry in objects if entry not in self._moving]
        nbytes = sum(entry.nbytes for entry in fresh)
        if not fresh:
            return 0
        if self._held(Tier.DISK) + self._moving_bytes + nbytes > self.site.disk_bytes:
            self._paused_until = now + PAUSE_SECONDS
            return 0
        self._moving.update(dict.fromkeys(fresh))
        self._moving_bytes += nbytes
        to_write = sum(entry.nbytes for entry in self._fresh([entry._replace(tier=Tier.DISK) for entry in fresh]))
        done = self._links.disk_write.transfer(to_write, now)
        self.site.later(done, lambda time: self._moved(fresh, time))
        return nbytes

    def _moved(self, objects: list[CacheObject], now: float) -> None:
        for entry in objects:
            del self._moving[entry]
            self._moving_bytes -= entry.nbytes
        nodes, tree = self._space.nodes, self._tree
        there = [
            entry
            for entry in objects
            if entry.chunk_hash in nodes and tree.size(nodes[entry.chunk_hash], entry.kind, Tier.CPU)
        ]
        self._add([entry._replace(tier=Tier.DISK) for entry in there], now)
        self._take(there, now)
        self._demote_overtaken(now)
        self._wait_for_overtaken(now)
        self._make_room(now)

    # -- overtaken snapshots (`backends.keeper`) ----------------------------------------------------------------------

    def _note_overtaken(self, chunk_hash: bytes, now: float) -> None:
        tree = self._tree
        node = self._space.nodes.get(chunk_hash, NO_NODE)
        if node == NO_NODE:
            return
        for other in (tree.previous_restorable(node), node):
            if other != NO_NODE and tree.hashes[other]:
                self._overtaken.append((now + SETTLE_SECONDS, tree.hashes[other]))
        self._wait_for_overtaken(now)

    def _wait_for_overtaken(self, now: float) -> None:
        """Look again when the next one has settled; where the disk is busy, the end of a write looks again."""
        if self._waiting or not self._overtaken:
            return
        due = max(self._overtaken[0][0], self._paused_until)
        if due <= now:
            if self._moving:
                return
            due = now + SETTLE_SECONDS
        self._waiting = True
        self.site.later(due, self._settled)

    def _settled(self, now: float) -> None:
        self._waiting = False
        self._demote_overtaken(now)
        self._wait_for_overtaken(now)

    def _demote_overtaken(self, now: float) -> None:
        tree = self._tree
        while self._overtaken and self._overtaken[0][0] <= now:
            node = self._space.nodes.get(self._overtaken[0][1], NO_NODE)
            self.policy.order.settle()
            if node != NO_NODE and tree.unit_kind[Tier.CPU][node] == UnitKind.SNAPSHOT:
                objects = tree.objects(node, Kind.SNAPSHOT, Tier.CPU)
                if not self._may_move(sum(entry.nbytes for entry in objects), now):
                    return
                self._move(objects, now)
            self._overtaken.popleft()

    # -- room (`backends.room`) ---------------------------------------------------------------------------------------

    def _make_room_for(self, nbytes: int, now: float) -> None:
        missing = nbytes - (self.site.cpu_bytes - self._held(Tier.CPU))
        if nbytes > self.site.cpu_bytes:
            return
        while missing > 0:
            victim = self.policy.next_victim(Tier.CPU, now)
            if victim is None:
                return
            missing -= self._delete_victim(victim, now)

    def _make_room(self, now: float, urgent: bool = False) -> None:
        total, used = self.site.cpu_bytes, self._held(Tier.CPU)
        excess = 0.0
        if urgent or used - self._moving_bytes > self.settings.high * total:
            excess = used - self._moving_bytes - self.settings.low * total
        if used > CRITICAL * total:
            excess = max(excess, used - self.settings.high * total)
        while excess > 0:
            victim = self.policy.next_victim(Tier.CPU, now)
            if victim is None:
                break
            excess -= self._move_victim(victim, now) or self._delete_victim(victim, now)
        excess = self._held(Tier.DISK) - self._disk_limit
        while excess > 0:
            victim = self.policy.next_victim(Tier.DISK, now)
            if victim is None:
                break
            excess -= self._delete_victim(victim, now)

    def _move_victim(self, victim: Victim, now: float) -> int:
        if not self._has_disk or not self._may_move(victim.nbytes, now):
            return 0
        free = self._disk_limit - self._held(Tier.DISK) - self._moving_bytes
        if not self.policy.worth_moving(victim, Tier.DISK, free):
            return 0
        return self._move(victim.objects, now)

    def _delete_victim(self, victim: Victim, now: float) -> int:
        """Delete a victim and what it strands. What is being written to disk is locked: then nothing goes."""
        everything = [*victim.objects, *victim.stranded]
        if victim.tier is Tier.CPU and any(entry in self._moving for entry in everything):
            return 0
        self._evicted[victim.tier] = True
        self._delete([entry for entry in everything if entry not in self._moving], now)
        return victim.nbytes
