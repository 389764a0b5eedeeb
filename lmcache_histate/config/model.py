"""The settings: one model for LMCache's words, one for HiState's own section.

Descriptions are written for users: ``histate config --help`` and docs/configuration.md are made from them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, PrivateAttr, model_validator
from pydantic_core import PydanticCustomError

from lmcache_histate.config import values
from lmcache_histate.config.remote import credentials, remote_adapter
from lmcache_histate.state_store.directory.url import parse_directory_url

MIN_LEASE = 2.0
"""Shortest lease of an instance, in seconds."""

Flag = Annotated[bool, BeforeValidator(values.parse_flag)]


def _words(*words: str) -> BeforeValidator:
    return BeforeValidator(lambda value: values.parse_word(value, words))


def _words_or_tokens(*words: str) -> BeforeValidator:
    return BeforeValidator(lambda value: values.parse_word_or_tokens(value, words))


def _chunk_size(value: object) -> object:
    return values.parse_word_or_tokens(value, ("auto",))


def _positive_seconds(value: object, hint: str) -> float:
    try:
        seconds = values.parse_number(value)
    except ValueError as error:
        raise ValueError(f"{error}. {hint}") from None
    if seconds <= 0:
        raise ValueError(f"{value!r} is not positive. {hint}")
    return seconds


def _tau(value: object) -> str | float:
    if isinstance(value, str) and value.strip().lower() == "auto":
        return "auto"
    return _positive_seconds(value, "Write 'auto', or a positive number of seconds, for example 600.")


def _seconds(value: object) -> float:
    return _positive_seconds(value, "Write a positive number of seconds, for example 120.")


def _fraction(value: object) -> float:
    try:
        fraction = values.parse_number(value)
    except ValueError as error:
        raise ValueError(f"{error}. Write a fraction between 0 and 1, for example 0.9.") from None
    if not 0 < fraction <= 1:
        raise ValueError(f"{value!r} is not between 0 and 1. Write a fraction, for example 0.9.")
    return fraction


def _directory(value: object) -> object:
    if value is None:
        return None
    parse_directory_url(value)
    assert isinstance(value, str)  # parse_directory_url has checked it
    return value.strip()


def _lease(value: object) -> float:
    lease = _positive_seconds(value, "Write a number of seconds, for example 30.")
    if lease < MIN_LEASE:
        raise ValueError(
            f"{value!r} is too short: news need time to travel. Write {MIN_LEASE} or more, for example 30."
        )
    return lease


def _instance(value: object) -> object:
    if value is None:
        return None
    name = str(value).strip() if isinstance(value, str | int) and not isinstance(value, bool) else ""
    if not 0 < len(name.encode()) <= 200 or not name.isprintable():
        raise ValueError(
            f"{value!r} is no name for an instance. Write 1 to 200 printable characters, for example gpu-7."
        )
    return name


def _instance_address(value: object) -> str:
    text = value.strip() if isinstance(value, str) else ""
    if value and (not text or len(text.encode()) > 200 or not text.isprintable() or " " in text):
        raise ValueError(f"{value!r} is no address. Write what your router understands, for example http://gpu-7:8000.")
    return text


def _remote_url(value: object) -> object:
    if value is None:
        return None
    remote_adapter(value)
    assert isinstance(value, str)  # remote_adapter has checked it
    return value.strip()


def _server_url(value: object) -> str:
    return ",".join(endpoint.url for endpoint in values.parse_endpoints(value))


class _Settings(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class HiStateSettings(_Settings):
    """The ``histate:`` section: what HiState adds to LMCache."""

    enabled: Flag = Field(
        default=True, description="Use HiState. false leaves vLLM and LMCache exactly as they are without it."
    )
    interval: Annotated[Literal["adaptive", "final-only"] | int, _words_or_tokens("adaptive", "final-only")] = Field(
        default="adaptive",
        description="Distance between snapshots of the recurrent state, in tokens (rounded to the model's blocks). "
        "adaptive: chosen from storage pressure; final-only: one snapshot at the end of each turn and no others.",
    )
    eviction: Annotated[Literal["cost", "lru"], _words("cost", "lru")] = Field(
        default="cost",
        description="What goes first when a tier is full. cost: what would be cheapest to recompute for the space "
        "it frees; lru: what was used longest ago, for comparison.",
    )
    tau: Annotated[Literal["auto"] | float, BeforeValidator(_tau)] = Field(
        default="auto",
        description="Weight of recomputation cost against age in the eviction score, in seconds. "
        "auto: tuned from what the cache sees. Only for eviction: cost.",
    )
    placement: Annotated[Literal["uniform", "histogram"], _words("uniform", "histogram")] = Field(
        default="uniform",
        description="Where hits are expected when the cache is valued for eviction. uniform: anywhere inside a session "
        "alike; histogram: as far from its end as earlier requests came back. Snapshots are spaced evenly in both cases.",
    )
    refresh: Annotated[Literal["all", "used", "none"], _words("all", "used", "none")] = Field(
        default="all",
        description="Which snapshots a hit makes recent again: all on the prefix up to the one used, only the one "
        "used, or none.",
    )
    cost_unit: Annotated[Literal["tokens", "ms"], _words("tokens", "ms")] = Field(
        default="ms",
        description="Unit of recomputation cost. ms: milliseconds from a prefill model that follows the engine, in which "
        "a token late in a long prompt costs more; tokens: every token costs the same.",
    )
    snapshots_to_disk: Flag = Field(
        default=True,
        description="Move historical snapshots from CPU memory to local_disk. false keeps every snapshot in CPU "
        "memory. Without local_disk it has no effect.",
    )
    local_disk_shared: Flag = Field(
        default=False,
        description="Several servers on this machine use the folder local_disk at the same time, within one "
        "max_local_disk_size; all of them must say so. false: the folder is this server's alone, and a second one is "
        "refused.",
    )
    write_through: Flag = Field(
        default=False,
        description="Also write KV and final snapshots to local_disk when they are stored, so that a crash of the "
        "server loses nothing. Costs disk bandwidth and disk space.",
    )
    max_disk_writes_per_day: Annotated[float, BeforeValidator(values.parse_gib)] = Field(
        default=0.0,
        description="What may be moved from CPU memory to local_disk in a day, in GiB or with a unit, to spare the SSD; "
        "beyond it, what leaves CPU memory is deleted. 0: no limit. Writes of write_through are not counted.",
    )
    offer_to_remote: Annotated[
        Literal["turn-ends", "shared", "all", "none"], _words("turn-ends", "shared", "all", "none")
    ] = Field(
        default="turn-ends",
        description="What is copied to remote_url and l2_adapters. turn-ends: the last snapshot of every turn and "
        "prefixes that several sessions share, each with all of the KV before it; shared: such prefixes only; all: "
        "whatever is stored, at once, as LMCache does; none: nothing, remote tiers are only read. With local_cpu: false, "
        "everything but for none.",
    )
    quotas: Annotated[dict[str, float], BeforeValidator(values.parse_quotas)] = Field(
        default_factory=dict,
        description="What each tenant (cache_salt) may hold in CPU memory and on local_disk together, by name, in GiB or "
        "with a unit: {alice: 20GiB, '*': 5GiB}. '*' is every tenant not named, _default requests without a cache_salt. "
        "Beyond it, what is worth least of that tenant is deleted. LMCache's PUT /quota/{cache_salt} changes them while "
        "the server runs. Tenants without a quota share what there is.",
    )
    save_answers: Flag = Field(
        default=True,
        description="Also cache generated tokens, which an agent's next prompt contains "
        "(LMCache's lmcache.mp.save_decode_cache).",
    )
    autostart: Flag = Field(
        default=True,
        description="vLLM starts the LMCache server itself when server_url is on this machine and nothing answers "
        "there. With a remote or several server_url it has no effect.",
    )
    autostart_timeout: Annotated[float, BeforeValidator(_seconds)] = Field(
        default=120.0, description="How long vLLM waits for the server that it started to answer, in seconds."
    )
    directory: Annotated[str | None, BeforeValidator(_directory)] = Field(
        default=None,
        description="Redis or Valkey server in which several instances tell each other what they hold: redis://, rediss:// "
        "(TLS), redis+sentinel:// or redis+cluster://. none: this instance alone. See docs/directory.md.",
    )
    directory_lease: Annotated[float, BeforeValidator(_lease)] = Field(
        default=30.0,
        description="Seconds without news after which the others count an instance, and all that it held, as gone. The "
        "same for all instances.",
    )
    instance: Annotated[str | None, BeforeValidator(_instance)] = Field(
        default=None,
        description="Name of this instance in the directory, unique among them and the same after a restart. none: host "
        "name and port of server_url.",
    )
    instance_address: Annotated[str, BeforeValidator(_instance_address)] = Field(
        default="",
        description="Where a router reaches the vLLM of this instance, for example http://gpu-7:8000: passed on by "
        "`histate locate`, not used otherwise.",
    )
    cpu_high_watermark: Annotated[float, BeforeValidator(_fraction)] = Field(
        default=0.9, description="Fraction of max_local_cpu_size in use above which eviction begins, 0 to 1."
    )
    cpu_low_watermark: Annotated[float, BeforeValidator(_fraction)] = Field(
        default=0.8,
        description="Fraction of max_local_cpu_size in use at which eviction stops, below cpu_high_watermark.",
    )
    allow_untested_versions: Flag = Field(
        default=False,
        description="Start with versions of vLLM or LMCache that HiState was not tested with, with a warning instead "
        "of an error. Wrong cache contents are possible.",
    )

    @model_validator(mode="after")
    def _watermarks(self) -> Self:
        if self.cpu_low_watermark >= self.cpu_high_watermark:
            raise _problem(
                "histate.cpu_low_watermark",
                f"{self.cpu_low_watermark} is not below cpu_high_watermark ({self.cpu_high_watermark}). "
                "Lower the one or raise the other.",
            )
        return self


class Config(_Settings):
    """Everything that a user can set. Immutable; :meth:`origin` says where each value came from.

    Build one with :func:`lmcache_histate.config.load_config`, or directly (``Config(max_local_cpu_size=2)``) in
    programs and tests, where wrong values raise pydantic's ``ValidationError`` (also a ``ValueError``).
    """

    chunk_size: Annotated[Literal["auto"] | int, BeforeValidator(_chunk_size)] = Field(
        default="auto",
        description="Tokens in one cache chunk. Must be the model's block size; auto lets the connector fill it in.",
    )
    local_cpu: Flag = Field(
        default=True,
        description="Keep cached data in CPU memory. false makes CPU memory only a buffer on the way to the other "
        "tiers, of which there must then be one.",
    )
    max_local_cpu_size: Annotated[float, BeforeValidator(values.parse_gib)] = Field(
        default=5.0, description="CPU memory for the cache, in GiB or with a unit ('96GiB', '500MiB', '1.5TB')."
    )
    local_disk: Annotated[
        str | None, BeforeValidator(lambda value: None if value is None else values.parse_local_folder(value))
    ] = Field(
        default=None,
        description="Folder on a local disk for snapshots and for what leaves CPU memory: file:///path or /path. "
        "Needs max_local_disk_size.",
    )
    max_local_disk_size: Annotated[float, BeforeValidator(values.parse_gib)] = Field(
        default=0.0,
        description="Disk space for the cache, in GiB or with a unit ('150GiB', '1.5TB'). Needs local_disk.",
    )
    remote_url: Annotated[str | None, BeforeValidator(_remote_url)] = Field(
        default=None,
        description="A tier shared by several machines: redis://host:port, rediss:// (TLS), "
        "s3://bucket.host?region=NAME, or file:///path of a shared folder.",
    )
    l2_adapters: Annotated[tuple[dict[str, Any], ...], BeforeValidator(values.parse_adapters)] = Field(
        default=(),
        description="Further LMCache L2 adapters, each the object that `lmcache server --l2-adapter` takes, passed on "
        "unchanged, behind the disk and remote_url.",
    )
    server_url: Annotated[str, BeforeValidator(_server_url)] = Field(
        default="tcp://localhost:5555",
        description="Where the LMCache server listens, or is to be started: tcp://host:port. Several, separated by "
        "commas, for tensor-parallel ranks spread over machines.",
    )
    http_port: Annotated[int, BeforeValidator(values.parse_port)] = Field(
        default=8080, description="TCP port of the LMCache server's HTTP interface (health, metrics)."
    )
    server_args: Annotated[tuple[str, ...], BeforeValidator(values.parse_arguments)] = Field(
        default=(),
        description="Further flags for `lmcache server`: one text, quoted as in a shell, or a list of words.",
    )
    histate: HiStateSettings = Field(
        default_factory=lambda: HiStateSettings(), description="The section with HiState's own settings."
    )

    _origins: dict[str, str] = PrivateAttr(default_factory=dict)
    _ignored: tuple[str, ...] = PrivateAttr(default=())
    _source: str = PrivateAttr(default="")

    @model_validator(mode="after")
    def _tiers(self) -> Self:
        if self.max_local_cpu_size <= 0:
            raise _problem(
                "max_local_cpu_size",
                "the cache needs some CPU memory, also when it is only a buffer (local_cpu: false). Give it at least "
                "a few GiB.",
            )
        if self.local_disk is not None and self.max_local_disk_size <= 0:
            raise _problem(
                "local_disk",
                "a folder without a size. Add max_local_disk_size, the space it may use in GiB.",
            )
        if self.local_disk is None and self.max_local_disk_size > 0:
            raise _problem(
                "max_local_disk_size",
                "a size without a folder. Add local_disk, for example file:///mnt/nvme/histate, or remove the size.",
            )
        if not self.local_cpu and self.local_disk is None and self.remote_url is None and not self.l2_adapters:
            raise _problem(
                "local_cpu",
                "false leaves nothing to cache in. Set it to true, or add local_disk, remote_url or l2_adapters.",
            )
        if not self.local_cpu and self.local_disk is None and self.histate.offer_to_remote == "none":
            raise _problem(
                "histate.offer_to_remote",
                "none leaves nothing to cache in, with local_cpu: false and without local_disk. Set local_cpu to true, "
                "add local_disk, or let the remote tier be written to.",
            )
        if self.histate.write_through and self.local_disk is None:
            raise _problem(
                "histate.write_through",
                "there is no disk to write to. Add local_disk and max_local_disk_size, or set it to false.",
            )
        return self

    def __eq__(self, other: object) -> bool:
        """Whether the settings are equal, wherever they came from."""
        return isinstance(other, Config) and self.model_dump() == other.model_dump()

    __hash__ = None  # type: ignore[assignment]  # adapter objects are dictionaries

    def origin(self, key: str) -> str:
        """Where the value of `key` came from: ``cache.yaml:12``, ``environment HISTATE_INTERVAL`` or ``default``.

        `key` is dotted: ``max_local_cpu_size``, ``histate.interval``. Raises ``KeyError`` for an unknown key.
        """
        if key not in SETTINGS:
            raise KeyError(key)
        return self._origins.get(key, "default")

    @property
    def ignored(self) -> tuple[str, ...]:
        """One text for every key of the file that has no meaning here and was passed over; worth a warning in a log."""
        return self._ignored

    @property
    def source(self) -> str:
        """The file that the configuration came from, ``histate`` for the defaults, or an empty text."""
        return self._source

    @property
    def endpoints(self) -> tuple[values.Endpoint, ...]:
        """Host and port of every server in ``server_url``."""
        return values.parse_endpoints(self.server_url)

    @property
    def starts_server(self) -> bool:
        """Whether vLLM is to start the server: autostart is on and ``server_url`` is one address on this machine."""
        endpoints = self.endpoints
        return self.histate.autostart and len(endpoints) == 1 and endpoints[0].host in values.LOCAL_HOSTS

    def value(self, key: str) -> Any:
        """The value of the dotted `key`; raises ``KeyError`` for an unknown key."""
        if key not in SETTINGS:
            raise KeyError(key)
        return getattr(self.histate, key.removeprefix("histate.")) if "." in key else getattr(self, key)

    def replaced(self, origin: str, **values: Any) -> Self:
        """A copy with some top-level settings replaced, for which :meth:`origin` says `origin`.

        Raises ``ValidationError`` for wrong values.
        """
        copy = self.model_validate({**self.model_dump(), **values})
        copy._origins.update(self._origins, **dict.fromkeys(values, origin))
        copy._ignored = self._ignored
        copy._source = self._source
        return copy

    def to_json(self) -> dict[str, Any]:
        """The settings as plain JSON values, passwords included. :meth:`from_json` turns them back."""
        return self.model_dump(mode="json")

    @classmethod
    def from_json(cls, data: Mapping[str, Any], environ: Mapping[str, str] | None = None) -> Self:
        """The settings that :meth:`to_json` (or the server module's ``config`` object) described.

        `environ` supplies what is not written on command lines, the password of ``histate.directory``: see
        :func:`lmcache_histate.backends.arguments.server_environment`. Raises ``ValidationError`` for wrong values.
        """
        data = dict(data)
        directory = (environ or {}).get("HISTATE_DIRECTORY", "").strip()
        section = dict(data.get("histate") or {})
        if directory and section.get("directory"):
            data["histate"] = {**section, "directory": directory}
        return cls.model_validate(data)

    def remote_credentials(self) -> tuple[str, str]:
        """User and password in ``remote_url``, empty texts when there are none."""
        return credentials(self.remote_url) if self.remote_url else ("", "")


def _problem(key: str, text: str) -> PydanticCustomError:
    """A problem found by comparing settings, which pydantic itself could not attribute to one of them."""
    return PydanticCustomError("histate", "{key}: {text}", {"key": key, "text": text})


SETTINGS: dict[str, str] = {
    **{name: field.description or "" for name, field in Config.model_fields.items() if name != "histate"},
    **{f"histate.{name}": field.description or "" for name, field in HiStateSettings.model_fields.items()},
}
"""Every setting, by dotted key, with its description."""


def default_of(key: str) -> Any:
    """The default value of the dotted `key`."""
    model = HiStateSettings if key.startswith("histate.") else Config
    return model.model_fields[key.removeprefix("histate.")].get_default(call_default_factory=True)
