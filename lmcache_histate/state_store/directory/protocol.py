"""The words of the directory, and what every implementation of it can do.

An *instance* is one LMCache server (with the vLLM processes that use it). It says what it holds and reads what others
said. Everything that it says is a hint for the others: it may be a moment old, and it counts for as long as the lease of
the instance that said it. Absent never means more than "nobody known holds it".

Two rules make retries and restarts harmless. A change states a whole truth (`ChunkHeld` names all that the instance holds
of a chunk), so that saying it twice changes nothing. And each registration of an instance has a number of its own: what
was said under another number of the same name is void.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from lmcache_histate.state_store.objects import Kind, Tier

TIERS = len(Tier)
FROM_THE_START = b""
"""Parent of the first chunk of a prompt, as in the prefix tree."""
UNPLACED = 0
"""Position of a chunk whose place in the prefix tree is not known yet."""


def held_bit(kind: Kind, tier: Tier) -> int:
    """The bit of `held` that says: this kind of object lies in this tier."""
    return 1 << (TIERS * kind + tier)


def tier_bits(tier: Tier) -> int:
    """The bits of both kinds in one tier."""
    return held_bit(Kind.KV, tier) | held_bit(Kind.SNAPSHOT, tier)


KV_BITS = sum(held_bit(Kind.KV, tier) for tier in Tier)
SNAPSHOT_BITS = sum(held_bit(Kind.SNAPSHOT, tier) for tier in Tier)
REMOTE_BITS = tier_bits(Tier.REMOTE)
ALL_BITS = KV_BITS | SNAPSHOT_BITS


@dataclass(frozen=True, slots=True)
class NamespaceFacts:
    """What is the same for every chunk of a namespace. Namespaces that differ in it never meet, whatever their names.

    Attributes:
        block_tokens: tokens of one chunk.
        kv_bytes: bytes of one chunk's KV, all ranks together.
        snapshot_bytes: bytes of one snapshot, all ranks together; 0 for a model without recurrent layers.
    """

    block_tokens: int
    kv_bytes: int
    snapshot_bytes: int

    @property
    def is_hybrid(self) -> bool:
        """Whether a prefix needs a snapshot at its end to be restored."""
        return self.snapshot_bytes > 0


# -- what an instance says ---------------------------------------------------------------------------------------------


class ChunkHeld(NamedTuple):
    """All that this instance holds of one chunk now. A later one for the same chunk replaces it.

    Attributes:
        chunk_hash: rolling hash of the prefix that ends with the chunk, 1 to 255 bytes.
        held: `held_bit`s of the complete objects (every rank's is there); 0 says that the instance holds nothing. The bits
            of `Tier.REMOTE` are added to what others said of the shared tier; where the remote tier is not shared (see
            `Member.shared_tier`) they are this instance's own like all the others.
        parent: hash of the chunk before it, `FROM_THE_START` for the first.
        position: tokens of the prefix, the chunk included; `UNPLACED` if parent and position are not known yet.
        shared_removed: `REMOTE_BITS` of what was removed from the shared tier, by whomever.
    """

    chunk_hash: bytes
    held: int
    parent: bytes = FROM_THE_START
    position: int = UNPLACED
    shared_removed: int = 0


class SessionEnded(NamedTuple):
    """A turn ended on this instance. A session is named by the chunk where its last turn ended.

    Attributes:
        end: hash of the last whole chunk of the turn.
        position: tokens where the turn ended, at or after the end of that chunk.
        previous: `end` of the turn before, on whichever instance, if the session came from there; `b""` for a new session.
            That end is *superseded* from now on (`SessionRecord.moved_to`).
    """

    end: bytes
    position: int
    previous: bytes = b""


class SessionHit(NamedTuple):
    """A request on this instance reused the path of the session that ends at `end`, up to `position` (tokens)."""

    end: bytes
    position: int


@dataclass(frozen=True, slots=True)
class Statistics:
    """Counters of hits and residence, so chosen that the fleet's are the sums of the instances'.

    An instance says its present values, already forgotten as its models forget (not differences: a retry must not count
    twice). They leave the sum when its lease ends.

    Attributes:
        hits: hits seen, weighted by age.
        end_hits: those at the end of a path.
        distances: hits elsewhere, by distance from the end: `AccessModel.counts`.
        kv_exposure: seconds that KV chunks spent in the cache.
        kv_departures: KV chunks that left.
        snapshot_exposure: seconds that snapshots spent in the cache.
        snapshot_departures: snapshots that left.
    """

    hits: float = 0.0
    end_hits: float = 0.0
    distances: tuple[float, ...] = ()
    kv_exposure: float = 0.0
    kv_departures: float = 0.0
    snapshot_exposure: float = 0.0
    snapshot_departures: float = 0.0

    def __add__(self, other: Statistics) -> Statistics:
        """The counters of both together; a missing bin counts as 0. O(bins)."""
        bins = max(len(self.distances), len(other.distances))
        ours, theirs = (one.distances + (0.0,) * (bins - len(one.distances)) for one in (self, other))
        return Statistics(
            self.hits + other.hits,
            self.end_hits + other.end_hits,
            tuple(a + b for a, b in zip(ours, theirs, strict=True)),
            self.kv_exposure + other.kv_exposure,
            self.kv_departures + other.kv_departures,
            self.snapshot_exposure + other.snapshot_exposure,
            self.snapshot_departures + other.snapshot_departures,
        )


Change = ChunkHeld | SessionEnded | SessionHit | Statistics


# -- what an instance reads --------------------------------------------------------------------------------------------


class Member(NamedTuple):
    """Who says something: an instance, or a shared tier, which is nobody's own and outlives those who wrote to it.

    Attributes:
        name: of the instance, or `shared_tier_name` of the tier.
        address: where a router sends requests, as the instance gave it; may be empty.
        shared_tier: name of the shared tier that the instance can load from; empty for none. Of a tier: its own name.
    """

    name: str
    address: str = ""
    shared_tier: str = ""

    @property
    def is_tier(self) -> bool:
        """Whether this is a shared tier, not an instance."""
        return bool(self.shared_tier) and self.name == self.shared_tier


class Holder(NamedTuple):
    """Who holds a chunk, and what of it (`held_bit`s)."""

    member: Member
    held: int


class ChunkRecord(NamedTuple):
    """What is known of one chunk; `holders` are those whose lease is good."""

    chunk_hash: bytes
    parent: bytes
    position: int
    holders: tuple[Holder, ...]


class Elsewhere(NamedTuple):
    """Whether others hold a chunk's KV (or its snapshot), for the decision whether to keep it here.

    Attributes:
        shared: it is on the shared tier that this instance can load from.
        others: another instance holds it in a tier of its own. It cannot be loaded from here, but a request can be sent
            there.
        ours_to_keep: of the instances that hold it, this is the one that keeps it while it is the last copy; true when no
            other instance holds it. All who see the same holders name the same one.
    """

    shared: bool
    others: bool
    ours_to_keep: bool


NOWHERE_ELSE = Elsewhere(False, False, True)


class SessionRecord(NamedTuple):
    """What is known of a session by the chunk where a turn of it ended.

    Attributes:
        end: hash of that chunk.
        position: tokens where the turn ended; `UNPLACED` if only what came after it is known.
        instance: name of the instance where it ended.
        moved_to: end of the session's next turn; `b""` if this is its last. With it, `instance` is where that turn ended.
        hit_age_s: seconds since a request last reused the session's path; None if none did.
        hit_position: tokens that it shared.
        hit_instance: name of the instance that served it.
    """

    end: bytes
    position: int
    instance: str
    moved_to: bytes
    hit_age_s: float | None
    hit_position: int
    hit_instance: str


class Location(NamedTuple):
    """How much of a prompt one member can restore: tokens of the longest prefix whose KV it holds whole and, for a hybrid
    model, that ends at a snapshot it holds.

    Attributes:
        member: an instance, or a shared tier by itself.
        cpu_tokens: with what lies in CPU memory.
        disk_tokens: with CPU memory and disk.
        tokens: with all that the instance can load from, the shared tier included.
    """

    member: Member
    cpu_tokens: int
    disk_tokens: int
    tokens: int


# -- errors ------------------------------------------------------------------------------------------------------------


class DirectoryError(Exception):
    """The directory cannot be used now. The message is one line for a user and never holds a password."""


class Unreachable(DirectoryError):
    """No answer: refused, timed out, disconnected, or still loading its data."""


class AccessDenied(DirectoryError):
    """Wrong user or password, or one without the right to the keys or commands."""


class OutOfMemory(DirectoryError):
    """The server takes no more data."""


class Unusable(DirectoryError):
    """The server answers, but not as a directory needs it: no scripts, a read-only replica, foreign data in our keys."""


class LeaseLost(DirectoryError):
    """What this instance said is void: its lease ended, the server lost its data, or another one claimed its name.

    `register` again, then say everything again.
    """


# -- the directory -----------------------------------------------------------------------------------------------------


class Registration(NamedTuple):
    """How a registration went.

    Attributes:
        name: the name it goes by: the one asked for, or one with a suffix if that belongs to a newer instance.
        displaced: a lease of the same name, of another process, was still good and is void now.
    """

    name: str
    displaced: bool


class Directory(Protocol):
    """Tells the other instances what this one holds, and knows what they told.

    Methods in the first group may wait for a server and belong to one thread. Those of the second read the local view,
    wait for nothing and may be called from any thread. `now` is in seconds, from one monotonic clock of this process; the
    clocks of two processes are never compared.

    In order: `register` once per namespace, `publish` what is held, then `publish` changes and `poll` a few times per
    lease. After `LeaseLost`, from the start.
    """

    lease_s: float
    """Seconds after which an instance that was not heard of counts as gone."""
    remote_is_shared: bool
    """Whether the remote tier of this instance is a shared one; see `ChunkHeld.held`."""
    other_schemas: tuple[int, ...]
    """Schema versions of instances that use the same server and cannot be seen, as of the last look."""

    # May wait for a server

    def register(self, namespace: str, facts: NamespaceFacts, now: float) -> Registration:
        """Begin to take part in a namespace, or begin again. All that was published in it before is void.

        Raises:
            DirectoryError: as above.
        """
        ...

    def publish(self, namespace: str, changes: Sequence[Change], now: float) -> None:
        """Say all of `changes`, or none. One round trip. Repeats change nothing, also after an unknown outcome.

        Raises:
            LeaseLost: register again.
            DirectoryError: as above; saying the same again is safe.
        """
        ...

    def poll(self, now: float) -> None:
        """Renew the leases, take in what others said, and do this instance's share of the cleaning.

        One round trip per namespace, more when there is much to take in.

        Raises:
            LeaseLost: register again (the view stays current all the same).
            DirectoryError: as above.
        """
        ...

    def withdraw(self, now: float) -> None:
        """Give up the leases at once, so that nobody counts on this instance. Never raises."""
        ...

    def close(self) -> None:
        """Withdraw and disconnect. Never raises."""
        ...

    # Read the local view

    def age(self, now: float) -> float:
        """Seconds since the view last was current; infinite before it first was."""
        ...

    def instances(self, namespace: str, now: float) -> list[Member]:
        """Members with a good lease, this one included, shared tiers last. O(members)."""
        ...

    def holders(self, namespace: str, chunk_hashes: Sequence[bytes], now: float) -> list[tuple[Holder, ...]]:
        """Who holds each of the chunks. O(chunks * holders)."""
        ...

    def elsewhere(self, namespace: str, chunk_hash: bytes, kind: Kind, now: float) -> Elsewhere:
        """Whether others hold one chunk's KV or snapshot. O(holders)."""
        ...

    def locate(self, namespace: str, chunk_hashes: Sequence[bytes], now: float) -> list[Location]:
        """How much of the prompt with these chunks, from its start, each member can restore; the most first.

        Only members that can restore something. O(chunks * holders).
        """
        ...

    def session(self, namespace: str, end: bytes, now: float) -> SessionRecord | None:
        """The session of which a turn ended at the chunk `end`, or None if none is known. O(1)."""
        ...

    def news(self, namespace: str, limit: int, now: float) -> list[ChunkRecord]:
        """Chunks of which something was said since the last call, as they are now: at most `limit`, oldest news first.

        One that nobody holds any more has no holders. This instance's own words are among them, and after the first `poll`
        everything that is known. For one reader. Of more news than the view keeps records, the oldest are lost. O(news).
        """
        ...

    def records(self, namespace: str, now: float) -> list[ChunkRecord]:
        """All placed chunks that somebody holds, parents before children: to start warm. O(n log n)."""
        ...

    def statistics(self, namespace: str, now: float) -> Statistics:
        """Sum over the other instances with a good lease. O(members)."""
        ...


def shared_tier_name(remote_url: str) -> str:
    """Name of a shared tier: equal for all who are configured with the same place, without user and password."""
    scheme, _, rest = remote_url.strip().partition("://")
    host, slash, path = rest.partition("/")
    return f"shared:{scheme.lower()}://{host.rpartition('@')[2].lower()}{slash}{path}".rstrip("/")
