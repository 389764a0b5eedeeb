"""Instances for tests, and a slow plain directory to compare with."""

from __future__ import annotations

from collections.abc import Iterable

from lmcache_histate.state_store.directory.keys import Keys, namespace_tag
from lmcache_histate.state_store.directory.protocol import (
    ALL_BITS,
    KV_BITS,
    REMOTE_BITS,
    SNAPSHOT_BITS,
    UNPLACED,
    ChunkHeld,
    NamespaceFacts,
    SessionEnded,
    SessionHit,
    held_bit,
    tier_bits,
)
from lmcache_histate.state_store.directory.redis_directory import RedisDirectory
from lmcache_histate.state_store.directory.url import parse_directory_url
from lmcache_histate.state_store.objects import Kind, Tier

SPACE = "model@1@"
FACTS = NamespaceFacts(64, 1000, 5000)
KV = held_bit(Kind.KV, Tier.CPU)
SNAPSHOT = held_bit(Kind.SNAPSHOT, Tier.DISK)
KV_SHARED = held_bit(Kind.KV, Tier.REMOTE)
SNAPSHOT_SHARED = held_bit(Kind.SNAPSHOT, Tier.REMOTE)
SHARED = "shared:redis://cache:6379"
PREFIX = Keys().of(namespace_tag(SPACE, FACTS))


def chunk_hash(index: int, session: int = 0) -> bytes:
    """32 bytes, different in the bytes that buckets are made of."""
    return bytes((session, index // 256, index % 256)) * 10 + b"--"


def chain(length: int, held: int = KV | SNAPSHOT, session: int = 0) -> list[ChunkHeld]:
    """The chunks of a path, all held alike."""
    hashes = [b"", *(chunk_hash(index, session) for index in range(length))]
    return [ChunkHeld(hashes[i], held, hashes[i - 1], i * FACTS.block_tokens) for i in range(1, length + 1)]


def hashes_of(changes: Iterable[ChunkHeld]) -> list[bytes]:
    return [change.chunk_hash for change in changes]


def instance(url: str, name: str, shared_tier: str = "", lease_s: float = 600.0, **options: object) -> RedisDirectory:
    """A registered instance whose lease ends only when a test ends it."""
    directory = RedisDirectory(
        parse_directory_url(url),
        name,
        f"http://{name}",
        shared_tier,
        lease_s,
        **options,  # type: ignore[arg-type]
    )
    directory.register(SPACE, FACTS, 0.0)
    return directory


def catch_up(directory: RedisDirectory, now: float) -> None:
    """Poll until the view is current."""
    directory.poll(now)
    while directory.age(now):
        directory.poll(now)


class PlainDirectory:
    """What a directory must answer, kept as plainly as can be: one dictionary for each instance, one for shared tiers."""

    def __init__(self) -> None:
        self.own: dict[str, dict[bytes, int]] = {}
        self.shared: dict[bytes, int] = {}
        self.places: dict[bytes, tuple[bytes, int]] = {}
        self.sessions: dict[bytes, tuple[int, str, bytes]] = {}
        self.tiers: dict[str, str] = {}

    def register(self, name: str, shared_tier: str) -> None:
        self.own[name] = {}
        self.tiers[name] = shared_tier
        self._forget_sessions(name)

    def died(self, name: str) -> None:
        del self.own[name]
        self._forget_sessions(name)

    def _forget_sessions(self, name: str) -> None:
        self.sessions = {end: session for end, session in self.sessions.items() if session[1] != name}

    def _anyone(self, chunk: bytes) -> bool:
        return bool(self.shared.get(chunk)) or any(held.get(chunk) for held in self.own.values())

    def publish(self, name: str, change: ChunkHeld | SessionEnded | SessionHit) -> None:
        if isinstance(change, ChunkHeld):
            chunk = change.chunk_hash
            if not self._anyone(chunk):
                self.places.pop(chunk, None)
            own = change.held
            if self.tiers[name]:
                own &= ~REMOTE_BITS
                bits = (self.shared.get(chunk, 0) | change.held & REMOTE_BITS) & ~change.shared_removed
                self.shared[chunk] = bits
            self.own[name][chunk] = own
            if change.position != UNPLACED:
                self.places[chunk] = change.parent, change.position
            if not self._anyone(chunk):
                self.sessions.pop(chunk, None)
        elif isinstance(change, SessionEnded):
            if change.previous and change.previous != change.end:
                position, _, _ = self.sessions.get(change.previous, (UNPLACED, "", b""))
                self.sessions[change.previous] = position, name, change.end
            self.sessions[change.end] = change.position, name, b""

    def holders(self, chunk: bytes) -> dict[str, int]:
        found = {name: held[chunk] for name, held in self.own.items() if held.get(chunk)}
        if self.shared.get(chunk):
            found[SHARED] = self.shared[chunk]
        return found

    def locate(self, path: list[bytes], facts: NamespaceFacts) -> dict[str, tuple[int, int, int]]:
        """(CPU, CPU and disk, all) tokens by member."""
        found = {}
        for name in [*self.own, SHARED]:
            figures = []
            for reach in (tier_bits(Tier.CPU), tier_bits(Tier.CPU) | tier_bits(Tier.DISK), ALL_BITS):
                best = 0
                for depth in range(1, len(path) + 1):
                    bits = [self.holders(chunk).get(name, 0) for chunk in path[:depth]]
                    if self.tiers.get(name):
                        bits = [b | self.shared.get(chunk, 0) for b, chunk in zip(bits, path, strict=False)]
                    bits = [b & reach for b in bits]
                    if all(b & KV_BITS for b in bits) and (bits[-1] & SNAPSHOT_BITS or not facts.is_hybrid):
                        best = depth * facts.block_tokens
                figures.append(best)
            if figures[2]:
                found[name] = figures[0], figures[1], figures[2]
        return found
