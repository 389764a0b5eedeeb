"""Tokens, bytes and blocks of one model's cache: the units that every decision is expressed in.

The recurring quantity is `N_s`, the size of one snapshot counted in tokens of KV. With it a byte of snapshot and a byte
of KV are compared on one scale, and the model's real sizes appear nowhere else.
"""

from __future__ import annotations

from dataclasses import dataclass

KIB = 1 << 10
MIB = 1 << 20
GIB = 1 << 30


@dataclass(frozen=True, slots=True)
class CacheGeometry:
    """Sizes of one model's cache, summed over all tensor-parallel ranks.

    Attributes:
        block_tokens: tokens of one chunk. Snapshots can only stand on multiples of it.
        kv_bytes_per_token: bytes of attention KV that one token takes.
        snapshot_bytes: bytes of one snapshot of the recurrent state. 0 for an attention-only model.
        ranks: objects that make up one chunk (tensor-parallel ranks); a chunk counts only when all of them are there.

    Raises:
        ValueError: a size that cannot be.
    """

    block_tokens: int
    kv_bytes_per_token: float
    snapshot_bytes: float
    ranks: int = 1

    def __post_init__(self) -> None:
        if self.block_tokens < 1:
            raise ValueError(f"block_tokens must be at least 1, got {self.block_tokens}")
        if self.kv_bytes_per_token <= 0:
            raise ValueError(f"kv_bytes_per_token must be positive, got {self.kv_bytes_per_token}")
        if self.snapshot_bytes < 0:
            raise ValueError(f"snapshot_bytes must not be negative, got {self.snapshot_bytes}")
        if not 1 <= self.ranks <= 32:
            raise ValueError(f"ranks must be between 1 and 32, got {self.ranks}")

    @property
    def snapshot_tokens(self) -> float:
        """`N_s`: how many tokens of KV take as many bytes as one snapshot."""
        return self.snapshot_bytes / self.kv_bytes_per_token

    @property
    def chunk_bytes(self) -> float:
        """Bytes of the KV of one chunk, all ranks together."""
        return self.kv_bytes_per_token * self.block_tokens

    def kv_bytes(self, tokens: float) -> float:
        """Bytes of KV that `tokens` tokens take."""
        return self.kv_bytes_per_token * tokens

    def state_bytes(self, tokens: int, interval: int) -> float:
        """Bytes of all snapshots of a context of `tokens` tokens with one every `interval` tokens."""
        return (tokens // interval) * self.snapshot_bytes

    def blocks(self, tokens: int) -> int:
        """Whole blocks in `tokens` tokens."""
        return tokens // self.block_tokens

    def align(self, tokens: int) -> int:
        """The last block boundary at or before position `tokens`."""
        return tokens - tokens % self.block_tokens


def access_ratio(tokens: int, interval: int) -> float:
    """Share of a context's snapshots that one hit reads: one of `tokens / interval` (paper, motivation).

    The KV's ratio is 1, a hit reads all of it; that asymmetry is why KV gets the fast memory and snapshots the disk.
    """
    return interval / tokens


def read_seconds(nbytes: float, bytes_per_second: float, latency_s: float = 0.0) -> float:
    """Seconds to read `nbytes` from a device of `bytes_per_second`, after `latency_s` of set-up."""
    return latency_s + nbytes / bytes_per_second
