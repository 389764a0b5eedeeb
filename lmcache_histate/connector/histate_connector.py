"""HiState's vLLM connector: LMCache's MP connector that also decides where snapshots of recurrent states are taken."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from lmcache.integration.vllm.lmcache_mp_metadata import (
    LMCacheMPConnectorMetadata,
    LMCacheMPRequestMetadata,
    LMCacheMPRequestState,
)
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorMetadata, KVConnectorRole
from vllm.logger import init_logger
from vllm.v1.request import RequestStatus

from lmcache_histate.backends.arguments import (
    connector_extra_config,
    server_environment,
    server_module_spec,
    settings_digest,
)
from lmcache_histate.config import Config, check_machine, load_config_or_defaults
from lmcache_histate.connector import guards
from lmcache_histate.connector.capture_plan import CapturePlanner
from lmcache_histate.connector.cpu import CpuHybridConnector, is_cpu_build, use_server_driven_transfers
from lmcache_histate.connector.health_probe import probes_in_own_context
from lmcache_histate.connector.placement import Placement
from lmcache_histate.connector.server_link import ServerLink
from lmcache_histate.connector.store_fence import StoreFence
from lmcache_histate.protocol import PlacementFacts

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.outputs import KVConnectorOutput
    from vllm.v1.request import Request

logger = init_logger("vllm.histate")  # vLLM shows what is logged below its own name

PREFILL_STEP_TOKENS = 512
"""Smaller steps say little about what prefill costs, and there are many of them."""


class HiStateConnector(CpuHybridConnector):
    """Drop-in replacement for ``LMCacheMPConnector``.

    For a hybrid model it starts (or joins) an LMCache server that runs HiState's server module, ends prefill steps
    where a snapshot is worth its price, keeps snapshots that nobody planned out of the cache, and makes the answer part
    of the turn. For any other model it behaves as stock LMCache does.

    Configuration comes from ``LMCACHE_CONFIG`` (see docs/configuration.md); keys given in vLLM's
    ``kv_connector_extra_config`` win over it.

    Raises:
        guards.StartupError: A set-up that would corrupt output or was never tested.
        lmcache_histate.config.ConfigError: A configuration that cannot be read.
    """

    def __init__(
        self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: KVCacheConfig | None = None
    ) -> None:
        self._planner: CapturePlanner | None = None
        self._fence: StoreFence | None = None
        self._failed_loads: set[str] = set()
        self._recurrent_groups = guards.recurrent_groups(kv_cache_config)
        block_size = guards.recurrent_block_size(kv_cache_config)
        config = load_config_or_defaults(os.environ)
        active = block_size is not None and config.histate.enabled
        if active:
            assert block_size is not None
            untested = config.histate.allow_untested_versions
            for line in (guards.check_versions(untested), guards.check_members(untested), *config.ignored):
                if line and role == KVConnectorRole.SCHEDULER:
                    logger.warning(line)
            guards.check_engine(vllm_config, block_size, is_cpu_build())
            assert vllm_config.kv_transfer_config is not None
            extra = vllm_config.kv_transfer_config.kv_connector_extra_config
            for key, value in connector_extra_config(config, block_size).items():
                extra.setdefault(key, value)
            use_server_driven_transfers(vllm_config)
            # A cache that dies must cost time, not requests: vLLM's default fails a request whose load fails. The
            # scheduler reads this right after it has built the connector.
            vllm_config.kv_transfer_config.kv_load_failure_policy = "recompute"
            # LMCache starts the server in the worker of rank 0, which vLLM builds before the scheduler.
            if config.starts_server and role == KVConnectorRole.WORKER and vllm_config.parallel_config.rank == 0:
                check_machine(config)
                # Passwords reach a server that LMCache starts through the environment, not its command line.
                os.environ.update(server_environment(config))
        with probes_in_own_context():
            super().__init__(vllm_config, role, kv_cache_config)
        if not active:
            return
        assert block_size is not None
        if role == KVConnectorRole.SCHEDULER:
            self._start_scheduler(config, vllm_config, block_size)
        else:
            self._fence = StoreFence(lambda: self.worker_adapter.is_healthy)

    def _start_scheduler(self, config: Config, vllm_config: VllmConfig, block_size: int) -> None:
        self._link = ServerLink(self.scheduler_adapter)
        for url, facts in self._link.hello():
            guards.check_server(facts, block_size, url)
            wanted = settings_digest(server_module_spec(config, block_size)["config"])
            if config.starts_server and facts.settings_digest != wanted:
                logger.warning(
                    "An LMCache server was already running at %s, with other settings than this configuration's; it is "
                    "used as it is. To apply the configuration, stop that server, then start vLLM again.",
                    url,
                )
        if guards.stop_is_honoured() is False:
            logger.error(
                "This vLLM does not end a prefill step at shared_prefix_boundary: HiState cannot place snapshots, "
                "only ends of turns will hit. Install a tested vLLM (%s).",
                ", ".join(guards.TESTED_VLLM),
            )
        self._placement = Placement(
            config.histate.interval,
            block_size,
            vllm_config.scheduler_config.max_num_batched_tokens,
            self._link,
            # Until the server says how large its objects are, vLLM's own pages are the best estimate.
            PlacementFacts(snapshot_tokens=guards.snapshot_tokens(self._kv_cache_config)),
            steps_ahead=vllm_config.max_concurrent_batches - 1,
        )
        self._planner = CapturePlanner(
            block_size,
            self._placement.interval,
            # Not every kind of drafting costs the last block (n-gram drafting does not).
            drops_last_block=vllm_config.speculative_config is not None
            and vllm_config.speculative_config.use_eagle_block_drop(),
        )
        self._overrun_reported = False
        logger.info(
            "HiState is on: recurrent block %d tokens, interval %s, server %s",
            block_size,
            config.histate.interval,
            ", ".join(self._link.urls),
        )

    # Scheduler side

    def get_num_new_matched_tokens(self, request: Request, num_computed_tokens: int) -> tuple[int | None, bool]:
        """Stock lookup; once its answer is known, plan the request's snapshots and arm the first stop.

        Args:
            request: vLLM's request; its ``shared_prefix_boundary`` is read (vLLM's junction) and overwritten.
            num_computed_tokens: Tokens that vLLM's own cache already holds.

        Returns:
            As ``KVConnectorBase_V1.get_num_new_matched_tokens``.
        """
        if request.request_id in self._failed_loads and request.status == RequestStatus.PREEMPTED:
            # LMCache looks a preempted request up again and again after a failed load, while vLLM still counts the first
            # reservation against it: with a pool that cannot hold both, nothing would ever be admitted again.
            self.scheduler_adapter.cleanup_lookup_result(request.request_id)
            self._get_or_create_request_tracker(request).state = LMCacheMPRequestState.BYPASS_LMCACHE
        external, load_async = super().get_num_new_matched_tokens(request, num_computed_tokens)
        if self._planner is not None and external is not None:
            usable = 0 if request.skip_reading_prefix_cache else external
            self._placement.on_request()
            self._planner.plan(request, num_computed_tokens + usable)
        return external, load_async

    def update_state_after_alloc(self, request: Request, blocks: KVCacheBlocks, num_external_tokens: int) -> None:
        """Stock bookkeeping; a request that was admitted without its failed load may use the cache again."""
        super().update_state_after_alloc(request, blocks, num_external_tokens)
        self._failed_loads.discard(request.request_id)

    def update_connector_output(self, connector_output: KVConnectorOutput) -> None:
        """Stock bookkeeping; loads that failed are remembered until their requests are admitted without them."""
        super().update_connector_output(connector_output)
        if self._planner is not None:
            # Of live requests only: nobody would ever take an aborted one out again.
            self._failed_loads.update(name for name in connector_output.failed_recving if self._planner.get(name))

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> KVConnectorMetadata:
        """Stock metadata of this step, less the snapshots that nobody planned; then every armed stop moves on."""
        metadata = super().build_connector_meta(scheduler_output)
        planner = self._planner
        if planner is None:
            return metadata
        tokens, scheduled = scheduler_output.total_num_scheduled_tokens, scheduler_output.num_scheduled_tokens
        chunk = planner.largest_chunk(scheduled) if tokens >= PREFILL_STEP_TOKENS else None
        self._placement.on_step(tokens, chunk)
        assert isinstance(metadata, LMCacheMPConnectorMetadata)
        for store in metadata.requests:
            if store.direction == "STORE":
                self._filter_snapshots(planner, store)
        planner.on_step(scheduled)
        planner.forget(scheduler_output.finished_req_ids)
        self._failed_loads -= scheduler_output.finished_req_ids
        if planner.stops_overrun and not self._overrun_reported:
            self._overrun_reported = True
            logger.error(
                "A prefill step ran past an armed stop: this vLLM does not honour shared_prefix_boundary, "
                "so rewinds will hit only at ends of turns."
            )
        return metadata

    def _filter_snapshots(self, planner: CapturePlanner, store: LMCacheMPRequestMetadata) -> None:
        """Replace the block ids of unwanted snapshots by the null block, which the server does not store."""
        plan = planner.get(store.request_id)
        if plan is None:
            return
        chunk = self.scheduler_adapter.lmcache_tokens_per_chunk
        kept: set[int] = set()
        for group in self._recurrent_groups:
            blocks = store.op.block_ids[group]
            for index, block in enumerate(blocks):
                if block == 0:
                    continue
                position = store.op.start + (index + 1) * chunk
                if plan.keeps(position):
                    kept.add(position)
                else:
                    blocks[index] = 0
        for position in sorted(kept):
            plan.took(position)
        if plan.superseded:
            self._link.drop_snapshots(store.request_id, plan.superseded)
            plan.superseded = []

    # Worker side

    def handle_preemptions(self, kv_connector_metadata: KVConnectorMetadata) -> None:
        """Called before every forward pass: besides LMCache's flush, wait for old snapshot stores (``StoreFence``)."""
        super().handle_preemptions(kv_connector_metadata)
        if self._fence is not None:
            self._fence.before_forward()

    def wait_for_save(self) -> None:
        """Submit this step's stores as LMCache does and remember those that read a recurrent state's block."""
        super().wait_for_save()
        if self._fence is not None:
            futures = self.worker_adapter.store_futures
            self._fence.submitted(
                futures[store.request_id]
                for store in self._get_connector_metadata().requests
                if store.direction == "STORE"
                and store.request_id in futures
                and any(any(store.op.block_ids[group]) for group in self._recurrent_groups)
            )

    def shutdown(self) -> None:
        """Close the stock connector; log what the planner counted."""
        if self._planner is not None:
            logger.info(
                "HiState planned %d stops, %d were overrun", self._planner.stops_planned, self._planner.stops_overrun
            )
        super().shutdown()


__all__ = ["HiStateConnector"]
