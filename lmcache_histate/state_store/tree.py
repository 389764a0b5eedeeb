"""The prefix tree: which chunks are known, where they hang, which of their objects lie in which tier.

A node is one chunk of one namespace, named by its rolling hash; it stands for the whole prefix that ends with it. Nodes
are integers that index parallel arrays, since a million Python objects would cost more memory than the state they
describe and be slower to walk. Ids are reused after a node is freed.

Events may come in any order: a store before the chunk's parent is known (the node stays *detached* until a path names
it), a removal seen twice, one rank long before another. What is there is always the union of what was reported.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple, cast

import numpy as np
import numpy.typing as npt

from lmcache_histate.geometry import CacheGeometry
from lmcache_histate.state_store.columns import TIERS, ObjectColumns
from lmcache_histate.state_store.frontier import Frontier
from lmcache_histate.state_store.objects import CacheObject, Kind
from lmcache_histate.state_store.residence import ResidenceTime

NO_NODE = -1
Ints = npt.NDArray[np.int64]


class Namespace(NamedTuple):
    """One model, layout and salt: chunks of two namespaces never meet."""

    name: str
    number: int
    geometry: CacheGeometry
    full_mask: int
    """Rank bits of a complete chunk."""
    root: int
    """The node of the empty prefix."""
    nodes: dict[bytes, int]
    """Chunk hash to node."""


class PathMatch(NamedTuple):
    """How much of a path the cache holds, in chunks counted from its start."""

    nodes: list[int]
    """Node of every chunk that is known, a prefix of the path."""
    whole: int
    """Chunks whose KV is complete: the longest attention match."""
    restorable: int
    """Chunks up to the last snapshot inside `whole`: what a hybrid model can resume from. 0 if none."""


class PrefixTree:
    """Prefix tree over chunk hashes with object presence per kind, tier and rank.

    Two facts are derived and kept current: a node is *whole* when its KV and that of all its ancestors is complete, and
    *restorable* when it is whole and its snapshot is complete. Complete means every rank's object is in some tier. An
    attention-only model has no snapshots and needs none: there every whole node is restorable.

    Subclasses extend the hooks at the end of the class.

    Args:
        pending_s: seconds that a chunk which was only looked up stays known while nothing was stored for it.
    """

    def __init__(self, pending_s: float = 60.0) -> None:
        self.namespaces: list[Namespace] = []
        self.kv_bytes_per_token = array("d")
        """Of every namespace, by its number."""
        self._by_name: dict[str, Namespace] = {}
        self.parent = array("i")
        self.position = array("i")
        """Tokens in the prefix that ends with the node; -1 while detached."""
        self.space = array("I")
        """Number of the node's namespace."""
        self.last_access = array("d")
        """Seconds: last use of the snapshot at a restorable node, of the KV elsewhere."""
        self.restorable = Frontier(self.parent)
        self.hashes: list[bytes] = []
        self.kv_residence = ResidenceTime()
        self.snapshot_residence = ResidenceTime()
        self.lineage = bytearray()
        """A byte that the chunks of one session share with high probability: the sampling class of a path."""
        self._child = array("i")
        self._next = array("i")
        self._previous = array("i")
        self._whole = bytearray()
        self._columns = ObjectColumns()
        self._free: list[int] = []
        self._used = 0
        self._last_path: list[int] = []
        self._last_array: Ints = np.zeros(0, dtype=np.int64)
        self._pending: deque[tuple[float, int, bytes]] = deque()
        self._pending_s = pending_s
        self.tier_bytes = [0] * TIERS
        """Bytes of all objects, per tier."""
        self.space_bytes: list[list[int]] = []
        """The same for every namespace, by its number."""

    # -- namespaces and nodes -------------------------------------------------------------------------------------

    def add_namespace(self, name: str, geometry: CacheGeometry) -> Namespace:
        """Register a namespace, or return the registered one.

        Raises:
            ValueError: the name is registered with another geometry.
        """
        known = self._by_name.get(name)
        if known is not None:
            if known.geometry != geometry:
                raise ValueError(f"namespace {name!r} is registered with {known.geometry}, not {geometry}")
            return known
        number = len(self.namespaces)
        root = self._allocate(b"", number, NO_NODE, 0)
        self._whole[root] = 1
        added = Namespace(name, number, geometry, (1 << geometry.ranks) - 1, root, {})
        self.namespaces.append(added)
        self.kv_bytes_per_token.append(geometry.kv_bytes_per_token)
        self.space_bytes.append([0] * TIERS)
        self._by_name[name] = added
        return added

    def __len__(self) -> int:
        """Chunks known, roots not counted."""
        return self._used - len(self.namespaces)

    @property
    def capacity(self) -> int:
        """Length of the node arrays: ids are below it."""
        return len(self.parent)

    def _grow(self, nodes: int) -> None:
        """Append room for `nodes` more ids to every column."""
        first = self.capacity
        for column in (self.parent, self.position, self._child, self._next, self._previous):
            column.frombytes(bytes(4 * nodes))
        self.space.frombytes(bytes(4 * nodes))
        self.last_access.frombytes(bytes(8 * nodes))
        self._columns.grow(nodes)
        self._whole.extend(bytes(nodes))
        self.lineage.extend(bytes(nodes))
        self.hashes.extend([b""] * nodes)
        self.restorable.grow(nodes)
        self._free.extend(range(first + nodes - 1, first - 1, -1))

    def _allocate(self, chunk_hash: bytes, space: int, parent: int, position: int) -> int:
        if not self._free:
            self._grow(max(1024, self.capacity >> 3))
        node = self._free.pop()
        self._used += 1
        self.parent[node] = NO_NODE
        self.position[node] = position
        self.space[node] = space
        self.last_access[node] = 0.0
        self.hashes[node] = chunk_hash
        self._child[node] = self._next[node] = self._previous[node] = NO_NODE
        self.lineage[node] = chunk_hash[-1] if chunk_hash else 0
        if parent != NO_NODE:
            self._hang(node, parent)
        return node

    def _hang(self, node: int, parent: int) -> None:
        self.parent[node] = parent
        sibling = self._child[parent]
        if self.hashes[parent] and (sibling == NO_NODE or self._next[sibling] == NO_NODE):
            # A first branch is most likely the same session rewinding; a place with many branches is a shared prefix,
            # and what hangs there is a session of its own.
            self.lineage[node] = self.lineage[parent]
        self._next[node] = sibling
        if sibling != NO_NODE:
            self._previous[sibling] = node
        self._child[parent] = node

    def _release(self, node: int) -> None:
        """Free `node` and then its ancestors, as long as they hold nothing and lead nowhere."""
        while self._child[node] == NO_NODE and self.hashes[node] and not self._columns.holds(node):
            above, following, before = self.parent[node], self._next[node], self._previous[node]
            if before != NO_NODE:
                self._next[before] = following
            elif above != NO_NODE:
                self._child[above] = following
            if following != NO_NODE:
                self._previous[following] = before
            del self.namespaces[self.space[node]].nodes[self.hashes[node]]
            self._released(node)
            self._forget_path()
            self.hashes[node] = b""
            self.parent[node] = NO_NODE
            self._whole[node] = 0
            self._free.append(node)
            self._used -= 1
            if above == NO_NODE:
                return
            node = above

    def expire(self, now: float) -> None:
        """Forget chunks that were looked up `pending_s` ago and never stored. O(1) amortised over the look-ups."""
        pending, horizon = self._pending, now - self._pending_s
        while pending and pending[0][0] <= horizon:
            _, node, chunk_hash = pending.popleft()
            if self.hashes[node] == chunk_hash:
                self._release(node)

    # -- paths ----------------------------------------------------------------------------------------------------

    def extend(self, space: Namespace, hashes: Sequence[bytes], now: float, after: bytes | None = None) -> list[int]:
        """Make every chunk of a path known and return the nodes, shallow to deep.

        The path starts at the root, or below the chunk `after` (known or not). Chunks that were stored before their
        parent was known are put in their place. O(path), plus what a late parent makes restorable.

        Raises:
            ValueError: a hash is known below another parent; it then does not name a prefix.
        """
        known, parents = space.nodes, self.parent
        block = space.geometry.block_tokens
        above = space.root
        if after is not None:
            above = self._known_or_detached(space, after)
            self._pending.append((now, above, after))
        nodes = self._known(space, hashes)
        start = self.position[above]
        # A hash covers its whole prefix: if the last known chunk hangs at the right depth, so do those before it.
        if nodes and start >= 0 and self.position[nodes[-1]] == start + len(nodes) * block:
            above = nodes[-1]
        else:
            nodes = []
        for chunk_hash in hashes[len(nodes) :]:
            node = known.get(chunk_hash, NO_NODE)
            if node == NO_NODE:
                depth = self.position[above]
                node = self._allocate(chunk_hash, space.number, above, depth + block if depth >= 0 else -1)
                known[chunk_hash] = node
                self._pending.append((now, node, chunk_hash))
            elif parents[node] != above:
                if parents[node] != NO_NODE:
                    raise ValueError(f"chunk {chunk_hash.hex()} follows two different prefixes")
                self._attach(node, above)
            nodes.append(node)
            above = node
        return nodes

    @staticmethod
    def _known(space: Namespace, hashes: Sequence[bytes]) -> list[int]:
        """Nodes of the known chunks that `hashes` begins with."""
        # In C: thousands of chunks a request are looked up, nearly all of them known.
        found = list(map(space.nodes.get, hashes))
        if None in found:
            found = found[: found.index(None)]
        return cast("list[int]", found)

    def _known_or_detached(self, space: Namespace, chunk_hash: bytes) -> int:
        node = space.nodes.get(chunk_hash, NO_NODE)
        if node == NO_NODE:
            node = self._allocate(chunk_hash, space.number, NO_NODE, -1)
            space.nodes[chunk_hash] = node
        return node

    def _attach(self, node: int, above: int) -> None:
        """Hang the detached `node`, with all that is below it, under `above`."""
        self._hang(node, above)
        self._forget_path()
        self._attached(node)
        if self.position[above] >= 0:
            block = self.namespaces[self.space[node]].geometry.block_tokens
            for below in self.subtree(node):
                self.position[below] = self.position[self.parent[below]] + block
        if self._whole[above] and self.complete(node, Kind.KV):
            self._spread_whole(node)

    def match(self, space: Namespace, hashes: Sequence[bytes]) -> PathMatch:
        """Longest known, attention and restorable match of a path. Changes nothing. O(path)."""
        return self._match(self._known(space, hashes))

    def _match(self, nodes: list[int]) -> PathMatch:
        # Whole chunks come before all others, so their number is found by halving.
        held = bisect_left(nodes, True, key=lambda node: not self._whole[node])
        usable = self.restorable.marked
        resume = next((depth for depth in range(held, 0, -1) if usable[nodes[depth - 1]]), 0)
        return PathMatch(nodes, held, resume)

    def visit(self, space: Namespace, hashes: Sequence[bytes], now: float) -> PathMatch:
        """`extend`, and `match` of what is known then. O(path)."""
        return self._match(self.extend(space, hashes, now))

    def path(self, node: int) -> Ints:
        """Nodes from the first chunk to `node`, the root left out; shape (chunks,), read only. O(path).

        One request asks for its path several times, so the last one is kept and only what differs is walked.
        """
        tail: list[int] = []
        parents, last = self.parent, self._last_path
        depth = self.position[node] // self.namespaces[self.space[node]].geometry.block_tokens
        while parents[node] >= 0:
            if 0 < depth <= len(last) and last[depth - 1] == node:
                break
            tail.append(node)
            node = parents[node]
            depth -= 1
        else:
            depth = 0
        if tail or depth != len(last):
            self._last_path = last[:depth] + tail[::-1]
            self._last_array = np.array(self._last_path, dtype=np.int64)
        return self._last_array

    def _forget_path(self) -> None:
        """Nodes of the last path may hang elsewhere from now on."""
        self._last_path = []
        self._last_array = np.zeros(0, dtype=np.int64)

    def children(self, node: int) -> Iterator[int]:
        """Children of `node`, the newest first."""
        child = self._child[node]
        while child != NO_NODE:
            yield child
            child = self._next[child]

    def subtree(self, node: int) -> list[int]:
        """`node` and everything below it, parents before children."""
        nodes = [node]
        for above in nodes:
            nodes.extend(self.children(above))
        return nodes

    # -- objects --------------------------------------------------------------------------------------------------

    def store(self, space: Namespace, objects: Iterable[CacheObject], now: float) -> None:
        """Record objects as present. Repeats are ignored; chunks that no path has named yet stay detached.

        O(1) an object, plus O(chunks whose restorability changes).

        Raises:
            ValueError: a rank outside the namespace's geometry, or a negative size.
        """
        columns = self._columns
        for chunk_hash, kind, rank, tier, nbytes in objects:
            bit = 1 << rank if rank >= 0 else 0
            if not bit & space.full_mask or nbytes < 0:
                raise ValueError(f"rank {rank} or size {nbytes} is outside of {space.geometry}")
            node = self._known_or_detached(space, chunk_hash)
            before = columns.ranks_anywhere(node, kind)
            first = columns.nbytes(node, kind, tier) == 0
            if not columns.add(node, kind, tier, bit, nbytes):
                continue
            self.tier_bytes[tier] += nbytes
            self.space_bytes[space.number][tier] += nbytes
            if not before & bit:
                # A copy in another tier is not news; a piece that was nowhere is.
                self.last_access[node] = max(self.last_access[node], now)
            if kind == Kind.KV and first and nbytes:
                self._kv_in(node, tier)
            self._changed(node)
            if before != space.full_mask and before | bit == space.full_mask:
                self._completed(node, kind, now)

    def remove(self, space: Namespace, objects: Iterable[CacheObject], now: float) -> None:
        """Record objects as gone. Unknown ones and repeats are ignored. Costs as `store`."""
        columns = self._columns
        for chunk_hash, kind, rank, tier, _ in objects:
            node = space.nodes.get(chunk_hash, NO_NODE)
            if node == NO_NODE:
                continue
            complete = self.complete(node, kind)
            nbytes = columns.take(node, kind, tier, rank)
            if nbytes is None:
                continue
            self.tier_bytes[tier] -= nbytes
            self.space_bytes[space.number][tier] -= nbytes
            if kind == Kind.KV and nbytes and not columns.nbytes(node, kind, tier):
                self._kv_out(node, tier)
            self._changed(node)
            if complete and not self.complete(node, kind):
                self._broken(node, kind, now)
            if not columns.ranks(node, kind, tier):
                self._release(node)

    def complete(self, node: int, kind: int) -> bool:
        """Whether every rank's object of `kind` is in some tier. O(1)."""
        return self._columns.ranks_anywhere(node, kind) == self.namespaces[self.space[node]].full_mask

    def complete_outside(self, node: int, kind: int, tier: int) -> bool:
        """Whether every rank's object of `kind` is in some tier other than `tier`. O(1)."""
        return self._columns.ranks_outside(node, kind, tier) == self.namespaces[self.space[node]].full_mask

    def complete_in(self, node: int, kind: int, tier: int) -> bool:
        """Whether every rank's object of `kind` is in `tier`. O(1)."""
        return self._columns.ranks(node, kind, tier) == self.namespaces[self.space[node]].full_mask

    def not_in(self, nodes: Sequence[int], kind: int, tier: int) -> list[int]:
        """Which of `nodes`, by index, have no object of `kind` in `tier`. O(nodes), vectorised."""
        held = self._columns.held(kind, tier)[np.array(nodes, dtype=np.int64)]
        indices: list[int] = np.flatnonzero(held == 0).tolist()
        return indices

    def ranks_lacking(self, node: int, kind: int, tier: int) -> set[int]:
        """Ranks whose object of `kind` is not in `tier`. O(ranks)."""
        held = self._columns.ranks(node, kind, tier)
        return {rank for rank in range(self.namespaces[self.space[node]].geometry.ranks) if not held >> rank & 1}

    def size(self, node: int, kind: int, tier: int) -> int:
        """Bytes that all ranks of `kind` take in `tier`. O(1)."""
        return self._columns.nbytes(node, kind, tier)

    def objects(self, node: int, kind: int, tier: int) -> list[CacheObject]:
        """The objects of one node, kind and tier, by rank."""
        return self._columns.objects(node, self.hashes[node], kind, tier)

    def is_whole(self, node: int) -> bool:
        """Whether the KV of the whole prefix is complete. O(1)."""
        return self._whole[node] != 0

    # -- what follows from an object ------------------------------------------------------------------------------

    def _completed(self, node: int, kind: int, now: float) -> None:
        if kind == Kind.KV:
            self.kv_residence.arrived(now)
            above = self.parent[node]
            if above != NO_NODE and self._whole[above]:
                self._spread_whole(node)
        else:
            self.snapshot_residence.arrived(now)
            if self._whole[node] and not self.restorable.marked[node]:
                self._enter(node)

    def _broken(self, node: int, kind: int, now: float) -> None:
        if kind == Kind.KV:
            self.kv_residence.left(now)
            if self._whole[node]:
                self._break_whole(node)
        else:
            self.snapshot_residence.left(now)
            if self.restorable.marked[node] and not self._can_resume(node):
                self._leave(node)

    def _spread_whole(self, top: int) -> None:
        """`top` has become whole: so have those below it whose KV is complete."""
        todo = [top]
        for node in todo:
            self._whole[node] = 1
            if self._can_resume(node):
                self._enter(node)
            if self._child[node] != NO_NODE:
                todo.extend(child for child in self.children(node) if self.complete(child, Kind.KV))

    def _can_resume(self, node: int) -> bool:
        """Whether a hit can resume at the whole `node`. O(1)."""
        return not self.namespaces[self.space[node]].geometry.snapshot_bytes or self.complete(node, Kind.SNAPSHOT)

    def _break_whole(self, top: int) -> None:
        lost = [top]
        for node in lost:
            if self._child[node] != NO_NODE:
                lost.extend(child for child in self.children(node) if self._whole[child])
        for node in reversed(lost):  # From the tail, as eviction would: a session's end moves up one step at a time.
            if self.restorable.marked[node]:
                self._leave(node)
            self._whole[node] = 0

    def _enter(self, node: int) -> None:
        if self.restorable.kids[node]:
            self._rearranging()
        self.restorable.mark(node)
        self._entered(node)

    def _leave(self, node: int) -> None:
        self._rearranging()
        self.restorable.unmark(node)
        self._left(node)

    # -- hooks ----------------------------------------------------------------------------------------------------

    def _attached(self, node: int) -> None:
        """The detached `node` was hung below its parent."""

    def _changed(self, node: int) -> None:
        """An object of `node` came or went."""

    def _kv_in(self, node: int, tier: int) -> None:
        """`tier` holds KV bytes of `node` and held none."""

    def _kv_out(self, node: int, tier: int) -> None:
        """`tier` holds no KV bytes of `node` any more."""

    def _rearranging(self) -> None:
        """The restorable nodes are about to change in another way than a path growing."""

    def _entered(self, node: int) -> None:
        """`node` has become restorable."""

    def _left(self, node: int) -> None:
        """`node` is restorable no more."""

    def _released(self, node: int) -> None:
        """`node` is about to be freed."""
