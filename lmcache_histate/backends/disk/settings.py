"""How a store is to run, and how a user writes it down."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

GIB = 1 << 30
MIN_CAPACITY_BYTES = 16 << 20

HELP = """HiState disk tier, adapter_params:
- base_path (str): folder of the store, on a local disk (required)
- max_capacity_gb (number): hard limit in GiB for everything in it, temporary files included (required)
- min_free_gb (number): free space in GiB that is left to others on the file system (default 1)
- shared (bool): other servers use the folder too, and all say so (default false)
- direct_io (auto, on, off): bypass the page cache (default auto: where the file system can)
- sync (bool): a reported store survives a power cut (default true)
- fingerprint (str): whatever else objects must have in common, such as a model revision (default empty)
- store_threads, load_threads (int): threads that write and read (default 2 and 4)"""

_FIELDS = frozenset(
    [
        "base_path",
        "max_capacity_gb",
        "min_free_gb",
        "shared",
        "direct_io",
        "sync",
        "fingerprint",
        "store_threads",
        "load_threads",
    ]
)


@dataclass(frozen=True)
class StoreConfig:
    """How a store is to run.

    Raises:
        ValueError: a value is impossible; the message says which, and what works.
    """

    root: Path
    capacity_bytes: int
    """Hard limit for everything under `root`, temporary files included."""

    min_free_bytes: int = GIB
    """The file system's free space is never taken below this."""

    shared: bool = False
    """Whether other servers use the folder at the same time (each must say so)."""

    direct_io: str = "auto"
    """`auto`, `on` or `off`."""

    sync: bool = True
    """Whether a store is on stable storage when it is reported. Without it a power cut (not a crash of the server)
    may lose what was stored last; it never makes the store serve anything wrong."""

    fingerprint: str = ""
    """Whatever else objects must have in common, a model revision for instance: part of every namespace."""

    store_threads: int = 2
    load_threads: int = 4

    def __post_init__(self) -> None:
        if self.capacity_bytes < MIN_CAPACITY_BYTES:
            raise ValueError(
                f"the capacity of {self.root} is {self.capacity_bytes} bytes; the least that works is "
                f"{MIN_CAPACITY_BYTES} (16 MiB: max_capacity_gb 0.015625)"
            )
        if self.min_free_bytes < 0:
            raise ValueError(f"min_free_gb of {self.root} is negative ({self.min_free_bytes} bytes); set 0 or more")
        if self.direct_io not in ("auto", "on", "off"):
            raise ValueError(f"direct_io of {self.root} must be auto, on or off, not {self.direct_io!r}")
        for name in ("store_threads", "load_threads"):
            if not 1 <= getattr(self, name) <= 64:
                raise ValueError(f"{name} of {self.root} must be 1 to 64, not {getattr(self, name)}")


def parse(params: Mapping[str, Any]) -> StoreConfig:
    """Settings from the `adapter_params` of LMCache's plugin adapter (`plugin_l2_adapter.py`).

    Raises:
        ValueError: a field is missing, unknown, or has an impossible value; the message says which, and what to set.
    """
    unknown = sorted(set(params) - _FIELDS)
    if unknown:
        raise ValueError(f"adapter_params: unknown field(s) {', '.join(unknown)}\n{HELP}")
    path = _typed(params, "base_path", str, "")
    if not path:
        raise ValueError("adapter_params.base_path must name a folder, for instance /mnt/nvme/histate")
    if params.get("max_capacity_gb") is None:
        raise ValueError("adapter_params.max_capacity_gb is required: the GiB that this tier may use")
    direct = params.get("direct_io", "auto")
    return StoreConfig(
        root=Path(path),
        capacity_bytes=int(_number(params, "max_capacity_gb", 0) * GIB),
        min_free_bytes=int(_number(params, "min_free_gb", 1.0) * GIB),
        shared=_typed(params, "shared", bool, False),
        direct_io=("on" if direct else "off") if isinstance(direct, bool) else str(direct),
        sync=_typed(params, "sync", bool, True),
        fingerprint=_typed(params, "fingerprint", str, ""),
        store_threads=int(_number(params, "store_threads", 2)),
        load_threads=int(_number(params, "load_threads", 4)),
    )


_T = TypeVar("_T")


def _typed(params: Mapping[str, Any], name: str, kind: type[_T], default: _T) -> _T:
    value = params.get(name, default)
    if not isinstance(value, kind):
        raise ValueError(f"adapter_params.{name} must be a {kind.__name__}, not {value!r}")
    return value


def _number(params: Mapping[str, Any], name: str, default: float) -> float:
    value = params.get(name, default)
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < 1e9:
        raise ValueError(f"adapter_params.{name} must be a number of at least 0, not {value!r}")
    return float(value)
