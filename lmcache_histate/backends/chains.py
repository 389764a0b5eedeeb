"""Which chunk follows which: from stores (``MP_TOKENS``) while the server runs, from the disk tier after a restart.

LMCache's object keys name a prefix by its hash and say neither parent nor position. A chunk hash covers the whole prefix,
so what follows what is the same in every namespace.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from lmcache.v1.distributed.api import ObjectKey

from lmcache_histate.backends.disk.adapter import HiStateDiskAdapter
from lmcache_histate.backends.disk.record import Kind as RecordKind
from lmcache_histate.backends.disk.record import Place
from lmcache_histate.backends.events import Chained
from lmcache_histate.backends.layout import Namespace, namespace_of
from lmcache_histate.state_store.objects import Kind
from lmcache_histate.state_store.tree import NO_NODE, PrefixTree
from lmcache_histate.state_store.tree import Namespace as CoreNamespace

MAX_CHUNKS = 1 << 17
"""Parents, and stored chunks whose parent is unknown, that are remembered; those not met for longest are forgotten first."""


class Link(NamedTuple):
    """``hashes`` follow the chunk ``parent`` (None: they start a prompt), in order."""

    namespace: Namespace
    parent: bytes | None
    hashes: Sequence[bytes]


class Chains:
    """Brings stored chunks and their parents together, whichever is reported first.

    Args:
        disk: The disk tier, which keeps places durably, or None.
    """

    def __init__(self, disk: HiStateDiskAdapter | None) -> None:
        self._disk = disk
        self._parents: OrderedDict[bytes, bytes | None] = OrderedDict()
        self._waiting: OrderedDict[bytes, set[Namespace]] = OrderedDict()

    def chained(self, event: Chained) -> list[Link]:
        """A store said which chunks follow which; returns the links of chunks that were stored before. O(chunks)."""
        parent = event.parent
        if parent is None and event.start > 0:
            return []  # the request's session was gone: the first chunk's parent is unknown, and the rest hangs on it
        links = []
        for chunk_hash in event.chunk_hashes:
            self._parents[chunk_hash] = parent
            self._parents.move_to_end(chunk_hash)
            links += [Link(space, parent, [chunk_hash]) for space in self._waiting.pop(chunk_hash, ())]
            parent = chunk_hash
        while len(self._parents) > MAX_CHUNKS:
            self._parents.popitem(last=False)
        return links

    def stored(
        self, namespace: Namespace, chunk_hashes: Iterable[bytes], tree: PrefixTree, space: CoreNamespace
    ) -> list[Link]:
        """Links of chunks that have just been stored and hang nowhere yet. O(chunks)."""
        links: list[Link] = []
        for chunk_hash in chunk_hashes:
            node = space.nodes.get(chunk_hash, NO_NODE)
            if node != NO_NODE and tree.position[node] >= 0:
                continue
            if chunk_hash in self._parents:
                self._parents.move_to_end(chunk_hash)
                links.append(Link(namespace, self._parents[chunk_hash], [chunk_hash]))
            else:
                self._waiting.setdefault(chunk_hash, set()).add(namespace)
                self._waiting.move_to_end(chunk_hash)
        while len(self._waiting) > MAX_CHUNKS:
            self._waiting.popitem(last=False)
        return links

    def on_disk(self) -> Iterator[Link]:
        """Links of everything that the disk tier knows the place of, parents before children. O(n log n), once."""
        if self._disk is None:
            return
        known = [entry for entry in self._disk.known() if entry.place.parent is not None]
        known.sort(key=lambda entry: entry.place.position or 0)
        for entry in known:
            yield Link(namespace_of(entry.key), entry.place.parent or None, [entry.key.chunk_hash])

    def place_of(self, tree: PrefixTree, space: CoreNamespace, key: ObjectKey, kinds: Sequence[Kind]) -> Place:
        """Where an object stands in the prefix tree, in the disk tier's words. O(1).

        Args:
            tree: The core's tree.
            space: The object's namespace in it.
            key: The object.
            kinds: Kind of every object group of the model.
        """
        kind = RecordKind.SNAPSHOT if kinds[key.object_group_id] == Kind.SNAPSHOT else RecordKind.KV
        node = space.nodes.get(key.chunk_hash, NO_NODE)
        if node == NO_NODE or tree.position[node] < 0:
            return Place(None, None, kind)
        return Place(tree.hashes[tree.parent[node]], tree.position[node], kind)

    def keep_places(
        self, tree: PrefixTree, space: CoreNamespace, keys: Iterable[ObjectKey], kinds: Sequence[Kind]
    ) -> None:
        """Have the disk tier remember the places of objects that LMCache wrote there by itself. O(objects)."""
        if self._disk is not None:
            self._disk.set_places((key, self.place_of(tree, space, key, kinds)) for key in keys)
