"""Every touch of a private part of LMCache, checked when the server starts. Written against lmcache 0.5.6.

Nothing else in this package reads an attribute of LMCache that starts with an underscore, but for the protected members
of the classes that it extends (the connector, the L2 adapter).
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from fastapi import FastAPI
from lmcache.v1.distributed.api import ObjectKey
from lmcache.v1.distributed.l2_adapters.base import L2AdapterInterface
from lmcache.v1.distributed.l2_adapters.native_connector_l2_adapter import NativeConnectorL2Adapter
from lmcache.v1.distributed.storage_controllers.prefetch_controller import PrefetchController
from lmcache.v1.distributed.storage_controllers.prefetch_policy import PrefetchPolicy
from lmcache.v1.distributed.storage_controllers.store_controller import StoreController, StoreListener
from lmcache.v1.distributed.storage_controllers.store_policy import StorePolicy
from lmcache.v1.distributed.storage_manager import StorageManager

from lmcache_histate.backends.native_batches import OneSizeBatches

TESTED = "0.5.6"
HTTP_SERVER = "lmcache.v1.multiprocess.http_server"


class CompatError(RuntimeError):
    """LMCache is not shaped as this package expects. The message names the part and the remedy."""


def check_signatures() -> None:
    """Compare the signatures of what is overridden or called here with those of lmcache 0.5.6.

    Raises:
        CompatError: Any difference, all of them named.
    """
    expected = {
        PrefetchPolicy.plan_load: (
            "self", "key_groups", "l1_locked_keys", "l2_locked_keys", "l1_manager_descs", "l2_adapter_descs",
            "fetching_policy",
        ),
        PrefetchPolicy.plan_l1_retention: ("self", "keys", "l1_manager_desc", "l2_adapter_desc"),
        StorePolicy.select_store_targets: ("self", "keys", "adapters"),
        StorePolicy.select_l1_deletions: ("self", "keys"),
        StoreListener.on_l1_keys_write_finished: ("self", "keys"),
        StoreController.report_status: ("self",),
        StoreController.get_inflight_stores_observations: ("self",),
        StorageManager.delete_l1_keys: ("self", "keys", "force"),
        StorageManager.get_l1_usage: ("self",),
    }  # fmt: skip
    wrong = [
        f"{function.__qualname__}{inspect.signature(function)}"
        for function, parameters in expected.items()
        if tuple(inspect.signature(function).parameters) != parameters
    ]
    if wrong:
        raise CompatError(
            f"this LMCache differs from {TESTED}, with which HiState was tested: {'; '.join(wrong)}. "
            f"Install lmcache {TESTED}."
        )


@dataclass(frozen=True)
class StorageParts:
    """The pieces of one ``StorageManager`` that HiState takes over."""

    manager: StorageManager
    l1_manager: Any
    store_controller: StoreController
    prefetch_controller: PrefetchController

    @classmethod
    def of(cls, manager: StorageManager) -> StorageParts:
        """Find them.

        Raises:
            CompatError: Another LMCache than the tested one, or more than one L1 manager.
        """
        try:
            l1_managers = list(manager._l1_managers_by_id.values())
            store_controllers = list(manager._store_controllers.values())
            prefetch_controller = manager._prefetch_controller
            parts = cls(manager, l1_managers[0], store_controllers[0], prefetch_controller)
            _ = parts.store_controller._policy, parts.prefetch_controller._policy, parts.store_controller._listener
        except (AttributeError, IndexError) as error:
            raise CompatError(
                f"this LMCache has no {error}, which lmcache {TESTED} has. Install lmcache {TESTED}."
            ) from error
        if len(l1_managers) > 1:
            raise CompatError("several L1 managers are configured; HiState supports one. Remove the extra L1 options.")
        return parts

    def take_over_policies(self, store: StorePolicy, prefetch: PrefetchPolicy) -> None:
        """Put our decisions in place of the configured ones.

        Policies are registered by name before flags are parsed, and vLLM's autostart runs LMCache's own entry point,
        where nothing of ours is imported by then: so the objects are swapped instead.
        """
        self.store_controller._policy = store
        self.prefetch_controller._policy = prefetch

    def store_again(self, keys: Sequence[ObjectKey]) -> None:
        """Have the StoreController ask its policy about these objects now, as if they had just been written. O(keys).

        It owns the adapters' stores: it locks the objects in CPU memory for as long as they are read, and counts.
        """
        self.store_controller._listener.on_l1_keys_write_finished(list(keys))

    def stores_in_hand(self, disk_index: int | None) -> bool:
        """Whether the StoreController has anything to do, or on its way to another tier than the disk.

        O(stores on their way).
        """
        if self.store_controller.report_status()["pending_keys_count"]:
            return True
        observed = self.store_controller.get_inflight_stores_observations()
        return any(count and attributes["adapter_index"] != disk_index for count, attributes in observed)


def registered_models(registry: Any) -> set[tuple[str, int]]:
    """(model, world size) of every model of a ``LayoutDescRegistry`` that has workers now. O(models)."""
    return set(registry._registry)


def http_app() -> FastAPI | None:
    """LMCache's HTTP application in this process, or None where its server runs without one.

    LMCache's autostart runs the module as a program, ``lmcache server`` imports it.
    """
    for name in ("__main__", HTTP_SERVER):
        module = sys.modules.get(name)
        app = getattr(module, "app", None)
        if getattr(getattr(module, "__spec__", None), "name", None) == HTTP_SERVER and isinstance(app, FastAPI):
            return app
    return None


def connection_is_lost(adapter: L2AdapterInterface) -> bool | None:
    """Whether an adapter over a native client has lost its server; None for other adapters. O(1)."""
    native = getattr(adapter, "_inner", adapter)
    client = native._client if isinstance(native, NativeConnectorL2Adapter) else None
    return client.connection_lost if isinstance(client, OneSizeBatches) else None


def split_batches_by_size(adapter: L2AdapterInterface) -> None:
    """Have an adapter over a native client send batches of one size each (`OneSizeBatches` says why); others stay.

    An adapter that converts objects on their way (``serde``) holds the native one inside.
    """
    native = getattr(adapter, "_inner", adapter)
    if isinstance(native, NativeConnectorL2Adapter) and not isinstance(native._client, OneSizeBatches):
        native._client = OneSizeBatches(native._client)
