"""Records, locating and merging, each against a plain way of doing the same."""

from __future__ import annotations

import contextlib

import pytest
from directory_boxes import SHARED, PlainDirectory
from hypothesis import given
from hypothesis import strategies as st

from lmcache_histate.backends.directory_writer import merge
from lmcache_histate.state_store.directory import encoding
from lmcache_histate.state_store.directory.encoding import Malformed, Session
from lmcache_histate.state_store.directory.local import LocalDirectory
from lmcache_histate.state_store.directory.locate import locate
from lmcache_histate.state_store.directory.protocol import (
    ALL_BITS,
    REMOTE_BITS,
    Change,
    ChunkHeld,
    Member,
    NamespaceFacts,
    SessionEnded,
    SessionHit,
    Statistics,
    shared_tier_name,
)

numbers = st.integers(0, (1 << 32) - 1)
hashes = st.binary(min_size=1, max_size=255)
holders = st.lists(st.tuples(numbers, st.integers(1, ALL_BITS)), max_size=20)


@given(numbers, st.binary(max_size=255), holders)
def test_chunk_records_come_back(position: int, parent: bytes, held: list[tuple[int, int]]) -> None:
    record = encoding.pack_chunk(position, parent, held)
    assert encoding.unpack_chunk(record) == (position, parent, held)


@given(numbers, numbers, st.binary(max_size=255), st.integers(0, (1 << 48) - 1), numbers, numbers)
def test_session_records_come_back(
    position: int, number: int, moved_to: bytes, hit_ms: int, hit_position: int, hit_number: int
) -> None:
    session = Session(position, number, moved_to, hit_ms, hit_position, hit_number)
    assert encoding.unpack_session(encoding.pack_session(session)) == session


@given(st.text(max_size=60), st.text(max_size=60), st.text(max_size=60))
def test_members_come_back(name: str, address: str, tier: str) -> None:
    member = Member(name, address, tier)
    assert encoding.unpack_member(encoding.pack_member(member, b"8 bytes.")) == member


@given(st.lists(st.floats(0, 1e12), min_size=6, max_size=50))
def test_statistics_come_back_and_add_up(values: list[float]) -> None:
    statistics = Statistics(values[0], values[1], tuple(values[6:]), *values[2:6])
    assert encoding.unpack_statistics(encoding.pack_statistics(statistics)) == statistics
    assert statistics + Statistics() == Statistics() + statistics == statistics
    assert (statistics + Statistics(distances=(1.0,) * 60)).distances[59] == 1.0


@given(st.binary(max_size=80))
def test_foreign_bytes_are_malformed_or_read_within_bounds(data: bytes) -> None:
    for unpack in (
        encoding.unpack_chunk,
        encoding.unpack_session,
        encoding.unpack_member,
        encoding.unpack_statistics,
        encoding.unpack_facts,
    ):
        with contextlib.suppress(Malformed):
            unpack(data)


@pytest.mark.parametrize("key", [b"", bytes(256)])
def test_hashes_that_do_not_fit_are_refused(key: bytes) -> None:
    with pytest.raises(ValueError, match="1 to 255 bytes"):
        encoding.pack_change(ChunkHeld(key, 1), remote_is_shared=False)
    with pytest.raises(ValueError, match="32 bits"):
        encoding.pack_change(SessionHit(b"x", 1 << 32), remote_is_shared=False)


paths = st.lists(st.dictionaries(st.sampled_from(["a", "b", SHARED]), st.integers(0, ALL_BITS)), max_size=8)


@given(paths, st.booleans(), st.sampled_from([0, 7]))
def test_locate_agrees_with_the_plain_way(path: list[dict[str, int]], b_shares: bool, snapshot_bytes: int) -> None:
    facts = NamespaceFacts(16, 1, snapshot_bytes)
    plain = PlainDirectory()
    plain.register("a", SHARED)
    plain.register("b", SHARED if b_shares else "")
    members = {70: Member("a", "", SHARED), 7: Member("b", "", plain.tiers["b"]), 9: Member(SHARED, "", SHARED)}
    numbers_of = {member.name: number for number, member in members.items()}
    records: list[bytes | None] = []
    for index, held in enumerate(path):
        for name, bits in held.items():
            if name == SHARED:
                plain.shared[bytes([index])] = bits & REMOTE_BITS
            else:
                plain.own[name][bytes([index])] = bits
        entries = [(numbers_of[name], bits & (REMOTE_BITS if name == SHARED else 63)) for name, bits in held.items()]
        # A number without a lease, and a malformed record: both count as nothing.
        records.append(
            encoding.pack_chunk(16, b"", [*entries, (5, ALL_BITS)]) if held else (None, b"", b"?")[index % 3]
        )
    found = locate(facts, records, members)
    expected = plain.locate([bytes([index]) for index in range(len(path))], facts)
    assert {at.member.name: (at.cpu_tokens, at.disk_tokens, at.tokens) for at in found} == expected
    assert [at.tokens for at in found] == sorted((at.tokens for at in found), reverse=True)


keys = st.sampled_from([b"1", b"2", b"3"])
changes = st.one_of(
    st.builds(
        ChunkHeld,
        keys,
        st.integers(0, ALL_BITS),
        st.just(b"p"),
        st.sampled_from([0, 64]),
        st.integers(0, ALL_BITS).map(lambda bits: bits & REMOTE_BITS),
    ).map(lambda change: change._replace(held=change.held & ~change.shared_removed)),
    st.builds(SessionEnded, keys, st.integers(1, 99), st.one_of(st.just(b""), keys)),
)


@given(st.lists(changes, max_size=12), st.sampled_from(["", SHARED]))
def test_merged_changes_say_the_same_of_chunks(said: list[Change], shared_tier: str) -> None:
    facts = NamespaceFacts(64, 1, 1)
    one_by_one, at_once = LocalDirectory("a", "", shared_tier), LocalDirectory("a", "", shared_tier)
    merged: dict[tuple[type, bytes], Change] = {}
    # Something is there already: bits of the shared tier that others have said.
    before = [ChunkHeld(key, ALL_BITS if shared_tier else 1, b"p", 64) for key in (b"1", b"2")]
    for directory in (one_by_one, at_once):
        directory.register("m", facts, 0.0)
        directory.publish("m", before, 0.0)
    for change in said:
        one_by_one.publish("m", [change], 0.0)
        merge(merged, change, bool(shared_tier))
    at_once.publish("m", list(merged.values()), 0.0)
    assert at_once.holders("m", [b"1", b"2", b"3"], 0.0) == one_by_one.holders("m", [b"1", b"2", b"3"], 0.0)
    assert len(merged) <= len(said)


@pytest.mark.parametrize(
    ("url", "name"),
    [
        ("redis://cache:6379", "shared:redis://cache:6379"),
        ("redis://user:secret@Cache:6379/2", "shared:redis://cache:6379/2"),
        ("file:///mnt/Share/", "shared:file:///mnt/Share"),
    ],
)
def test_a_shared_tier_has_one_name_for_all(url: str, name: str) -> None:
    assert shared_tier_name(url) == name
