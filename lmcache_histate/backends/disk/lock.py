"""Who may use a folder: an advisory lock (`flock`) on the file `LOCK` in it.

The kernel drops the lock when its holder dies, so that a crash leaves nothing to clean up.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import socket
from pathlib import Path

LOCK_FILE = "LOCK"


class FolderInUseError(RuntimeError):
    """Another server holds the folder in a way that excludes this one."""


def same_file(path: Path, fd: int) -> bool:
    """Whether the file of this name is the one that is open as `fd`."""
    try:
        there, held = os.stat(path), os.fstat(fd)
    except OSError:
        return False
    return (there.st_dev, there.st_ino) == (held.st_dev, held.st_ino)


class FolderLock:
    """Hold a folder alone, or together with other servers that declare it shared.

    Args:
        root: An existing folder.
        shared: Whether other servers that also say `shared` may use it at the same time.

    Raises:
        FolderInUseError: another process holds it, and at least one of the two wants it alone.
        OSError: the lock file cannot be created.
    """

    def __init__(self, root: Path, shared: bool) -> None:
        self._root = root
        self._shared = shared
        self._fd = -1
        self.acquire()

    def acquire(self) -> None:
        """Take the lock, again if it was held before (the folder may have been deleted and made anew)."""
        fd = os.open(self._root / LOCK_FILE, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            fcntl.flock(fd, (fcntl.LOCK_SH if self._shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
        except OSError as e:
            holder = os.pread(fd, 200, 0).decode(errors="replace").strip() or "another process"
            os.close(fd)
            if not isinstance(e, BlockingIOError):
                raise
            raise FolderInUseError(
                f"{self._root} is in use by {holder}. Give every server its own folder, or declare this one shared "
                f'on every server that uses it (histate.local_disk_shared: true; "shared": true in adapter_params where '
                "the disk tier is used alone)."
            ) from None
        note = f"{'shared, last opened by ' if self._shared else ''}pid {os.getpid()} on {socket.gethostname()}\n"
        with contextlib.suppress(OSError):  # the text only helps a human; the lock is what counts
            os.ftruncate(fd, 0)
            os.pwrite(fd, note.encode(), 0)
        self.release()
        self._fd = fd

    def still_ours(self) -> bool:
        """Whether the lock file under the folder's name is still the one that is held."""
        return same_file(self._root / LOCK_FILE, self._fd)

    def release(self) -> None:
        """Give the folder up. Doing so twice is harmless."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


class Scratch:
    """A process's own folder for temporary files, `tmp/<token>`, whose `owner` file it keeps locked while it lives.

    A folder whose owner file can be locked belongs to a dead process, and everything in it is a leftover.
    """

    def __init__(self, root: Path) -> None:
        self.token = (
            int.from_bytes(os.urandom(7), "little") or 1
        )  # seven bytes: fits sqlite's and struct's signed 64 bits
        self.folder = root / "tmp" / f"{self.token:014x}"
        self._fd = -1
        self.create()

    def create(self) -> None:
        """Make the folder and its owner file (again, if somebody deleted it)."""
        if self._fd >= 0 and same_file(self.folder / "owner", self._fd):
            return
        self.folder.mkdir(parents=True, exist_ok=True)
        fd = os.open(self.folder / "owner", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        fcntl.flock(fd, fcntl.LOCK_EX)
        if self._fd >= 0:
            os.close(self._fd)
        self._fd = fd

    def remove(self) -> None:
        """Give the folder up and delete it."""
        with contextlib.suppress(OSError):
            shutil.rmtree(self.folder)
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


def sweep_scratch(root: Path) -> tuple[set[int], int]:
    """Delete the temporary folders of dead processes.

    Call it while nobody creates one: under the folder lock when the folder is not shared, under the ledger's when it
    is.

    Returns:
        Tokens of the dead, and the number of files that they left.
    """
    dead: set[int] = set()
    files = 0
    for folder in sorted((root / "tmp").glob("*")):
        if not scratch_is_dead(folder):
            continue
        left = [p for p in folder.iterdir() if p.name != "owner"] if folder.is_dir() else []
        with contextlib.suppress(ValueError):
            dead.add(int(folder.name, 16))
        files += len(left)
        shutil.rmtree(folder, ignore_errors=True)
    return dead, files


def scratch_is_dead(folder: Path) -> bool:
    """Whether a temporary folder belongs to no living process."""
    try:
        fd = os.open(folder / "owner", os.O_RDWR | os.O_CLOEXEC)
    except FileNotFoundError:
        return True
    except OSError:
        return False
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    finally:
        os.close(fd)
    return True
