"""How often prompts come back into the middle of what was stored: what a snapshot there is worth."""

from __future__ import annotations

PRIOR_SEGMENTS = 8.0
"""Segments that the prior of one inner hit each is worth (the paper's rule assumes one hit a segment throughout)."""
MEMORY_SEGMENTS = 4096.0
"""Segments after which an old one weighs 1/e."""


class SegmentStatistics:
    """Moving averages over segments, the uncached parts of prompts."""

    def __init__(self) -> None:
        self._segments = 0.0
        self._tokens = 0.0
        self._inner_hits = 0.0

    def looked_up(self, new_tokens: int, inside: bool) -> None:
        """A prompt was looked up. O(1).

        Args:
            new_tokens: Tokens of its whole chunks that are not restored: the segment that it adds.
            inside: It left a cached path that goes on.
        """
        keep = 1.0 - 1.0 / MEMORY_SEGMENTS
        self._inner_hits = self._inner_hits * keep + inside
        if new_tokens > 0:
            self._segments = self._segments * keep + 1.0
            self._tokens = self._tokens * keep + new_tokens

    @property
    def internal_hits_per_token(self) -> float:
        """Expected inner hits for each token of a segment over its life; 0 before the first segment."""
        if self._tokens <= 0.0:
            return 0.0
        a_segment = (PRIOR_SEGMENTS + self._inner_hits) / (PRIOR_SEGMENTS + self._segments)
        return a_segment * self._segments / self._tokens
