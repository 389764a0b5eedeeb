"""Making room: moves the least valuable units of a short tier down, or deletes them."""

from __future__ import annotations

from collections.abc import Container, Sequence

from lmcache.logging import init_logger
from lmcache.v1.distributed.api import ObjectKey

from lmcache_histate.backends.chains import Chains
from lmcache_histate.backends.compat import StorageParts
from lmcache_histate.backends.disk.adapter import HiStateDiskAdapter
from lmcache_histate.backends.layout import Layouts, Namespace, namespace_of
from lmcache_histate.backends.limits import CRITICAL, DISK_HEADROOM
from lmcache_histate.backends.mover import Mover
from lmcache_histate.backends.quotas import Quotas
from lmcache_histate.config import HiStateSettings
from lmcache_histate.scorer.eviction import Victim
from lmcache_histate.scorer.policy import CachePolicy
from lmcache_histate.state_store.objects import CacheObject, Tier
from lmcache_histate.state_store.units import MANAGED

logger = init_logger(__name__)

STRANGERS_SECONDS = 10.0
"""Pause between two searches for what models left that did not come back."""
MAX_VICTIMS = 256
"""Victims of one round, so that events are applied in between."""


class RoomMaker:
    """Keeps CPU memory and the disk tier below their watermarks.

    Args:
        policy: Says who goes first.
        parts: LMCache's storage manager and controllers.
        layouts: Object keys of the core's objects.
        chains: Places of objects, kept with them on disk.
        disk: The disk tier, or None.
        mover: What writes to it, or None.
        settings: Watermarks.
        disk_limit: Bytes that the disk tier may hold.
        strangers: (model, world size) of objects on disk whose model has not come back yet; kept by the caller.
    """

    def __init__(
        self,
        policy: CachePolicy,
        parts: StorageParts,
        layouts: Layouts,
        chains: Chains,
        disk: HiStateDiskAdapter | None,
        mover: Mover | None,
        settings: HiStateSettings,
        disk_limit: float,
        strangers: Container[tuple[str, int]] = (),
    ) -> None:
        self._policy = policy
        self._parts = parts
        self._layouts = layouts
        self._chains = chains
        self._disk = disk
        self._mover = mover
        self._high = settings.cpu_high_watermark
        self._low = settings.cpu_low_watermark
        self._disk_limit = disk_limit
        self._strangers = strangers
        self._strangers_after = float("-inf")
        self._stranded_on_disk: list[ObjectKey] = []
        self._evicted = {Tier.CPU: False, Tier.DISK: False}
        self.counts = dict.fromkeys(("evicted_from_cpu", "evicted_from_disk", "evicted_for_quota", "locked_victims"), 0)

    def disk_bytes(self) -> int:
        """Bytes that the disk tier holds; 0 without one."""
        return int(self._disk.get_usage().total_bytes_used) if self._disk is not None else 0

    def _disk_free(self) -> float:
        """Bytes that the disk tier may still take: to its limit, or less where others fill its file system. O(1)."""
        if self._disk is None:
            return 0.0
        usage = self._disk.store.usage()
        limit = min(self._disk_limit, (usage.used_bytes + usage.free_bytes) * (1 - DISK_HEADROOM))
        return limit - usage.used_bytes

    def pressure(self) -> float:
        """How full the tier of historical snapshots is, 0 to 1; 1 once anything had to go from it. O(1).

        While there is room, a snapshot displaces nothing: the paper's rule alone would save too few of them.
        """
        tier = Tier.DISK if self._disk is not None else Tier.CPU
        if self._evicted[tier]:
            return 1.0
        if self._disk is not None:
            return min(1.0, self.disk_bytes() / self._disk_limit)
        used, total = self._parts.manager.get_l1_usage()
        return min(1.0, used / (self._high * total))

    def make_room(self, now: float, urgent: bool = False) -> None:
        """One round for each tier. O(victims), and nothing when neither tier is short.

        Args:
            now: Seconds, monotonic.
            urgent: A store has just found no room, whatever the watermarks say.
        """
        if self._stranded_on_disk:
            # The core believes them gone: what is being read now is tried again until it is.
            self._stranded_on_disk = self._delete_on_disk(self._stranded_on_disk)
        self._make_room_in_cpu(now, urgent)
        self._make_room_on_disk(now)

    # CPU memory

    def make_room_for(self, nbytes: int, now: float) -> None:
        """Free CPU memory for a load of ``nbytes`` that is about to begin, by deleting: a move would come too late.

        LMCache reserves a whole load at once, and a load that finds no room is recomputed from the first token. O(victims).
        """
        used, total = self._parts.manager.get_l1_usage()
        if nbytes > total:
            return  # it will not fit whatever goes
        missing = nbytes - (total - used)
        while missing > 0:
            victim = self._policy.next_victim(Tier.CPU, now)
            if victim is None:
                return
            missing -= self._delete_victim(victim, now, wait_for_disk=False)

    def hold_quota(self, quotas: Quotas, salt: str, now: float) -> None:
        """Delete what is worth least of a tenant, in CPU memory or on disk, until it is within its quota. O(victims)."""
        namespaces = quotas.namespaces(salt)
        for _ in range(MAX_VICTIMS):
            if quotas.excess(salt, now) <= 0:
                return
            # A byte freed counts the same wherever it lies, so values of the two tiers compare.
            tiers = sorted(MANAGED, key=lambda tier: self._policy.lowest_value(tier, namespaces))
            found = (self._policy.next_victim(tier, now, namespaces) for tier in tiers)
            victim = next((victim for victim in found if victim is not None), None)
            if victim is None:
                return
            if self._delete_victim(victim, now):
                self.counts["evicted_for_quota"] += 1
            else:
                quotas.wait_for(salt, victim.nbytes, now)

    def _make_room_in_cpu(self, now: float, urgent: bool) -> None:
        used, total = self._parts.manager.get_l1_usage()
        leaving = self._mover.bytes_in_flight if self._mover is not None else 0
        excess = 0.0
        if urgent or used - leaving > self._high * total:
            excess = used - leaving - self._low * total
        if used > CRITICAL * total:
            excess = max(excess, used - self._high * total)
        for _ in range(MAX_VICTIMS):
            if excess <= 0:
                return
            victim = self._policy.next_victim(Tier.CPU, now)
            if victim is None:
                return
            moved = self._move_victim(victim, now)
            excess -= moved or self._delete_victim(victim, now)

    def _move_victim(self, victim: Victim, now: float) -> int:
        """Start moving a victim to disk, if it is worth its place there; returns the bytes that will leave."""
        mover = self._mover
        if mover is None or not (mover.has_room(victim.nbytes, now) and mover.within_budget(victim.nbytes, now)):
            return 0
        free = self._disk_free() - mover.bytes_in_flight
        if not self._policy.worth_moving(victim, Tier.DISK, free):
            return 0
        return self.move_down(Namespace.of_name(victim.namespace), victim.objects)

    def move_down(self, namespace: Namespace, objects: Sequence[CacheObject]) -> int:
        """Write objects to disk, then let CPU memory go of them; returns the bytes that will leave. O(objects)."""
        layout = self._layouts.of(namespace)
        if layout is None or self._mover is None:
            return 0
        space = self._policy.space(namespace.name)
        return self._mover.move(
            layout.keys_of(namespace, objects),
            lambda key: self._chains.place_of(self._policy.tree, space, key, layout.group_kinds),
        )

    def _delete_victim(self, victim: Victim, now: float, wait_for_disk: bool = True) -> int:
        """Delete a victim and what it strands, in both tiers; returns the bytes freed in its own.

        Locked objects are passed over: what depends on them stays, and the unit is offered again later.

        Args:
            victim: The unit.
            now: Seconds, monotonic.
            wait_for_disk: Delete files at once; a request that waits leaves them to the controller's next round.
        """
        namespace = Namespace.of_name(victim.namespace)
        layout = self._layouts.of(namespace)
        if layout is None:
            return 0
        everything = [*victim.objects, *victim.stranded]
        in_cpu = layout.keys_of(namespace, [entry for entry in everything if entry.tier is Tier.CPU])
        on_disk = layout.keys_of(namespace, [entry for entry in everything if entry.tier is Tier.DISK])
        deleted, locked = self._parts.manager.delete_l1_keys(in_cpu) if in_cpu else (0, 0)
        self.counts["evicted_from_cpu"] += deleted
        self.counts["locked_victims"] += locked
        if locked and victim.tier is Tier.CPU:
            return 0
        self._evicted[victim.tier] = True
        kept: list[ObjectKey] = []
        if wait_for_disk:
            kept = self._delete_on_disk(on_disk)
            self.counts["locked_victims"] += len(kept)
        else:
            self._stranded_on_disk += on_disk
        if kept and victim.tier is Tier.DISK:
            return 0
        if not locked and not kept:
            # Not left to the events that follow: the next victim of this round may be what this one has uncovered.
            self._policy.discard(victim, now)
        return victim.nbytes

    def delete(self, keys: Sequence[ObjectKey]) -> int:
        """Delete objects from CPU memory and from disk, unless they are locked; returns how many left CPU memory."""
        deleted, _ = self._parts.manager.delete_l1_keys(list(keys))
        self._delete_on_disk(keys)
        return deleted

    # Disk

    def _make_room_on_disk(self, now: float) -> None:
        if self._disk is None:
            return
        excess = -self._disk_free()
        if excess > 0:
            excess -= self._delete_strangers(int(excess), now)
        for _ in range(MAX_VICTIMS):
            if excess <= 0:
                return
            victim = self._policy.next_victim(Tier.DISK, now)
            if victim is None:
                return
            excess -= self._delete_victim(victim, now)

    def _delete_strangers(self, excess: int, now: float) -> int:
        """Make room from what models left that have not come back since the server started; returns the bytes freed.

        The core does not know them, so nothing else would ever delete them. Oldest first. O(n log n) in the objects on disk,
        at most once in ``STRANGERS_SECONDS``.
        """
        if self._disk is None or not self._strangers or now < self._strangers_after:
            return 0
        self._strangers_after = now + STRANGERS_SECONDS
        excess = max(excess, int(DISK_HEADROOM * self._disk_limit))  # a search is worth a good piece
        left = [known for known in self._disk.known() if namespace_of(known.key)[:2] in self._strangers]
        left.sort(key=lambda known: known.last_access)
        chosen: list[ObjectKey] = []
        for known in left:
            if excess <= 0:
                break
            chosen.append(known.key)
            excess -= known.charge_bytes
        report = self._disk.delete_keys(chosen)
        self.counts["evicted_from_disk"] += len(report.deleted)
        return report.freed_bytes

    def _delete_on_disk(self, keys: Sequence[ObjectKey]) -> list[ObjectKey]:
        """Delete files; returns what stays, since it is being read or cannot be deleted. O(objects)."""
        if self._disk is None or not keys:
            return []
        report = self._disk.delete_keys(keys)
        self.counts["evicted_from_disk"] += len(report.deleted)
        return [*report.held, *report.failed]
