"""From what people write to values: sizes, URLs, paths, flags. Every function raises ``ValueError`` in plain words.

All of them accept both what YAML gives (numbers, booleans, lists) and the text of an environment variable, so the
file and the environment understand exactly the same words.
"""

from __future__ import annotations

import json
import math
import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any
from urllib.parse import SplitResult, urlsplit, urlunsplit

GIB = 1 << 30
"""Bytes in one GiB."""

LOCAL_HOSTS = frozenset({"localhost", "127.0.0.1"})
"""The hosts on which LMCache's autostart is willing to start a server."""

_SIZE = re.compile(r"\s*([0-9]*\.?[0-9]+(?:[eE][+-]?[0-9]+)?)\s*([A-Za-z]*)\s*")
_UNITS: dict[str, float] = {"": GIB, "b": 1}
for _power, _letter in enumerate("kmgtp", start=1):
    # As everywhere in storage: kB, MB, GB are powers of 1000; KiB, MiB, GiB (and the bare letter) powers of 1024.
    _UNITS[f"{_letter}b"] = 1000.0**_power
    _UNITS[f"{_letter}ib"] = _UNITS[f"{_letter}i"] = _UNITS[_letter] = 1024.0**_power

_TRUE = frozenset({"true", "yes", "on", "1"})
_FALSE = frozenset({"false", "no", "off", "0"})


def suggestion(word: str, choices: Sequence[str]) -> str:
    """``" Did you mean 'x'?"`` for the nearest of `choices`, or an empty text when nothing is near."""
    near = get_close_matches(word.lower(), [choice.lower() for choice in choices], n=1, cutoff=0.6)
    if not near:
        return ""
    match = next(choice for choice in choices if choice.lower() == near[0])
    return f" Did you mean {match!r}?"


def parse_gib(value: object) -> float:
    """A size in GiB, from a number of GiB or a text with a unit (``96GiB``, ``500MiB``, ``1.5TB``)."""
    hint = "Write a number of GiB, or a number and a unit, for example 96, '96GiB', '500MiB' or '1.5TB'."
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        raise ValueError(f"{value!r} is not a size. {hint}")
    if isinstance(value, str):
        match = _SIZE.fullmatch(value)
        if match is None:
            raise ValueError(f"{value!r} is not a size. {hint}")
        number, unit = match.groups()
        if unit.lower() not in _UNITS:
            raise ValueError(f"{value!r} is not a size: there is no unit {unit!r}. {hint}")
        gib = float(number) * _UNITS[unit.lower()] / GIB
    else:
        gib = float(value)
    if not math.isfinite(gib):
        raise ValueError(f"{value!r} is not a finite size. {hint}")
    if gib < 0:
        raise ValueError(f"{value!r} is negative. {hint}")
    return gib


def format_gib(gib: float) -> str:
    """A size for people: ``96 GiB``, ``500 MiB``, ``1.5 TiB``."""
    for unit, factor in (("TiB", 1024.0), ("GiB", 1.0), ("MiB", 1 / 1024)):
        if gib >= factor:
            return f"{gib / factor:.4g} {unit}"
    return f"{gib * 1024**2:.4g} KiB" if gib else "0 GiB"


def parse_flag(value: object) -> bool:
    """A boolean; the environment may say true/false, yes/no, on/off or 1/0."""
    if isinstance(value, bool):
        return value
    text = str(value).strip().lower() if isinstance(value, str | int) else ""
    if text in _TRUE:
        return True
    if text in _FALSE:
        return False
    raise ValueError(f"{value!r} is neither true nor false. Write true or false.")


def parse_whole(value: object) -> int:
    """A whole number; raises ``ValueError`` for fractions, booleans and words."""
    if isinstance(value, bool):
        raise ValueError(f"{value!r} is not a whole number")
    if isinstance(value, int):
        return value
    if isinstance(value, float) and value.is_integer():
        return int(value)
    if isinstance(value, str) and re.fullmatch(r"\s*[+-]?\d+\s*", value):
        return int(value)
    raise ValueError(f"{value!r} is not a whole number")


def parse_number(value: object) -> float:
    """A finite number; raises ``ValueError`` otherwise."""
    if isinstance(value, int | float | str) and not isinstance(value, bool):
        try:
            number = float(value)
        except ValueError:
            number = math.nan
        if math.isfinite(number):
            return number
    raise ValueError(f"{value!r} is not a number")


def parse_word(value: object, words: tuple[str, ...]) -> str:
    """One of `words` (any case; ``_`` for ``-`` is forgiven)."""
    text = value.strip().lower().replace("_", "-") if isinstance(value, str) else ""
    if text in words:
        return text
    listed = " or ".join(f"'{word}'" for word in words)
    raise ValueError(f"{value!r} is not one of the choices. Write {listed}.{suggestion(text, words)}")


def parse_word_or_tokens(value: object, words: tuple[str, ...]) -> str | int:
    """One of `words`, or a positive number of tokens."""
    listed = " or ".join(f"'{word}'" for word in words)
    hint = f"Write {listed}, or a positive number of tokens, for example 1024."
    if isinstance(value, str) and not value.strip().lstrip("+-").replace(".", "", 1).isdigit():
        text = value.strip().lower().replace("_", "-")
        if text in words:
            return text
        raise ValueError(f"{value!r} is not understood. {hint}{suggestion(text, words)}")
    try:
        tokens = parse_whole(value)
    except ValueError as error:
        raise ValueError(f"{error}. {hint}") from None
    if tokens <= 0:
        raise ValueError(f"{tokens} is not positive. {hint}")
    return tokens


def parse_port(value: object) -> int:
    """A TCP port, 1 to 65535."""
    try:
        port = parse_whole(value)
    except ValueError:
        port = 0
    if not 1 <= port <= 65535:
        raise ValueError(f"{value!r} is not a port. Write a number from 1 to 65535.")
    return port


def parse_local_folder(value: object) -> str:
    """The absolute path of a folder, from ``file:///path`` or ``/path`` (LMCache's two ways of writing it).

    As in LMCache, what follows ``file://`` is taken as it stands, without percent-decoding.
    """
    hint = "Write the absolute path of a folder, for example file:///mnt/nvme/histate or /mnt/nvme/histate."
    if not isinstance(value, str) or not value.strip():
        raise ValueError(f"{value!r} is not a path. {hint}")
    path = value.strip()
    if "," in path and all(part.strip().startswith(("/", "file://")) for part in path.split(",")):
        raise ValueError(
            f"{value!r} names several folders, HiState uses one. Keep one (several disks can be joined by LVM or RAID)."
        )
    if "://" in path:
        scheme, rest = path.split("://", 1)
        if scheme.lower() != "file":
            raise ValueError(f"{value!r} is not a local folder ({scheme}://). {hint}")
        if not rest.startswith("/"):
            raise ValueError(f"{value!r} has two slashes where three are needed: file:///{rest}. {hint}")
        path = rest
    if not path.startswith("/"):
        raise ValueError(f"{value!r} is a relative path, and vLLM and the server may run in other folders. {hint}")
    if "\0" in path:
        raise ValueError(f"{value!r} contains a null character. {hint}")
    return path.rstrip("/") or "/"


def split_url(value: object, schemes: tuple[str, ...], example: str) -> SplitResult:
    """A URL split into parts, checked for scheme, host and port.

    Raises ``ValueError`` naming `example` when the scheme is not one of `schemes` or a part is malformed.
    """
    hint = f"Write it like {example}."
    if not isinstance(value, str) or "://" not in value:
        raise ValueError(f"{value!r} is not a URL. {hint}")
    try:
        parts = urlsplit(value.strip())
        port = parts.port
    except ValueError as error:
        raise ValueError(f"{hide_password(value)!r} is not a valid URL ({error}). {hint}") from None
    if parts.scheme.lower() not in schemes:
        listed = ", ".join(f"{scheme}://" for scheme in schemes)
        raise ValueError(f"{hide_password(value)!r} is a {parts.scheme}:// URL, and only {listed} can be used. {hint}")
    if not parts.hostname:
        raise ValueError(f"{hide_password(value)!r} names no host. {hint}")
    if re.search(r"\s", value.strip()):
        raise ValueError(f"{hide_password(value)!r} contains a space. {hint}")
    if port == 0:
        raise ValueError(f"{hide_password(value)!r} has port 0. {hint}")
    return parts


def hide_password(url: str) -> str:
    """`url` with the passwords in it replaced by ``***``."""
    # A regular expression, not urlsplit: this also serves the messages about URLs that urlsplit refuses.
    url = re.sub(r"(://[^/@\s:]*:)[^/\s]+@", r"\1***@", url)
    return re.sub(r"([?&]\w*password=)[^&\s]+", r"\1***", url)


def strip_credentials(url: str) -> str:
    """`url` without user and password."""
    parts = urlsplit(url)
    return urlunsplit(parts._replace(netloc=parts.netloc.rsplit("@", 1)[-1]))


@dataclass(frozen=True)
class Endpoint:
    """Where one LMCache server listens for vLLM."""

    host: str
    port: int

    @property
    def url(self) -> str:
        """``tcp://host:port``."""
        return f"tcp://{f'[{self.host}]' if ':' in self.host else self.host}:{self.port}"


def parse_endpoints(value: object) -> tuple[Endpoint, ...]:
    """The LMCache servers named by `value`: one URL, several separated by commas, or a list of them."""
    example = "tcp://localhost:5555"
    items = value.split(",") if isinstance(value, str) else value
    if not isinstance(items, list | tuple) or not items:
        raise ValueError(f"{value!r} is not a server address. Write it like {example}.")
    endpoints = []
    for item in items:
        text = item.strip() if isinstance(item, str) else item
        parts = split_url(
            f"tcp://{text}" if isinstance(text, str) and text and "://" not in text else text, ("tcp",), example
        )
        if parts.port is None:
            raise ValueError(f"{item!r} has no port. Write it like {example}.")
        if parts.username is not None or parts.path.strip("/") or parts.query or parts.fragment:
            raise ValueError(f"{item!r} has more than a host and a port. Write it like {example}.")
        assert parts.hostname is not None  # split_url has checked it
        endpoints.append(Endpoint(parts.hostname, parts.port))
    if len(set(endpoints)) != len(endpoints):
        raise ValueError(f"{value!r} names the same server twice. Name each server once.")
    return tuple(endpoints)


def parse_adapters(value: object) -> tuple[dict[str, Any], ...]:
    """LMCache L2 adapter objects: a list of mappings (or the same as JSON text), each with a ``type``."""
    hint = 'Write a list of objects, for example [{"type": "fs", "base_path": "/mnt/share"}].'
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except json.JSONDecodeError as error:
            raise ValueError(f"not valid JSON ({error}). {hint}") from None
    items = [value] if isinstance(value, dict) else value
    if not isinstance(items, list | tuple):
        raise ValueError(f"{value!r} is not a list. {hint}")
    for number, item in enumerate(items, start=1):
        if not isinstance(item, dict):
            raise ValueError(f"adapter {number} is not an object. {hint}")
        if not isinstance(item.get("type"), str) or not item["type"]:
            raise ValueError(f"adapter {number} has no 'type', the name of an LMCache L2 adapter. {hint}")
        try:
            json.dumps(item, allow_nan=False)
        except (TypeError, ValueError) as error:
            raise ValueError(f"adapter {number} cannot be written as JSON ({error}). {hint}") from None
    return tuple(items)


def parse_quotas(value: object) -> dict[str, float]:
    """Sizes in GiB by tenant, from a mapping (or the same as JSON text)."""
    hint = "Write tenants and sizes, for example {alice: 20GiB, '*': 5GiB}; in the environment as JSON."
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except json.JSONDecodeError as error:
            raise ValueError(f"not valid JSON ({error}). {hint}") from None
    if not isinstance(value, Mapping):
        raise ValueError(f"{value!r} is not a list of tenants and sizes. {hint}")
    quotas = {}
    for salt, size in value.items():
        # LMCache's own rule for a salt; numbers are what YAML makes of tenants named by digits.
        if (
            isinstance(salt, bool)
            or not isinstance(salt, str | int)
            or not re.fullmatch(r"[^@/\\\0]{1,128}", str(salt))
        ):
            raise ValueError(
                f"{salt!r} cannot be a tenant: a cache_salt has 1 to 128 characters, and no @, / or \\ among them. {hint}"
            )
        try:
            quotas[str(salt)] = parse_gib(size)
        except ValueError as error:
            raise ValueError(f"tenant {str(salt)!r}: {error}") from None
    return quotas


def parse_arguments(value: object) -> tuple[str, ...]:
    """Command-line words, from one shell-quoted text or a list of words."""
    if isinstance(value, str):
        try:
            words = shlex.split(value)
        except ValueError as error:
            raise ValueError(f"{value!r} is not valid shell text ({error}). Close every quote.") from None
    elif isinstance(value, list | tuple):
        if any(isinstance(item, bool) or not isinstance(item, str | int | float) for item in value):
            raise ValueError("every item of the list must be a text or a number. Quote the others.")
        words = [str(item) for item in value]
        for word in words:
            # A list is taken word by word; "- --max-workers 4" would reach LMCache as one unknown flag.
            if re.match(r"--[\w-]+\s", word):
                flag, rest = word.split(None, 1)
                raise ValueError(f"{word!r} is one item with a flag and its value. Write {f'{flag}={rest}'!r}.")
    else:
        raise ValueError(f"{value!r} is neither a text nor a list. Write for example '--max-workers 4'.")
    for word in words:
        _refuse_reserved(word)
    return tuple(words)


RESERVED_FLAGS: dict[str, str] = {
    "--host": "set server_url",
    "--port": "set server_url",
    "--http-host": "it is chosen when the server starts: use `histate server --http-host`",
    "--http-port": "set http_port",
    "--transport": "only the default transport (zmq) is supported",
    "--chunk-size": "set chunk_size",
    "--separate-object-groups": "HiState always sets it",
    "--no-separate-object-groups": "a hybrid model's cache would return wrong tokens",
    "--l1-size-gb": "set max_local_cpu_size",
    "--eviction-policy": "set histate.eviction",
    "--eviction-trigger-watermark": "set histate.cpu_high_watermark",
    "--eviction-ratio": "set histate.cpu_low_watermark",
    "--l2-store-policy": "HiState decides what is stored where: see local_cpu and histate.snapshots_to_disk",
    "--l2-prefetch-policy": "HiState decides what is loaded from where",
    "--l2-adapter": "set local_disk, remote_url or l2_adapters",
}
"""Flags of ``lmcache server`` that HiState sets itself, with what to do instead."""


def _refuse_reserved(word: str) -> None:
    if word in {"", "-"}:
        # LMCache's autostart takes these two for abbreviations of --host.
        raise ValueError(f"{word!r} cannot stand alone. Write it behind its flag, for example --shm-name=")
    option = word.split("=", 1)[0]
    if not option.startswith("--") or option == "--":
        return
    for flag, remedy in RESERVED_FLAGS.items():
        # argparse accepts any prefix of a flag, so `--chunk` is `--chunk-size`.
        if flag.startswith(option):
            raise ValueError(f"{option} cannot be given here: {remedy}.")
