"""Does the configuration fit this machine: memory, disk space, writable folders."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

from lmcache_histate.config.errors import ConfigError
from lmcache_histate.config.model import Config
from lmcache_histate.config.remote import remote_adapter
from lmcache_histate.config.values import GIB, format_gib


def check_machine(config: Config) -> None:
    """Raise :class:`ConfigError` if this machine cannot give what `config` asks for.

    Looks at physical memory and control-group limits, at the file systems of ``local_disk`` and of a ``file://``
    ``remote_url``, and tries to write where a folder exists already. It creates no folder.
    """
    problems = [*_memory_problems(config), *_disk_problems(config)]
    if problems:
        raise ConfigError(problems)


def memory_limit() -> int:
    """Bytes of memory that this process may use: the machine's, or less where a control group (container) says so."""
    return min([os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"), *cgroup_limits()])


def cgroup_limits(listing: Path = Path("/proc/self/cgroup"), mount: Path = Path("/sys/fs/cgroup")) -> list[int]:
    """Memory limits of this process's control groups and of their parents, in bytes (versions 1 and 2)."""
    limits = []
    try:
        groups = listing.read_text().splitlines()
    except OSError:
        return []
    for line in groups:
        _, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if not controllers:
            root, name = mount, "memory.max"
        elif "memory" in controllers.split(","):
            root, name = mount / "memory", "memory.limit_in_bytes"
        else:
            continue
        # Inside a container the path may be the host's and not exist here; the root is then the container's own.
        folder = root / path.lstrip("/")
        for candidate in [folder, *folder.parents]:
            if candidate != root and root not in candidate.parents:
                break
            try:
                limits.append(int((candidate / name).read_text()))
            except (OSError, ValueError):  # absent, or "max"
                continue
    return limits


def _memory_problems(config: Config) -> list[str]:
    limit = memory_limit()
    if config.max_local_cpu_size * GIB <= limit:
        return []
    return [
        f"{_where(config, 'max_local_cpu_size')}: {format_gib(config.max_local_cpu_size)} is more than the "
        f"{format_gib(limit / GIB)} of memory here. Lower it, and leave room for vLLM itself."
    ]


def _disk_problems(config: Config) -> list[str]:
    problems = []
    if config.local_disk is not None:
        folder = Path(config.local_disk)
        problem = _folder_problem(folder) or _space_problem(folder, config.max_local_disk_size)
        if problem:
            key = "max_local_disk_size" if "Lower" in problem else "local_disk"
            problems.append(f"{_where(config, key)}: {problem}")
    if config.remote_url is not None and config.remote_url.startswith("file:"):
        problem = _folder_problem(Path(remote_adapter(config.remote_url)["base_path"]))
        if problem:
            problems.append(f"{_where(config, 'remote_url')}: {problem}")
    return problems


def _where(config: Config, key: str) -> str:
    return f"{config.origin(key)}: {key}"


def _folder_problem(folder: Path) -> str | None:
    nearest = _nearest_existing(folder)
    if not nearest.is_dir():
        return f"{nearest} is a file, not a folder. Name another folder, or move the file away."
    try:
        if nearest == folder:
            # Only a real attempt knows about read-only mounts, quotas and access lists.
            with tempfile.TemporaryFile(dir=folder):
                return None
        read_only = bool(os.statvfs(nearest).f_flag & os.ST_RDONLY)
        if not read_only and os.access(nearest, os.W_OK | os.X_OK):
            return None
        reason = "Read-only file system" if read_only else "Permission denied"
    except OSError as error:
        reason = error.strerror or str(error)
    return f"cannot write in {nearest} ({reason}). Name another folder, or let this user write there."


def _space_problem(folder: Path, gib: float) -> str | None:
    status = os.statvfs(_nearest_existing(folder))
    free = status.f_bavail * status.f_frsize
    wanted = gib * GIB
    if wanted <= free:
        return None  # the usual case, without walking a folder that may hold a million files
    held = _bytes_in(folder)
    if wanted <= free + held:
        return None
    return (
        f"{format_gib(gib)} does not fit: the file system of {folder} has {format_gib(free / GIB)} free"
        + (f", and the folder already holds {format_gib(held / GIB)}" if held else "")
        + ". Lower it, or free some space."
    )


def _nearest_existing(folder: Path) -> Path:
    for candidate in [folder, *folder.parents]:
        if os.path.lexists(candidate):
            return candidate
    return folder


def _bytes_in(folder: Path) -> int:
    """Bytes on disk of the files below `folder`, which count as available to the cache that owns them."""
    total = 0
    for parent, _, names in os.walk(folder):
        for name in names:
            try:
                total += os.lstat(os.path.join(parent, name)).st_blocks * 512
            except OSError:
                continue  # removed meanwhile
    return total
