"""What is copied to remote tiers (any LMCache L2 adapter behind the disk): ends of turns, and prefixes that sessions share.

A remote tier serves other machines, and this one after its disk was lost. So a copy is made whole: a snapshot with all KV
before it that is not there yet. It is made after the request, from CPU memory, a bounded piece at a time, by LMCache's own
StoreController, which owns the adapters.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import islice

from lmcache.v1.distributed.api import ObjectKey

from lmcache_histate.backends.compat import StorageParts
from lmcache_histate.backends.layout import Layouts, Namespace
from lmcache_histate.scorer.policy import CachePolicy
from lmcache_histate.state_store.copies import copies_needed
from lmcache_histate.state_store.objects import CacheObject, Tier
from lmcache_histate.state_store.tree import NO_NODE

SETTLE_SECONDS = 2.0
"""After the end of a request its last objects may still be on their way into CPU memory."""
WAIT_SECONDS = 10.0
"""An offer of which something is in neither CPU memory nor the remote tier waits this long for it."""
IN_FLIGHT_SHARE = 8
"""At most this fraction (one over it) of CPU memory is being copied at a time: it cannot be evicted meanwhile."""
GRACE_SECONDS = 1.0
"""A copy has failed when LMCache has had nothing in hand for this long and no tier has reported it."""
PAUSE_SECONDS = 5.0
"""No offers for this long after one failed: the remote tier is in trouble."""
MAX_FAILURES = 3
"""An offer that failed as often is given up."""
MAX_OFFERS = 4096
"""Offers that wait; the oldest are given up first."""
MAX_SHARED = 4096
"""Places whose snapshot is wanted as soon as it comes into CPU memory."""
TRIES_PER_ROUND = 8
"""Offers looked at in one round of the controller, each O(its path)."""


@dataclass
class Offer:
    """The prefix that ends with one chunk."""

    until: float
    """When it is given up, in seconds."""
    shared: bool
    """Several sessions go through it: it is of use also after the session at hand went on."""
    sent: bool = False
    failures: int = 0


class RemoteOffers:
    """Chooses what is copied to remote tiers, and when.

    Used by the controller's thread alone.

    Args:
        policy: The core.
        parts: LMCache's storage manager and controllers.
        layouts: Object keys of the core's objects.
        disk_index: LMCache's index of the disk adapter, or None; all others are remote tiers.
        announce: Told the keys before they are handed to LMCache, so that its store policy knows them.
        turn_ends: Whether ends of turns are copied, too (``offer_to_remote: turn-ends``).
    """

    def __init__(
        self,
        policy: CachePolicy,
        parts: StorageParts,
        layouts: Layouts,
        disk_index: int | None,
        announce: Callable[[Iterable[ObjectKey]], None],
        turn_ends: bool,
    ) -> None:
        self._policy = policy
        self._parts = parts
        self._layouts = layouts
        self._disk_index = disk_index
        self._announce = announce
        self._turn_ends = turn_ends
        self._limit = parts.manager.get_l1_usage()[1] // IN_FLIGHT_SHARE
        self._ended: deque[tuple[float, Namespace, Sequence[bytes]]] = deque(maxlen=MAX_OFFERS)
        self._shared: OrderedDict[tuple[Namespace, bytes], None] = OrderedDict()
        self._offers: OrderedDict[tuple[Namespace, bytes], Offer] = OrderedDict()
        self._sending: tuple[Namespace, bytes] | None = None
        self._awaited: set[ObjectKey] = set()
        self._idle_since: float | None = None
        self._paused_until = float("-inf")
        self.counts = dict.fromkeys(("offered_to_remote", "bytes_offered_to_remote", "failed_offers", "lost_offers"), 0)

    # Told by the controller

    def turn_ended(self, namespace: Namespace, chunk_hashes: Sequence[bytes], now: float) -> None:
        """A request is over; ``chunk_hashes`` are its chunks, in any order. O(1)."""
        if self._turn_ends:
            self._ended.append((now + SETTLE_SECONDS, namespace, chunk_hashes))

    def shared(self, namespace: Namespace, chunk_hash: bytes, now: float) -> None:
        """A prompt left another's path at or after this chunk: several sessions go through it. O(1)."""
        node = self._node(namespace, chunk_hash)
        if node != NO_NODE and self._policy.tree.restorable.marked[node]:
            self._add(namespace, chunk_hash, now, shared=True)
        self._shared[namespace, chunk_hash] = None
        self._shared.move_to_end((namespace, chunk_hash))
        if len(self._shared) > MAX_SHARED:
            self._shared.popitem(last=False)

    def came_to_cpu(self, namespace: Namespace, chunk_hash: bytes, now: float) -> None:
        """A snapshot was stored or read back (for an attention-only model: KV). O(1)."""
        if (namespace, chunk_hash) in self._shared:
            del self._shared[namespace, chunk_hash]
            self._add(namespace, chunk_hash, now, shared=True)

    def arrived(self, keys: Iterable[ObjectKey]) -> None:
        """A remote tier reported objects as stored. O(keys)."""
        self._awaited.difference_update(keys)

    # The work

    def send(self, now: float) -> None:
        """Go on with copying: one piece at a time. O(``TRIES_PER_ROUND`` paths + chunks of turns that ended)."""
        while self._ended and self._ended[0][0] <= now:
            _, namespace, chunk_hashes = self._ended.popleft()
            end = self._end_of(namespace, chunk_hashes)
            if end is not None:
                self._add(namespace, end, now, shared=False)
        if self._awaited and not self._given_up(now):
            return
        if now < self._paused_until:
            return
        for place in list(islice(self._offers, TRIES_PER_ROUND)):
            if self._go_on(place, now):
                return

    def _go_on(self, place: tuple[Namespace, bytes], now: float) -> bool:
        """Hand the next piece of an offer to LMCache; whether there was one."""
        namespace, chunk_hash = place
        offer = self._offers[place]
        node, layout = self._node(namespace, chunk_hash), self._layouts.of(namespace)
        tree = self._policy.tree
        if node != NO_NODE and tree.restorable.kids[node] and not offer.shared:
            # The session went on, and no other one came through here: the next end of a turn is worth more.
            del self._offers[place]
            return False
        needed = copies_needed(tree, node, Tier.CPU, Tier.REMOTE) if node != NO_NODE and layout is not None else None
        if needed:
            assert layout is not None
            self._send(place, layout.keys_of(namespace, self._piece(needed)))
            return True
        if needed is not None:
            self.counts["offered_to_remote"] += offer.sent
            del self._offers[place]
        elif now >= offer.until:
            self.counts["lost_offers"] += 1
            del self._offers[place]
        else:
            self._offers.move_to_end(place)
        return False

    def _piece(self, objects: Sequence[CacheObject]) -> list[CacheObject]:
        """The first of ``objects``, as many as may be on their way at a time, families of ranks together."""
        piece: list[CacheObject] = []
        nbytes = 0
        for entry in objects:
            same = bool(piece) and (piece[-1].chunk_hash, piece[-1].kind) == (entry.chunk_hash, entry.kind)
            if piece and not same and nbytes + entry.nbytes > self._limit:
                break
            piece.append(entry)
            nbytes += entry.nbytes
        self.counts["bytes_offered_to_remote"] += nbytes
        return piece

    def _send(self, place: tuple[Namespace, bytes], keys: Sequence[ObjectKey]) -> None:
        self._offers[place].sent = True
        self._sending = place
        self._awaited = set(keys)
        self._idle_since = None
        self._announce(keys)
        self._parts.store_again(keys)

    def _given_up(self, now: float) -> bool:
        """Whether LMCache is done with the piece on its way although no tier has reported it."""
        if self._parts.stores_in_hand(self._disk_index):
            self._idle_since = None
            return False
        if self._idle_since is None:
            self._idle_since = now
        if now - self._idle_since < GRACE_SECONDS:
            return False
        self._awaited.clear()
        assert self._sending is not None
        offer = self._offers.get(self._sending)
        if offer is not None:
            offer.failures += 1
            if offer.failures == MAX_FAILURES:
                del self._offers[self._sending]
        self.counts["failed_offers"] += 1
        self._paused_until = now + PAUSE_SECONDS
        return True

    def _add(self, namespace: Namespace, chunk_hash: bytes, now: float, shared: bool) -> None:
        place = namespace, chunk_hash
        offer = self._offers.setdefault(place, Offer(0.0, shared))
        offer.until = now + WAIT_SECONDS
        offer.shared |= shared
        if len(self._offers) > MAX_OFFERS:
            self._offers.popitem(last=False)
            self.counts["lost_offers"] += 1

    def _end_of(self, namespace: Namespace, chunk_hashes: Sequence[bytes]) -> bytes | None:
        """The last of a request's chunks that can be resumed from. O(chunks)."""
        tree = self._policy.tree
        nodes = [node for chunk in chunk_hashes if (node := self._node(namespace, chunk)) != NO_NODE]
        usable = [node for node in nodes if tree.restorable.marked[node]]
        return tree.hashes[max(usable, key=tree.position.__getitem__)] if usable else None

    def _node(self, namespace: Namespace, chunk_hash: bytes) -> int:
        return self._policy.space(namespace.name).nodes.get(chunk_hash, NO_NODE)
