"""Access model: how likely a path is hit at its end, and where inside it is hit otherwise.

For a path that ends at position `e`, the *reach* of a position `x` is the probability that the path's next hit lands at
or after `x`:

    reach(x) = w * (a + (1 - a) * G(e - x) / G(e))

`w` is 1, but for a session that went on in another instance: there it is the probability that such a session comes back
here. `a` is the probability that the end is hit. `G` says how the other hits spread over the distance from the end: `G(d) =
d` is the paper's uniform model; learned, it is the cumulative histogram of observed distances. A restore point serves
the hits from itself up to the next one, so its share is a difference of two reaches.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeVar

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]
Real = TypeVar("Real", float, Floats)

BINS_PER_OCTAVE = 2
FIRST_EDGE = 64.0
LAST_EDGE = float(1 << 22)


@dataclass(slots=True)
class PathRecord:
    """What is known of one path through the tree, kept at its last restorable node.

    Attributes:
        end: position in tokens where its last turn ended. It stays when the tail is evicted: the next request of the
            session comes back to that position, whatever is left.
        hits: hits seen inside or at the end of the path.
        end_hits: those at its end.
        moved: another instance served the session's last turn.
    """

    end: float
    hits: int = 0
    end_hits: int = 0
    moved: bool = False


class AccessModel:
    """End-hit probability and depth of the other hits, learned online from observed hits.

    What is learned goes live only at `publish`, since a change of the fleet's values re-prices everything.

    Args:
        placement: `"uniform"` for the paper's model, `"histogram"` for the learned distances.
        end_prior: end-hit probability before anything was seen.
        prior_hits: observations that the prior is worth, for the fleet and for a path against the fleet.
        memory: hits after which an old one weighs 1/e.
    """

    def __init__(
        self, placement: str = "uniform", end_prior: float = 0.5, prior_hits: float = 8.0, memory: float = 4096.0
    ) -> None:
        octaves = int(np.log2(LAST_EDGE / FIRST_EDGE))
        inner = FIRST_EDGE * 2.0 ** (np.arange(octaves * BINS_PER_OCTAVE + 1) / BINS_PER_OCTAVE)
        self.edges: Floats = np.concatenate(([0.0], inner))
        """Distances from the end in tokens: bin i is [edges[i], edges[i+1])."""
        self.counts: Floats = np.zeros(len(self.edges) - 1)
        self._placement = placement
        self._prior_hits = prior_hits
        self._keep = 1.0 - 1.0 / memory
        self._hits = prior_hits
        self._end_hits = prior_hits * end_prior
        # The same without the prior and what other caches have seen, to be told to them.
        self._own_hits = self._own_end_hits = 0.0
        self._own_counts: Floats = np.zeros(len(self.counts))
        self.end_probability = end_prior
        """The fleet's `a`, as published."""
        # Of sessions that moved away, how many came back; one of either kind is the prior, since nothing is known.
        self._moved, self._returned = 2.0, 1.0
        self.return_probability = 0.5
        """Probability that a session which moved to another instance is served here again, as published."""
        self._spread: Floats | None = None

    # -- learning -------------------------------------------------------------------------------------------------

    def observe(self, record: PathRecord, position: float, slack: float) -> None:
        """A hit at `position` of the path that `record` describes; within `slack` tokens of its end it is an end hit.

        O(1). Slack is one chunk: a cache cannot tell positions inside a chunk apart.
        """
        at_end = record.end - position < slack
        if record.moved:
            record.moved = False
            self._returned += 1.0
        record.hits += 1
        record.end_hits += at_end
        self._hits = self._hits * self._keep + 1.0
        self._end_hits = self._end_hits * self._keep + at_end
        self._own_hits = self._own_hits * self._keep + 1.0
        self._own_end_hits = self._own_end_hits * self._keep + at_end
        if not at_end:
            distance = min(record.end - position, self.edges[-1] - 1.0)
            for counts in (self.counts, self._own_counts):
                counts *= self._keep
                counts[int(np.searchsorted(self.edges, distance, side="right")) - 1] += 1.0

    def observe_move(self, record: PathRecord, was_ours: bool = True) -> None:
        """The session's last turn was served by another instance; whether it was served here before. O(1)."""
        if record.moved:
            return
        record.moved = True
        if was_ours:
            self._moved = self._moved * self._keep + 1.0
            self._returned *= self._keep

    def own_counters(self) -> tuple[float, float, Floats]:
        """Hits, end hits, and other hits by distance, that this cache itself has seen, weighted by age."""
        return self._own_hits, self._own_end_hits, self._own_counts

    def seed(self, hits: float, end_hits: float, counts: Floats) -> None:
        """Begin with what other caches have seen (the sums of their `own_counters`); not live before `publish`.

        It weighs at most as much as the memory, so that what is seen here takes over. Numbers that make no sense are
        ignored.
        """
        if not 0.0 <= end_hits <= hits or hits <= 0.0 or counts.shape != self.counts.shape or np.any(counts < 0.0):
            return
        weight = min(1.0, 1.0 / ((1.0 - self._keep) * hits))
        self._hits += weight * hits
        self._end_hits += weight * end_hits
        self.counts += weight * counts

    @property
    def observed_end_probability(self) -> float:
        """The fleet's `a` as learned so far (moving average with a prior)."""
        return self._end_hits / self._hits

    def publish(self) -> None:
        """Make what was learned the live model. Whoever holds reaches must work them out anew."""
        self.end_probability = self.observed_end_probability
        self.return_probability = self._returned / self._moved
        total = float(self.counts.sum())
        if self._placement == "histogram" and total > 0:
            self._spread = np.concatenate(([0.0], np.cumsum(self.counts))) / total
            # How far the histogram is trusted against the uniform model.
            self._trust = total / (total + 4.0 * self._prior_hits)

    # -- the live model -------------------------------------------------------------------------------------------

    def path_end_probability(self, record: PathRecord) -> float:
        """`a` of one path: its own hits, shrunk to the fleet's value by `prior_hits` pseudo-observations."""
        weight = self._prior_hits
        return (record.end_hits + weight * self.end_probability) / (record.hits + weight)

    def inside(self, distance: Real, end: float) -> Real:
        """`G(distance) / G(end)`: share of a path's inner hits that land within `distance` tokens of its end.

        Distances are clipped to [0, end]. With a histogram the value is mixed with the uniform one by the number of
        hits seen.
        """
        if isinstance(distance, float):
            uniform: Real = min(max(distance / end, 0.0), 1.0) if end > 0 else 0.0
        else:
            uniform = np.clip(distance / end, 0.0, 1.0) if end > 0 else np.zeros_like(distance)
        if self._spread is None:
            return uniform
        whole = float(np.interp(end, self.edges, self._spread))
        if whole <= 0.0:
            return uniform
        learned = np.interp(uniform * end, self.edges, self._spread) / whole
        mixed = self._trust * learned + (1.0 - self._trust) * uniform
        return float(mixed) if isinstance(distance, float) else mixed

    def reach(self, record: PathRecord, position: Real) -> Real:
        """Probability that the next hit of the path lands at or after `position` (tokens, scalar or array)."""
        at_end = self.path_end_probability(record)
        reach = at_end + (1.0 - at_end) * self.inside(record.end - position, record.end)
        return self.return_probability * reach if record.moved else reach

    def hit_weights(self, start: int, end: int, block: int) -> Floats:
        """Probability of the next hit landing in each block of a segment, if `end` is where its path ends.

        Shape: ((end - start) / block,). The end hit itself belongs to no block: the segment's last snapshot serves it.
        """
        corners = np.arange(start, end + 1, block, dtype=np.float64)
        inside = self.inside(float(end) - corners, float(end))
        return (1.0 - self.end_probability) * -np.diff(inside)

    # -- plain data -----------------------------------------------------------------------------------------------

    def dump(self) -> dict[str, object]:
        """The learned state as plain data."""
        return {"hits": self._hits, "end_hits": self._end_hits, "counts": self.counts.tolist()}

    def load(self, data: dict[str, object]) -> None:
        """Take back what `dump` gave, and publish it."""
        self._hits = float(data["hits"])  # type: ignore[arg-type]
        self._end_hits = float(data["end_hits"])  # type: ignore[arg-type]
        self.counts = np.asarray(data["counts"], dtype=np.float64)
        self.publish()
