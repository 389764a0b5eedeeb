"""Processes that a run starts, and the promise that none of them outlives it (Linux).

Everything is started inside a `ProcessScope`. The scope marks each process through its environment, so that it finds
all descendants again, even those whose parent died or that moved to a session of their own, and never touches a process
that it did not start. On leaving, whatever the reason, the processes are ended and their shared memory is unlinked.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
import uuid
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType, TracebackType
from typing import IO, Any

_MARK = "REPLAY_RUN_MARK"
_SHARED_MEMORY = Path("/dev/shm")
# What LMCache calls the segments that a CPU engine's cache moves to, and the one of a server's memory pool.
_SHARED_MEMORY_PATTERNS = ("lmcache_kv_{pid}_*", "lmcache_l1_pool_{pid}")
# The segments that one engine's worker processes exchange tensors through; no pid is in their names.
_WORKERS_SEGMENTS = str(_SHARED_MEMORY / "vllm_dist_")


class StartError(RuntimeError):
    """A process did not come up; the message holds the end of its log."""


class Terminated(SystemExit):
    """SIGTERM or SIGHUP arrived; raised in the main thread so that scopes unwind as they do on Ctrl-C."""


def free_ports(count: int) -> list[int]:
    """Find TCP ports on the loopback interface that nothing listens on now.

    Args:
        count: How many.

    Returns:
        Distinct ports. Another process can still take one before it is used.
    """
    sockets = [socket.socket() for _ in range(count)]
    try:
        for item in sockets:
            item.bind(("127.0.0.1", 0))
        return [int(item.getsockname()[1]) for item in sockets]
    finally:
        for item in sockets:
            item.close()


@contextlib.contextmanager
def unwinding_on_signals() -> Iterator[None]:
    """Turn SIGTERM and SIGHUP into `Terminated`, so that ``with`` blocks clean up; main thread only."""

    def handler(number: int, frame: FrameType | None) -> None:
        raise Terminated(128 + number)

    previous = {number: signal.signal(number, handler) for number in (signal.SIGTERM, signal.SIGHUP)}
    try:
        yield
    finally:
        for number, old in previous.items():
            signal.signal(number, old)


def child_environment(extra: Mapping[str, str] | None = None) -> dict[str, str]:
    """The environment for a Python child: ours, offline, without usage reports, and with bytecode cached.

    Importing vLLM without cached bytecode costs eight seconds of CPU, so where writing it beside the sources is
    switched off it goes to a cache folder instead. A cache that the caller's shell is configured for is left out: what
    a child uses is said in `extra`.

    Args:
        extra: Variables that win over all others.

    Returns:
        A new mapping.
    """
    environment = dict(os.environ)
    for name in ("LMCACHE_CONFIG", "LMCACHE_CONFIG_FILE"):
        environment.pop(name, None)
    if environment.pop("PYTHONDONTWRITEBYTECODE", ""):
        environment.setdefault("PYTHONPYCACHEPREFIX", str(cache_folder() / "pycache"))
    environment.update(
        HF_HUB_OFFLINE="1",
        VLLM_NO_USAGE_STATS="1",
        LMCACHE_TRACK_USAGE="false",
        LMCACHE_DISABLE_BANNER="1",
        PYTHONUNBUFFERED="1",
    )
    environment.update(extra or {})
    return environment


def cache_folder() -> Path:
    """Where models and bytecode are kept between runs: ``$XDG_CACHE_HOME/histate``, else ``~/.cache/histate``."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "histate"


def _die_with_parent() -> None:
    """Ask Linux to send SIGTERM to this child when the thread that started it is gone (even after a SIGKILL)."""
    pr_set_pdeathsig = 1
    ctypes.CDLL(None).prctl(pr_set_pdeathsig, signal.SIGTERM)


@dataclass
class ProcessScope:
    """Starts processes and ends every one of them, with all descendants, when left.

    Attributes:
        grace_s: Seconds that processes get to end after SIGTERM, before SIGKILL.
    """

    grace_s: float = 10.0
    _mark: str = field(default_factory=lambda: uuid.uuid4().hex, init=False)
    _started: list[subprocess.Popen[bytes]] = field(default_factory=list, init=False)
    _seen: set[int] = field(default_factory=set, init=False)
    _mapped: set[Path] = field(default_factory=set, init=False)
    _open: list[IO[bytes]] = field(default_factory=list, init=False)

    def __enter__(self) -> ProcessScope:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        # A second Ctrl-C must not leave half of them behind: it is held back until the work is done.
        with _holding_back(signal.SIGINT, signal.SIGTERM):
            self.stop_all()

    def start(
        self,
        argv: Sequence[str],
        log: Path,
        environment: Mapping[str, str] | None = None,
        stdin: int = subprocess.DEVNULL,
        stdout: int | None = None,
    ) -> subprocess.Popen[bytes]:
        """Start a process in a session of its own, so that Ctrl-C reaches us alone and we end it in order.

        Args:
            argv: The command line.
            log: File that its standard output and error are appended to.
            environment: The whole environment; `child_environment()` if None.
            stdin: As `subprocess.Popen` takes it.
            stdout: As `subprocess.Popen` takes it; the log if None.

        Returns:
            The process.
        """
        log.parent.mkdir(parents=True, exist_ok=True)
        variables = dict(child_environment() if environment is None else environment)
        variables[_MARK] = self._mark
        # vLLM names its worker processes, and the library it does that with would write over the mark.
        variables["SPT_NOENV"] = "1"
        with log.open("ab") as sink:
            process = subprocess.Popen(
                list(argv),
                stdin=stdin,
                stdout=sink if stdout is None else stdout,
                stderr=sink,
                env=variables,
                start_new_session=True,
                preexec_fn=_die_with_parent if sys.platform == "linux" else None,
            )
        self._started.append(process)
        self._seen.add(process.pid)
        return process

    def pids(self) -> set[int]:
        """Every living process of this scope, descendants included."""
        wanted = f"{_MARK}={self._mark}".encode()
        found = set()
        for entry in Path("/proc").iterdir():
            if entry.name.isdigit() and int(entry.name) != os.getpid():
                with contextlib.suppress(OSError):
                    if wanted in (entry / "environ").read_bytes().split(b"\0"):
                        found.add(int(entry.name))
                        self._mapped |= _workers_segments(entry)
        self._seen |= found
        return found

    def stop(self, process: subprocess.Popen[bytes]) -> None:
        """End one process (SIGTERM, then SIGKILL); its descendants end with the scope at the latest.

        Args:
            process: One that `start` returned.
        """
        self.pids()  # remember its descendants while their shared memory can still be told apart
        _signal(process.pid, signal.SIGTERM)
        try:
            process.wait(self.grace_s)
        except subprocess.TimeoutExpired:
            _signal(process.pid, signal.SIGKILL)
            process.wait(5)
        self._unlink_shared_memory()

    def stop_all(self) -> None:
        """End everything; called on leaving the scope."""
        for pid in self.pids():
            _signal(pid, signal.SIGTERM)
        deadline = time.monotonic() + self.grace_s
        while self._alive() and time.monotonic() < deadline:
            time.sleep(0.05)
        deadline = time.monotonic() + 5
        while (alive := self._alive()) and time.monotonic() < deadline:
            for pid in alive:
                _signal(pid, signal.SIGKILL)
            time.sleep(0.05)
        self._unlink_shared_memory()

    def _alive(self) -> set[int]:
        for process in self._started:
            process.poll()  # reaps it, or it would stay in /proc
        return self.pids()

    def _unlink_shared_memory(self) -> None:
        """Remove the segments of processes of ours that are gone; a killed engine cannot unlink them itself."""
        alive = self._alive()
        for pid in self._seen - alive:
            for pattern in _SHARED_MEMORY_PATTERNS:
                for segment in _SHARED_MEMORY.glob(pattern.format(pid=pid)):
                    segment.unlink(missing_ok=True)
        in_use = {segment for pid in alive for segment in _workers_segments(Path(f"/proc/{pid}"))}
        for segment in self._mapped - in_use:
            segment.unlink(missing_ok=True)


def _workers_segments(process: Path) -> set[Path]:
    """Segments of vLLM's worker processes that the process with this folder in /proc has mapped."""
    try:
        lines = (process / "maps").read_text(errors="replace").splitlines()
    except OSError:
        return set()
    return {Path(line[line.index(_WORKERS_SEGMENTS) :]) for line in lines if _WORKERS_SEGMENTS in line}


@contextlib.contextmanager
def _holding_back(*numbers: signal.Signals) -> Iterator[None]:
    try:
        old = signal.pthread_sigmask(signal.SIG_BLOCK, numbers)
    except (AttributeError, ValueError):
        yield
        return
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, old)


def _signal(pid: int, number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.kill(pid, number)


def log_tail(log: Path, lines: int = 30) -> str:
    """The last lines of a log, for error messages.

    Args:
        log: The file; a missing one gives an empty text.
        lines: How many.
    """
    try:
        return "\n".join(log.read_text(errors="replace").splitlines()[-lines:])
    except OSError:
        return ""


def http_json(url: str, body: Any = None, timeout_s: float = 5.0) -> Any:
    """GET a URL, or POST a JSON body to it, and parse the JSON answer.

    Args:
        url: An address on this machine.
        body: What to post; None for a GET.
        timeout_s: Seconds to wait.

    Raises:
        OSError: No answer, or an HTTP error.
    """
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url, data=data, headers={"Content-Type": "application/json"})
    # Proxies of the environment are for the world outside, not for this machine.
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    with opener.open(request, timeout=timeout_s) as answer:
        return json.loads(answer.read() or b"null")


def wait_until_healthy(process: subprocess.Popen[bytes], url: str, log: Path, timeout_s: float = 120.0) -> None:
    """Wait until a URL answers.

    Args:
        process: The process behind it.
        url: Its health check.
        log: Its log, quoted when it fails.
        timeout_s: Seconds before giving up.

    Raises:
        StartError: The process ended, or the time is over.
    """
    deadline = time.monotonic() + timeout_s
    while True:
        if process.poll() is not None:
            raise StartError(f"process ended with status {process.returncode}; end of {log}:\n{log_tail(log)}")
        try:
            http_json(url)
            return
        except (OSError, ValueError):
            if time.monotonic() > deadline:
                raise StartError(
                    f"{url} did not answer within {timeout_s:.0f} s; end of {log}:\n{log_tail(log)}"
                ) from None
        time.sleep(0.1)
