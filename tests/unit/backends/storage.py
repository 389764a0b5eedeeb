"""A real LMCache storage manager with HiState's server module in it, driven as vLLM's worker would: no engine, no RPC."""

from __future__ import annotations

import shlex
import time
import zlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from lmcache.v1.distributed.api import AttnWindowDesc, MemoryLayoutDesc, ObjectKey, PrefetchTaskSpec
from lmcache.v1.distributed.config import get_arg_parser, parse_args_to_config
from lmcache.v1.mp_observability.event import Event, EventType
from lmcache.v1.mp_observability.event_bus import EventBusConfig, init_event_bus
from lmcache.v1.multiprocess.engine_context import MPCacheServerContext
from lmcache.v1.multiprocess.ext_server_module import ExtServerModuleBuildContext

from lmcache_histate.backends.arguments import server_arguments, server_module_spec
from lmcache_histate.backends.server_module import build_server_module
from lmcache_histate.config import Config

CHUNK = 64
MODEL = "tiny"
MIB = 1 / 1024
"""One MiB in GiB."""
KV_GROUP, STATE_GROUP = 0, 1
KV_SHAPE, STATE_SHAPE = torch.Size([2, 2, CHUNK, 128]), torch.Size([1, 1, 1, 32768])
"""64 KiB of KV a chunk, as much a snapshot: with unlike sizes, an arena of a few MiB runs out of large enough holes."""


def kv_bytes() -> int:
    """Bytes of one chunk's KV."""
    return KV_SHAPE.numel() * 2


def state_bytes() -> int:
    """Bytes of one snapshot."""
    return STATE_SHAPE.numel() * 2


def chunk_hashes(session: str, count: int, fork: tuple[str, int] | None = None) -> list[bytes]:
    """Made-up rolling hashes of a session's chunks; ``fork`` shares the first chunks of another session."""
    own = [f"{session}:{index}".encode().ljust(32, b".") for index in range(count)]
    if fork is None:
        return own
    parent, shared = fork
    return chunk_hashes(parent, shared) + own[shared:]


class Storage:
    """LMCache's tiers under HiState, for one model on ``world_size`` ranks; ``hybrid=False``: one without snapshots."""

    def __init__(self, config: Config, world_size: int = 1, registered: bool = True, hybrid: bool = True) -> None:
        self.config = config
        self.world_size = world_size
        self.hybrid = hybrid
        self._closed = False
        self.model = MODEL
        flags = list(server_arguments(config, CHUNK))
        parser = get_arg_parser()
        known, _ = parser.parse_known_args([*flags, *shlex.split("--no-l1-use-lazy --l1-align-bytes 4096")])
        self.bus = init_event_bus(EventBusConfig())
        self.bus.start()
        self.context = MPCacheServerContext(
            storage_manager_config=parse_args_to_config(known), chunk_size=CHUNK, separate_object_groups=True
        )
        self.manager = self.context.storage_manager
        self.module = build_server_module(
            ExtServerModuleBuildContext(self.context, None, None, (), server_module_spec(config, CHUNK)["config"])
        )
        if registered:
            self.register(hybrid=hybrid)

    def register(self, model: str = MODEL, hybrid: bool = True) -> None:
        """What a worker's registration does; keys are those of this model from here on."""
        self.model = model
        self.hybrid = hybrid
        kv = MemoryLayoutDesc([KV_SHAPE], [torch.bfloat16])
        state = MemoryLayoutDesc([STATE_SHAPE], [torch.bfloat16])
        self.layouts = {KV_GROUP: kv, STATE_GROUP: state} if hybrid else {KV_GROUP: kv}
        kinds = ("attention", "recurrent") if hybrid else ("attention",)
        self.context.layout_desc_registry.register(
            model,
            self.world_size,
            kv,
            AttnWindowDesc([-1, 1][: len(kinds)], world_size=self.world_size, group_kinds=kinds),
            self.layouts,
        )

    @property
    def keeper(self) -> Any:
        """The controller, for looking at the core."""
        return self.module._keeper

    def keys(self, hashes: Sequence[bytes], group: int, salt: str = "") -> list[ObjectKey]:
        """Object keys of chunks, all ranks."""
        return [
            ObjectKey(
                chunk_hash,
                self.model,
                ObjectKey.ComputeKVRank(self.world_size, rank, self.world_size, rank),
                group,
                salt,
            )
            for chunk_hash in hashes
            for rank in range(self.world_size)
        ]

    def store(
        self, path: Sequence[bytes], start: int, end: int, snapshots: Sequence[int] = (), salt: str = ""
    ) -> list[ObjectKey]:
        """Store the KV of chunks [start, end) of a path, and snapshots at the ends of the chunks named.

        Returns the keys that found room.
        """
        parents = [None if index == 0 else path[index - 1] for index in range(start, end)]
        self.bus.publish(
            Event(
                event_type=EventType.MP_TOKENS,
                session_id="",
                metadata={
                    "chunk_hashes": list(path[start:end]),
                    "token_chunks": [],
                    "token_offsets": [index * CHUNK for index in range(start, end)],
                    "parent_hashes": parents,
                },
            )
        )
        stored: list[ObjectKey] = []
        for group, chunks in ((KV_GROUP, range(start, end)), (STATE_GROUP, snapshots)):
            if not chunks:
                continue
            keys = self.keys([path[index] for index in chunks], group, salt)
            reserved = self.manager.reserve_write(keys, self.layouts[group])
            for key, obj in reserved.items():
                obj.tensor.view(torch.uint8).copy_(
                    content(key, obj.get_size()).view(obj.tensor.view(torch.uint8).shape)
                )
            self.manager.finish_write(list(reserved))
            stored += reserved
        return stored

    def lookup(self, path: Sequence[bytes], salt: str = "", read: bool = True) -> int:
        """Look a prompt up as vLLM would, check every byte that comes back, and return the chunks restored."""
        groups = [
            (group, [key for key in self.keys(path, group, salt) if (key.kv_rank >> 16) & 0xFF == rank])
            for group in self.layouts
            for rank in range(self.world_size)
        ]
        from lmcache.v1.distributed.api import GroupedObjectKeys

        rows = [
            GroupedObjectKeys(keys, group, self.layouts[group], -1 if group == KV_GROUP else 1)
            for group, keys in groups
        ]
        handle = self.manager.submit_prefetch_task(PrefetchTaskSpec(key_groups=rows, num_kv_readers=1))
        assert self.manager.wait_prefetch_status(handle, 30.0)
        result = self.manager.query_prefetch_status(handle)
        cells = [(row, column) for row, bits in enumerate(result.hit_cells) for column in bits.get_indices_list()]
        hits = [rows[row].keys[column] for row, column in cells]
        if read and hits:
            with self.manager.read_prefetched_results(hits) as objects:
                assert objects is not None
                for key, obj in zip(hits, objects, strict=True):
                    assert torch.equal(obj.tensor.view(torch.uint8).flatten(), content(key, obj.get_size())), key
        self.manager.finish_read_prefetched(hits)
        last = STATE_GROUP if self.hybrid else KV_GROUP
        return max((column + 1 for row, column in cells if rows[row].object_group_id == last), default=0)

    def end_turn(self, path: Sequence[bytes], salt: str = "") -> None:
        """What LMCache does when a request ends: it touches all keys that the request could have."""
        self.manager.touch_l1_keys([key for group in self.layouts for key in self.keys(path, group, salt)])

    def resident(self, keys: Sequence[ObjectKey]) -> list[ObjectKey]:
        """Those in CPU memory."""
        l1_manager = self.keeper._parts.l1_manager
        return [key for key in keys if l1_manager.get_object_state(key) is not None]

    def on_disk(self, keys: Sequence[ObjectKey]) -> list[ObjectKey]:
        """Those on disk."""
        (_, disk), *_ = self.manager.l2_adapters()
        held = {entry.key for entry in disk.known()}
        return [key for key in keys if key in held]

    def has_room(self) -> bool:
        """Whether CPU memory is below its high watermark."""
        used, total = self.manager.get_l1_usage()
        return used <= self.config.histate.cpu_high_watermark * total

    def close(self) -> None:
        """Stop everything, as LMCache's server does. Twice is once."""
        if self._closed:
            return
        self._closed = True
        self.module.close()
        self.context.close()
        self.bus.stop()


def content(key: ObjectKey, size: int) -> torch.Tensor:
    """The bytes that an object must have: all drawn from its key, the same in every process."""
    name = b"%b %d %d %b" % (key.chunk_hash, key.kv_rank, key.object_group_id, key.cache_salt.encode())
    seed = zlib.crc32(name)
    return torch.randint(0, 256, (size,), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))


def eventually(condition: Callable[[], bool], seconds: float = 20.0) -> bool:
    """Wait until something that other threads do has happened."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if condition():
            return True
        time.sleep(0.02)
    return condition()


def hybrid_config(
    disk: Path | None,
    cpu_gib: float,
    disk_gib: float = 1.0,
    local_cpu: bool = True,
    remote_url: str | None = None,
    **histate: Any,
) -> Config:
    """A configuration of small tiers."""
    tiers: dict[str, Any] = {"remote_url": remote_url}
    if disk is not None:
        tiers |= {"local_disk": str(disk), "max_local_disk_size": disk_gib}
    return Config(max_local_cpu_size=cpu_gib, local_cpu=local_cpu, **tiers, histate=histate)
