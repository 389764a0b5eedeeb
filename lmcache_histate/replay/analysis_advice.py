"""From what a trace needs to a configuration, with the reason for every value."""

from __future__ import annotations

import math
import textwrap

import msgspec

from lmcache_histate.config.model import default_of
from lmcache_histate.geometry import GIB, MIB, CacheGeometry
from lmcache_histate.replay.analysis import Analysis

FOLDER = "file:///mnt/nvme/histate"
"""Stands for the user's SSD."""

INTERVAL_GAIN = 0.0005
"""Share of all prompt tokens that snapshots inside turns must save before they are recommended."""


class Setting(msgspec.Struct, frozen=True):
    """One line of a configuration: `key` dotted as in `histate config`, and why it has this value."""

    key: str
    value: str | int
    reason: str


def advise(
    analysis: Analysis, geometry: CacheGeometry, cpu_budget: float | None = None, folder: str = FOLDER
) -> list[Setting]:
    """A configuration for a trace.

    Args:
        analysis: Of the trace.
        geometry: Of the model.
        cpu_budget: Most bytes of CPU memory that may be recommended; what does not fit goes to disk.
        folder: `local_disk`.
    """
    need = analysis.working_set
    usable = float(default_of("histate.cpu_high_watermark"))
    hot = need.kv.p90 + need.final_snapshots.p90
    most = need.kv.most + need.final_snapshots.most
    cpu = max(1, math.ceil(hot / usable / GIB))
    cut = cpu_budget is not None and cpu_budget < cpu * GIB
    if cut:
        assert cpu_budget is not None
        cpu = max(1, math.floor(cpu_budget / GIB))
    overflow = max(0.0, most - cpu * GIB * usable)
    disk = max(1, math.ceil((need.historical_snapshots.p90 + overflow) * 1.1 / GIB))
    held = (
        f"At nine of ten requests, {gib(need.kv.p90)} of KV and {gib(need.final_snapshots.p90)} of newest snapshots "
        f"({need.live_streams.p90:.0f} live streams, {geometry.snapshot_bytes / MIB:.1f} MiB each) or less are needed again"
    )
    room = f"eviction starts at {usable:.0%} of this size"
    writes = need.all_snapshots / max(analysis.seconds, 1.0) * 86400
    return [
        Setting(
            "chunk_size",
            "auto",
            f"The model's block size; {geometry.block_tokens} tokens here ({analysis.block_tokens} in this analysis).",
        ),
        Setting(
            "max_local_cpu_size",
            cpu,
            f"{held}; {room}. " + (f"More than the budget of {cpu} GiB: the rest goes to disk." if cut else
            f"At the peak it is {gib(most)}: {gib(overflow)} of that goes to disk."),
        ),
        Setting("local_disk", folder, "A folder on an SSD: a hit reads one historical snapshot, and all of the KV."),
        Setting(
            "max_local_disk_size",
            disk,
            f"Historical snapshots of live streams take {gib(need.historical_snapshots.p90)} at nine of ten requests, what "
            f"does not fit CPU memory {gib(overflow)}; a tenth more for what is on its way out. Snapshots are written at "
            f"up to {gib(writes)} a day; histate.max_disk_writes_per_day limits it.",
        ),
        *([_interval(analysis)] if geometry.snapshot_bytes else []),
        Setting("histate.tau", "auto", _gaps(analysis)),
    ]  # fmt: skip


def _interval(analysis: Analysis) -> Setting:
    bounds, hits = analysis.bounds, analysis.hits
    junctions = bounds["ends and junctions"]
    best = max(share for name, share in bounds.items() if name.startswith("ends and every"))
    gain = best - junctions
    inside = (
        f"{hits.inside:,} of {analysis.requests:,} requests ({hits.inside / analysis.requests:.1%}) hit inside a turn"
    )
    if gain < INTERVAL_GAIN:
        return Setting(
            "histate.interval",
            "final-only",
            f"{inside}, and snapshots inside turns would save {gain:.2%} of all prompt tokens at most: less than they are "
            "worth. Requests of other kinds need adaptive, the default.",
        )
    return Setting(
        "histate.interval",
        "adaptive",
        f"{inside}. With snapshots at ends and junctions alone, {hits.recomputed_junctions:,} matched tokens "
        f"({hits.recomputed_junctions / analysis.prompt_tokens:.2%} of all) are computed again; snapshots inside turns save "
        f"up to {gain:.2%} of all. The paper's rule would start at {analysis.working_set.interval_tokens:,} tokens here.",
    )


def _gaps(analysis: Analysis) -> str:
    gaps = analysis.gap_seconds
    return (
        f"Half of the requests follow the answer before within {gaps.p50:,.0f} s, one in a hundred after more than "
        f"{gaps.p99:,.0f} s: no fixed value suits both, so it follows what the cache sees."
    )


def gib(nbytes: float) -> str:
    """Bytes for readers."""
    return f"{nbytes / GIB:,.1f} GiB"


def to_yaml(settings: list[Setting], title: str) -> str:
    """The configuration as a file, reasons as comments."""
    lines = [*_comment(title, ""), ""]
    section = [setting for setting in settings if setting.key.startswith("histate.")]
    for setting in settings:
        if setting in section:
            continue
        lines += [*_comment(setting.reason, ""), f"{setting.key}: {setting.value}"]
    if section:
        lines.append("histate:")
    for setting in section:
        lines += [*_comment(setting.reason, "  "), f"  {setting.key.removeprefix('histate.')}: {setting.value}"]
    return "\n".join(lines) + "\n"


def _comment(text: str, indent: str) -> list[str]:
    return textwrap.wrap(text, 100, initial_indent=f"{indent}# ", subsequent_indent=f"{indent}# ")
