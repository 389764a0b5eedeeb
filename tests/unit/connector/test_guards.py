"""Each refusal at start-up, and that its message names the remedy."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    MambaSpec,
    UniformTypeKVCacheSpecs,
)

from lmcache_histate.connector import guards
from lmcache_histate.connector.guards import StartupError
from lmcache_histate.protocol import ServerFacts


def attention(block: int = 64) -> FullAttentionSpec:
    return FullAttentionSpec(block_size=block, num_kv_heads=2, head_size=16, dtype=torch.bfloat16)


def recurrent(block: int = 64, floats: int = 1000) -> MambaSpec:
    return MambaSpec(block_size=block, shapes=((floats,),), dtypes=(torch.float32,), mamba_cache_mode="align")


def config(*groups: tuple[list[str], Any]) -> KVCacheConfig:
    return KVCacheConfig(
        num_blocks=10, kv_cache_tensors=[], kv_cache_groups=[KVCacheGroupSpec(names, spec) for names, spec in groups]
    )


HYBRID = config((["a0", "a1"], attention()), (["m0", "m1"], recurrent()), (["m2", "m3"], recurrent()))
ATTENTION_ONLY = config((["a0"], attention()))


def test_finds_the_recurrent_groups_of_a_hybrid_model() -> None:
    assert guards.recurrent_block_size(HYBRID) == 64
    assert guards.recurrent_groups(HYBRID) == [1, 2]


@pytest.mark.parametrize("nothing", [None, ATTENTION_ONLY])
def test_finds_none_in_other_models(nothing: KVCacheConfig | None) -> None:
    assert guards.recurrent_block_size(nothing) is None
    assert guards.recurrent_groups(nothing) == []
    assert guards.snapshot_tokens(nothing) == 0.0


def test_looks_into_groups_of_several_specs() -> None:
    mixed = UniformTypeKVCacheSpecs(block_size=528, kv_cache_specs={"m0": recurrent(528), "m1": recurrent(528)})
    found = config((["a0"], attention(528)), (["m0", "m1"], mixed))
    assert guards.recurrent_block_size(found) == 528
    assert guards.recurrent_groups(found) == [1]


def test_refuses_recurrent_layers_of_several_block_sizes() -> None:
    with pytest.raises(StartupError, match="--mamba-block-size") as refused:
        guards.recurrent_block_size(config((["m0"], recurrent(64)), (["m1"], recurrent(128))))
    assert "[64, 128]" in str(refused.value)


def test_snapshot_tokens_is_the_ratio_of_what_vllm_allocates() -> None:
    token = 2 * 2 * 2 * 16 * 2  # two layers, keys and values, two heads of 16 numbers of two bytes
    assert guards.snapshot_tokens(HYBRID) == pytest.approx(4 * 1000 * 4 / token)
    mixed = UniformTypeKVCacheSpecs(block_size=64, kv_cache_specs={"m0": recurrent(), "m1": recurrent(floats=3000)})
    uneven = config((["a0", "a1"], attention()), (["m0", "m1"], mixed))
    assert guards.snapshot_tokens(uneven) == pytest.approx((1000 + 3000) * 4 / token)


@pytest.mark.parametrize(
    ("vllm", "lmcache", "named"),
    [("0.33.0", "0.5.6", "vllm 0.33.0"), ("0.32.0", "0.5.7", "lmcache 0.5.7"), ("0.320.0", "0.5.6", "vllm 0.320.0")],
)
def test_refuses_untested_versions_unless_told_otherwise(
    monkeypatch: pytest.MonkeyPatch, vllm: str, lmcache: str, named: str
) -> None:
    monkeypatch.setattr(guards, "installed_version", lambda names: vllm if "vllm" in names else lmcache)
    with pytest.raises(StartupError, match="HISTATE_ALLOW_UNTESTED_VERSIONS") as refused:
        guards.check_versions(allow_untested=False)
    assert named in str(refused.value)
    warning = guards.check_versions(allow_untested=True)
    assert warning is not None
    assert named in warning


@pytest.mark.parametrize("vllm", ["0.32", "0.32.0", "0.32.4", None])
def test_accepts_tested_versions_and_source_checkouts(monkeypatch: pytest.MonkeyPatch, vllm: str | None) -> None:
    monkeypatch.setattr(guards, "installed_version", lambda names: vllm if "vllm" in names else "0.5.6")
    assert guards.check_versions(allow_untested=False) is None


def test_the_installed_versions_are_tested_ones() -> None:
    assert guards.installed_version(("lmcache",)) is not None
    assert guards.installed_version(("no-such-distribution",)) is None
    assert guards.check_versions(allow_untested=False) is None


def engine(**cache: Any) -> Any:
    settings = {"enable_prefix_caching": True, "mamba_cache_mode": "align", "user_specified_block_size": True} | cache
    return SimpleNamespace(cache_config=SimpleNamespace(**settings))


@pytest.mark.parametrize(
    ("cache", "remedy"),
    [
        ({"enable_prefix_caching": False}, "--no-enable-prefix-caching"),
        ({"mamba_cache_mode": "all"}, "--mamba-cache-mode align"),
        ({"user_specified_block_size": False}, "--block-size 528"),
    ],
)
def test_refuses_engines_that_lose_states(cache: dict[str, Any], remedy: str) -> None:
    with pytest.raises(StartupError, match=remedy):
        guards.check_engine(engine(**cache), 528, on_cpu=True)


def test_accepts_a_good_engine_and_needs_no_block_size_on_a_gpu() -> None:
    guards.check_engine(engine(), 528, on_cpu=True)
    guards.check_engine(engine(user_specified_block_size=False), 528, on_cpu=False)


GOOD = {
    "histate_version": "0",
    "lmcache_version": "0",
    "chunk_size": 528,
    "separate_object_groups": True,
    "null_block_id": 0,
}


@pytest.mark.parametrize(
    ("wrong", "remedy"),
    [
        ({"separate_object_groups": False}, "--separate-object-groups"),
        ({"chunk_size": 1056}, "--chunk-size 528"),
        ({"chunk_size": 264}, "--chunk-size 528"),
        ({"null_block_id": 7}, "--null-block-id 7"),
    ],
)
def test_refuses_servers_that_would_serve_wrong_states(wrong: dict[str, Any], remedy: str) -> None:
    with pytest.raises(StartupError, match=remedy) as refused:
        guards.check_server(ServerFacts(**GOOD | wrong), 528, "tcp://cache:5555")
    assert "tcp://cache:5555" in str(refused.value)


def test_accepts_a_good_server() -> None:
    guards.check_server(ServerFacts(**GOOD), 528, "tcp://cache:5555")


def test_this_vllm_honours_the_stop() -> None:
    assert guards.stop_is_honoured() is True


def test_the_self_test_notices_a_scheduler_that_ignores_the_stop(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Scheduler, "_mamba_block_aligned_split", lambda self, request, tokens, *_: tokens)
    assert guards.stop_is_honoured() is False


@pytest.mark.parametrize(
    "change",
    [
        lambda self, request, tokens: self.no_such_attribute,
        lambda self: 0,
    ],
)
def test_the_self_test_cannot_tell_when_the_schedulers_insides_changed(
    monkeypatch: pytest.MonkeyPatch, change: Any
) -> None:
    monkeypatch.setattr(Scheduler, "_mamba_block_aligned_split", change)
    assert guards.stop_is_honoured() is None


def test_the_self_test_cannot_tell_when_the_split_is_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(Scheduler, "_mamba_block_aligned_split")
    assert guards.stop_is_honoured() is None


def test_everything_that_is_used_of_vllm_and_lmcache_is_there() -> None:
    assert guards.check_members(allow_untested=False) is None
    owners = {owner.__name__ for owner, *_ in guards.used_members()}
    assert {"LMCacheMPConnector", "Request", "SchedulerOutput"} <= owners


@pytest.mark.parametrize(
    ("owner", "name", "parameters"),
    [
        (Scheduler, "_no_such_method", ("request",)),
        (Scheduler, "schedule", ("no_such_parameter",)),
        (Scheduler, "no_such_attribute", ()),
    ],
)
def test_a_member_that_is_gone_is_named_at_start_up(
    monkeypatch: pytest.MonkeyPatch, owner: type, name: str, parameters: tuple[str, ...]
) -> None:
    used = guards.used_members()
    monkeypatch.setattr(guards, "used_members", lambda: [*used, (owner, name, parameters)])
    with pytest.raises(StartupError, match=f"Scheduler.{name}.*Install vllm") as refused:
        guards.check_members(allow_untested=False)
    assert "LMCacheMPConnector" not in str(refused.value)
    warning = guards.check_members(allow_untested=True)
    assert warning is not None
    assert name in warning
