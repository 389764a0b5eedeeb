"""The model, worked out from nothing every time: slow, short, and written from the definitions alone.

It shares no code with the real objects except the access model's reach of one path and the price of one recomputation, which
have tests of their own.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from lmcache_histate.geometry import CacheGeometry
from lmcache_histate.scorer.policy import CachePolicy
from lmcache_histate.state_store.objects import CacheObject, Kind, Tier
from lmcache_histate.state_store.units import UnitKind

Path = tuple[str, ...]
MANAGED = (Tier.CPU, Tier.DISK)


def name(path: Path) -> bytes:
    return "/".join(path).encode()


@dataclass
class Unit:
    kind: UnitKind
    tier: Tier
    anchor: Path
    objects: set[tuple[bytes, Kind, int, Tier]]
    nbytes: int
    backed: bool
    value: float


@dataclass
class Oracle:
    geometry: CacheGeometry
    present: dict[tuple[Path, Kind, int, Tier], int] = field(default_factory=dict)
    accessed: dict[Path, float] = field(default_factory=dict)
    linked: set[Path] = field(default_factory=set)

    # -- events ---------------------------------------------------------------------------------------------------

    def store(self, path: Path, kind: Kind, rank: int, tier: Tier, nbytes: int, now: float) -> None:
        if (path, kind, rank, tier) in self.present:
            return
        if not any((path, kind, rank, other) in self.present for other in Tier):
            self.accessed[path] = now
        self.present[path, kind, rank, tier] = nbytes

    def remove(self, path: Path, kind: Kind, rank: int, tier: Tier) -> None:
        self.present.pop((path, kind, rank, tier), None)

    # -- definitions ----------------------------------------------------------------------------------------------

    def complete(self, path: Path, kind: Kind, outside: Tier | None = None) -> bool:
        return all(
            any((path, kind, rank, tier) in self.present for tier in Tier if tier != outside)
            for rank in range(self.geometry.ranks)
        )

    def size(self, path: Path, kind: Kind, tier: Tier) -> int:
        return sum(self.present.get((path, kind, rank, tier), 0) for rank in range(self.geometry.ranks))

    def keys(self, path: Path, kind: Kind, tier: Tier) -> set[tuple[bytes, Kind, int, Tier]]:
        ranks = range(self.geometry.ranks)
        return {(name(path), kind, rank, tier) for rank in ranks if (path, kind, rank, tier) in self.present}

    def chunks(self) -> set[Path]:
        return {path for path, *_ in self.present}

    def whole(self, path: Path) -> bool:
        """KV whole up to `path`, and the order of these chunks known."""
        prefixes = [path[: depth + 1] for depth in range(len(path))]
        return all(self.complete(prefix, Kind.KV) and prefix in self.linked for prefix in prefixes)

    def points(self) -> set[Path]:
        """Restorable prefixes."""
        return {path for path in self.chunks() if self.can_resume(path) and self.whole(path)}

    def can_resume(self, path: Path) -> bool:
        """Whether what a hit needs beside the KV is there: a snapshot, in a model that has recurrent layers."""
        return self.geometry.snapshot_bytes == 0 or self.complete(path, Kind.SNAPSHOT)

    def ends(self, points: set[Path]) -> set[Path]:
        return {p for p in points if not any(q != p and q[: len(p)] == p for q in points)}

    def branches(self, path: Path, among: set[Path]) -> int:
        """Children of `path` that lead to a member of `among`."""
        return len({q[: len(path) + 1] for q in among if len(q) > len(path) and q[: len(path)] == path})

    def before(self, path: Path, points: set[Path]) -> Path | None:
        above = [path[:depth] for depth in range(1, len(path)) if path[:depth] in points]
        return above[-1] if above else None

    def position(self, path: Path) -> int:
        return len(path) * self.geometry.block_tokens

    def run(self, path: Path, kv: set[Path], points: set[Path]) -> list[Path]:
        chunks = [path]
        for depth in range(len(path) - 1, 0, -1):
            above = path[:depth]
            if above in points or self.branches(above, kv) > 1 or self.branches(above, points) > 1:
                break
            chunks.append(above)
        return chunks

    # -- units ----------------------------------------------------------------------------------------------------

    def units(self, policy: CachePolicy) -> list[Unit]:
        points = self.points()
        reach, share = self.reaches(policy, points)
        found = []
        for tier in MANAGED:
            # A chunk whose place is not known yet is a tree of its own.
            kv = {path for path in self.chunks() if self.size(path, Kind.KV, tier) and path in self.linked}
            loose = {path for path in self.chunks() if path not in self.linked}
            for path in self.chunks():
                end = self.size(path, Kind.KV, tier) > 0 and (path in loose or not self.branches(path, kv))
                useful = path in self.linked and self.whole(path) and any(p[: len(path)] == path for p in points)
                snapshot = self.keys(path, Kind.SNAPSHOT, tier)
                if end:
                    kind = UnitKind.BUNDLE if useful else UnitKind.ORPHAN
                elif snapshot:
                    kind = UnitKind.SNAPSHOT if path in points else UnitKind.ORPHAN
                else:
                    continue
                run = self.run(path, kv, points) if kind == UnitKind.BUNDLE else [path] if end else []
                objects = set(snapshot).union(*(self.keys(chunk, Kind.KV, tier) for chunk in run))
                nbytes = self.size(path, Kind.SNAPSHOT, tier) + sum(self.size(c, Kind.KV, tier) for c in run)
                backed = kind != UnitKind.ORPHAN
                if path in points and self.size(path, Kind.SNAPSHOT, tier):
                    backed = backed and self.complete(path, Kind.SNAPSHOT, tier)
                for chunk in run:
                    if self.size(chunk, Kind.KV, tier):
                        backed = backed and self.complete(chunk, Kind.KV, tier)
                unit = Unit(kind, tier, path, objects, nbytes, backed, 0.0)
                if kind != UnitKind.ORPHAN:
                    hits = reach[path] if kind == UnitKind.BUNDLE else share[path]
                    unit.value = self.value(policy, unit, hits, points)
                found.append(unit)
        return found

    def value(self, policy: CachePolicy, unit: Unit, hits: float, points: set[Path]) -> float:
        if unit.backed:
            others = (t for t in Tier if t != unit.tier and any(self.size(unit.anchor, kind, t) for kind in Kind))
            price = policy.cost.fetch(float(unit.nbytes), next(others, Tier.REMOTE))
        else:
            before = self.before(unit.anchor, points)
            start = self.position(before) if before else 0
            price = policy.cost.recompute(float(start), float(self.position(unit.anchor)))
        freed = unit.nbytes / self.geometry.kv_bytes_per_token
        accessed = self.accessed[unit.anchor] - 1e-6 * self.position(unit.anchor)
        return accessed + policy.tau * hits * price / freed

    def reaches(self, policy: CachePolicy, points: set[Path]) -> tuple[dict[Path, float], dict[Path, float]]:
        """Expected hits at or after every prefix of a restorable one, and those that resume at each restorable one."""
        ends = {self.find(policy, end): record for end, record in policy.reach.records.items()}
        assert set(ends) == self.ends(points)
        reach: dict[Path, float] = {}
        share = dict.fromkeys(points, 0.0)
        for end, record in ends.items():
            assert record.end >= self.position(end) or record.end > 0
            for depth in range(1, len(end) + 1):
                at = policy.access.reach(record, float(self.position(end[:depth])))
                reach[end[:depth]] = reach.get(end[:depth], 0.0) + at
            on_path = [end[:depth] for depth in range(1, len(end) + 1) if end[:depth] in points]
            for here, there in zip(on_path, [*on_path[1:], None], strict=True):
                share[here] += policy.access.reach(record, float(self.position(here)))
                if there is not None:
                    share[here] -= policy.access.reach(record, float(self.position(there)))
        return reach, share

    @staticmethod
    def find(policy: CachePolicy, node: int) -> Path:
        return tuple(policy.tree.hashes[node].decode().split("/"))

    def useless(self) -> set[tuple[Path, Kind, int, Tier]]:
        """Objects that no hit can be served from, now."""
        points = self.points()
        return {
            (path, kind, rank, tier)
            for path, kind, rank, tier in self.present
            if (path not in points if kind == Kind.SNAPSHOT else not any(p[: len(path)] == path for p in points))
        }


def split(obj: CacheObject) -> tuple[Path, Kind, int, Tier]:
    return tuple(obj.chunk_hash.decode().split("/")), Kind(obj.kind), obj.rank, Tier(obj.tier)
