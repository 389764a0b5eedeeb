"""The directory in Redis (or Valkey): keys, leases and the feed of changes. What runs in the server is in `scripts.py`."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from lmcache_histate.state_store.directory import scripts
from lmcache_histate.state_store.directory.client import Client, Script
from lmcache_histate.state_store.directory.encoding import (
    SCHEMA,
    Malformed,
    pack_change,
    pack_facts,
    pack_member,
    pack_statistics,
    unpack_member,
    unpack_statistics,
)
from lmcache_histate.state_store.directory.keys import Keys, namespace_tag
from lmcache_histate.state_store.directory.protocol import (
    Change,
    DirectoryError,
    LeaseLost,
    Member,
    NamespaceFacts,
    Registration,
    Statistics,
    Unusable,
)
from lmcache_histate.state_store.directory.url import DirectoryAddress
from lmcache_histate.state_store.directory.view import LiveMember, NamespaceView, ViewReader

ENTRIES_AT_ONCE = 64
"""Feed entries taken in with one round trip."""
SCAN_RECORDS = 4096
"""Records read with one round trip when a view is built anew."""
SCANS_AT_ONCE = 4
"""Such round trips in one `poll`: the thread has other things to do."""
_REGISTER, _PUBLISH, _POLL, _SCAN, _WITHDRAW = map(
    Script, (scripts.REGISTER, scripts.PUBLISH, scripts.POLL, scripts.SCAN, scripts.WITHDRAW)
)


@dataclass(slots=True)
class _Seat:
    """Where this instance stands in one namespace."""

    namespace: str
    key: str
    view: NamespaceView
    number: int | None = None
    """Number of the registration; None without one."""
    tier_number: str = ""
    batch: int = 0
    incarnation: bytes = b""
    """Of the data that the view was read from."""
    seq: int = 0
    """Last feed entry that the view knows."""
    scan: int | None = 0
    """Next bucket to read while the view is built anew."""
    current_at: float = -math.inf
    registered_before: bool = False
    """Whether this process ever registered here."""


class RedisDirectory(ViewReader):
    """See `Directory`.

    Args:
        address: of the server.
        name: of this instance; unique in the fleet, and the same after a restart.
        instance_address: where a router sends requests; may be empty.
        shared_tier: name of the shared tier that this instance uses (`shared_tier_name`); empty for none.
        lease_s: seconds without news after which an instance counts as gone.
        shared_ttl_s: seconds that what lies on a shared tier is remembered after the last instance that uses it has gone.
        max_records: chunk records that the view of each namespace keeps.
        token: names this process; 8 random bytes if not given.

    Raises:
        ValueError: a name that is empty or too long, or a lease under 0.1 s.
    """

    def __init__(
        self,
        address: DirectoryAddress,
        name: str,
        instance_address: str = "",
        shared_tier: str = "",
        lease_s: float = 30.0,
        shared_ttl_s: float = 86400.0,
        max_records: int = 1_000_000,
        token: bytes = b"",
    ) -> None:
        super().__init__()
        if not 0 < len(name.encode()) <= 200:
            raise ValueError(f"the name of an instance has 1 to 200 bytes, not {len(name.encode())}: {name!r}")
        if lease_s < 0.1:
            raise ValueError(f"a lease of {lease_s} s is too short: use 0.1 s or more")
        self.lease_s = lease_s
        self.remote_is_shared = bool(shared_tier)
        self.client = Client(address, min(2.0, lease_s / 4))
        self._keys = Keys(address.prefix)
        self._member = Member(name, instance_address, shared_tier)
        self._token = token or os.urandom(8)
        self._lease_ms = int(lease_s * 1000)
        self._shared_ttl_ms = int(shared_ttl_s * 1000)
        # With a shared tier, records must stay for those who come after the last instance has gone.
        self._ttl_ms = max(2 * self._lease_ms, self._shared_ttl_ms if shared_tier else 0)
        self._max_records = max_records
        self._seats: dict[str, _Seat] = {}
        self._facts: dict[str, NamespaceFacts] = {}
        self._announced_at = -math.inf
        self.other_schemas: tuple[int, ...] = ()

    @property
    def name(self) -> str:
        """The name that this instance goes by now."""
        return self._member.name

    # -- may wait for the server -----------------------------------------------------------------------------------

    def register(self, namespace: str, facts: NamespaceFacts, now: float) -> Registration:
        """See `Directory.register`.

        The first registration of a process takes its name from whoever has it: most likely its own predecessor, which
        died. One that comes again leaves a name that another process took meanwhile, and goes by `name~token` from then
        on.
        """
        seat = self._seat(namespace, facts)
        self._announce(now)
        status, displaced, tier = self._try_register(seat)
        if status == b"claimed":
            self._member = self._member._replace(name=f"{self._member.name.partition('~')[0]}~{self._token.hex()[:6]}")
            status, displaced, tier = self._try_register(seat)
        if status != b"ok":
            raise Unusable("the directory does not let this instance register")  # as likely as two equal random numbers
        seat.registered_before = True
        seat.tier_number = tier.decode()
        seat.view.own_numbers = frozenset({seat.number or 0})
        return Registration(self._member.name, bool(displaced))

    def _seat(self, namespace: str, facts: NamespaceFacts) -> _Seat:
        seat = self._seats.get(namespace)
        if seat is None or seat.view.facts != facts:
            view = NamespaceView(facts, self._max_records)
            view.own_tier = self._member.shared_tier
            seat = self._seats[namespace] = _Seat(namespace, self._keys.of(namespace_tag(namespace, facts)), view)
            self._views[namespace] = view
            self._announced_at = -math.inf
        return seat

    def _try_register(self, seat: _Seat) -> tuple[bytes, int, bytes]:
        fresh = int.from_bytes(os.urandom(4), "little")
        seat.number = None
        seat.view.own_numbers = frozenset()
        tier = self._member.shared_tier
        answer = self.client.run(
            _REGISTER,
            seat.key,
            fresh,
            self._token,
            pack_member(self._member, self._token),
            self._lease_ms,
            self._ttl_ms,
            os.urandom(8),
            int(not seat.registered_before),
            int.from_bytes(os.urandom(4), "little"),
            pack_member(Member(tier, "", tier), b"\0" * 8) if tier else b"",
            self._shared_ttl_ms,
        )
        if answer[0] == b"ok":
            seat.number, seat.batch = fresh, 0
            return answer[0], answer[1], answer[2]
        return answer[0], 0, b""

    def _announce(self, now: float) -> None:
        """Say that this schema is in use and which namespaces there are, and see which other schemas are.

        Once in half a lease.
        """
        if now - self._announced_at < self.lease_s / 2:
            return
        keys, ttl = self._keys, max(2 * self._ttl_ms, 2 * self._lease_ms)
        commands: list[tuple[bytes | str | int, ...]] = [
            ("SADD", keys.schemas, SCHEMA),
            ("SET", keys.schema(SCHEMA), 1, "PX", 2 * self._lease_ms),
            ("PEXPIRE", keys.schemas, ttl),
        ]
        for seat in self._seats.values():
            tag, packed = namespace_tag(seat.namespace, seat.view.facts), pack_facts(seat.namespace, seat.view.facts)
            commands.append(("HSET", keys.namespaces, tag, packed))
        commands += [("PEXPIRE", keys.namespaces, ttl), ("SMEMBERS", keys.schemas)]
        try:
            known = self.client.pipeline(commands)[-1]
        except Unusable as error:
            raise Unusable(f"{error}; the keys that begin with '{keys.prefix}:' must belong to HiState") from error
        others = sorted(int(version) for version in known if version.isdigit() and int(version) != SCHEMA)
        if others:
            alive = self.client.pipeline([("EXISTS", keys.schema(version)) for version in others])
            others = [version for version, exists in zip(others, alive, strict=True) if exists]
        self.other_schemas = tuple(others)
        self._announced_at = now

    def publish(self, namespace: str, changes: Sequence[Change], now: float) -> None:
        """See `Directory.publish`. O(changes) here and in the server.

        Raises:
            LeaseLost: register again.
            DirectoryError: as `Directory.publish`. Call again with the same changes before any others.
        """
        seat = self._seats.get(namespace)
        if seat is None or seat.number is None:
            raise LeaseLost("this instance is not registered")
        packed, statistics = [], b""
        for change in changes:
            if isinstance(change, Statistics):
                statistics = pack_statistics(change)
            else:
                packed.append(pack_change(change, self.remote_is_shared))
        status = self.client.run(
            _PUBLISH,
            seat.key,
            seat.number,
            self._token,
            seat.batch + 1,
            self._ttl_ms,
            seat.tier_number,
            b"".join(packed),
            statistics,
        )
        if status == b"lost":
            seat.number = None
            raise LeaseLost("the server does not know this instance any more")
        seat.batch += 1

    def poll(self, now: float) -> None:
        """See `Directory.poll`. O(members + changes) and a bounded share of the cleaning."""
        if any(seat.number is not None for seat in self._seats.values()):
            self._announce(now)
        lost = [seat for seat in self._seats.values() if not self._poll(seat, now)]
        if lost:
            raise LeaseLost("the server does not know this instance any more")

    def _poll(self, seat: _Seat, now: float) -> bool:
        """Whether the lease is good (or there is none to lose)."""
        good = True
        while True:
            status, incarnation, seq, server_ms, leases, entries = self.client.run(
                _POLL,
                seat.key,
                "" if seat.number is None else seat.number,
                self._token,
                self._lease_ms,
                self._ttl_ms,
                seat.incarnation,
                seat.seq,
                ENTRIES_AT_ONCE,
                seat.tier_number,
                self._shared_ttl_ms,
            )
            if status == b"lost":
                seat.number, good = None, False
            seat.view.set_members(_members(leases, now), int(server_ms), now)
            latest = int(seq)
            if incarnation != seat.incarnation or latest < seat.seq or not self._take_in(seat, entries):
                # Other data than the view was read from, or more news than the feed keeps.
                seat.incarnation, seat.seq, seat.scan = incarnation, latest, 0
                seat.view.clear()
            if seat.seq >= latest or not entries:
                break
        if seat.scan is not None:
            self._scan(seat)
        seat.view.prune()
        if seat.scan is None and seat.seq >= latest:
            seat.current_at = now
        return good

    @staticmethod
    def _take_in(seat: _Seat, entries: Sequence[bytes]) -> bool:
        """Apply feed entries; False if some are missing before them."""
        for number, entry in zip(entries[::2], entries[1::2], strict=True):
            if int(number) != seat.seq + 1:
                return False
            seat.view.apply(_unpack_entry(entry))
            seat.seq += 1
        return True

    def _scan(self, seat: _Seat) -> None:
        """Read some more of all records. What changes meanwhile comes with the feed, which is applied after it."""
        for _ in range(SCANS_AT_ONCE):
            if seat.scan is None:
                return
            following, found = self.client.run(_SCAN, seat.key, seat.scan, SCAN_RECORDS)
            seat.view.apply(zip(found[::2], found[1::2], strict=True))
            seat.scan = following if following < scripts.BUCKETS else None

    def withdraw(self, now: float) -> None:
        """See `Directory.withdraw`."""
        for seat in self._seats.values():
            number, seat.number = seat.number, None
            if number is not None:
                try:
                    self.client.run(_WITHDRAW, seat.key, number, self._token)
                except DirectoryError:
                    continue  # the lease runs out by itself

    def close(self) -> None:
        """See `Directory.close`."""
        self.withdraw(math.inf)
        self.client.close()

    # -- reads the views -------------------------------------------------------------------------------------------

    def age(self, now: float) -> float:
        """See `Directory.age`: of the namespace that is furthest behind; infinite without one."""
        return max((now - seat.current_at for seat in self._seats.values()), default=math.inf)

    @property
    def records_known(self) -> int:
        """Chunk records in the views of all namespaces."""
        return sum(len(seat.view) for seat in self._seats.values())

    @property
    def records_malformed(self) -> int:
        """Records left out since no code of this schema wrote them."""
        return sum(seat.view.malformed for seat in self._seats.values())


def _members(leases: Sequence[Any], now: float) -> dict[int, LiveMember]:
    """Members by number, from (number, lease, milliseconds left, statistics) one after another."""
    members = {}
    for number, lease, left, counters in zip(*(leases[i::4] for i in range(4)), strict=True):
        try:
            statistics = unpack_statistics(counters) if counters else Statistics()
            members[int(number)] = LiveMember(unpack_member(lease), now + max(0, left) / 1000.0, statistics)
        except Malformed:
            continue
    return members


def _unpack_entry(entry: bytes) -> Iterator[tuple[bytes, bytes]]:
    """(field, record) pairs of one feed entry."""
    at = 0
    while at < len(entry):
        middle = at + 4 + int.from_bytes(entry[at : at + 2], "little")
        end = middle + int.from_bytes(entry[at + 2 : at + 4], "little")
        yield entry[at + 4 : middle], entry[middle:end]
        at = end
