"""Files of a trace: found, opened (packed or not), read line by line; lines that are no good are counted."""

from __future__ import annotations

import gzip
import io
import logging
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Annotated

import msgspec

logger = logging.getLogger(__name__)

SUFFIXES = (".json", ".jsonl", ".ndjson", ".json.gz", ".jsonl.gz", ".ndjson.gz")
"""What is read of a folder; a file that is named itself may have any name."""

_GZIP_MAGIC = b"\x1f\x8b"

Count = Annotated[int, msgspec.Meta(ge=0, le=(1 << 62))]
"""A number in a trace that counts or names something."""


class TraceError(ValueError):
    """A trace that cannot be read; the message says which file and line, and what is wrong."""


@dataclass
class BadLines:
    """Counts lines that were skipped, and gives up when there are too many.

    Attributes:
        limit: Skipped lines that are tolerated.
        report: Called with a message for every skipped line.
        count: Skipped so far.
    """

    limit: int = 100
    report: Callable[[str], None] = logger.warning
    count: int = 0

    def skip(self, path: Path, line: int, reason: str) -> None:
        """Take note of a line that is skipped.

        Raises:
            TraceError: More than `limit` were skipped.
        """
        self.count += 1
        self.report(f"{path}, line {line}: skipped: {reason}")
        if self.count > self.limit:
            raise TraceError(
                f"{path}, line {line}: {self.count} bad lines, the last one: {reason}. That is more than the limit of "
                f"{self.limit}: is this the right file? A higher limit lets it pass."
            )


@dataclass(frozen=True)
class Source:
    """The files of one trace.

    Attributes:
        paths: In the order in which they are read.
        bad_lines: Where skipped lines go.
        on_progress: Called with the bytes of the files (as they lie on disk) read since the last call.
    """

    paths: Sequence[Path]
    bad_lines: BadLines = field(default_factory=BadLines)
    on_progress: Callable[[int], None] | None = None

    def lines(self, path: Path) -> Iterator[tuple[int, bytes]]:
        """The lines of a file that are not blank, with their numbers from 1. Holds one line at a time in memory."""
        number = 0
        with path.open("rb") as raw:
            seen = 0
            try:
                for line in _unpacked(raw):
                    number += 1
                    if line.strip():
                        yield number, line
                    # A read of the packed file is far larger than a line: tell() changes rarely.
                    if self.on_progress is not None and (at := raw.tell()) != seen:
                        self.on_progress(at - seen)
                        seen = at
            except (EOFError, zlib.error, gzip.BadGzipFile) as error:
                self.bad_lines.skip(path, number + 1, f"the rest of the file cannot be unpacked ({error})")
            if self.on_progress is not None:
                self.on_progress(path.stat().st_size - seen)


def find_files(paths: Sequence[str | Path]) -> list[Path]:
    """The files that are meant by files and folders; of a folder, those with a name of `SUFFIXES`, by name.

    Raises:
        TraceError: Something does not exist, or a folder holds no such file.
    """
    files: list[Path] = []
    for name in paths:
        path = Path(name)
        if path.is_dir():
            found = sorted(entry for entry in path.rglob("*") if entry.name.lower().endswith(SUFFIXES))
            if not found:
                raise TraceError(f"{path}: no file in this folder ends in one of {', '.join(SUFFIXES)}")
            files += found
        elif path.exists():
            files.append(path)
        else:
            raise TraceError(f"{path}: there is no such file or folder")
    if not files:
        raise TraceError("no trace was named: give a file, a folder, or a built-in workload such as builtin:agents")
    return list(dict.fromkeys(files))


def first_lines(path: Path, count: int, most: int) -> list[bytes]:
    """Up to `count` lines from the beginning of a file that are not blank, each cut after `most` bytes.

    Raises:
        TraceError: The file cannot be read or unpacked.
    """
    found: list[bytes] = []
    try:
        with path.open("rb") as raw:
            unpacked = _unpacked(raw)
            while len(found) < count and (line := unpacked.readline(most)):
                if line.strip():
                    found.append(line)
                if not line.endswith(b"\n"):
                    break  # cut, or the file ends: what follows is no line's beginning
    except (OSError, EOFError, zlib.error) as error:
        if not found:
            raise TraceError(f"{path}: cannot be read ({error})") from error
    return found


def _unpacked(raw: IO[bytes]) -> IO[bytes]:
    """The file as plain bytes, whatever its name says."""
    packed = raw.read(len(_GZIP_MAGIC)) == _GZIP_MAGIC
    raw.seek(0)
    return io.BufferedReader(gzip.GzipFile(fileobj=raw), 1 << 18) if packed else raw
