"""vLLM's real scheduler and HiState's real connector around a modelled worker and cache server: no engine, no tensors.

The model keeps, for every physical cache block, *which* prefix its bytes belong to, and checks at every step that the
worker reads what it believes to read, and at every copy that what is stored is what its key says. So a state block
that was freed too early, a snapshot taken at another position, or a stop that a step ran past, all show up as errors
here, as they would show up as wrong tokens in an engine.

Copies to the server happen as late as the engine allows (`StoreFence`), which is when they are most in danger.
"""

from __future__ import annotations

import random
from collections import deque
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import msgspec
import torch
from lmcache.integration.vllm import lmcache_mp_connector
from lmcache.v1.multiprocess.protocols.server_module import ServerModuleCallResponse
from vllm.config import CacheConfig, DeviceConfig, KVTransferConfig, ModelConfig, SchedulerConfig, VllmConfig
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec, MambaSpec
from vllm.v1.outputs import KVConnectorOutput, ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus
from vllm.v1.structured_output import StructuredOutputManager

from lmcache_histate.connector.store_fence import StoreFence
from lmcache_histate.protocol import (
    DROP_SNAPSHOTS,
    HELLO,
    PLACEMENT,
    DropSnapshots,
    PlacementFacts,
    ServerFacts,
    encode,
)

MAX_TOKENS = 1 << 18
ATTENTION, RECURRENT = 0, 1
"""Cache groups of the modelled model."""
STOCK = "LMCacheMPConnector"


@cache
def model_config(folder: Path) -> ModelConfig:
    """A model configuration that vLLM reads from `folder`; its architecture plays no part, the cache groups do."""
    from transformers import LlamaConfig

    LlamaConfig(
        vocab_size=512,
        hidden_size=64,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        max_position_embeddings=MAX_TOKENS,
        architectures=["LlamaForCausalLM"],
    ).save_pretrained(folder)
    return ModelConfig(model=str(folder), skip_tokenizer_init=True, dtype="bfloat16", max_model_len=MAX_TOKENS)


def cache_groups(block: int, num_blocks: int) -> KVCacheConfig:
    """One attention and one recurrent group with pages of one size, as vLLM builds them for a hybrid model."""
    page = block * 2 * 8 * 4
    return KVCacheConfig(
        num_blocks=num_blocks,
        kv_cache_tensors=[],
        kv_cache_groups=[
            KVCacheGroupSpec(
                ["attention"], FullAttentionSpec(block_size=block, num_kv_heads=1, head_size=8, dtype=torch.float32)
            ),
            KVCacheGroupSpec(
                ["recurrent"],
                MambaSpec(
                    block_size=block,
                    shapes=((16,),),
                    dtypes=(torch.float32,),
                    mamba_cache_mode="align",
                    page_size_padded=page,
                ),
            ),
        ],
    )


def build_config(
    folder: Path,
    block: int,
    budget: int,
    num_blocks: int,
    asynchronous: bool,
    connector: str | None,
    max_num_seqs: int = 64,
    policy: str = "fcfs",
) -> VllmConfig:
    """vLLM's configuration for a scheduler on its own. `connector` is HiState's class name, the stock one, or None."""
    transfer = None
    if connector is not None:
        transfer = KVTransferConfig(
            kv_connector=connector,
            kv_connector_module_path="lmcache_histate.connector.histate_connector" if connector != STOCK else None,
            kv_role="kv_both",
            kv_load_failure_policy="recompute",
            kv_connector_extra_config={"lmcache.mp.save_decode_cache": True},
        )
    config = VllmConfig(
        model_config=model_config(folder),
        scheduler_config=SchedulerConfig(
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=budget,
            max_model_len=MAX_TOKENS,
            enable_chunked_prefill=True,
            is_encoder_decoder=False,
            async_scheduling=asynchronous,
            policy=policy,
        ),
        cache_config=CacheConfig(block_size=block, enable_prefix_caching=True, mamba_cache_mode="align"),
        device_config=DeviceConfig("cpu"),
        kv_transfer_config=transfer,
    )
    # What the executor fills in once it knows the memory; set after construction, which may adjust it to the platform.
    config.cache_config.block_size = block
    config.cache_config.mamba_cache_mode = "align"
    config.cache_config.num_gpu_blocks = num_blocks
    config.scheduler_config.async_scheduling = asynchronous
    assert config.max_concurrent_batches == 1 + asynchronous
    return config


class Future:
    """An answer that is there already."""

    def __init__(self, value: Any) -> None:
        self._value = value

    def query(self) -> bool:
        """Whether the answer arrived."""
        return True

    def result(self, timeout: float | None = None) -> Any:
        """The answer."""
        return self._value


@dataclass
class Server:
    """The cache server: which chunks it holds, by the identity of the prefix that each ends."""

    block: int
    attention: set[int] = field(default_factory=set)
    snapshots: set[int] = field(default_factory=set)
    dropped: list[DropSnapshots] = field(default_factory=list)
    prefixes: dict[str, list[int]] = field(default_factory=dict)
    lookup_delay: int = 0
    """Polls before a lookup is answered."""
    facts: PlacementFacts = field(default_factory=PlacementFacts)
    deaf: bool = False
    """Answers no lookup with a hit and stores nothing."""

    def server_module_call(self, request: Any) -> Future:
        """LMCache's envelope for extension calls."""
        if request.method == HELLO:
            payload = encode(ServerFacts("0", "0", self.block, True, 0))
        elif request.method == PLACEMENT:
            payload = encode(self.facts)
        else:
            assert request.method == DROP_SNAPSHOTS
            message = msgspec.msgpack.decode(request.payload, type=DropSnapshots)
            self.dropped.append(message)
            for position in message.positions:
                self.snapshots.discard(self.prefixes[message.request_id][position])
            payload = b""
        return Future(ServerModuleCallResponse(True, payload, ""))

    def longest_hit(self, prefixes: list[int]) -> int:
        """Tokens that a resend of `prefixes` (identity of every prefix, by length) can resume after."""
        hit = 0
        for end in range(self.block, len(prefixes), self.block):
            if prefixes[end] not in self.attention:
                break
            if prefixes[end] in self.snapshots:
                hit = end
        return hit


class SchedulerAdapter:
    """Stands in for LMCache's adapter between connector and server, on the scheduler's side."""

    server: Server
    """Set on a subclass for each engine, because LMCache's connector constructs its adapter itself."""

    def __init__(self, server_urls: list[str], **_: Any) -> None:
        self.req_clients = dict.fromkeys(server_urls, self.server)
        self.lmcache_tokens_per_chunk = self.server.block
        self.is_healthy = True
        self.model_name = "model"
        self.world_size = 1
        self._polls: dict[str, int] = {}
        self._tokens: dict[str, list[int]] = {}

    def maybe_submit_lookup_request(
        self, request_id: str, token_ids: list[int], reserve_last_token: bool = False, **_: Any
    ) -> None:
        """Start a lookup unless one runs."""
        self._tokens.setdefault(request_id, token_ids[: len(token_ids) - int(reserve_last_token)])

    def check_lookup_result(self, request_id: str) -> int | None:
        """Tokens hit, or None while the server thinks."""
        self._polls[request_id] = self._polls.get(request_id, 0) + 1
        if self._polls[request_id] <= self.server.lookup_delay:
            return None
        if self.server.deaf:
            return 0
        return self.server.longest_hit(identities(self._tokens[request_id]))

    def cleanup_lookup_result(self, request_id: str) -> None:
        """Forget a lookup."""
        self._polls.pop(request_id, None)
        self._tokens.pop(request_id, None)

    def free_lookup_locks(self, **_: Any) -> None:
        """Locks are not modelled."""

    def end_session(self, request_id: str) -> None:
        """Sessions are not modelled."""

    def report_block_allocations(self, records: Any) -> None:
        """Observability is not modelled."""

    def shutdown(self) -> None:
        """Nothing to close."""


def identities(tokens: list[int]) -> list[int]:
    """The identity of every prefix of `tokens`, by its length."""
    result = [1]
    for token in tokens:
        result.append(hash((result[-1], token)))
    return result


class Copy:
    """A store that the server carries out when somebody waits for it, and not before."""

    def __init__(self, worker: Worker, op: Any, prefixes: list[int]) -> None:
        self._worker, self._op, self._prefixes = worker, op, prefixes
        self.done = False

    def wait(self, timeout: float | None = None) -> bool:
        """Copy now."""
        if not self.done:
            self.done = True
            self._worker.copy_out(self._op, self._prefixes)
        return True


class Worker:
    """What a GPU would hold: for every cache block the prefix that its bytes belong to."""

    def __init__(self, block: int, server: Server) -> None:
        self.block, self.server = block, server
        self.fence = StoreFence(lambda: True)
        self.sequences: dict[str, list[int]] = {}
        self.prefixes: dict[str, list[int]] = {}
        self.known: dict[str, int] = {}
        self._memory: dict[int, tuple[int, int, int]] = {}
        self._tables: dict[str, list[list[int]]] = {}
        self._state_column: dict[str, int] = {}
        self._copies: dict[str, list[Copy]] = {}
        self._loading: dict[str, bool] = {}
        self.fail_loads = False

    def add(self, request_id: str, sequence: list[int], prompt: int) -> None:
        """Tell the worker what the model will say: `sequence` is the prompt and the answer after it."""
        self.sequences[request_id] = sequence
        self.prefixes[request_id] = self.server.prefixes[request_id] = identities(sequence)
        self.known[request_id] = prompt

    def run(self, output: SchedulerOutput) -> ModelRunnerOutput:
        """One forward pass, with the loads and stores around it."""
        metadata = output.kv_connector_metadata
        requests = metadata.requests if metadata is not None else []
        if metadata is not None and metadata.need_flush_before_forward:
            for copies in self._copies.values():
                for copy in copies:
                    copy.wait()
        self.fence.before_forward()
        received, failed = self._finish_loads()
        for request in requests:
            if request.direction == "RETRIEVE":
                self._load(request)
        self._update_tables(output)
        sampled = {request_id: self._forward(output, request_id) for request_id in output.num_scheduled_tokens}
        fenced = []
        for request in requests:
            if request.direction == "STORE":
                copy = Copy(self, request.op, self.prefixes[request.request_id])
                self._copies.setdefault(request.request_id, []).append(copy)
                if any(request.op.block_ids[RECURRENT]):
                    fenced.append(copy)
        self.fence.submitted(fenced)
        for request_id in output.finished_req_ids:
            # The scheduler keeps the blocks until this is reported.
            for copy in self._copies.pop(request_id, []):
                copy.wait()
        return ModelRunnerOutput(
            req_ids=list(sampled),
            req_id_to_index={request_id: index for index, request_id in enumerate(sampled)},
            sampled_token_ids=list(sampled.values()),
            kv_connector_output=KVConnectorOutput(
                finished_sending=set(output.finished_req_ids) if metadata is not None else None,
                finished_recving=received,
                failed_recving=failed,
            ),
        )

    def _update_tables(self, output: SchedulerOutput) -> None:
        for request_id in output.preempted_req_ids or ():
            self._state_column.pop(request_id, None)
        for new in output.scheduled_new_reqs:
            self._tables[new.req_id] = [list(group) for group in new.block_ids]
            self._state_column.pop(new.req_id, None)
        cached = output.scheduled_cached_reqs
        for request_id, blocks in zip(cached.req_ids, cached.new_block_ids, strict=True):
            if request_id in cached.resumed_req_ids:
                # What was in flight at the preemption was dropped and is sampled again.
                self.known[request_id] = len(cached.all_token_ids[request_id])
                self._tables[request_id] = [list(group) for group in blocks]
                self._state_column.pop(request_id, None)
            elif blocks is not None:
                for table, group in zip(self._tables[request_id], blocks, strict=True):
                    table.extend(group)
        self._starts = {new.req_id: new.num_computed_tokens for new in output.scheduled_new_reqs}
        self._starts |= dict(zip(cached.req_ids, cached.num_computed_tokens, strict=True))

    def _forward(self, output: SchedulerOutput, request_id: str) -> list[int]:
        start = self._starts[request_id]
        end = start + output.num_scheduled_tokens[request_id]
        prefixes = self.prefixes[request_id]
        attention, recurrent = self._tables[request_id]
        for column in range(-(-start // self.block)):
            held = min((column + 1) * self.block, start)
            self._expect(attention[column], ATTENTION, held, prefixes, f"{request_id} reads KV")
        if start:
            source = self._state_column.get(request_id, (start - 1) // self.block)
            self._expect(recurrent[source], RECURRENT, start, prefixes, f"{request_id} reads its state")
        for column in range(start // self.block, -(-end // self.block)):
            held = min((column + 1) * self.block, end)
            assert attention[column]
            self._memory[attention[column]] = (ATTENTION, held, prefixes[held])
        target = self._state_column[request_id] = -(-end // self.block) - 1
        assert recurrent[target], "the running state has no block"
        self._memory[recurrent[target]] = (RECURRENT, end, prefixes[end])
        if end < self.known[request_id]:
            return []
        assert end == self.known[request_id]
        self.known[request_id] += 1
        return [self.sequences[request_id][end]]

    def _expect(self, block_id: int, group: int, position: int, prefixes: list[int], what: str) -> None:
        held = self._memory.get(block_id)
        assert held == (group, position, prefixes[position]), f"{what} at {position}: block {block_id} holds {held}"

    def copy_out(self, op: Any, prefixes: list[int]) -> None:
        """The server copies what a STORE names; null blocks are not stored."""
        if self.server.deaf:
            return
        for index, end in enumerate(range(op.start + self.block, op.end + 1, self.block)):
            for group, kept in ((ATTENTION, self.server.attention), (RECURRENT, self.server.snapshots)):
                block_id = op.block_ids[group][index]
                if block_id:
                    self._expect(block_id, group, end, prefixes, "a store copies the wrong bytes")
                    kept.add(prefixes[end])

    def _load(self, request: Any) -> None:
        if not self.fail_loads:
            op, prefixes = request.op, self.prefixes[request.request_id]
            for index, end in enumerate(range(op.start + self.block, op.end + 1, self.block)):
                assert prefixes[end] in self.server.attention
                if end > op.start + op.skip_first_n_tokens:
                    self._memory[op.block_ids[ATTENTION][index]] = (ATTENTION, end, prefixes[end])
            assert prefixes[op.end] in self.server.snapshots
            self._memory[op.block_ids[RECURRENT][-1]] = (RECURRENT, op.end, prefixes[op.end])
        self._loading[request.request_id] = self.fail_loads

    def _finish_loads(self) -> tuple[set[str], set[str]]:
        loads, self._loading = self._loading, {}
        return set(loads), {request_id for request_id, failed in loads.items() if failed}


@dataclass
class Step:
    """What one request did in one scheduler step."""

    index: int
    start: int
    end: int
    armed: int
    """The stop that was armed when the step was scheduled."""
    state_block: int
    """Physical block of the recurrent group that holds the state at `end`, 0 for none."""


class Engine:
    """A scheduler, a connector, a worker and a server, stepped by hand.

    Args:
        folder: Where the model configuration goes.
        block: Tokens in a block.
        budget: Tokens in a scheduler step.
        num_blocks: Blocks in the pool.
        asynchronous: Whether the asynchronous scheduler runs, one step ahead of the worker.
        connector: ``HiStateConnector``, stock LMCache's, or None for vLLM alone.
        server: An existing server, to restart an engine beside it.
        monkeypatch: Puts the server's adapter in place of LMCache's.
    """

    def __init__(
        self,
        monkeypatch: Any,
        folder: Path,
        block: int = 64,
        budget: int = 2048,
        num_blocks: int = 400,
        asynchronous: bool = False,
        connector: str | None = "HiStateConnector",
        server: Server | None = None,
        **options: Any,
    ) -> None:
        self.block = block
        self.server = server or Server(block)
        self.worker = Worker(block, self.server)
        adapter = type("Adapter", (SchedulerAdapter,), {"server": self.server})
        monkeypatch.setattr(lmcache_mp_connector, "LMCacheMPSchedulerAdapter", adapter)
        self.config = build_config(folder, block, budget, num_blocks, asynchronous, connector, **options)
        init_none_hash(sha256)
        self._hasher = get_request_block_hasher(block, sha256)
        kind = AsyncScheduler if asynchronous else Scheduler
        self.scheduler = kind(self.config, cache_groups(block, num_blocks), StructuredOutputManager(self.config), block)
        self.connector: Any = self.scheduler.connector
        self._depth = 2 if asynchronous else 1
        self._queue: deque[SchedulerOutput] = deque()
        self.requests: dict[str, Request] = {}
        self.steps: dict[str, list[Step]] = {}
        self.planned: dict[str, list[tuple[int, ...]]] = {}
        self.answers: dict[str, list[int]] = {}
        self.count = 0
        self._spy()

    def _spy(self) -> None:
        """Note every plan that is made."""
        planner = getattr(self.connector, "_planner", None)
        if planner is None:
            return
        plan = planner.plan

        def noting(request: Any, matched: int) -> Any:
            made = plan(request, matched)
            self.planned.setdefault(request.request_id, []).append(made.stops)
            return made

        planner.plan = noting

    def submit(self, request_id: str, prompt: list[int], answer: int, priority: int = 0) -> list[int]:
        """Queue a request; returns its prompt and answer, which depend on the prompt alone."""
        sequence = list(prompt)
        identity = identities(prompt)[-1]
        # The asynchronous scheduler may compute a little past the end, so the model has a little more to say.
        for _ in range(answer + 4):
            sequence.append(identity % 500)
            identity = hash((identity, sequence[-1]))
        self.worker.add(request_id, sequence, len(prompt))
        request = Request(
            request_id,
            list(prompt),
            SamplingParams(max_tokens=answer, ignore_eos=True),
            None,
            priority=priority,
            block_hasher=self._hasher,
        )
        self.requests[request_id] = request
        self.steps[request_id] = []
        self.answers[request_id] = []
        self.scheduler.add_request(request)
        return sequence[: len(prompt) + answer]

    def step(self) -> None:
        """Schedule one step; once the pipeline is full, run the oldest and process what it produced."""
        armed = {request_id: request.shared_prefix_boundary for request_id, request in self.requests.items()}
        plans_before = {request_id: len(plans) for request_id, plans in self.planned.items()}
        output = self.scheduler.schedule()
        self.count += 1
        for request_id, tokens in output.num_scheduled_tokens.items():
            request = self.requests[request_id]
            end = request.num_computed_tokens
            made = self.planned.get(request_id, [])[plans_before.get(request_id, 0) :]
            if made:
                armed[request_id] = next(iter(made[-1]), 0)
            column = -(-end // self.block) - 1
            table = self.scheduler.kv_cache_manager.get_block_ids(request_id)[RECURRENT]
            self.steps[request_id].append(Step(self.count, end - tokens, end, armed[request_id], table[column]))
        self._queue.append(output)
        if len(self._queue) >= self._depth or not self.scheduler.has_unfinished_requests():
            self._process()

    def _process(self) -> None:
        output = self._queue.popleft()
        results = self.scheduler.update_from_output(output, self.worker.run(output))
        for outputs in results.values():
            for result in outputs.outputs:
                self.answers[result.request_id].extend(result.new_token_ids)

    def run(self, limit: int = 5000) -> None:
        """Step until every request is done; fails when that takes more than `limit` steps (a request starves)."""
        while self.scheduler.has_requests() or self._queue:
            if not self.scheduler.has_requests():
                self._process()
                continue
            self.step()
            assert self.count < limit, {name: str(request.status) for name, request in self.requests.items()}
        for request_id, request in self.requests.items():
            assert request.status == RequestStatus.FINISHED_LENGTH_CAPPED
            end = request.num_prompt_tokens + request.max_tokens
            assert self.answers[request_id] == self.worker.sequences[request_id][request.num_prompt_tokens : end]
        leaked = self.scheduler.kv_cache_manager.block_pool.get_num_free_blocks()
        assert leaked == self.config.cache_config.num_gpu_blocks - 1, "blocks leaked"

    def prefill_steps(self, request_id: str) -> list[Step]:
        """The steps in which the request computed its prompt."""
        request = self.requests[request_id]
        return [step for step in self.steps[request_id] if step.start < request.num_prompt_tokens]

    def snapshots(self, request_id: str) -> list[int]:
        """Positions of the request's sequence at which the server holds a snapshot."""
        prefixes = self.worker.prefixes[request_id]
        return [end for end in range(self.block, len(prefixes), self.block) if prefixes[end] in self.server.snapshots]


def tokens(seed: int, count: int) -> list[int]:
    """A prompt."""
    generator = random.Random(seed)
    return [generator.randrange(500) for _ in range(count)]
