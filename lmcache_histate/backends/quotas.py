"""Holds every tenant (``cache_salt``) to its quota, with LMCache's own registry of them.

LMCache's ``QuotaManager`` knows the limits, from the configuration and from ``PUT /quota/{salt}`` while the server runs;
LMCache itself would apply them to single objects of a lower tier, HiState to whatever of a tenant is worth least.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping

from lmcache.v1.distributed.quota_manager import QuotaManager

from lmcache_histate.backends.layout import Namespace
from lmcache_histate.geometry import GIB
from lmcache_histate.scorer.policy import CachePolicy
from lmcache_histate.state_store.units import MANAGED

DEFAULT, UNSALTED = "*", "_default"
"""In the setting ``quotas``: every tenant without a quota of its own; requests without a salt (LMCache's word)."""
LOCKED_SECONDS = 2.0
"""How long something that is in use is waited for; the core offers it again after as long."""
ALL_SECONDS = 1.0
"""How often every tenant is looked at, since a limit may have changed; LMCache's own cycle is as long."""


class Quotas:
    """Which tenants hold more than they may, in CPU memory and on disk together.

    Args:
        policy: The core, which counts bytes.
        manager: LMCache's registry of limits.
        leaving: Bytes of a tenant that are being moved, and so are in CPU memory only for the moment.
    """

    def __init__(self, policy: CachePolicy, manager: QuotaManager, leaving: Callable[[str], int]) -> None:
        self._policy = policy
        self._manager = manager
        self._leaving = leaving
        self._namespaces: dict[str, list[str]] = {}
        self._changed: set[str] = set()
        self._locked: dict[str, deque[tuple[float, int]]] = {}
        self._all_at = float("-inf")

    def configure(self, limits: Mapping[str, float]) -> None:
        """Register the configured limits, in GiB by tenant (`DEFAULT` and `UNSALTED` as described there)."""
        for salt, gib in limits.items():
            if salt == DEFAULT:
                self._manager.set_default_limit_bytes(int(gib * GIB))
            else:
                self._manager.set_quota("" if salt == UNSALTED else salt, int(gib * GIB))

    def registered(self, namespace: Namespace) -> None:
        """A namespace became known. O(1)."""
        self._namespaces.setdefault(namespace.cache_salt, []).append(namespace.name)

    def stored(self, namespace: Namespace) -> None:
        """Something of a namespace was stored. O(1)."""
        self._changed.add(namespace.cache_salt)

    def over(self, now: float) -> list[str]:
        """Tenants over their quota. O(tenants that stored something since the last call), all of them once a second."""
        salts: set[str] | dict[str, list[str]] = self._changed
        if now >= self._all_at:
            self._all_at = now + ALL_SECONDS
            salts = self._namespaces
        over = [salt for salt in salts if self.excess(salt, now) > 0]
        self._changed = set()
        return over

    def excess(self, salt: str, now: float) -> int:
        """Bytes that a tenant holds beyond its quota; none without a quota. O(namespaces of the tenant)."""
        # Not `get_limit_bytes`, for which a tenant that nobody registered has a quota of nothing.
        limit = self._manager.effective_limit_bytes(salt)
        if limit is None:
            return 0
        locked = self._locked.get(salt)
        while locked and locked[0][0] <= now:
            locked.popleft()
        going = self._leaving(salt) + sum(nbytes for _, nbytes in locked or ())
        held = sum(self._policy.held_bytes(name, tier) for name in self.namespaces(salt) for tier in MANAGED)
        return held - going - limit

    def wait_for(self, salt: str, nbytes: int, now: float) -> None:
        """Bytes that should go are in use: they are waited for, and nothing else goes in their place meanwhile. O(1)."""
        self._locked.setdefault(salt, deque()).append((now + LOCKED_SECONDS, nbytes))

    def namespaces(self, salt: str) -> list[str]:
        """Names of the namespaces of a tenant, one for each model that it uses."""
        return self._namespaces.get(salt, [])
