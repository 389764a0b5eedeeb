"""What this server tells the directory, and what it makes of what other instances say.

Lives on the controller's thread. Nothing here waits: what is said goes into the directory writer's bounded queue, what is
heard is read from the directory's local view.

What other instances hold in tiers of their own never enters the core, since nothing can be loaded from there. What lies on
the shared tier does, as a copy in `Tier.REMOTE`: its loss here then costs no more than fetching it.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple

from lmcache.logging import init_logger

from lmcache_histate.backends.directory_writer import DirectoryWriter
from lmcache_histate.backends.layout import ModelLayout, Namespace
from lmcache_histate.backends.remote_copies import RemoteCopies
from lmcache_histate.scorer.policy import CachePolicy
from lmcache_histate.state_store.directory.protocol import (
    REMOTE_BITS,
    UNPLACED,
    ChunkHeld,
    ChunkRecord,
    NamespaceFacts,
    SessionEnded,
    SessionHit,
    Statistics,
    held_bit,
)
from lmcache_histate.state_store.objects import CacheObject, Kind, Tier
from lmcache_histate.state_store.tree import NO_NODE

logger = init_logger(__name__)

SAID_PER_ROUND = 2048
"""Chunks told in one round of the controller: some 10 ms."""
HEARD_PER_ROUND = 1024
"""News taken in, and sessions looked up, in one round of the controller: some 10 ms."""
SETTLE_SECONDS = 2.0
"""After the end of a request its last snapshot may still be on its way into CPU memory."""
HIT_SECONDS = 10.0
"""A session that was hit here so lately is ours, whatever the view, which may be older, says."""
CHECK_SECONDS = 1.0
"""Pause between two rounds of questions whether sessions went on elsewhere."""
STATISTICS_SECONDS = 5.0
"""Pause between two statements of our statistics."""
MAX_UNSAID = 1 << 17
"""Chunks that wait to be told, some 40 MB; beyond it everything is told anew once the directory takes words again."""
MAX_TURNS = 4096
"""Turns that wait to settle; the oldest are not told."""
MAX_UNPLACED = 1 << 16
"""Chunks told without their place, which follows once it is known; the oldest are not."""


class SharedNews(NamedTuple):
    """What was seen of a chunk on the shared tier, in `held_bit`s of `Tier.REMOTE`."""

    there: int = 0
    gone: int = 0


NOTHING_SEEN = SharedNews()


class Fleet:
    """Ties the core to the directory.

    Args:
        policy: The core.
        copies: What it knows of remote tiers.
        writer: Carries our words to the directory and keeps the view of it.
        shared_tier: Name of the shared tier that this server reads and writes; empty for none.
        restore_copy: Called with (namespace, chunk, seconds) to have the prefix that ends there copied to the shared tier.
    """

    def __init__(
        self,
        policy: CachePolicy,
        copies: RemoteCopies,
        writer: DirectoryWriter,
        shared_tier: str,
        restore_copy: Callable[[Namespace, bytes, float], None] | None = None,
    ) -> None:
        self._policy = policy
        self._copies = copies
        self._writer = writer
        self._directory = writer.directory
        self._shared_tier = shared_tier
        self._restore_copy = restore_copy
        # Without a shared tier, what remote tiers hold is this instance's own like all the rest.
        self._own_tiers = tuple(tier for tier in Tier if tier is not Tier.REMOTE or not shared_tier)
        self._namespaces: dict[str, Namespace] = {}
        self.facts: dict[str, NamespaceFacts] = {}
        """Namespaces that this server takes part in; replaced whole, so that any thread may read it."""
        self._to_say: dict[tuple[str, bytes], SharedNews] = {}
        self._to_tell_again: dict[str, Iterator[bytes]] = {}
        self._unplaced: OrderedDict[tuple[str, bytes], None] = OrderedDict()
        # What was said of the shared tier and not seen in the view yet: bits, and until when it is believed.
        self._claimed: dict[tuple[str, bytes], tuple[int, float]] = {}
        self._hit_here: OrderedDict[tuple[str, bytes], float] = OrderedDict()
        self._ended: deque[tuple[float, str, Sequence[bytes]]] = deque(maxlen=MAX_TURNS)
        self._sessions: Iterator[int] | None = None
        self._next_check = self._next_statistics = float("-inf")
        self._seeded = False
        self.counts = dict.fromkeys(
            ("shared_copies_heard_of", "shared_copies_lost", "shared_copies_to_restore", "sessions_moved_away"), 0
        )

    @property
    def unsaid(self) -> int:
        """Chunks that wait to be told."""
        return len(self._to_say)

    # -- told by the controller -----------------------------------------------------------------------------------

    def joined(self, namespace: Namespace, layout: ModelLayout, chunk_tokens: int) -> None:
        """A namespace is known to the core from now on. O(1)."""
        self._namespaces[namespace.name] = namespace
        kv, snapshot = layout.bytes_of(Kind.KV), layout.bytes_of(Kind.SNAPSHOT)
        facts = NamespaceFacts(chunk_tokens, kv, snapshot)
        self.facts = {**self.facts, namespace.name: facts}
        self._writer.join(namespace.name, facts)

    def changed(self, namespace: Namespace, chunk_hashes: Iterable[bytes]) -> None:
        """Objects of these chunks came or went, or their place became known. O(chunks)."""
        for chunk_hash in chunk_hashes:
            self._say_later(namespace.name, chunk_hash, NOTHING_SEEN)

    def came_to_shared_tier(self, namespace: Namespace, chunk_hashes: Iterable[bytes]) -> None:
        """This server has written something of these chunks to the remote tier. O(chunks)."""
        for chunk_hash in chunk_hashes:
            there = self._on_shared_tier(namespace.name, chunk_hash)
            self._say_later(namespace.name, chunk_hash, SharedNews(there=there))

    def left_shared_tier(self, namespace: Namespace, chunk_hashes: Iterable[bytes]) -> None:
        """This server has deleted something of these chunks from the remote tier. O(chunks)."""
        for chunk_hash in chunk_hashes:
            there = self._on_shared_tier(namespace.name, chunk_hash)
            self._say_later(namespace.name, chunk_hash, SharedNews(gone=REMOTE_BITS & ~there))

    def looked(self, namespace: Namespace, chunk_hashes: Sequence[bytes], shared_tier_asked: bool, now: float) -> None:
        """A prompt was looked up, in the shared tier too if ``shared_tier_asked`` (the core has been told). O(chunks)."""
        name = namespace.name
        if self._unplaced:
            for chunk_hash in chunk_hashes:
                if (name, chunk_hash) in self._unplaced:
                    self._say_later(name, chunk_hash, NOTHING_SEEN)
        if not shared_tier_asked or not self._shared_tier:
            return
        told = self._directory.holders(name, chunk_hashes, now)
        for chunk_hash, holders in zip(chunk_hashes, told, strict=True):
            said = next((held for member, held in holders if member.name == self._shared_tier), 0) & REMOTE_BITS
            there = self._on_shared_tier(name, chunk_hash)
            if said == there:
                continue
            lost = said & ~there
            self._say_later(name, chunk_hash, SharedNews(there & ~said, lost))
            for kind in Kind:
                if lost & held_bit(kind, Tier.REMOTE):
                    self._lost(namespace, chunk_hash, kind, now)

    def hit(self, namespace: Namespace, chunk_hashes: Sequence[bytes], matched: int, now: float) -> None:
        """A request reused the first ``matched`` chunks of its prompt. O(path)."""
        tree, reach = self._policy.tree, self._policy.reach
        node = self._policy.space(namespace.name).nodes.get(chunk_hashes[matched - 1], NO_NODE)
        end = reach.path_of(node) if node != NO_NODE else NO_NODE
        if end == NO_NODE or tree.position[node] <= 0:
            return
        place = namespace.name, tree.hashes[end]
        self._hit_here[place] = now
        self._hit_here.move_to_end(place)
        if len(self._hit_here) > MAX_TURNS:
            self._hit_here.popitem(last=False)
        self._writer.put(namespace.name, SessionHit(tree.hashes[end], tree.position[node]))

    def turn_ended(self, namespace: Namespace, chunk_hashes: Sequence[bytes], now: float) -> None:
        """A request with these chunks, in any order, is over. O(1)."""
        self._ended.append((now + SETTLE_SECONDS, namespace.name, chunk_hashes))

    def round(self, now: float) -> bool:
        """Say and hear what there is, a bounded amount of it; whether something is left to do at once."""
        for name in self._writer.to_be_told_again():
            self._to_tell_again[name] = iter(list(self._policy.space(name).nodes))
        self._tell_again()
        more = self._hear(now)
        while self._ended and self._ended[0][0] <= now:
            _, name, chunk_hashes = self._ended.popleft()
            self._say_end(name, chunk_hashes, now)
        self._look_for_moved_sessions(now)
        if now >= self._next_statistics:
            self._next_statistics = now + STATISTICS_SECONDS
            self._statistics(now)
        taken = self._say(now)
        return more or (taken and bool(self._to_say or self._to_tell_again))

    # -- saying ---------------------------------------------------------------------------------------------------

    def _say_later(self, name: str, chunk_hash: bytes, seen: SharedNews) -> None:
        before = self._to_say.get((name, chunk_hash), NOTHING_SEEN)
        # What was seen last counts.
        there = before.there & ~seen.gone | seen.there
        self._to_say[name, chunk_hash] = SharedNews(there, before.gone & ~seen.there | seen.gone)
        if len(self._to_say) > MAX_UNSAID:
            self._to_say.clear()
            self._to_tell_again.clear()
            for served in self._namespaces:
                self._writer.begin_again(served)

    def _say(self, now: float) -> bool:
        """Tell some of what waits; False when the queue was full."""
        for _ in range(min(SAID_PER_ROUND, len(self._to_say))):
            (name, chunk_hash), seen = next(iter(self._to_say.items()))
            change = self._held(name, chunk_hash, seen)
            if not self._writer.put(name, change):
                return False
            del self._to_say[name, chunk_hash]
            if seen.there:
                self._claimed[name, chunk_hash] = seen.there, now + 2.0 * self._directory.lease_s
                if len(self._claimed) > MAX_UNSAID:  # of those, the view never heard
                    del self._claimed[next(iter(self._claimed))]
            elif seen.gone:
                self._claimed.pop((name, chunk_hash), None)
            self._unplaced.pop((name, chunk_hash), None)
            if change.held and change.position == UNPLACED:
                self._unplaced[name, chunk_hash] = None
                if len(self._unplaced) > MAX_UNPLACED:
                    self._unplaced.popitem(last=False)
        return True

    def _held(self, name: str, chunk_hash: bytes, seen: SharedNews) -> ChunkHeld:
        """All that is to be said of one chunk. O(1)."""
        tree = self._policy.tree
        node = self._policy.space(name).nodes.get(chunk_hash, NO_NODE)
        if node == NO_NODE:
            return ChunkHeld(chunk_hash, seen.there, shared_removed=seen.gone)
        held = seen.there
        for kind in Kind:
            for tier in self._own_tiers:
                if tree.complete_in(node, kind, tier):
                    held |= held_bit(kind, tier)
        if tree.position[node] <= 0:
            return ChunkHeld(chunk_hash, held, shared_removed=seen.gone)
        return ChunkHeld(chunk_hash, held, tree.hashes[tree.parent[node]], tree.position[node], seen.gone)

    def _tell_again(self) -> None:
        """Go on with namespaces of which all that was said is void. O(``SAID_PER_ROUND``).

        What is known of the shared tier is said as well: where the directory lost its data, nobody else may know it.
        """
        for _ in range(SAID_PER_ROUND if len(self._to_say) < SAID_PER_ROUND else 0):
            if not self._to_tell_again:
                return
            name, chunk_hashes = next(iter(self._to_tell_again.items()))
            chunk_hash = next(chunk_hashes, None)
            if chunk_hash is None:
                del self._to_tell_again[name]
                continue
            seen = SharedNews(self._on_shared_tier(name, chunk_hash))
            if self._held(name, chunk_hash, seen).held:
                self._say_later(name, chunk_hash, seen)

    def _say_end(self, name: str, chunk_hashes: Sequence[bytes], now: float) -> None:
        """Where a turn ended, and the end that it went on from: the last one that is known on its way. O(path)."""
        tree, nodes = self._policy.tree, self._policy.space(name).nodes
        usable = [
            node
            for chunk_hash in chunk_hashes
            if (node := nodes.get(chunk_hash, NO_NODE)) != NO_NODE and tree.restorable.marked[node]
        ]
        if not usable:
            return
        end = max(usable, key=tree.position.__getitem__)
        if tree.restorable.kids[end]:
            return  # a lookup touched it; the path went on long ago
        before, previous = tree.parent[end], b""
        while before != NO_NODE and tree.hashes[before]:
            if self._directory.session(name, tree.hashes[before], now) is not None:
                previous = tree.hashes[before]
                break
            before = tree.parent[before]
        self._writer.put(name, SessionEnded(tree.hashes[end], tree.position[end], previous))

    def _statistics(self, now: float) -> None:
        for name in self._namespaces:
            self._writer.put(name, self._policy.statistics(now))

    # -- hearing --------------------------------------------------------------------------------------------------

    def _hear(self, now: float) -> bool:
        heard = 0
        for name, namespace in self._namespaces.items():
            if not self._seeded:
                self._seed(name, now)
            for record in self._directory.news(name, HEARD_PER_ROUND - heard, now):
                heard += 1
                if self._shared_tier:
                    self._heard(namespace, record, now)
            if heard >= HEARD_PER_ROUND:
                return True
        return False

    def _seed(self, name: str, now: float) -> None:
        """Begin with the fleet's statistics, as soon as there are any and unless this server has seen some hits itself."""
        fleet = self._directory.statistics(name, now)
        if fleet == Statistics():
            return
        self._seeded = True
        if self._policy.statistics(now).hits == 0.0:
            self._policy.seed(fleet)

    def _heard(self, namespace: Namespace, record: ChunkRecord, now: float) -> None:
        """Take over what is said of a chunk on the shared tier. O(holders + ranks)."""
        name, chunk_hash = namespace.name, record.chunk_hash
        if (name, chunk_hash) in self._to_say:
            return  # what is known here is newer
        said = next((held for member, held in record.holders if member.name == self._shared_tier), 0) & REMOTE_BITS
        claimed, until = self._claimed.get((name, chunk_hash), (0, 0.0))
        if claimed and (not claimed & ~said or now >= until):
            del self._claimed[name, chunk_hash]
        elif claimed:
            said |= claimed  # our own word is still on its way
        known = self._on_shared_tier(name, chunk_hash)
        if said == known:
            return
        arrived = [kind for kind in Kind if said & ~known & held_bit(kind, Tier.REMOTE)]
        gone = [kind for kind in Kind if known & ~said & held_bit(kind, Tier.REMOTE)]
        if arrived:
            self._arrived(namespace, record, arrived, now)
        if gone:
            self._gone(namespace, chunk_hash, gone, now)

    def _arrived(self, namespace: Namespace, record: ChunkRecord, kinds: Sequence[Kind], now: float) -> None:
        name, chunk_hash = namespace.name, record.chunk_hash
        space = self._policy.space(name)
        if record.position != UNPLACED:
            try:
                self._policy.link(name, record.parent or None, [chunk_hash], now)
            except ValueError as error:
                logger.warning("HiState ignores what the directory says of a chunk: %s", error)
                return
        geometry = space.geometry
        sizes = {Kind.KV: geometry.kv_bytes_per_token * geometry.block_tokens, Kind.SNAPSHOT: geometry.snapshot_bytes}
        ranks = geometry.ranks
        self._policy.stored(
            name,
            [
                CacheObject(chunk_hash, kind, rank, Tier.REMOTE, int(sizes[kind]) // ranks)
                for kind in kinds
                for rank in range(ranks)
            ],
            now,
        )
        self._copies.stored(namespace, [chunk_hash], now)
        self.counts["shared_copies_heard_of"] += len(kinds)

    def _gone(self, namespace: Namespace, chunk_hash: bytes, kinds: Sequence[Kind], now: float) -> None:
        """The shared tier lost copies, as another instance found. O(ranks + path)."""
        name, tree, nodes = namespace.name, self._policy.tree, self._policy.space(namespace.name).nodes
        for kind in kinds:
            node = nodes.get(chunk_hash, NO_NODE)  # the removal before may have freed it
            if node != NO_NODE:
                self._policy.removed(name, tree.objects(node, kind, Tier.REMOTE), now)
            self._lost(namespace, chunk_hash, kind, now)

    def _lost(self, namespace: Namespace, chunk_hash: bytes, kind: Kind, now: float) -> None:
        """The shared tier lost a copy: of the instances that still hold the object, exactly one puts it back. O(path).

        They all see the same holders, and the directory names one of them; when that one is gone, another.
        """
        self.counts["shared_copies_lost"] += 1
        name, tree = namespace.name, self._policy.tree
        node = self._policy.space(name).nodes.get(chunk_hash, NO_NODE)
        if self._restore_copy is None or node == NO_NODE:
            return
        if not any(tree.complete_in(node, kind, tier) for tier in self._own_tiers):
            return
        end = self._policy.reach.path_of(node)
        if end != NO_NODE and self._directory.elsewhere(name, chunk_hash, kind, now).ours_to_keep:
            self.counts["shared_copies_to_restore"] += 1
            self._restore_copy(namespace, tree.hashes[end], now)

    def _look_for_moved_sessions(self, now: float) -> None:
        """Sessions whose next turn another instance served lose value here. O(``HEARD_PER_ROUND``)."""
        if self._sessions is None:
            if now < self._next_check:
                return
            self._sessions = iter(list(self._policy.reach.records))
            self._next_check = now + CHECK_SECONDS
        tree = self._policy.tree
        for _ in range(HEARD_PER_ROUND):
            node = next(self._sessions, None)
            if node is None:
                self._sessions = None
                return
            record = self._policy.reach.records.get(node)
            if record is None or record.moved:
                continue
            name, end = tree.namespaces[tree.space[node]].name, tree.hashes[node]
            session = self._directory.session(name, end, now)
            if session is None or self._writer.instance in (session.instance, session.hit_instance):
                continue
            if now - self._hit_here.get((name, end), float("-inf")) > HIT_SECONDS:
                was_ours = self._was_ours(node)
                self._policy.session_moved(name, end, was_ours)
                self.counts["sessions_moved_away"] += was_ours

    def _was_ours(self, end: int) -> bool:
        """Whether anything of a path's own, behind the last fork, lies in a tier of this instance. O(stretch)."""
        tree = self._policy.tree
        node = end
        while node != NO_NODE and tree.hashes[node] and tree.restorable.kids[node] < 2:
            if any(tree.complete_in(node, Kind.KV, tier) for tier in self._own_tiers):
                return True
            node = tree.parent[node]
        return False

    def _on_shared_tier(self, name: str, chunk_hash: bytes) -> int:
        """What the core knows of a chunk on the shared tier, in `held_bit`s; 0 without one. O(1)."""
        if not self._shared_tier:
            return 0
        tree = self._policy.tree
        node = self._policy.space(name).nodes.get(chunk_hash, NO_NODE)
        if node == NO_NODE:
            return 0
        return sum(held_bit(kind, Tier.REMOTE) for kind in Kind if tree.complete_in(node, kind, Tier.REMOTE))
