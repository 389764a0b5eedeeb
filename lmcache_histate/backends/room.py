"""Making room: moves the least valuable units of a short tier down, or deletes them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from lmcache.logging import init_logger
from lmcache.v1.distributed.api import ObjectKey

from lmcache_histate.backends.compat import StorageParts
from lmcache_histate.backends.layout import Layouts, Namespace
from lmcache_histate.backends.policies import Moves
from lmcache_histate.config import HiStateSettings
from lmcache_histate.scorer.eviction import Victim
from lmcache_histate.scorer.policy import CachePolicy
from lmcache_histate.state_store.objects import CacheObject, Tier

logger = init_logger(__name__)

DISK_HEADROOM = 0.05
"""Share of the disk tier kept free for writes that are on their way."""
CRITICAL = 0.97
"""CPU usage above which victims are deleted at once: a move to disk would free their memory too late."""
MAX_VICTIMS = 256
"""Victims of one round, so that events are applied in between."""


class RoomMaker:
    """Keeps CPU memory and the disk tier below their watermarks.

    Args:
        policy: Says who goes first.
        parts: LMCache's storage manager and controllers.
        layouts: Object keys of the core's objects.
        moves: What is asked of LMCache's store thread.
        disk: LMCache's adapter of the disk tier, or None.
        settings: Watermarks.
        disk_limit: Bytes of the disk tier that may be used, or None without a limit.
    """

    def __init__(
        self,
        policy: CachePolicy,
        parts: StorageParts,
        layouts: Layouts,
        moves: Moves,
        disk: Any | None,
        settings: HiStateSettings,
        disk_limit: float | None,
    ) -> None:
        self._policy = policy
        self._parts = parts
        self._layouts = layouts
        self._moves = moves
        self._disk = disk
        self._high = settings.cpu_high_watermark
        self._low = settings.cpu_low_watermark
        self._disk_limit = disk_limit
        self._leaving: dict[ObjectKey, int] = {}
        self.counts = dict.fromkeys(("moved_to_disk", "evicted_from_cpu", "evicted_from_disk", "locked_victims"), 0)

    def disk_bytes(self) -> int:
        """Bytes that the disk tier holds; 0 without one."""
        return int(self._disk.get_usage().total_bytes_used) if self._disk is not None else 0

    def left_cpu(self, keys: Iterable[ObjectKey]) -> None:
        """Objects are no longer in CPU memory."""
        for key in keys:
            self._leaving.pop(key, None)

    def make_room(self, now: float) -> None:
        """One round for each tier. O(victims), and nothing when neither tier is short."""
        self._make_room_in_cpu(now)
        self._make_room_on_disk(now)

    # CPU memory

    def _make_room_in_cpu(self, now: float) -> None:
        used, total = self._parts.manager.get_l1_usage()
        used_soon = used - sum(self._leaving.values())
        if used_soon <= self._high * total and used <= CRITICAL * total:
            return
        excess = used_soon - self._low * total
        urgent = used > CRITICAL * total
        if urgent:
            excess = max(excess, used - self._high * total)
        for _ in range(MAX_VICTIMS):
            if excess <= 0:
                return
            victim = self._policy.next_victim(Tier.CPU, now)
            if victim is None:
                return
            if not urgent and self._worth_moving(victim):
                self.move_down(Namespace.of_name(victim.namespace), victim.objects)
                excess -= victim.nbytes
            else:
                excess -= self._evict(victim)

    def _worth_moving(self, victim: Victim) -> bool:
        if self._disk is None:
            return False
        free = float("inf") if self._disk_limit is None else self._disk_limit - self.disk_bytes()
        return self._policy.worth_moving(victim, Tier.DISK, free)

    def move_down(self, namespace: Namespace, objects: Sequence[CacheObject]) -> int:
        """Write objects to disk and let CPU memory go of them afterwards; returns how many are newly on their way.

        Objects that the disk holds already only leave CPU memory. O(objects).
        """
        layout = self._layouts.of(namespace)
        if layout is None:
            return 0
        keys = self._moves.ask(layout.keys_of(namespace, objects), leave_cpu=True)
        if keys:
            self._leaving.update({key: layout.group_bytes[key.object_group_id] for key in keys})
            self._parts.offer_again(keys)
            self.counts["moved_to_disk"] += len(keys)
        return len(keys)

    def _evict(self, victim: Victim) -> int:
        """Delete a victim and what it strands, in every tier; returns the bytes freed in CPU memory."""
        namespace = Namespace.of_name(victim.namespace)
        layout = self._layouts.of(namespace)
        if layout is None:
            return 0
        cpu = [entry for entry in (*victim.objects, *victim.stranded) if entry.tier is Tier.CPU]
        keys = layout.keys_of(namespace, cpu)
        deleted, skipped = self._parts.manager.delete_l1_keys(keys)
        self.counts["evicted_from_cpu"] += deleted
        self.counts["locked_victims"] += skipped
        on_disk = layout.keys_of(namespace, [entry for entry in victim.stranded if entry.tier is Tier.DISK])
        if on_disk and not skipped:
            self._delete_on_disk(on_disk)
        return victim.nbytes if not skipped else 0

    def delete(self, keys: Sequence[ObjectKey]) -> int:
        """Delete objects from CPU memory and from disk, unless they are locked; returns how many left CPU memory."""
        deleted, _ = self._parts.manager.delete_l1_keys(list(keys))
        self._delete_on_disk(keys)
        return deleted

    # Disk

    def _make_room_on_disk(self, now: float) -> None:
        if self._disk is None or self._disk_limit is None:
            return
        excess = self.disk_bytes() - self._disk_limit
        for _ in range(MAX_VICTIMS):
            if excess <= 0:
                return
            victim = self._policy.next_victim(Tier.DISK, now)
            if victim is None:
                return
            namespace = Namespace.of_name(victim.namespace)
            layout = self._layouts.of(namespace)
            if layout is None:
                continue
            on_disk = [entry for entry in (*victim.objects, *victim.stranded) if entry.tier is Tier.DISK]
            self._delete_on_disk(layout.keys_of(namespace, on_disk))
            in_cpu = layout.keys_of(namespace, [entry for entry in victim.stranded if entry.tier is Tier.CPU])
            if in_cpu:
                self._parts.manager.delete_l1_keys(in_cpu)
            excess -= victim.nbytes
            self.counts["evicted_from_disk"] += len(on_disk)

    def _delete_on_disk(self, keys: Sequence[ObjectKey]) -> None:
        if self._disk is not None and keys:
            try:
                self._disk.delete(list(keys))
            except Exception:
                # Another adapter than ours may raise; what it kept stays accounted for and is offered again.
                logger.exception("The disk tier failed to delete %d objects", len(keys))
