"""The contracts of a policy's two halves, and what the simulator offers them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from lmcache_histate.connector.capture_plan import CapturePlan, SchedulerRequest
from lmcache_histate.geometry import CacheGeometry
from lmcache_histate.replay.simulator.hardware import Link, StepTimes
from lmcache_histate.replay.simulator.ledger import Ledger
from lmcache_histate.replay.simulator.prompts import PreparedTrace, Prompt


@dataclass(frozen=True, slots=True)
class Links:
    """The machine's data paths, one each way. All policies have the same."""

    to_gpu: Link
    disk_read: Link
    disk_write: Link
    remote_read: Link
    remote_write: Link


@dataclass(frozen=True, slots=True)
class Site:
    """What a policy runs on.

    Attributes:
        trace: All prompts. Only bounds look ahead in it.
        geometry: Sizes of the model's cache.
        times: Cost of steps.
        step_tokens: Token budget of a step.
        gpu_bytes: Of vLLM's block pool.
        cpu_bytes, disk_bytes, remote_bytes: Capacities below the GPU; 0 for a tier that is absent.
        links: Data paths.
        ledger: Told what leaves a tier.
        later: `later(time, action)` runs `action(time)` when the simulation gets there.
    """

    trace: PreparedTrace
    geometry: CacheGeometry
    times: StepTimes
    step_tokens: int
    gpu_bytes: float
    cpu_bytes: float
    disk_bytes: float
    remote_bytes: float
    links: Links
    ledger: Ledger
    later: Callable[[float, Callable[[float], None]], None]


class Match(NamedTuple):
    """What the tiers below the GPU hold of a prompt, in blocks."""

    kv: int
    """Leading blocks whose KV is there."""
    resume: int
    """Blocks up to the last snapshot among them."""


class Load(NamedTuple):
    """A load that was started."""

    ready_at: float
    """When its last byte is in GPU memory."""
    disk_blocks: int
    """Blocks of KV that came from disk."""
    remote_blocks: int
    """Blocks of KV that came from a remote tier."""


@dataclass(slots=True)
class Occupancy:
    """Bytes in every tier below the GPU, by its name."""

    kv: dict[str, float] = field(default_factory=dict)
    snapshots: dict[str, float] = field(default_factory=dict)


class Capture(ABC):
    """Where snapshots of the recurrent state are taken. Costs nothing by itself: the engine charges the steps it cuts."""

    @abstractmethod
    def plan(self, request: SchedulerRequest, resumed: int, cached: int, now: float) -> CapturePlan:
        """Plan one request, when it is admitted.

        Args:
            request: As vLLM's scheduler has it; `shared_prefix_boundary` is vLLM's own junction, where the prompt leaves
                what the GPU's pool holds.
            resumed: Tokens that it does not compute.
            cached: Tokens up to which any tier holds its KV: where it leaves a cached path, if that is after `resumed`.
            now: Seconds.

        Returns:
            Stops inside the prefill, which snapshots are kept, and which of the answer's stay.
        """

    def stepped(self, now: float, tokens: int) -> None:  # noqa: B027 - most captures have nothing to learn
        """The engine begins a step of `tokens` tokens (0: it falls idle). For captures that learn what a step costs."""


class Tiers(ABC):
    """What lies below the GPU's block pool, and what goes first there.

    Invariants: no tier ever holds more bytes than its capacity; `lookup` changes no contents; what `lookup` reported can
    be loaded at the same moment. `now` never goes back. Positions are in blocks of the prompt's path.
    """

    @abstractmethod
    def lookup(self, prompt: Prompt, path: Sequence[int], now: float) -> Match:
        """What is held of `path`, the blocks that the prompt can resume behind. Once for each request. O(path)."""

    @abstractmethod
    def load(self, prompt: Prompt, path: Sequence[int], start: int, end: int, now: float) -> Load:
        """Bring the KV of blocks [start, end) of `path` and the snapshot at their end into the GPU. O(path)."""

    @abstractmethod
    def store(
        self, prompt: Prompt, path: Sequence[int], start: int, end: int, snapshots: Sequence[int], now: float
    ) -> None:
        """Blocks [start, end) of `path` were computed; `snapshots` are those at whose end a snapshot was taken.

        What has no room and deserves none is dropped. O(blocks + evicted).
        """

    @abstractmethod
    def finished(self, prompt: Prompt, path: Sequence[int], resumed: int, now: float) -> None:
        """A request ended, which had resumed after `resumed` blocks of `path` (prompt and answer). O(path)."""

    @abstractmethod
    def holds(self, key: int) -> bool:
        """Whether any tier below the GPU holds this object. O(1)."""

    @abstractmethod
    def occupancy(self) -> Occupancy:
        """Bytes by tier and kind. O(1)."""


class NoTiers(Tiers):
    """Nothing below the GPU."""

    def lookup(self, prompt: Prompt, path: Sequence[int], now: float) -> Match:
        """Nothing."""
        return Match(0, 0)

    def load(self, prompt: Prompt, path: Sequence[int], start: int, end: int, now: float) -> Load:
        """Never called with anything to load."""
        return Load(now, 0, 0)

    def store(
        self, prompt: Prompt, path: Sequence[int], start: int, end: int, snapshots: Sequence[int], now: float
    ) -> None:
        """Keep nothing."""

    def finished(self, prompt: Prompt, path: Sequence[int], resumed: int, now: float) -> None:
        """Nothing to do."""

    def holds(self, key: int) -> bool:
        """Nothing."""
        return False

    def occupancy(self) -> Occupancy:
        """Nothing."""
        return Occupancy()
