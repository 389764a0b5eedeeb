from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lmcache_histate.backends.disk.record import (
    HEADER_BYTES,
    SEGMENT,
    Header,
    Kind,
    ObjectId,
    Place,
    RecordError,
    combine,
    decode_header,
    encode_header,
    file_name,
    payload_checksum,
    record_bytes,
    segment_digest,
)

text = st.text(st.characters(blacklist_categories=["Cs"]), max_size=40)
object_ids = st.builds(
    ObjectId, text, st.binary(max_size=64), st.integers(0, (1 << 63) - 1), st.integers(0, 1 << 20), text
)
places = st.builds(
    Place,
    st.none() | st.binary(max_size=64),
    st.none() | st.integers(-(1 << 62), 1 << 62),
    st.sampled_from(Kind),
)
headers = st.builds(
    Header,
    text,
    object_ids,
    st.integers(0, 1 << 50),
    st.integers(0, (1 << 64) - 1),
    st.floats(0, 1e12),
    places,
)


@given(headers)
def test_a_header_reads_back_as_it_was_written(header: Header) -> None:
    block = encode_header(header)
    assert len(block) == HEADER_BYTES
    assert decode_header(block) == header


@given(headers, st.integers(0, HEADER_BYTES * 8 - 1))
@settings(max_examples=300)
def test_any_flipped_bit_of_a_header_is_noticed(header: Header, bit: int) -> None:
    block = bytearray(encode_header(header))
    block[bit // 8] ^= 1 << bit % 8
    with pytest.raises(RecordError):
        decode_header(bytes(block))


@pytest.mark.parametrize("size", [1, 4095, SEGMENT, SEGMENT + 1, 3 * SEGMENT - 5])
def test_any_flipped_bit_of_a_payload_is_noticed(size: int) -> None:
    payload = bytearray(random.Random(size).randbytes(size))
    good = payload_checksum(memoryview(payload))
    for at in {0, size // 2, size - 1, min(size - 1, SEGMENT)}:
        payload[at] ^= 0x10
        assert payload_checksum(memoryview(payload)) != good
        payload[at] ^= 0x10
    assert payload_checksum(memoryview(payload)) == good


def test_the_payload_checksum_is_over_its_segments_in_order() -> None:
    payload = random.Random(1).randbytes(2 * SEGMENT + 10)
    pieces = [segment_digest(payload[at : at + SEGMENT]) for at in range(0, len(payload), SEGMENT)]
    assert combine(pieces) == payload_checksum(memoryview(payload))
    assert combine(pieces[::-1]) != combine(pieces)


@given(object_ids, object_ids)
def test_different_keys_have_different_names(a: ObjectId, b: ObjectId) -> None:
    assert (file_name(a) == file_name(b)) == (a == b)


def test_fields_do_not_run_into_each_other() -> None:
    assert file_name(ObjectId("ab", b"c", 0, 0, "")) != file_name(ObjectId("a", b"bc", 0, 0, ""))


def test_a_key_that_does_not_fit_is_refused() -> None:
    oid = ObjectId("m" * 5000, b"", 0, 0, "")
    with pytest.raises(RecordError, match="a record header holds 4096"):
        encode_header(Header("ns", oid, 0, 0, 0.0))


@pytest.mark.parametrize("block", [b"", b"x" * 100, bytes(HEADER_BYTES), b"LMCIDX01" + bytes(HEADER_BYTES)])
def test_what_is_no_header_is_refused(block: bytes) -> None:
    with pytest.raises(RecordError):
        decode_header(block)


def test_another_version_is_named() -> None:
    block = bytearray(encode_header(Header("ns", ObjectId("m", b"h", 0, 0, ""), 0, 0, 0.0)))
    block[8] = 9
    with pytest.raises(RecordError, match="version 9"):
        decode_header(bytes(block))


@given(st.integers(0, 1 << 40))
def test_records_are_whole_blocks(size: int) -> None:
    assert record_bytes(size) % 4096 == 0
    assert 0 <= record_bytes(size) - HEADER_BYTES - size < 4096
