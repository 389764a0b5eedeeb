"""vLLM's block pool: KV blocks and recurrent states in one pool, what no request uses in a queue, least recent first.

One block is the KV of one block of tokens; a state takes as many blocks as its bytes need (vLLM pads the layers of all
groups to one page size, so a group of recurrent layers takes a block each). Blocks return to the queue when their
request ends, its tail first; a state does as soon as its request has moved on.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence

from lmcache_histate.replay.simulator.objects import SNAPSHOT, kind_of, kv_key, snapshot_key


class BlockPool:
    """The pool of one GPU. Sizes are in blocks.

    Args:
        blocks: Its size.
        state_blocks: Blocks of one recurrent state.
        evicted: Called with the key of what was let go of, once it is out.
    """

    def __init__(self, blocks: int, state_blocks: int, evicted: Callable[[int], None]) -> None:
        self.blocks = blocks
        self.state_blocks = state_blocks
        self._evicted = evicted
        self._users: dict[int, int] = {}
        """Requests that use a block, of every cached object; 0 for those in the queue."""
        self._queue: OrderedDict[int, None] = OrderedDict()
        self._queued = 0
        self._free = blocks
        self.kv_blocks = 0
        """Cached blocks of KV."""
        self.states = 0
        """Cached states."""

    def match(self, path: Sequence[int]) -> tuple[int, int]:
        """Leading blocks of `path` whose KV is here, and blocks up to the last state among them. O(path)."""
        users = self._users
        kv = 0
        for node in path:
            if 2 * node not in users:
                break
            kv += 1
        resume = kv
        while resume and 2 * path[resume - 1] + 1 not in users:
            resume -= 1
        return kv, resume

    def holds(self, key: int) -> bool:
        """Whether an object is cached here. O(1)."""
        return key in self._users

    @property
    def obtainable(self) -> int:
        """Blocks that a request could get: free, or cached and unused."""
        return self._free + self._queued

    def queued_among(self, path: Sequence[int]) -> int:
        """How many blocks of KV of `path`, all cached, no request uses. O(path)."""
        users = self._users
        return sum(not users[2 * node] for node in path)

    def take(self, path: Sequence[int], blocks: int) -> None:
        """A request begins: it uses the cached KV of `path` and gets `blocks` blocks of its own.

        Only if `obtainable` holds them. O(path + evicted).
        """
        users = self._users
        for node in path:
            key = kv_key(node)
            if not users[key]:
                del self._queue[key]
                self._queued -= 1
            users[key] += 1
        self._make_free(blocks)
        self._free -= blocks

    def touch_state(self, node: int) -> None:
        """A request resumes from the state at `node`, which is used most recently now. O(1)."""
        self._queue.move_to_end(snapshot_key(node))

    def fill(self, node: int) -> bool:
        """One of a request's own blocks holds the KV of `node` now; it is cached and used by the request. O(1).

        Returns:
            False if another block with the same content is cached: then the request's stays its own.
        """
        key = kv_key(node)
        if key in self._users:
            return False
        self._users[key] = 1
        self.kv_blocks += 1
        return True

    def save_state(self, node: int) -> bool:
        """Keep a copy of a request's state at the end of `node`; False if there is no room. O(evicted)."""
        key = snapshot_key(node)
        if key in self._users:
            self._queue.move_to_end(key)
            return True
        if self.obtainable < self.state_blocks:
            return False
        self._make_free(self.state_blocks)
        self._free -= self.state_blocks
        self._users[key] = 0
        self._queue[key] = None
        self._queued += self.state_blocks
        self.states += 1
        return True

    def drop_state(self, node: int) -> None:
        """Let go of the state at `node`, if it is here. O(1)."""
        key = snapshot_key(node)
        if key in self._users:
            del self._queue[key]
            self._queued -= self.state_blocks
            self._remove(key)

    def release(self, path: Sequence[int], blocks: int) -> None:
        """A request ends: it used the cached KV of `path`, shallow to deep, and had `blocks` other blocks. O(path)."""
        self._free += blocks
        users, queue = self._users, self._queue
        for node in reversed(path):
            key = kv_key(node)
            users[key] -= 1
            if not users[key]:
                queue[key] = None
                self._queued += 1

    def _make_free(self, blocks: int) -> None:
        while self._free < blocks:
            key, _ = self._queue.popitem(last=False)
            self._queued -= self.state_blocks if kind_of(key) == SNAPSHOT else 1
            self._remove(key)

    def _remove(self, key: int) -> None:
        del self._users[key]
        if kind_of(key) == SNAPSHOT:
            self.states -= 1
            self._free += self.state_blocks
        else:
            self.kv_blocks -= 1
            self._free += 1
        self._evicted(key)
