"""The reading half of a directory, from its local views."""

from __future__ import annotations

from collections.abc import Sequence

from lmcache_histate.state_store.directory.protocol import (
    NOWHERE_ELSE,
    ChunkRecord,
    Elsewhere,
    Holder,
    Location,
    Member,
    SessionRecord,
    Statistics,
)
from lmcache_histate.state_store.directory.view import NamespaceView
from lmcache_histate.state_store.objects import Kind


class ViewReader:
    """Answers from the views in `_views`; a namespace that was never registered is empty. See `Directory`."""

    def __init__(self) -> None:
        self._views: dict[str, NamespaceView] = {}

    def instances(self, namespace: str, now: float) -> list[Member]:
        """See `Directory.instances`."""
        view = self._views.get(namespace)
        return [] if view is None else sorted(view.live(now).values(), key=lambda member: (member.is_tier, member))

    def holders(self, namespace: str, chunk_hashes: Sequence[bytes], now: float) -> list[tuple[Holder, ...]]:
        """See `Directory.holders`."""
        view = self._views.get(namespace)
        if view is None:
            return [()] * len(chunk_hashes)
        live = view.live(now)
        return [view.holders(chunk_hash, live) for chunk_hash in chunk_hashes]

    def elsewhere(self, namespace: str, chunk_hash: bytes, kind: Kind, now: float) -> Elsewhere:
        """See `Directory.elsewhere`."""
        view = self._views.get(namespace)
        return NOWHERE_ELSE if view is None else view.elsewhere(chunk_hash, kind, now)

    def locate(self, namespace: str, chunk_hashes: Sequence[bytes], now: float) -> list[Location]:
        """See `Directory.locate`."""
        view = self._views.get(namespace)
        return [] if view is None else view.locate(chunk_hashes, now)

    def session(self, namespace: str, end: bytes, now: float) -> SessionRecord | None:
        """See `Directory.session`."""
        view = self._views.get(namespace)
        return None if view is None else view.session(end, now)

    def news(self, namespace: str, limit: int, now: float) -> list[ChunkRecord]:
        """See `Directory.news`."""
        view = self._views.get(namespace)
        return [] if view is None else view.news(limit, now)

    def records(self, namespace: str, now: float) -> list[ChunkRecord]:
        """See `Directory.records`."""
        view = self._views.get(namespace)
        return [] if view is None else view.records(now)

    def statistics(self, namespace: str, now: float) -> Statistics:
        """See `Directory.statistics`."""
        view = self._views.get(namespace)
        return Statistics() if view is None else view.statistics(now)
