"""Between LMCache's object keys and the core's words: namespace, chunk hash, kind, rank."""

from __future__ import annotations

import threading
from collections.abc import Iterable
from dataclasses import dataclass, field
from math import lcm, prod
from typing import Any, NamedTuple

from lmcache.v1.distributed.api import MemoryLayoutDesc, ObjectKey

from lmcache_histate.backends.compat import registered_models
from lmcache_histate.geometry import CacheGeometry
from lmcache_histate.state_store.objects import CacheObject, Kind, Tier


def object_bytes(description: MemoryLayoutDesc) -> int:
    """Bytes of one object of a layout."""
    return sum(
        prod(shape) * dtype.itemsize for shape, dtype in zip(description.shapes, description.dtypes, strict=True)
    )


class Namespace(NamedTuple):
    """Objects of different namespaces never serve each other: another model, parallel layout, or tenant."""

    model_name: str
    world_size: int
    cache_salt: str

    @property
    def name(self) -> str:
        """The core's name for it. ``@`` occurs in neither a model name nor a salt (``ObjectKey``)."""
        return f"{self.model_name}@{self.world_size}@{self.cache_salt}"

    @classmethod
    def of_name(cls, name: str) -> Namespace:
        """The namespace that ``name`` stands for."""
        model_name, world_size, cache_salt = name.split("@")
        return cls(model_name, int(world_size), cache_salt)


class Shard(NamedTuple):
    """One of the objects that together make a chunk's KV or its snapshot."""

    kv_rank: int
    object_group_id: int


def namespace_of(key: ObjectKey) -> Namespace:
    """The namespace an object belongs to. O(1)."""
    return Namespace(key.model_name, ObjectKey.WorldSizeFromKVRank(key.kv_rank), key.cache_salt)


@dataclass
class ModelLayout:
    """Which object groups of a model hold KV and which hold snapshots, and how large the objects are.

    Several groups of one kind, and several tensor-parallel ranks, are shards of one thing: it exists only when all do.
    The core counts shards of both kinds alike, so ``ranks`` is a common multiple and a shard may stand for several.
    """

    group_kinds: tuple[Kind, ...]
    group_bytes: tuple[int, ...]
    world_size: int
    shards: dict[tuple[Kind, int], Shard] = field(default_factory=dict)
    """(kind, shard index) -> shard, filled as keys are seen: the local rank inside ``kv_rank`` cannot be derived."""

    @property
    def is_hybrid(self) -> bool:
        """Whether the model has both KV and recurrent states."""
        return Kind.SNAPSHOT in self.group_kinds and Kind.KV in self.group_kinds

    @property
    def has_snapshots(self) -> bool:
        """Whether the model has recurrent layers."""
        return Kind.SNAPSHOT in self.group_kinds

    @property
    def ranks(self) -> int:
        """Ranks that the core knows this model by."""
        return lcm(*(self.shard_count(kind) for kind in set(self.group_kinds)))

    def shard_count(self, kind: Kind) -> int:
        """How many objects make one chunk's KV (or one snapshot)."""
        return self.group_kinds.count(kind) * self.world_size

    def bytes_of(self, kind: Kind) -> int:
        """Bytes of one chunk's KV (or one snapshot), all shards together."""
        return self.world_size * sum(
            size for size, group_kind in zip(self.group_bytes, self.group_kinds, strict=True) if group_kind == kind
        )

    def geometry(self, chunk_tokens: int) -> CacheGeometry:
        """The core's view of the model.

        Raises:
            ValueError: More shards than the core can count (32).
        """
        return CacheGeometry(
            block_tokens=chunk_tokens,
            kv_bytes_per_token=self.bytes_of(Kind.KV) / chunk_tokens,
            snapshot_bytes=self.bytes_of(Kind.SNAPSHOT),
            ranks=self.ranks,
        )

    def objects_of(self, key: ObjectKey, tier: Tier) -> list[CacheObject]:
        """An object in the core's words: one entry for every rank that it stands for. O(groups + ranks)."""
        group = key.object_group_id
        kind = self.group_kinds[group]
        global_rank = (key.kv_rank >> 16) & 0xFF
        shard = global_rank * self.group_kinds.count(kind) + self.group_kinds[:group].count(kind)
        self.shards.setdefault((kind, shard), Shard(key.kv_rank, group))
        width = self.ranks // self.shard_count(kind)
        share = self.group_bytes[group] // width
        return [CacheObject(key.chunk_hash, kind, shard * width + index, tier, share) for index in range(width)]

    def keys_of(self, namespace: Namespace, objects: Iterable[CacheObject]) -> list[ObjectKey]:
        """LMCache keys of core objects, each once. O(objects)."""
        seen: dict[tuple[bytes, Kind, int], None] = {}
        for chunk_hash, kind, rank, _, _ in objects:
            seen[chunk_hash, kind, rank * self.shard_count(kind) // self.ranks] = None
        return [
            ObjectKey(chunk_hash, namespace.model_name, shard.kv_rank, shard.object_group_id, namespace.cache_salt)
            for chunk_hash, kind, index in seen
            if (shard := self.shards.get((kind, index))) is not None
        ]

    def all_keys(self, namespace: Namespace, chunk_hash: bytes, kind: Kind) -> list[ObjectKey]:
        """LMCache keys of every shard of one chunk's KV (or snapshot) that was ever seen. O(shards)."""
        return [
            ObjectKey(chunk_hash, namespace.model_name, shard.kv_rank, shard.object_group_id, namespace.cache_salt)
            for (shard_kind, _), shard in self.shards.items()
            if shard_kind == kind
        ]


class Layouts:
    """Layouts of all models that ever registered; they outlive the workers, as the objects do.

    Args:
        registry: LMCache's ``LayoutDescRegistry``.
    """

    def __init__(self, registry: Any) -> None:
        self._registry = registry
        self._known: dict[tuple[str, int], ModelLayout] = {}
        self._lock = threading.Lock()

    def find(self, model_name: str, world_size: int) -> ModelLayout | None:
        """The layout of a model, or None before its first worker registered. O(1) once known."""
        known = self._known.get((model_name, world_size))
        if known is not None:
            return known
        try:
            windows = self._registry.find_attn_desc(model_name, world_size)
        except ValueError:
            return None
        descriptions = self._registry.find_group_layout_descs(model_name, world_size)
        if not descriptions:
            return None
        count = windows.num_object_groups
        kinds = windows.group_kinds or ("attention",) * count
        layout = ModelLayout(
            tuple(Kind.SNAPSHOT if kind == "recurrent" else Kind.KV for kind in kinds),
            tuple(object_bytes(descriptions[group]) for group in range(count)),
            windows.world_size,
        )
        with self._lock:
            return self._known.setdefault((model_name, world_size), layout)

    def registered(self) -> set[tuple[str, int]]:
        """(model, world size) of every model that has workers now. O(models)."""
        return registered_models(self._registry)

    def of(self, namespace: Namespace) -> ModelLayout | None:
        """The layout of a namespace's model."""
        return self.find(namespace.model_name, namespace.world_size)
