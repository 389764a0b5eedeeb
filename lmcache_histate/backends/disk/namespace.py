"""Namespaces: one folder per model and memory layout, so that neither two models nor two layouts ever meet."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from lmcache_histate.backends.disk.syncing import fsync_path

MANIFEST = "manifest.json"
FORMAT = 1

Layout = tuple[tuple[tuple[int, ...], str], ...]
"""Shapes and dtypes of an object's tensors, in order: ((shape, dtype), ...)."""


@dataclass(eq=False)
class Namespace:
    """A folder of records that all have one model and one layout. Compared by identity: the store makes one per
    folder.
    """

    name: str
    folder: Path
    model: str
    layout: Layout | None
    """`None` when the manifest was lost; the name still carries the fingerprint."""

    opaque: bool
    """Whether objects are plain bytes of a serializer's making, whose layout a lookup cannot know."""

    def __post_init__(self) -> None:
        self._base = f"{self.folder}/"

    def path(self, file_name: str) -> str:
        """Where the record of this name lives: 256 shards by the first two digits.

        A plain string: on the way of every store and load, `Path` objects cost more than the system calls they lead to.
        """
        return f"{self._base}{file_name[:2]}/{file_name}"


def namespace_name(model: str, layout: Layout, fingerprint: str) -> str:
    """Folder name for a model and layout: a readable part and 64 bits of digest over everything that matters."""
    content = json.dumps([FORMAT, model, layout, fingerprint], separators=(",", ":"))
    readable = re.sub(r"[^A-Za-z0-9._-]+", "-", model).strip("-.")[-64:] or "model"
    return f"{readable}-{hashlib.blake2b(content.encode(), digest_size=8).hexdigest()}"


def is_opaque(layout: Layout) -> bool:
    """Whether a layout is a flat run of bytes: what LMCache's serde wrapper hands to an adapter."""
    return len(layout) == 1 and len(layout[0][0]) == 1 and layout[0][1] == "torch.uint8"


def create(root: Path, model: str, layout: Layout, fingerprint: str) -> Namespace:
    """Make the namespace's folder and manifest, durably, or take them as they are.

    Raises:
        OSError: they cannot be written.
    """
    name = namespace_name(model, layout, fingerprint)
    folder = root / "ns" / name
    known = load(folder)
    if known is not None and known.layout is not None:
        return known
    make_folders(folder)
    write_manifest(folder, model, layout, fingerprint)
    for made in (folder, folder.parent, root):
        fsync_path(str(made))
    return Namespace(name, folder, model, layout, is_opaque(layout))


def make_folders(folder: Path) -> None:
    """Make a namespace's folder and all its shards: made one by one, each would cost the store that needs it two fsyncs.

    Raises:
        OSError: as the system says.
    """
    folder.mkdir(parents=True, exist_ok=True)
    for shard in range(256):
        (folder / f"{shard:02x}").mkdir(exist_ok=True)


def write_manifest(folder: Path, model: str, layout: Layout | None, fingerprint: str) -> None:
    """Write a namespace's manifest so that a crash leaves the old one or the new one.

    Raises:
        OSError: as the system says.
    """
    manifest = {
        "format": FORMAT,
        "model": model,
        "fingerprint": fingerprint,
        "layout": None if layout is None else [{"shape": list(shape), "dtype": dtype} for shape, dtype in layout],
        "created": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "about": "Objects of one model and one memory layout. Check this store with: histate fsck",
    }
    temporary = folder / f".{MANIFEST}.{os.urandom(6).hex()}"
    with open(temporary, "w", encoding="utf-8") as f:
        json.dump(manifest, f, indent=2)
        f.write("\n")
        f.flush()
        os.fsync(f.fileno())
    os.replace(temporary, folder / MANIFEST)


def load(folder: Path) -> Namespace | None:
    """The namespace whose manifest stands in `folder`; `None` if there is none that can be read."""
    try:
        manifest = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
        raw = manifest["layout"]
        layout = None if raw is None else tuple((tuple(map(int, t["shape"])), str(t["dtype"])) for t in raw)
        model = manifest["model"]
        if not isinstance(model, str):
            return None
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return Namespace(folder.name, folder, model, layout, layout is not None and is_opaque(layout))


def folders(root: Path) -> list[Path]:
    """Namespace folders under a store's root, sorted."""
    with contextlib.suppress(FileNotFoundError):
        return sorted(p for p in (root / "ns").iterdir() if p.is_dir())
    return []


class Namespaces:
    """The namespaces of an open store. Thread-safe.

    Args:
        root: The store's folder.
        fingerprint: `StoreConfig.fingerprint`.
        shared: Whether other servers may make namespaces, so that unknown ones are looked for on disk.
    """

    def __init__(self, root: Path, fingerprint: str, shared: bool) -> None:
        self._root = root
        self._fingerprint = fingerprint
        self._shared = shared
        self._lock = threading.Lock()
        self._known: dict[str, Namespace] = {}
        self._names: dict[tuple[str, Layout], str] = {}

    def __iter__(self) -> Iterator[Namespace]:
        return iter(list(self._known.values()))

    def add(self, namespace: Namespace) -> None:
        """Know a namespace that was found on disk."""
        with self._lock:
            self._known.setdefault(namespace.name, namespace)

    def name_of(self, model: str, layout: Layout) -> str:
        """Name of a model and layout's namespace, whether it exists or not."""
        name = self._names.get((model, layout))
        if name is None:
            name = self._names[model, layout] = namespace_name(model, layout, self._fingerprint)
        return name

    def get(self, model: str, layout: Layout) -> Namespace | None:
        """The namespace of a model and layout, if it is known and whole."""
        known = self._known.get(self.name_of(model, layout))
        return None if known is None or known.layout is None else known

    def get_or_make(self, model: str, layout: Layout, reserve: Callable[[], None]) -> Namespace:
        """The namespace of a model and layout.

        Args:
            reserve: Called before a folder is made; raises if there is no room.

        Raises:
            OSError: the folder cannot be made, or `reserve` said no.
        """
        name = self.name_of(model, layout)
        with self._lock:
            known = self._known.get(name)
            if known is not None and known.layout is not None:
                return known
            if known is None and not (self._root / "ns" / name).is_dir():
                reserve()
            made = create(self._root, model, layout, self._fingerprint)
            if known is not None:  # its manifest was lost; entries hold on to this very object
                known.layout, known.opaque = made.layout, made.opaque
                return known
            self._known[name] = made
            return made

    def candidates(self, model: str, layout: Layout | None) -> tuple[Namespace, ...]:
        """Namespaces in which an object of this model and layout may be, best first; the model's all if the layout is
        unknown.

        Namespaces of serialized objects always count: their layout is not the one that a lookup names. A load checks
        again.
        """
        if layout is None:
            return tuple(n for n in self if n.model == model)
        exact = self.name_of(model, layout)
        first = self._known.get(exact)
        if first is None and self._shared and (found := load(self._root / "ns" / exact)) is not None:
            self.add(found)
            first = self._known[exact]
        others = tuple(n for n in self if n.opaque and n.model == model and n is not first)
        return others if first is None else (first, *others)

    def put_back(self, lost: Iterable[Namespace]) -> None:
        """Make the folders and manifests of namespaces anew.

        Raises:
            OSError: as the system says.
        """
        for n in lost:
            make_folders(n.folder)
            write_manifest(n.folder, n.model, n.layout, self._fingerprint)


def layout_of(shapes: Sequence[Iterable[int]], dtypes: Sequence[object]) -> Layout:
    """A layout from torch's shapes and dtypes (or anything that prints the same)."""
    return tuple((tuple(int(n) for n in shape), str(dtype)) for shape, dtype in zip(shapes, dtypes, strict=True))
