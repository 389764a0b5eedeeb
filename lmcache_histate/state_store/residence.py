"""How long things stay cached, estimated from everything that is or was there."""

from __future__ import annotations


class ResidenceTime:
    """Moving average of the residence time of one kind of thing, in seconds.

    The estimate is (seconds spent in the cache by all things together) / (things that left), both forgotten at the same
    rate; it is the maximum-likelihood lifetime when some are still present. Time spent by those counts as it passes, so
    an idle cache lengthens the estimate instead of freezing it. Constant memory, O(1) an event.

    Args:
        memory: departures after which an old one weighs 1/e.
    """

    __slots__ = ("_exposure", "_gone", "_keep", "_present", "_seed_exposure", "_seed_gone", "_time")

    def __init__(self, memory: float = 512.0) -> None:
        self._keep = 1.0 - 1.0 / memory
        self._present = 0
        self._exposure = 0.0
        self._gone = 0.0
        # What other caches have seen, apart from the rest, so that it is not told to them as ours.
        self._seed_exposure = self._seed_gone = 0.0
        self._time: float | None = None

    @property
    def present(self) -> int:
        """Things that are there now."""
        return self._present

    def _advance(self, now: float) -> None:
        if self._time is None:
            self._time = now
        elif now > self._time:  # A clock that steps back adds nothing.
            self._exposure += self._present * (now - self._time)
            self._time = now

    def arrived(self, now: float, count: int = 1) -> None:
        """`count` things were stored at `now`."""
        self._advance(now)
        self._present += count

    def left(self, now: float, count: int = 1) -> None:
        """`count` things went at `now`."""
        self._advance(now)
        self._present = max(0, self._present - count)
        keep = self._keep**count
        self._exposure *= keep
        self._seed_exposure *= keep
        self._seed_gone *= keep
        self._gone = self._gone * keep + (1.0 - keep) / (1.0 - self._keep)

    def mean(self, now: float) -> float | None:
        """The estimate in seconds at `now`, or None while nothing has left yet."""
        self._advance(now)
        gone = self._gone + self._seed_gone
        return (self._exposure + self._seed_exposure) / gone if gone > 0 else None

    def counters(self, now: float) -> tuple[float, float]:
        """Seconds that all things together spent in this cache, and things that left it, weighted by age."""
        self._advance(now)
        return self._exposure, self._gone

    def seed(self, exposure: float, gone: float) -> None:
        """Begin with what other caches have seen (the sums of their `counters`).

        It weighs at most as much as the memory, and less with everything that leaves here. Numbers that make no sense are
        ignored.
        """
        if exposure < 0.0 or gone <= 0.0:
            return
        weight = min(1.0, 1.0 / ((1.0 - self._keep) * gone))
        self._seed_exposure, self._seed_gone = weight * exposure, weight * gone

    def dump(self) -> dict[str, float]:
        """The state as plain data; what is present is counted again by whoever loads the tree."""
        return {"exposure": self._exposure, "gone": self._gone}

    def load(self, data: dict[str, float]) -> None:
        """Take back the state that `dump` gave."""
        self._exposure = float(data["exposure"])
        self._gone = float(data["gone"])
