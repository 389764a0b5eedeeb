"""The GPU's block pool: KV blocks and recurrent states, what no request uses in a queue, least recent first.

vLLM has one pool for both: a block is the KV of one block of tokens, and a state takes as many blocks as its bytes need
(vLLM pads the layers of all groups to one page size, so a group of recurrent layers takes a block each). Blocks return to
the queue when their request ends, its tail first; a state does as soon as its request has moved on. SGLang splits the
memory into a pool of KV and a pool of states, each with a queue of its own.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from lmcache_histate.replay.simulator.objects import KV, SNAPSHOT, kind_of, kv_key, snapshot_key


@dataclass(slots=True)
class _Memory:
    """One pool of blocks."""

    free: int
    """Blocks that hold nothing."""
    queued: int = 0
    """Blocks of cached objects that no request uses."""
    queue: OrderedDict[int, None] = field(default_factory=OrderedDict)
    """Those objects, least recent first."""

    @property
    def obtainable(self) -> int:
        return self.free + self.queued


class BlockPool:
    """The pool of one GPU. Sizes are in blocks.

    Args:
        blocks: Its size, or that of its KV half.
        state_blocks: Blocks of one recurrent state.
        evicted: Called with the key of what was let go of, once it is out.
        state_pool: Blocks of a pool of states alone; None for one pool of both.
    """

    def __init__(
        self, blocks: int, state_blocks: int, evicted: Callable[[int], None], state_pool: int | None = None
    ) -> None:
        self.state_blocks = state_blocks
        self._evicted = evicted
        kv = _Memory(blocks)
        self._memory = (kv, kv if state_pool is None else _Memory(state_pool))
        self._size = (1, state_blocks)
        self._users: dict[int, int] = {}
        """Requests that use it, of every cached object; 0 for those in a queue."""
        self.blocks = blocks + (state_pool or 0)
        self.cached = [0, 0]
        """Cached objects, by kind."""

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

    def fits(self, path: Sequence[int], blocks: int) -> bool:
        """Whether a request can have `blocks` blocks and a state of its own, beside the cached KV of `path`. O(path)."""
        kv, states = self._memory
        users = self._users
        if kv is states:
            blocks += self.state_blocks
        elif states.obtainable < self.state_blocks:
            return False
        if blocks > kv.obtainable:
            return False
        return blocks <= kv.obtainable - sum(not users[2 * node] for node in path)

    def take(self, path: Sequence[int], blocks: int) -> None:
        """A request begins, for which `fits`: it uses the cached KV of `path` and gets the rest. O(path + evicted)."""
        users, kv = self._users, self._memory[KV]
        for node in path:
            key = kv_key(node)
            if not users[key]:
                del kv.queue[key]
                kv.queued -= 1
            users[key] += 1
        self._allot(KV, blocks)
        self._allot(SNAPSHOT, self.state_blocks)

    def release(self, path: Sequence[int], blocks: int) -> None:
        """A request ends: it used the cached KV of `path`, shallow to deep, `blocks` others, and a state. O(path)."""
        users, kv = self._users, self._memory[KV]
        kv.free += blocks
        self._memory[SNAPSHOT].free += self.state_blocks
        for node in reversed(path):
            key = kv_key(node)
            users[key] -= 1
            if not users[key]:
                kv.queue[key] = None
                kv.queued += 1

    def fill(self, node: int) -> bool:
        """One of a request's own blocks holds the KV of `node` now; it is cached and used by the request. O(1).

        Returns:
            False if another block with the same content is cached: then the request's stays its own.
        """
        key = kv_key(node)
        if key in self._users:
            return False
        self._users[key] = 1
        self.cached[KV] += 1
        return True

    def save_state(self, node: int) -> bool:
        """Keep a copy of a request's state at the end of `node`; False if there is no room. O(evicted)."""
        key, memory = snapshot_key(node), self._memory[SNAPSHOT]
        if key in self._users:
            memory.queue.move_to_end(key)
            return True
        if memory.obtainable < self.state_blocks:
            return False
        self._allot(SNAPSHOT, self.state_blocks)
        self._users[key] = 0
        memory.queue[key] = None
        memory.queued += self.state_blocks
        self.cached[SNAPSHOT] += 1
        return True

    def touch_state(self, node: int) -> None:
        """A request resumes from the state at `node`, which is used most recently now. O(1)."""
        self._memory[SNAPSHOT].queue.move_to_end(snapshot_key(node))

    def _allot(self, kind: int, blocks: int) -> None:
        memory = self._memory[kind]
        while memory.free < blocks:
            key, _ = memory.queue.popitem(last=False)
            size = self._size[kind_of(key)]
            del self._users[key]
            memory.queued -= size
            memory.free += size
            self.cached[kind_of(key)] -= 1
            self._evicted(key)
        memory.free -= blocks
