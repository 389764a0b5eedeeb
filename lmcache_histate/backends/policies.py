"""HiState's answers to LMCache's questions: what goes to which tier, what leaves CPU memory, what a lookup loads."""

from __future__ import annotations

import operator
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import reduce

from lmcache.lmcache_native import Bitmap
from lmcache.logging import init_logger
from lmcache.v1.distributed.api import FetchingPolicy, GroupedObjectKeys, ObjectKey
from lmcache.v1.distributed.storage_controllers.prefetch_policy import DefaultPrefetchPolicy, PrefetchPlan
from lmcache.v1.distributed.storage_controllers.store_policy import StorePolicy
from lmcache.v1.distributed.storage_controllers.utils import (
    L1ManagerDescriptor,
    L2AdapterDescriptor,
    MapState,
)

from lmcache_histate.backends.events import Looked, RemoteRow
from lmcache_histate.backends.layout import namespace_of, object_bytes
from lmcache_histate.state_store.objects import Kind

logger = init_logger(__name__)


class HiStateStorePolicy(StorePolicy):
    """What is written below CPU memory at store time: nothing unless asked.

    To disk the controller moves things later, by itself. To remote tiers it offers things later, through LMCache's
    StoreController, which then asks again.

    Args:
        disk_index: LMCache's index of the disk adapter, or None without one.
        write_through: Write everything to disk when it is stored, too (the setting ``histate.write_through``).
        keep_in_cpu: Whether CPU memory is a tier, or only a buffer on the way down (the setting ``local_cpu``).
        everything_to_remote: Write everything to the remote tiers when it is stored (``offer_to_remote: all``).
    """

    def __init__(
        self,
        disk_index: int | None,
        write_through: bool,
        keep_in_cpu: bool = True,
        everything_to_remote: bool = False,
    ) -> None:
        self._disk_index = disk_index
        self._write_through = write_through or not keep_in_cpu
        self._keep_in_cpu = keep_in_cpu
        self._everything_to_remote = everything_to_remote
        self._offered: set[ObjectKey] = set()
        self._lock = threading.Lock()

    def announce(self, keys: Iterable[ObjectKey]) -> None:
        """These objects are about to be handed to the StoreController again, for the remote tiers. O(keys)."""
        with self._lock:
            # Whatever was announced before and never asked about has left CPU memory: only one piece is on its way.
            self._offered = set(keys)

    def select_store_targets(
        self, keys: list[ObjectKey], adapters: list[L2AdapterDescriptor]
    ) -> dict[int, list[ObjectKey]]:
        """The disk tier gets what is new with write-through, remote tiers what was announced (or all that is new).

        Args:
            keys: Objects just written, or handed over again.
            adapters: The lower tiers that accept writes.

        Returns:
            Adapter index -> keys. O(keys).
        """
        with self._lock:
            offered = [key for key in keys if key in self._offered]
            self._offered.difference_update(offered)
        again = set(offered)
        fresh = [key for key in keys if key not in again]
        targets = {}
        for adapter in adapters:
            if adapter.index == self._disk_index:
                targets[adapter.index] = fresh if self._write_through else []
            else:
                targets[adapter.index] = list(keys) if self._everything_to_remote else offered
        return targets

    def select_l1_deletions(self, keys: list[ObjectKey]) -> list[ObjectKey]:
        """Nothing, since the controller decides what leaves CPU memory; all, where that is only a buffer."""
        return [] if self._keep_in_cpu else list(keys)


class HiStatePrefetchPolicy(DefaultPrefetchPolicy):
    """Loads as LMCache does, tells the core what every lookup found, and keeps KV that was read back in CPU memory.

    Args:
        on_lookup: Called once per planned lookup, on LMCache's prefetch thread; must not block.
        make_room_for: Called with the bytes of CPU memory that a load from below is about to reserve.
        kind_of: Whether an object is KV or a snapshot.
        keep_in_cpu: As in ``HiStateStorePolicy``.
        disk_index: As in ``HiStateStorePolicy``.
    """

    def __init__(
        self,
        on_lookup: Callable[[Looked], None],
        make_room_for: Callable[[int], None],
        kind_of: Callable[[ObjectKey], Kind | None],
        keep_in_cpu: bool = True,
        disk_index: int | None = None,
    ) -> None:
        self._on_lookup = on_lookup
        self._make_room_for = make_room_for
        self._kind_of = kind_of
        self._keep_in_cpu = keep_in_cpu
        self._disk_index = disk_index

    def plan_load(
        self,
        key_groups: list[GroupedObjectKeys],
        l1_locked_keys: MapState,
        l2_locked_keys: MapState,
        l1_manager_descs: dict[int, L1ManagerDescriptor],
        l2_adapter_descs: dict[int, L2AdapterDescriptor],
        fetching_policy: FetchingPolicy,
    ) -> PrefetchPlan:
        """LMCache's own plan; the lookup is reported on the side, and room is made for what comes from below.

        O(chunks of the prompt), plus O(victims) when CPU memory is short.
        """
        plan = super().plan_load(
            key_groups, l1_locked_keys, l2_locked_keys, l1_manager_descs, l2_adapter_descs, fetching_policy
        )
        try:
            self._tell(key_groups, l1_locked_keys, l2_locked_keys, plan)
        except Exception:
            # LMCache's prefetch thread serves every request: what is only reported on the side must not stop it.
            logger.exception("HiState could not take note of a lookup")
        return plan

    def _tell(self, key_groups: list[GroupedObjectKeys], in_cpu: MapState, below: MapState, plan: PrefetchPlan) -> None:
        if not key_groups or not key_groups[0].keys:
            return
        looked = describe_lookup(key_groups, [in_cpu, below], [plan.l1_planned_keys, plan.l2_planned_keys])
        self._on_lookup(replace(looked, remote=self._found_remotely(key_groups, below)))
        from_below = sum(
            row.popcount() * object_bytes(group.layout_desc)
            for group, row in zip(key_groups, _union([plan.l2_planned_keys]), strict=False)
        )
        if from_below:
            self._make_room_for(from_below)

    def _found_remotely(self, key_groups: list[GroupedObjectKeys], below: MapState) -> Sequence[RemoteRow] | None:
        """What the remote tiers answered; LMCache asks every tier for every key. None without a remote tier."""
        grids = [grid for index, grid in below.items() if index != self._disk_index and len(grid)]
        if not grids:
            return None
        rows = reduce(operator.add, grids).to_list()
        return [RemoteRow(group.keys, row.get_indices_list()) for group, row in zip(key_groups, rows, strict=False)]

    def plan_l1_retention(
        self, keys: list[ObjectKey], l1_manager_desc: L1ManagerDescriptor, l2_adapter_desc: L2AdapterDescriptor
    ) -> list[bool]:
        """KV that was worth reading back stays in CPU memory; a snapshot is read once and has its copy below."""
        return [self._keep_in_cpu and self._kind_of(key) == Kind.KV for key in keys]


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
