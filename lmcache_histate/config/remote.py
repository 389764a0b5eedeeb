"""``remote_url`` to the LMCache L2 adapter that serves it."""

from __future__ import annotations

import re
from typing import Any
from urllib.parse import parse_qsl, unquote, urlsplit

from lmcache_histate.config.values import parse_flag, parse_local_folder, parse_whole, split_url, suggestion

REMOTE_SCHEMES = ("redis", "rediss", "valkey", "s3", "file")
"""URL schemes that ``remote_url`` understands; everything else LMCache has is reached through ``l2_adapters``."""

_ELSEWHERE = (
    "remote_url understands " + ", ".join(f"{scheme}://" for scheme in REMOTE_SCHEMES) + ". "
    "Any other tier of LMCache goes into l2_adapters, as the JSON object that `lmcache server --l2-adapter` takes."
)
_S3_EXAMPLE = "s3://bucket.s3.eu-west-1.amazonaws.com or s3://bucket.minio.local:9000?region=us-east-1&disable_tls=true"
_S3_FLAGS = ("disable_tls", "s3_prefer_http2", "s3_enable_s3express")
_S3_NUMBERS = ("s3_num_io_threads",)
_S3_OPTIONS = ("region", *_S3_FLAGS, *_S3_NUMBERS)


def remote_adapter(url: object) -> dict[str, Any]:
    """The ``--l2-adapter`` object for `url`, without user and password (see :func:`credentials`).

    Raises ``ValueError`` in plain words when the URL is malformed or no adapter fits it.
    """
    if not isinstance(url, str) or not url.strip():
        raise ValueError(f"{url!r} is not a URL. Write it like redis://cache:6379.")
    text = url.strip()
    if "://" not in text:
        raise ValueError(f"{text!r} is not a URL. Write it like redis://cache:6379 or file:///mnt/share/histate.")
    scheme = text.split("://", 1)[0].lower()
    if scheme in {"redis", "rediss", "valkey"}:
        return _redis(text)
    if scheme == "s3":
        return _s3(text)
    if scheme == "file":
        # `shared`: several instances may mount this folder, so LMCache must not treat it as its own.
        return {"type": "fs", "base_path": parse_local_folder(text), "shared": True}
    raise ValueError(f"{scheme}:// is not known. {_ELSEWHERE}")


def credentials(url: str) -> tuple[str, str]:
    """User and password of a Redis URL, percent-decoded; empty texts when it has none."""
    parts = urlsplit(url)
    return unquote(parts.username or ""), unquote(parts.password or "")


def _redis(text: str) -> dict[str, Any]:
    parts = split_url(text, REMOTE_SCHEMES, "redis://cache:6379")
    port = parts.port or 6379
    database = parts.path.strip("/")
    if parts.query or parts.fragment or (database and not database.isdigit()):
        raise ValueError("a Redis URL is a host and a port, for example redis://cache:6379. Remove what follows them.")
    if parts.scheme.lower() == "redis" and int(database or 0) == 0:
        return {"type": "resp", "host": parts.hostname, "port": port, "shared": True}
    # LMCache's plain Redis client knows neither TLS nor database numbers; its Valkey client does.
    spec: dict[str, Any] = {"type": "valkey", "startup_nodes": f"{parts.hostname}:{port}", "shared": True}
    if parts.scheme.lower() == "rediss":
        spec["tls_enable"] = True
    if database:
        spec["database_id"] = int(database)
    return spec


def _s3(text: str) -> dict[str, Any]:
    parts = split_url(text, ("s3",), _S3_EXAMPLE)
    if parts.username is not None:
        raise ValueError(
            "an S3 URL must not carry keys. Set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY (or a profile) instead."
        )
    if parts.path.strip("/"):
        raise ValueError(f"LMCache uses a whole bucket, not a folder of it. Remove {parts.path!r}: {_S3_EXAMPLE}.")
    options = dict(parse_qsl(parts.query, keep_blank_values=True))
    for name in options:
        if name not in _S3_OPTIONS:
            raise ValueError(f"unknown option {name!r} in the S3 URL.{suggestion(name, _S3_OPTIONS)}")
    host = parts.hostname or ""
    found = re.search(r"\.s3[.-](?:dualstack\.)?([a-z]{2}(?:-[a-z]+)+-\d+)\.amazonaws\.com", host)
    region = options.pop("region", "") or (found.group(1) if found else "")
    if not region:
        raise ValueError(f"the S3 region is missing. Append ?region=NAME, as in {_S3_EXAMPLE}.")
    if "." not in host:
        host = f"{host}.s3.{region}.amazonaws.com"  # a bare bucket name means Amazon's own S3
    spec: dict[str, Any] = {
        "type": "s3",
        "s3_endpoint": f"s3://{host}" + (f":{parts.port}" if parts.port else ""),
        "s3_region": region,
        "shared": True,
    }
    for name, value in options.items():
        spec[name] = parse_flag(value) if name in _S3_FLAGS else parse_whole(value)
    return spec
