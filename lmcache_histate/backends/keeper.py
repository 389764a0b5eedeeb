"""The one thread that drives the core: tells it what LMCache's tiers hold, and carries out what it decides.

Lookups and stores append events and go on; the connector reads the last published facts. Only a load from below that finds
too little CPU memory takes the core for a moment, to make room. Whatever is deleted from CPU memory goes through LMCache's
own call, which skips locked objects.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from lmcache.logging import init_logger
from lmcache.v1.distributed.api import ObjectKey

from lmcache_histate.backends.chains import Chains, Link
from lmcache_histate.backends.compat import StorageParts
from lmcache_histate.backends.disk.adapter import HiStateDiskAdapter
from lmcache_histate.backends.events import (
    AllocationFailed,
    Chained,
    Change,
    EventQueue,
    Looked,
    MoveEnded,
    ObjectsChanged,
    Restored,
    SnapshotsReplaced,
    StoreEvent,
    Timed,
    Touched,
)
from lmcache_histate.backends.fleet import Fleet
from lmcache_histate.backends.historical import HistoricalSnapshots
from lmcache_histate.backends.layout import Layouts, ModelLayout, Namespace, namespace_of
from lmcache_histate.backends.limits import DISK_HEADROOM
from lmcache_histate.backends.mover import Mover
from lmcache_histate.backends.offers import RemoteOffers
from lmcache_histate.backends.quotas import Quotas
from lmcache_histate.backends.remote_copies import RemoteCopies
from lmcache_histate.backends.room import RoomMaker
from lmcache_histate.backends.segments import SegmentStatistics
from lmcache_histate.config import Config
from lmcache_histate.geometry import GIB
from lmcache_histate.protocol import PlacementFacts, PrefillTime
from lmcache_histate.scorer.policy import CachePolicy
from lmcache_histate.scorer.settings import PolicySettings
from lmcache_histate.state_store.directory.protocol import NamespaceFacts
from lmcache_histate.state_store.objects import CacheObject, Kind, Tier
from lmcache_histate.state_store.tree import NO_NODE
from lmcache_histate.state_store.tree import Namespace as CoreNamespace

logger = init_logger(__name__)

IDLE_SECONDS = 0.5
"""How long the thread sleeps when nothing happens."""
LOAD_WAIT_SECONDS = 0.05
"""How long a load waits at most for room to be made: far less than what it saves."""
MAX_LOGGED_ERRORS = 20
"""Errors written to the log one by one; all are counted."""


class Keeper:
    """Feeds the core and acts on it.

    Args:
        config: The resolved configuration.
        parts: LMCache's storage manager and controllers.
        layouts: Which object groups hold what.
        queue: What happened, written by LMCache's threads.
        disk: The disk tier, or None.
        chunk_tokens: Tokens of one chunk.
        fleet: Makes what talks to the directory, from ``policy``, ``copies`` and ``restore_copy`` (see `Fleet`).
        offers: Makes what copies things to remote tiers, or None.
    """

    def __init__(
        self,
        config: Config,
        parts: StorageParts,
        layouts: Layouts,
        queue: EventQueue,
        disk: HiStateDiskAdapter | None,
        chunk_tokens: int,
        fleet: Callable[..., Fleet],
        offers: Callable[[CachePolicy], RemoteOffers] | None = None,
    ) -> None:
        settings = config.histate
        self._parts = parts
        self._layouts = layouts
        self._queue = queue
        self._chunk_tokens = chunk_tokens
        disk_limit = disk.get_usage().total_capacity_bytes * (1 - DISK_HEADROOM) if disk is not None else 0.0
        capacities = {Tier.CPU: float(parts.manager.get_l1_usage()[1])}
        if disk is not None:
            capacities[Tier.DISK] = disk_limit
        self.policy = CachePolicy(
            PolicySettings(
                eviction=settings.eviction,
                refresh=settings.refresh,
                interval=settings.interval,
                tau=settings.tau,
                cost_unit=settings.cost_unit,
                placement=settings.placement,
            ),
            capacities,
        )
        self._undecided: dict[tuple[str, int], deque[ObjectsChanged]] = {}
        self._chains = Chains(disk)
        self._mover = (
            Mover(parts, disk, queue, settings.max_disk_writes_per_day * GIB or None) if disk is not None else None
        )
        self._room = RoomMaker(
            self.policy,
            parts,
            layouts,
            self._chains,
            disk,
            self._mover,
            settings,
            disk_limit,
            self._undecided,
        )
        self._historical = (
            HistoricalSnapshots(self.policy, self._room, self._mover)
            if self._mover is not None and settings.snapshots_to_disk
            else None
        )
        self._quotas = Quotas(
            self.policy, parts.manager.quota_manager, self._mover.leaving if self._mover is not None else lambda _: 0
        )
        self._quotas.configure(settings.quotas)
        self._remote = RemoteCopies(self.policy)
        self._offers = offers(self.policy) if offers is not None else None
        self._fleet = fleet(
            policy=self.policy,
            copies=self._remote,
            restore_copy=self._offers.shared if self._offers is not None else None,
        )
        self._registered: dict[Namespace, CoreNamespace] = {}
        self._facts: dict[tuple[str, int], PlacementFacts] = {}
        self._counts = dict.fromkeys(("lookups", "hits", "dropped_snapshots", "errors"), 0)
        self._segments = SegmentStatistics()
        self._core = threading.Lock()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="histate-keeper", daemon=True)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def stop(self) -> None:
        """Stop it after the work in hand; what is queued is left."""
        self._stop.set()
        self._queue.wake()
        self._thread.join(timeout=30.0)

    # Read by other threads: values that the keeper's thread replaces whole

    def placement_facts(self, model_name: str, world_size: int) -> PlacementFacts:
        """The last published facts about one model; sizes come from its layout, so they are there from the start. O(1)."""
        facts = self._facts.get((model_name, world_size))
        if facts is not None:
            return facts
        layout = self._layouts.find(model_name, world_size)
        return PlacementFacts() if layout is None else self._describe(layout, time.monotonic())

    def status(self) -> dict[str, Any]:
        """Counters and sizes for ``/status``. O(1)."""
        used, total = self._parts.manager.get_l1_usage()
        return {
            **self._counts,
            **self._room.counts,
            **(self._historical.counts if self._historical is not None else {"demoted_snapshots": 0}),
            **(self._offers.counts if self._offers is not None else {}),
            **self._fleet.counts,
            "healthy": self._thread.is_alive(),
            "queued_events": len(self._queue),
            **(self._mover.counts if self._mover is not None else {}),
            "moves_in_flight": len(self._mover) if self._mover is not None else 0,
            "cpu_bytes": used,
            "cpu_capacity_bytes": total,
            "disk_bytes": self._room.disk_bytes(),
            "chunks_known": len(self.policy.tree),
            "tau_seconds": self.policy.tau,
        }

    def served(self) -> dict[str, NamespaceFacts]:
        """What the directory knows of the namespaces that this server serves, by their names. O(1)."""
        return self._fleet.facts

    def make_room_for(self, nbytes: int) -> None:
        """Called on LMCache's prefetch thread, before it reserves memory for a load from below.

        Waits for the controller's round in hand, but never longer than ``LOAD_WAIT_SECONDS``. O(victims).
        """
        if not self._core.acquire(timeout=LOAD_WAIT_SECONDS):
            return
        try:
            self._room.make_room_for(nbytes, time.monotonic())
        except Exception:
            # LMCache's prefetch thread serves every request: it must see a full tier at worst, never our bug.
            self._counts["errors"] += 1
            logger.exception("HiState could not make room for a load of %d bytes", nbytes)
        finally:
            self._core.release()

    # The thread

    def _run(self) -> None:
        while not self._stop.is_set():
            try:
                self._round(self._queue.take(IDLE_SECONDS))
                self._tune()
            except Exception:
                # A bug here must not take the server down, nor stop eviction for good.
                self._counts["errors"] += 1
                logger.exception("HiState's controller failed on one round; it goes on with the next")

    def _tune(self) -> None:
        """Let tau learn, in pieces of a few milliseconds between which a load can take the core, until something happens."""
        more = True
        while more and not self._stop.is_set():
            with self._core:
                more = self.policy.tune()
            if len(self._queue):
                return
            time.sleep(0)  # a lock that is taken again at once would starve who waits for it

    def _round(self, events: Sequence[StoreEvent]) -> None:
        with self._core:
            for event in events:
                try:
                    self._apply(event)
                except Exception as error:
                    self._counts["errors"] += 1
                    if self._counts["errors"] <= MAX_LOGGED_ERRORS:
                        logger.warning(
                            "HiState ignores an event that contradicts what it knows: %s", error, exc_info=True
                        )
            now = time.monotonic()
            if self._historical is not None:
                self._historical.move(now)
            for salt in self._quotas.over(now):
                self._room.hold_quota(self._quotas, salt, now)
            self._room.make_room(now, urgent=any(isinstance(event, AllocationFailed) for event in events))
            if self._offers is not None:
                self._offers.send(now)
            for appeared in self._layouts.registered() - self._facts.keys():
                # Before its first request, so that what others say of it is known by then.
                self._register(Namespace(*appeared, ""))
            if self._fleet.round(now):
                self._queue.wake()
            for model in self._facts:
                layout = self._layouts.find(*model)
                if layout is not None:
                    self._facts[model] = self._describe(layout, now)

    def _describe(self, layout: ModelLayout, now: float) -> PlacementFacts:
        return PlacementFacts(
            residence_ratio=self.policy.residence_ratio(now),
            snapshot_tokens=layout.geometry(self._chunk_tokens).snapshot_tokens if layout.is_hybrid else 0.0,
            pressure=self._room.pressure(),
            internal_hits_per_token=self._segments.internal_hits_per_token,
        )

    # Events

    def _apply(self, event: StoreEvent) -> None:
        if isinstance(event, ObjectsChanged):
            self._objects_changed(event)
        elif isinstance(event, Looked):
            self._looked(event)
        elif isinstance(event, Chained):
            self._link(self._chains.chained(event), event.time)
        elif isinstance(event, Touched):
            self._touched(event)
        elif isinstance(event, MoveEnded):
            self._move_ended(event)
        elif isinstance(event, SnapshotsReplaced):
            self._snapshots_replaced(event)
        elif isinstance(event, Timed):
            self.policy.observe_prefill(event.start, event.end, event.milliseconds)
        elif isinstance(event, Restored):
            self.policy.observe_restore(event.tier, event.nbytes, event.milliseconds)

    def _register(self, namespace: Namespace) -> ModelLayout | None:
        """The layout of a namespace, known to the core from now on; None before its model's first worker registered."""
        layout = self._layouts.of(namespace)
        if layout is None:
            return None
        if namespace not in self._registered:
            geometry = layout.geometry(self._chunk_tokens)
            self._registered[namespace] = self.policy.add_namespace(namespace.name, geometry)
            self._quotas.registered(namespace)
            self._fleet.joined(namespace, layout, self._chunk_tokens)
            model = namespace.model_name, namespace.world_size
            self._facts.setdefault(model, self._describe(layout, time.monotonic()))
        return layout

    def _link(self, links: Iterable[Link], now: float) -> None:
        for link in links:
            if self._register(link.namespace) is not None:
                self.policy.link(link.namespace.name, link.parent, link.hashes, now)
                self._fleet.changed(link.namespace, link.hashes)

    def _objects_changed(self, event: ObjectsChanged) -> None:
        families: dict[Namespace, list[ObjectKey]] = {}
        for key in event.keys:
            families.setdefault(namespace_of(key), []).append(key)
        for namespace, keys in families.items():
            layout = self._register(namespace)
            if layout is None:
                # Objects of an earlier run, found on disk before the model's workers are back.
                model = namespace.model_name, namespace.world_size
                waiting = self._undecided.setdefault(model, deque(maxlen=100_000))
                waiting.append(ObjectsChanged(event.change, event.tier, keys, event.time))
                continue
            objects = [entry for key in keys for entry in layout.objects_of(key, event.tier)]
            if event.change is Change.STORED:
                self._stored(namespace, layout, keys, objects, event)
            else:
                self.policy.removed(namespace.name, objects, event.time)
            self._tell_fleet(event, namespace, {key.chunk_hash for key in keys})

    def _tell_fleet(self, event: ObjectsChanged, namespace: Namespace, chunk_hashes: set[bytes]) -> None:
        if event.tier is not Tier.REMOTE:
            self._fleet.changed(namespace, chunk_hashes)
        elif event.change is Change.STORED:
            self._fleet.came_to_shared_tier(namespace, chunk_hashes)
        else:
            self._fleet.left_shared_tier(namespace, chunk_hashes)

    def _stored(
        self,
        namespace: Namespace,
        layout: ModelLayout,
        keys: list[ObjectKey],
        objects: list[CacheObject],
        event: ObjectsChanged,
    ) -> None:
        tree, space = self.policy.tree, self._registered[namespace]
        chunk_hashes = dict.fromkeys(key.chunk_hash for key in keys)
        self._link(self._chains.stored(namespace, chunk_hashes, tree, space), event.time)
        self.policy.stored(namespace.name, objects, event.time)
        if event.tier is Tier.REMOTE:
            self._remote.stored(namespace, chunk_hashes, event.time)
            if self._offers is not None:
                self._offers.arrived(keys)
            return
        self._quotas.stored(namespace)
        if event.tier is Tier.DISK:
            self._chains.keep_places(tree, space, keys, layout.group_kinds)
            return
        restore_points = {
            entry.chunk_hash for entry in objects if entry.kind == Kind.SNAPSHOT or not layout.has_snapshots
        }
        for chunk_hash in restore_points:
            if self._historical is not None and layout.has_snapshots:
                self._historical.stored(namespace, chunk_hash, event.time)
            if self._offers is not None:
                self._offers.came_to_cpu(namespace, chunk_hash, event.time)

    def _move_ended(self, event: MoveEnded) -> None:
        if self._mover is None:
            return
        now = time.monotonic()
        for key in self._mover.ended(event, now):
            # Not left to the events that follow: until they come, what was moved would count twice.
            namespace = namespace_of(key)
            layout = self._register(namespace)
            if layout is not None:
                self.policy.removed(namespace.name, layout.objects_of(key, Tier.CPU), now)
                self._fleet.changed(namespace, [key.chunk_hash])

    def _touched(self, event: Touched) -> None:
        """A request ended (or hit CPU memory: what it hit was an end, too, or is no news)."""
        chunks: dict[Namespace, dict[bytes, None]] = {}
        for key in event.keys:
            chunks.setdefault(namespace_of(key), {})[key.chunk_hash] = None
        for namespace, hashes in chunks.items():
            if self._register(namespace) is not None:
                self._fleet.turn_ended(namespace, list(hashes), event.time)
                if self._offers is not None:
                    self._offers.turn_ended(namespace, list(hashes), event.time)

    def _looked(self, event: Looked) -> None:
        namespace = Namespace(event.model_name, event.world_size, event.cache_salt)
        layout = self._register(namespace)
        if layout is None:
            return
        self._place_undecided()
        self._counts["lookups"] += 1
        self.policy.lookup(namespace.name, event.chunk_hashes, event.time)
        if event.remote is not None:
            self._remote.found(namespace, layout, event.remote, event.time)
        self._fleet.looked(namespace, event.chunk_hashes, event.remote is not None, event.time)
        inside = self._goes_on(namespace, event)
        self._segments.looked_up((len(event.chunk_hashes) - event.hit_chunks) * self._chunk_tokens, inside)
        if inside and self._offers is not None:
            # Where it resumes, and where it parts: vLLM saves a state there, too.
            for reached in {event.hit_chunks, event.kv_chunks} - {0}:
                self._offers.shared(namespace, event.chunk_hashes[reached - 1], event.time)
        if event.kv_chunks:
            self._counts["hits"] += event.hit_chunks > 0
            self._fleet.hit(namespace, event.chunk_hashes, event.kv_chunks, event.time)
            self.policy.hit(
                namespace.name,
                event.chunk_hashes,
                event.kv_chunks * self._chunk_tokens,
                event.hit_chunks * self._chunk_tokens,
                event.time,
            )

    def _goes_on(self, namespace: Namespace, event: Looked) -> bool:
        """Whether the cached path goes on where the prompt left it: a hit inside, not at an end. O(children)."""
        tree = self.policy.tree
        node = self._node(namespace, event.chunk_hashes[event.kv_chunks - 1]) if event.kv_chunks else NO_NODE
        return node != NO_NODE and any(tree.is_whole(child) for child in tree.children(node))

    def _place_undecided(self) -> None:
        """Objects found on disk at start-up, once their model is known: their places come from the catalogue.

        O(models that are not known yet), and O(n log n) once a model.
        """
        known = [model for model in self._undecided if self._layouts.find(*model) is not None]
        if not known:
            return
        self._link(self._chains.on_disk(), time.monotonic())
        for event in [event for model in known for event in self._undecided.pop(model)]:
            self._objects_changed(event)

    def prefilled(self, prefill: PrefillTime) -> None:
        """The engine says how long a prefill took. Called on a request thread; only queues."""
        self._queue.put(Timed(prefill.start, prefill.end, prefill.milliseconds))

    def drop_snapshots(self, namespace: Namespace, chunk_hashes: Sequence[bytes]) -> None:
        """The connector says that these snapshots were replaced. Called on a request thread; only queues."""
        self._queue.put(SnapshotsReplaced(*namespace, chunk_hashes, time.monotonic()))

    def _snapshots_replaced(self, event: SnapshotsReplaced) -> None:
        namespace = Namespace(event.model_name, event.world_size, event.cache_salt)
        layout = self._register(namespace)
        if layout is None:
            return
        for chunk_hash in event.chunk_hashes:
            keys = layout.all_keys(namespace, chunk_hash, Kind.SNAPSHOT)
            self._counts["dropped_snapshots"] += self._room.delete(keys)

    def _node(self, namespace: Namespace, chunk_hash: bytes) -> int:
        space = self._registered.get(namespace)
        return NO_NODE if space is None else space.nodes.get(chunk_hash, NO_NODE)
