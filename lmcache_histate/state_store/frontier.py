"""Which branches of the tree still carry something, and where each of them ends.

One `Frontier` follows one mark over the nodes: "a usable snapshot stands here", "KV bytes of this chunk lie in this
tier". A node is *alive* when it or anything below it is marked; an *end* is a marked node with nothing alive below it;
a *fork* has two or more alive children. Eviction unravels a tier from its ends.
"""

from __future__ import annotations

from array import array


class Frontier:
    """Marks on tree nodes, with the number of alive children of every node kept current.

    Node ids are indices; `parent` is the tree's own array (-1 above a root or a detached node) and is only read.
    Children are not listed: the XOR of the ids of the alive ones is enough, since it *is* the child when there is one.
    """

    __slots__ = ("_parent", "kids", "marked", "xor")

    def __init__(self, parent: array[int]) -> None:
        self._parent = parent
        self.marked = bytearray()
        self.kids = array("i")
        self.xor = array("i")

    def grow(self, nodes: int) -> None:
        """Make room for `nodes` more ids."""
        self.marked.extend(bytes(nodes))
        self.kids.frombytes(bytes(4 * nodes))
        self.xor.frombytes(bytes(4 * nodes))

    def alive(self, node: int) -> bool:
        """Whether `node` or anything below it is marked. O(1)."""
        return self.marked[node] != 0 or self.kids[node] > 0

    def is_end(self, node: int) -> bool:
        """Whether `node` is marked and nothing below it is. O(1)."""
        return self.marked[node] != 0 and self.kids[node] == 0

    def mark(self, node: int) -> int:
        """Mark `node`; return the node where the news stopped (-1: it reached the top).

        That is the nearest ancestor that was alive already; its count grew by one. O(chunks that came alive).
        """
        was_alive = self.alive(node)
        self.marked[node] = 1
        return node if was_alive else self.link(node)

    def unmark(self, node: int) -> int:
        """Unmark `node`; return the nearest node that stays alive (-1: none). O(chunks that died)."""
        self.marked[node] = 0
        return node if self.kids[node] else self.unlink(node)

    def link(self, node: int) -> int:
        """`node` has come alive or, alive, was hung below a parent: tell the ancestors. Returns as `mark` does."""
        parent, kids, xor = self._parent, self.kids, self.xor
        above = parent[node]
        while above >= 0:
            xor[above] ^= node
            kids[above] += 1
            if kids[above] > 1 or self.marked[above]:
                return above
            node = above
            above = parent[node]
        return -1

    def unlink(self, node: int) -> int:
        """The opposite of `link`. Returns as `unmark` does."""
        parent, kids, xor = self._parent, self.kids, self.xor
        above = parent[node]
        while above >= 0:
            xor[above] ^= node
            kids[above] -= 1
            if kids[above] or self.marked[above]:
                return above
            node = above
            above = parent[node]
        return -1
