"""Conversations that have no tokens: what a cache can tell about them, for workloads and traces without hashes."""

from __future__ import annotations

import numpy as np
import xxhash

from lmcache_histate.replay.traces.build import mixed
from lmcache_histate.replay.traces.model import BlockHashes

TEXT_BLOCK_TOKENS = 64


class Numbers:
    """Numbers of blocks, none twice."""

    def __init__(self, salt: str) -> None:
        self._seed = xxhash.xxh3_64_intdigest(salt.encode())
        self._used = 0

    def take(self, count: int) -> BlockHashes:
        """`count` numbers not taken before."""
        taken = mixed(np.arange(self._used, self._used + count, dtype=np.uint64), self._seed)
        self._used += count
        return taken


class Text:
    """A conversation as far as a cache can tell: its length and its blocks.

    Args:
        numbers: Where numbers of new blocks come from.
    """

    def __init__(self, numbers: Numbers, hashes: BlockHashes | None = None, tokens: int = 0) -> None:
        self._numbers = numbers
        self.hashes = np.empty(0, np.uint64) if hashes is None else hashes
        self.tokens = tokens

    def kept(self, tokens: int) -> Text:
        """A new conversation that begins with the first `tokens` of this one."""
        return Text(self._numbers, self.hashes[: tokens // TEXT_BLOCK_TOKENS], tokens)

    def extend(self, tokens: int) -> None:
        """Append tokens that nobody else has."""
        self.tokens += tokens
        fresh = self._numbers.take(self.tokens // TEXT_BLOCK_TOKENS - len(self.hashes))
        self.hashes = np.concatenate((self.hashes, fresh))


def shared_text(name: str, tokens: int, numbers: Numbers) -> Text:
    """A text that is the same wherever its name is, continued with `numbers`."""
    return Text(numbers, Numbers(f"{name}/{tokens}").take(tokens // TEXT_BLOCK_TOKENS), tokens)
