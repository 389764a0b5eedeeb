"""Sizes and folders against the machine, without creating anything."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from lmcache_histate.config import Config, ConfigError, check_machine
from lmcache_histate.config.machine import cgroup_limits, memory_limit
from lmcache_histate.config.values import GIB


def test_a_fitting_configuration_passes_and_creates_nothing(tmp_path: Path) -> None:
    folder = tmp_path / "not" / "yet"
    check_machine(Config(max_local_cpu_size=0.1, local_disk=str(folder), max_local_disk_size=0.001))
    assert list(tmp_path.iterdir()) == []
    folder.mkdir(parents=True)
    check_machine(Config(max_local_cpu_size=0.1, local_disk=str(folder), max_local_disk_size=0.001))
    assert list(folder.iterdir()) == []


def test_more_memory_than_there_is() -> None:
    with pytest.raises(
        ConfigError, match=r"default: max_local_cpu_size: .* is more than the .* of memory here. Lower it"
    ):
        check_machine(Config(max_local_cpu_size=memory_limit() / GIB * 1.01))
    check_machine(Config(max_local_cpu_size=memory_limit() / GIB * 0.99))


def test_the_memory_limit_is_at_most_the_machines() -> None:
    assert 0 < memory_limit() <= os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


@pytest.mark.parametrize(
    ("listing", "files", "limits"),
    [
        # version 2: a parent's limit holds for the child as well
        ("0::/pod/app\n", {"pod/app/memory.max": "max\n", "pod/memory.max": "4096\n"}, [4096]),
        # in a container the path is the host's, and the root is the container's own group
        ("0::/kubepods/x\n", {"memory.max": "8192\n"}, [8192]),
        ("5:cpu,memory:/a\n1:name=systemd:/\n", {"memory/a/memory.limit_in_bytes": "77\n"}, [77]),
        ("0::/\n4:memory:/a\n", {"memory/a/memory.limit_in_bytes": "7\n", "memory/memory.limit_in_bytes": "9"}, [7, 9]),
        ("0::/\n", {}, []),
    ],
)
def test_limits_of_control_groups(tmp_path: Path, listing: str, files: dict[str, str], limits: list[int]) -> None:
    (tmp_path / "cgroup").write_text(listing)
    for name, text in files.items():
        path = tmp_path / "mount" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    assert cgroup_limits(tmp_path / "cgroup", tmp_path / "mount") == limits
    assert cgroup_limits(tmp_path / "absent", tmp_path / "mount") == []


def test_more_disk_than_there_is(tmp_path: Path) -> None:
    free = shutil.disk_usage(tmp_path).free / GIB
    with pytest.raises(ConfigError, match=r"max_local_disk_size: .* does not fit: the file system of .* Lower it"):
        check_machine(Config(max_local_cpu_size=0.1, local_disk=str(tmp_path / "new"), max_local_disk_size=free + 1000))


def test_what_the_folder_already_holds_counts_as_room(tmp_path: Path) -> None:
    held = 64 << 20
    with open(tmp_path / "data", "wb") as file:
        os.posix_fallocate(file.fileno(), 0, held)
    status = os.statvfs(tmp_path)
    free = status.f_bavail * status.f_frsize
    # Other processes write to the same file system: half of what is held is margin enough on both sides.
    check_machine(Config(max_local_cpu_size=0.1, local_disk=str(tmp_path), max_local_disk_size=(free + held / 2) / GIB))
    with pytest.raises(ConfigError, match="already holds 64 MiB"):
        check_machine(
            Config(max_local_cpu_size=0.1, local_disk=str(tmp_path), max_local_disk_size=(free + held * 4) / GIB)
        )


@pytest.mark.parametrize("below", ["", "sub/folder"])
def test_a_file_in_place_of_the_folder(tmp_path: Path, below: str) -> None:
    (tmp_path / "file").write_text("x")
    with pytest.raises(ConfigError, match=r"local_disk: .*/file is a file, not a folder"):
        check_machine(
            Config(max_local_cpu_size=0.1, local_disk=str(tmp_path / "file" / below), max_local_disk_size=0.001)
        )


@pytest.mark.parametrize("folder", ["/proc", "/proc/new"])
def test_a_folder_that_cannot_be_written(folder: str) -> None:
    if folder == "/proc/new" and os.geteuid() == 0:
        pytest.skip("root has every permission bit; only an attempt would tell")
    with pytest.raises(ConfigError, match=r"local_disk: cannot write in /proc .*Name another folder"):
        check_machine(Config(max_local_cpu_size=0.1, local_disk=folder, max_local_disk_size=0.001))


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root to become another user")
def test_a_folder_of_another_user(tmp_path: Path) -> None:
    code = (
        "import os, sys\n"
        "from lmcache_histate.config import Config, ConfigError, check_machine\n"
        "os.setgid(65534); os.setuid(65534)\n"
        "for path in sys.argv[1:]:\n"
        "    try:\n"
        "        check_machine(Config(max_local_cpu_size=0.1, local_disk=path, max_local_disk_size=0.001))\n"
        "    except ConfigError as error:\n"
        "        print(error)\n"
    )
    tmp_path.chmod(0o755)
    done = subprocess.run(
        [sys.executable, "-c", code, "/opt", "/opt/new"], capture_output=True, text=True, check=True, timeout=60
    )
    lines = done.stdout.splitlines()
    assert len(lines) == 2
    assert all("cannot write in /opt (Permission denied)" in line for line in lines)


def test_the_shared_folder_is_checked_too(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    with pytest.raises(ConfigError, match=r"remote_url: .* is a file"):
        check_machine(Config(max_local_cpu_size=0.1, remote_url=f"file://{tmp_path}/file"))


def test_all_problems_at_once(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    config = Config(max_local_cpu_size="900TiB", local_disk=str(tmp_path / "file"), max_local_disk_size=1)
    with pytest.raises(ConfigError) as caught:
        check_machine(config)
    assert len(caught.value.problems) == 2
