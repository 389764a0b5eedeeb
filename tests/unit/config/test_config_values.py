"""Sizes, words, paths and URLs: what people write, and the messages they get when it cannot be understood."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lmcache_histate.config import values


@pytest.mark.parametrize(
    ("text", "gib"),
    [
        (96, 96.0),
        (0.5, 0.5),
        ("96", 96.0),
        ("96GiB", 96.0),
        ("96 gib", 96.0),
        ("96Gi", 96.0),
        ("96G", 96.0),
        ("512MiB", 0.5),
        ("1.5TiB", 1536.0),
        ("1.5TB", 1.5e12 / 2**30),
        ("500MB", 5e8 / 2**30),
        (".5g", 0.5),
        ("1e3MiB", 1000 / 1024),
        ("1073741824B", 1.0),
        (0, 0.0),
    ],
)
def test_a_size_is_a_number_of_gib_or_has_a_unit(text: object, gib: float) -> None:
    assert values.parse_gib(text) == pytest.approx(gib)


@pytest.mark.parametrize(
    "text", ["", "GiB", "96 XiB", "ninety", "-1", -1, True, None, [1], math.inf, math.nan, "1,5TB"]
)
def test_what_is_no_size_is_refused_with_an_example(text: object) -> None:
    with pytest.raises(ValueError, match=r"'96GiB'"):
        values.parse_gib(text)


@settings(deadline=None)
@given(st.floats(min_value=0.001, max_value=1e6), st.sampled_from(["KiB", "MiB", "GiB", "TiB"]))
def test_a_unit_scales_by_powers_of_1024(number: float, unit: str) -> None:
    power = {"KiB": -2, "MiB": -1, "GiB": 0, "TiB": 1}[unit]
    assert values.parse_gib(f"{number:f}{unit}") == pytest.approx(float(f"{number:f}") * 1024.0**power)


@settings(deadline=None)
@given(st.floats(min_value=1e-5, max_value=1e7))
def test_a_printed_size_reads_back(gib: float) -> None:
    assert values.parse_gib(values.format_gib(gib)) == pytest.approx(gib, rel=1e-3)


YAML_VALUES = st.one_of(
    st.none(), st.booleans(), st.integers(), st.floats(), st.lists(st.integers()), st.dictionaries(st.text(), st.none())
)


@pytest.mark.parametrize(
    "parse",
    [
        values.parse_gib,
        values.parse_flag,
        values.parse_port,
        values.parse_local_folder,
        values.parse_endpoints,
        values.parse_adapters,
        values.parse_arguments,
        lambda value: values.parse_word_or_tokens(value, ("auto",)),
        lambda value: values.parse_word(value, ("cost", "lru")),
    ],
)
@settings(deadline=None)
@given(value=st.one_of(st.text(), YAML_VALUES))
def test_parsers_fail_only_by_value_errors_that_say_something(parse: Callable[[object], object], value: object) -> None:
    message = None
    try:
        parse(value)
    except ValueError as error:
        message = str(error)
    assert message is None or message.strip()


@pytest.mark.parametrize(
    ("value", "flag"),
    [
        (True, True),
        (False, False),
        ("true", True),
        ("Yes", True),
        ("on", True),
        ("1", True),
        (1, True),
        ("OFF", False),
        ("0", False),
    ],
)
def test_flags(value: object, flag: bool) -> None:
    assert values.parse_flag(value) is flag


@pytest.mark.parametrize("value", ["maybe", "", 2, None, 1.0, []])
def test_what_is_no_flag_is_refused(value: object) -> None:
    with pytest.raises(ValueError, match="Write true or false"):
        values.parse_flag(value)


@pytest.mark.parametrize(
    ("value", "expected"),
    [("adaptive", "adaptive"), ("Final_Only", "final-only"), (512, 512), ("512", 512), (512.0, 512), (" 512 ", 512)],
)
def test_word_or_tokens(value: object, expected: object) -> None:
    assert values.parse_word_or_tokens(value, ("adaptive", "final-only")) == expected


@pytest.mark.parametrize("value", [0, -1, "-512", "512.5", 0.5, True, None, "", "adaptiv", [512]])
def test_what_is_neither_word_nor_positive_tokens_is_refused(value: object) -> None:
    with pytest.raises(ValueError, match="a positive number of tokens"):
        values.parse_word_or_tokens(value, ("adaptive", "final-only"))


def test_a_misspelt_word_gets_the_nearest_one() -> None:
    with pytest.raises(ValueError, match="Did you mean 'adaptive'"):
        values.parse_word_or_tokens("adaptve", ("adaptive", "final-only"))
    with pytest.raises(ValueError, match=r"Write 'cost' or 'lru'"):
        values.parse_word("lfu", ("cost", "lru"))


@pytest.mark.parametrize(
    ("value", "path"),
    [
        ("file:///mnt/nvme/histate", "/mnt/nvme/histate"),
        ("FILE:///mnt/nvme", "/mnt/nvme"),
        ("/mnt/nvme/", "/mnt/nvme"),
        ("file:///mnt/my disk", "/mnt/my disk"),
        ("file:///mnt/a%20b", "/mnt/a%20b"),  # as LMCache: taken as it stands
        ("/mnt/a,b", "/mnt/a,b"),
        ("/", "/"),
    ],
)
def test_folders(value: str, path: str) -> None:
    assert values.parse_local_folder(value) == path


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ("mnt/nvme", "relative path"),
        ("file://mnt/nvme", "three are needed: file:///mnt/nvme"),
        ("s3://bucket", "not a local folder"),
        ("/a,/b", "several folders"),
        ("file:///a/,file:///b/", "several folders"),
        ("", "not a path"),
        (True, "not a path"),
        ("/a\0b", "null character"),
    ],
)
def test_what_is_no_folder_is_refused(value: object, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        values.parse_local_folder(value)


@pytest.mark.parametrize(
    ("value", "urls"),
    [
        ("tcp://localhost:5555", ["tcp://localhost:5555"]),
        ("localhost:5555", ["tcp://localhost:5555"]),
        ("10.0.0.1:5555, tcp://b:6", ["tcp://10.0.0.1:5555", "tcp://b:6"]),
        (["a:1", "b:2"], ["tcp://a:1", "tcp://b:2"]),
        ("tcp://[::1]:5555", ["tcp://[::1]:5555"]),
    ],
)
def test_endpoints(value: object, urls: list[str]) -> None:
    assert [endpoint.url for endpoint in values.parse_endpoints(value)] == urls


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ("tcp://localhost", "no port"),
        ("grpc://localhost:5", "only tcp://"),
        ("tcp://:5555", "no host"),
        ("tcp://a:99999", "not a valid URL"),
        ("tcp://a:0", "port 0"),
        ("tcp://a:5/x", "more than a host and a port"),
        ("a:1,a:1", "same server twice"),
        ("a:1,", "not a URL"),
        (5555, "not a server address"),
        ([], "not a server address"),
        ([5], "not a URL"),
        ("tcp://a b:1", "space"),
    ],
)
def test_what_is_no_endpoint_is_refused_with_an_example(value: object, message: str) -> None:
    with pytest.raises(ValueError, match=message) as caught:
        values.parse_endpoints(value)
    assert "tcp://localhost:5555" in str(caught.value) or "same server" in str(caught.value)


def test_a_password_never_appears_in_a_message() -> None:
    for url in ("ftp://user:hunter2@host", "redis://user:hunter2@host:999999", "redis://user:hunter2@:1"):
        with pytest.raises(ValueError, match=r"\*\*\*") as caught:
            values.split_url(url, ("redis",), "redis://cache:6379")
        assert "hunter2" not in str(caught.value)


@pytest.mark.parametrize("password", ["p", "p@q", "a:b@c", "%40"])
def test_hiding_and_stripping_credentials(password: str) -> None:
    url = f"redis://user:{password}@host:1/2"
    assert values.hide_password(url) == "redis://user:***@host:1/2"
    assert values.strip_credentials(url) == "redis://host:1/2"
    assert values.hide_password("redis://host:1") == "redis://host:1"


def test_adapters_from_yaml_or_json() -> None:
    spec = {"type": "fs", "base_path": "/a"}
    assert values.parse_adapters([spec]) == (spec,)
    assert values.parse_adapters('[{"type": "fs", "base_path": "/a"}]') == (spec,)
    assert values.parse_adapters(spec) == (spec,)
    for wrong, message in (
        ("{", "not valid JSON"),
        ([{"base_path": "/a"}], "adapter 1 has no 'type'"),
        ([spec, 5], "adapter 2 is not an object"),
        ([{"type": "fs", "n": math.nan}], "cannot be written as JSON"),
        (7, "not a list"),
    ):
        with pytest.raises(ValueError, match=message):
            values.parse_adapters(wrong)


def test_arguments_as_text_or_list() -> None:
    assert values.parse_arguments("--max-workers 4 --instance-id 'a b'") == (
        "--max-workers",
        "4",
        "--instance-id",
        "a b",
    )
    assert values.parse_arguments(["--max-workers", 4]) == ("--max-workers", "4")
    for wrong, message in (
        ("--instance-id 'a", "Close every quote"),
        (["--max-workers 4"], "--max-workers=4"),
        ([None], "every item"),
        (5, "neither a text nor a list"),
        (["--shm-name", ""], "--shm-name="),
        ("--chunk-size 5", "set chunk_size"),
        ("--chunk-size=5", "set chunk_size"),
        ("--chunk 5", "set chunk_size"),  # argparse takes abbreviations
        ("--no-separate-object-groups", "wrong tokens"),
        ("--eviction-policy LRU", "histate.eviction"),
        ("--http-host 0.0.0.0", "histate server"),
        ('--l2-adapter {"type":"fs"}', "l2_adapters"),
    ):
        with pytest.raises(ValueError, match=message):
            values.parse_arguments(wrong)


def test_quotas_are_sizes_by_tenant_in_the_file_and_in_the_environment() -> None:
    assert values.parse_quotas({"alice": "20GiB", "*": 5, 42: "512MiB"}) == {"alice": 20.0, "*": 5.0, "42": 0.5}
    assert values.parse_quotas('{"_default": "1GiB"}') == {"_default": 1.0}
    assert values.parse_quotas({}) == {}
    for wrong in ("alice=5", "[1]", {"": 1}, {"a/b": 1}, {"x" * 129: 1}, {True: 1}, {"alice": -1}):
        with pytest.raises(ValueError, match=r"tenant|JSON"):
            values.parse_quotas(wrong)
