"""HiState's answers to LMCache's questions: what goes to which tier, what leaves CPU memory, what a lookup loads."""

from __future__ import annotations

import operator
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from functools import reduce

from lmcache.lmcache_native import Bitmap
from lmcache.v1.distributed.api import FetchingPolicy, GroupedObjectKeys, ObjectKey
from lmcache.v1.distributed.storage_controllers.prefetch_policy import DefaultPrefetchPolicy, PrefetchPlan
from lmcache.v1.distributed.storage_controllers.store_policy import StorePolicy
from lmcache.v1.distributed.storage_controllers.utils import (
    L1ManagerDescriptor,
    L2AdapterDescriptor,
    MapState,
)

from lmcache_histate.backends.events import Looked
from lmcache_histate.backends.layout import namespace_of
from lmcache_histate.state_store.objects import Kind

FORGET_SECONDS = 60.0
"""A requested move whose outcome LMCache never reported (a failed write) is forgotten after this long."""


class Moves:
    """Objects that the controller wants written to the disk tier, and whether they leave CPU memory afterwards.

    Written by the controller's thread, read by LMCache's store thread.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._asked: dict[ObjectKey, tuple[bool, float]] = {}

    def ask(self, keys: Iterable[ObjectKey], leave_cpu: bool) -> list[ObjectKey]:
        """Request moves; returns the keys that were not already on their way. O(keys)."""
        now = time.monotonic()
        fresh = []
        with self._lock:
            for key in keys:
                known = self._asked.get(key)
                if known is None or (leave_cpu and not known[0]):
                    self._asked[key] = (leave_cpu, now)
                    fresh.append(key)
        return fresh

    def wanted(self, key: ObjectKey) -> bool:
        """Whether the controller asked for ``key`` to be on disk."""
        with self._lock:
            return key in self._asked

    def finish(self, keys: Iterable[ObjectKey]) -> list[ObjectKey]:
        """The writes of ``keys`` succeeded; returns those that should leave CPU memory now."""
        with self._lock:
            return [key for key in keys if self._asked.pop(key, (False, 0.0))[0]]

    def forget(self, keys: Iterable[ObjectKey]) -> None:
        """Drop requests, for example because the objects are gone."""
        with self._lock:
            for key in keys:
                self._asked.pop(key, None)

    def forget_old(self) -> int:
        """Drop requests that never came to an end; returns how many."""
        limit = time.monotonic() - FORGET_SECONDS
        with self._lock:
            old = [key for key, (_, asked) in self._asked.items() if asked < limit]
            for key in old:
                del self._asked[key]
        return len(old)

    def __len__(self) -> int:
        return len(self._asked)


class HiStateStorePolicy(StorePolicy):
    """Nothing is written below CPU memory when it is stored, unless asked: the controller moves what should move.

    Args:
        moves: What the controller asked for.
        disk_index: LMCache's index of the disk adapter, or None without one.
        write_through: Write everything to disk when it is stored, too (the setting ``histate.write_through``).
    """

    def __init__(self, moves: Moves, disk_index: int | None, write_through: bool) -> None:
        self._moves = moves
        self._disk_index = disk_index
        self._write_through = write_through

    def select_store_targets(
        self, keys: list[ObjectKey], adapters: list[L2AdapterDescriptor]
    ) -> dict[int, list[ObjectKey]]:
        """Disk for what was asked (or everything, with write-through); remote tiers get what is newly stored.

        Args:
            keys: Objects just written, or offered again by the controller.
            adapters: The lower tiers that accept writes.

        Returns:
            Adapter index -> keys.
        """
        asked = [key for key in keys if self._moves.wanted(key)]
        targets: dict[int, list[ObjectKey]] = {}
        for adapter in adapters:
            if adapter.index == self._disk_index:
                chosen = list(keys) if self._write_through else asked
            else:
                moved = set(asked)
                chosen = [key for key in keys if key not in moved]
            if chosen:
                targets[adapter.index] = chosen
        return targets

    def select_l1_deletions(self, keys: list[ObjectKey]) -> list[ObjectKey]:
        """What was written successfully and should leave CPU memory."""
        return self._moves.finish(keys)


class HiStatePrefetchPolicy(DefaultPrefetchPolicy):
    """Loads as LMCache does, tells the core what every lookup found, and keeps KV that was read back in CPU memory.

    Args:
        on_lookup: Called once per planned lookup, on LMCache's prefetch thread; must not block.
        kind_of: Whether an object is KV or a snapshot.
    """

    def __init__(self, on_lookup: Callable[[Looked], None], kind_of: Callable[[ObjectKey], Kind | None]) -> None:
        self._on_lookup = on_lookup
        self._kind_of = kind_of

    def plan_load(
        self,
        key_groups: list[GroupedObjectKeys],
        l1_locked_keys: MapState,
        l2_locked_keys: MapState,
        l1_manager_descs: dict[int, L1ManagerDescriptor],
        l2_adapter_descs: dict[int, L2AdapterDescriptor],
        fetching_policy: FetchingPolicy,
    ) -> PrefetchPlan:
        """LMCache's own plan; the lookup is reported on the side. O(chunks of the prompt)."""
        plan = super().plan_load(
            key_groups, l1_locked_keys, l2_locked_keys, l1_manager_descs, l2_adapter_descs, fetching_policy
        )
        if key_groups and key_groups[0].keys:
            self._on_lookup(
                describe_lookup(
                    key_groups, [l1_locked_keys, l2_locked_keys], [plan.l1_planned_keys, plan.l2_planned_keys]
                )
            )
        return plan

    def plan_l1_retention(
        self, keys: list[ObjectKey], l1_manager_desc: L1ManagerDescriptor, l2_adapter_desc: L2AdapterDescriptor
    ) -> list[bool]:
        """KV that was worth reading back stays in CPU memory; a snapshot is read once and has its copy below."""
        return [self._kind_of(key) == Kind.KV for key in keys]


def describe_lookup(
    key_groups: Sequence[GroupedObjectKeys], found: Sequence[MapState], planned: Sequence[MapState]
) -> Looked:
    """Summarise one lookup. O(chunks of the prompt), nearly all of it collecting the hashes.

    Args:
        key_groups: One row per (object group, rank).
        found: What each tier holds, before planning.
        planned: What will be loaded from each tier.

    Returns:
        The prompt's chunks, how many leading ones have their KV anywhere, how many are restored.
    """
    namespace = namespace_of(key_groups[0].keys[0])
    found_rows, planned_rows = _union(found), _union(planned)
    kv_chunks = len(key_groups[0].keys) if found_rows else 0
    for group, row in zip(key_groups, found_rows, strict=False):
        if group.sliding_window_size < 0:
            kv_chunks = min(kv_chunks, row.count_leading_ones())
    return Looked(
        namespace.model_name,
        namespace.world_size,
        namespace.cache_salt,
        [key.chunk_hash for key in key_groups[0].keys],
        kv_chunks,
        max((row.highest_set_bit() for row in planned_rows), default=-1) + 1,
        time.monotonic(),
    )


def _union(states: Sequence[MapState]) -> list[Bitmap]:
    """Rows of the union of all grids; empty when there is none."""
    grids = [grid for state in states if len(grid := state.merge()) > 0]
    return reduce(operator.add, grids).to_list() if grids else []
