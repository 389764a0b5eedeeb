"""Messages between the vLLM side and the server module, carried by LMCache's ``server_module_call`` envelope.

Bytes are msgpack (msgspec), so that both sides check types and older peers ignore fields that they do not know.
"""

from __future__ import annotations

import msgspec

HELLO = "histate.hello"
"""() -> ServerFacts"""
PLACEMENT = "histate.placement"
"""PlacementQuery -> PlacementFacts"""
DROP_SNAPSHOTS = "histate.drop_snapshots"
"""DropSnapshots -> ()"""


class ServerFacts(msgspec.Struct, frozen=True):
    """What a connector must know about the server before it uses it."""

    histate_version: str
    lmcache_version: str
    chunk_size: int
    """Tokens in one LMCache chunk (``--chunk-size``)."""
    separate_object_groups: bool
    """Whether the server runs with ``--separate-object-groups``."""
    null_block_id: int
    """Block id that means "no data here": chunks of such blocks are not stored."""
    settings_digest: str = ""
    """Name of the settings that the server runs with (``backends.arguments.settings_digest``)."""


class PrefillTime(msgspec.Struct, frozen=True):
    """How long the engine took for a part of one prompt."""

    start: int
    """First position, in tokens."""
    end: int
    """Position behind the last one."""
    milliseconds: float


class PlacementQuery(msgspec.Struct, frozen=True):
    """Ask for the current pressure on one model's storage, and tell what was learned since the last time."""

    model_name: str
    world_size: int
    prefill: PrefillTime | None = None
    """A recent prefill, so that the server knows what recomputing costs on this engine."""


class PlacementFacts(msgspec.Struct, frozen=True):
    """What the choice of an interval needs from the server. All of it changes slowly."""

    residence_ratio: float = 1.0
    """Mean residence time of KV over that of snapshots (``T_KV / T_state``); 1 until something was evicted."""
    snapshot_tokens: float = 0.0
    """Bytes of one snapshot over bytes of one token's KV (``N_s``), as stored; 0 while unknown."""
    pressure: float = 1.0
    """How much a snapshot's bytes displace, 0 to 1: the fill of its tier until something was evicted there, then 1."""
    internal_hits_per_token: float = 0.0
    """Expected hits inside a segment for each of its tokens, over its life; 0 while unknown."""


class DropSnapshots(msgspec.Struct, frozen=True):
    """Snapshots of a running request that a later one of the same answer has replaced."""

    request_id: str
    positions: tuple[int, ...]
    """Where the snapshots were taken, in tokens from the start of the prompt."""


def encode(message: msgspec.Struct) -> bytes:
    """Message to bytes."""
    return msgspec.msgpack.encode(message)
