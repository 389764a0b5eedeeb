"""LMCache's MP connector on vLLM's CPU build, for hybrid models (development, CI and the demo; GPUs never come here).

LMCache's server reads vLLM's cache through shared memory. On CPU it moves each tensor's storage into a shared-memory
segment, but it wants contiguous tensors and re-points only the tensor objects that it is handed. Recurrent state pages
are padded to the attention page size, and vLLM keeps further views of the same storage, so both are mended here.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from lmcache.integration.vllm.lmcache_mp_connector import LMCacheMPConnector

if TYPE_CHECKING:
    from vllm.config import VllmConfig

TRANSFER_MODE_KEY = "lmcache.mp.mp_transfer_mode"
"""Extra-config key of the LMCache MP adapter; ``lmcache_driven`` is the only mode that serves several KV groups on CPU."""


def is_cpu_build() -> bool:
    """Whether this vLLM runs on its CPU platform."""
    from vllm.platforms import current_platform

    return bool(current_platform.is_cpu())


def whole_page_view(tensor: torch.Tensor) -> torch.Tensor:
    """View a cache tensor contiguously: a padded recurrent page ``(blocks, 1, 1, bytes)`` as its whole page.

    Args:
        tensor: One layer's cache as vLLM hands it to a connector.

    Returns:
        A new tensor object over the same storage. Contiguous tensors keep their shape; a recurrent state tensor whose
        rows are padded becomes ``(blocks, 1, 1, page)`` with the page stride of the allocation.
    """
    if not tensor.is_contiguous() and tensor.shape[1:-1].numel() == 1:
        page = tensor.stride(0)
        return torch.as_strided(tensor, (tensor.shape[0], 1, 1, page), (page, page, page, 1), tensor.storage_offset())
    return tensor.view_as(tensor)


def repoint(value: Any, moved: dict[int, torch.UntypedStorage]) -> None:
    """Re-point every tensor in a nest of lists and tuples whose storage was moved.

    Args:
        value: A tensor, a list or tuple of such, or anything else (left alone).
        moved: Old storage address -> the storage that replaced it.
    """
    if isinstance(value, torch.Tensor):
        storage = moved.get(value.untyped_storage().data_ptr())
        if storage is not None:
            value.set_(storage, value.storage_offset(), value.shape, value.stride())
    elif isinstance(value, (list, tuple)):
        for item in value:
            repoint(item, moved)


class CpuHybridConnector(LMCacheMPConnector):
    """Stock LMCache, able to register a hybrid model's caches on CPU. Adds nothing else: the baseline of the demo."""

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        """Register whole-page views, then re-point every tensor that vLLM still holds on the old storage.

        Args:
            kv_caches: Layer name -> that layer's cache tensor.
        """
        if not is_cpu_build():
            super().register_kv_caches(kv_caches)
            return
        views = {name: whole_page_view(tensor) for name, tensor in kv_caches.items()}
        before = {name: tensor.untyped_storage().data_ptr() for name, tensor in kv_caches.items()}
        super().register_kv_caches(views)
        moved = {before[name]: views[name].untyped_storage() for name in views}
        for layer in self._vllm_config.compilation_config.static_forward_context.values():
            repoint(getattr(layer, "kv_cache", None), moved)
        for tensor in kv_caches.values():
            repoint(tensor, moved)


def use_server_driven_transfers(vllm_config: VllmConfig) -> None:
    """Select the transfer mode that CPU needs, unless the user named one.

    Args:
        vllm_config: Its ``kv_transfer_config`` is changed in place.
    """
    transfer = vllm_config.kv_transfer_config
    if transfer is not None and is_cpu_build():
        transfer.kv_connector_extra_config.setdefault(TRANSFER_MODE_KEY, "lmcache_driven")
