"""remote_url becomes the LMCache adapter that serves it."""

from __future__ import annotations

from typing import Any

import pytest

from lmcache_histate.config.remote import credentials, remote_adapter


@pytest.mark.parametrize(
    ("url", "spec"),
    [
        ("redis://cache:6380", {"type": "resp", "host": "cache", "port": 6380}),
        ("redis://user:pw@cache", {"type": "resp", "host": "cache", "port": 6379}),
        ("redis://cache:6379/0", {"type": "resp", "host": "cache", "port": 6379}),
        # LMCache's plain client has no database numbers and no TLS
        ("redis://cache/2", {"type": "valkey", "startup_nodes": "cache:6379", "database_id": 2}),
        ("rediss://cache", {"type": "valkey", "startup_nodes": "cache:6379", "tls_enable": True}),
        ("valkey://cache:1", {"type": "valkey", "startup_nodes": "cache:1"}),
        ("file:///mnt/share/x y", {"type": "fs", "base_path": "/mnt/share/x y"}),
        (
            "s3://bucket.s3.eu-west-1.amazonaws.com",
            {"type": "s3", "s3_endpoint": "s3://bucket.s3.eu-west-1.amazonaws.com", "s3_region": "eu-west-1"},
        ),
        (
            "s3://bucket?region=us-east-2",
            {"type": "s3", "s3_endpoint": "s3://bucket.s3.us-east-2.amazonaws.com", "s3_region": "us-east-2"},
        ),
        (
            "s3://b.minio:9000?region=x&disable_tls=true&s3_num_io_threads=8",
            {
                "type": "s3",
                "s3_endpoint": "s3://b.minio:9000",
                "s3_region": "x",
                "disable_tls": True,
                "s3_num_io_threads": 8,
            },
        ),
    ],
)
def test_adapter(url: str, spec: dict[str, Any]) -> None:
    assert remote_adapter(url) == {**spec, "shared": True}


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("cache:6379", "not a URL"),
        ("lm://cache:65432", "l2_adapters"),
        ("mooncakestore://x:1", "l2_adapters"),
        ("redis://cache:port", "not a valid URL"),
        ("redis://cache/db", "a host and a port"),
        ("redis://cache?ssl=1", "a host and a port"),
        ("s3://bucket", "region is missing"),
        ("s3://b.minio/folder?region=x", "whole bucket"),
        ("s3://b.minio?region=x&disable_tsl=1", "Did you mean 'disable_tls'"),
        ("s3://key:secret@b.minio?region=x", "AWS_ACCESS_KEY_ID"),
        ("file://share", "three are needed"),
        ("", "not a URL"),
        (5, "not a URL"),
    ],
)
def test_wrong_url(url: object, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        remote_adapter(url)


def test_credentials_are_decoded() -> None:
    assert credentials("redis://us%20er:p%40ss@cache") == ("us er", "p@ss")
    assert credentials("redis://:pw@cache") == ("", "pw")
    assert credentials("redis://cache") == ("", "")
    assert credentials("file:///mnt/x") == ("", "")
