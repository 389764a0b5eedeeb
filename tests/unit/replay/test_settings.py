import json
from pathlib import Path

import pytest

from lmcache_histate.config import load_config
from lmcache_histate.replay.cache_server import CacheServerSettings
from lmcache_histate.replay.engine import EngineSettings
from lmcache_histate.replay.live import BACKENDS, Capacity
from lmcache_histate.replay.processes import ProcessScope
from lmcache_histate.replay.tiny_model import TinyModelSpec, ensure_tiny_model

CAPACITY = Capacity(pool_blocks=100, memory_bytes=1 << 30, disk_bytes=2 << 30)


def test_a_limited_disk_gets_an_adapter_that_evicts():
    arguments = CacheServerSettings(64, 1 << 29, 1 << 30).arguments(5001, 5002, Path("/d"))
    adapter = json.loads(arguments[arguments.index("--l2-adapter") + 1])
    assert adapter["max_capacity_gb"] == 1.0
    assert adapter["eviction"] == {"eviction_policy": "LRU"}
    assert arguments[arguments.index("--l1-size-gb") + 1] == "0.500000"
    assert "--separate-object-groups" in arguments


def test_no_disk_means_no_adapter():
    assert "--l2-adapter" not in CacheServerSettings(64, 1 << 29).arguments(5001, 5002, Path("/d"))


def test_engine_arguments_name_the_block_size_and_let_the_caller_win():
    settings = EngineSettings(Path("/m"), blocks=100, arguments={"max_num_seqs": 2})
    arguments = settings.engine_arguments()
    assert arguments["block_size"] == 64
    assert arguments["num_gpu_blocks_override"] == 100
    assert arguments["max_num_seqs"] == 2
    assert "kv_transfer_config" not in arguments


def test_histate_is_switched_on_by_its_config_file_alone(tmp_path):
    with ProcessScope() as scope:
        prepared = BACKENDS["histate"].prepare(scope, tmp_path, EngineSettings(Path("/m")), CAPACITY)
    transfer = prepared.engine.kv_transfer
    assert transfer["kv_connector"] == "HiStateConnector"
    assert transfer["kv_connector_extra_config"] == {}
    config = load_config(prepared.engine.environment)
    assert config.max_local_cpu_size == 1.0
    assert config.max_local_disk_size == 2.0
    assert config.starts_server


def test_vllm_alone_has_no_connector(tmp_path):
    with ProcessScope() as scope:
        prepared = BACKENDS["vllm"].prepare(scope, tmp_path, EngineSettings(Path("/m")), CAPACITY)
    assert prepared.engine.kv_transfer is None
    assert prepared.server is None


def test_the_model_is_written_once_and_again_for_another_spec(tmp_path):
    pytest.importorskip("transformers")
    folder = ensure_tiny_model(tmp_path / "model")
    weights = folder / "model.safetensors"
    first = weights.stat().st_mtime_ns
    assert ensure_tiny_model(folder).joinpath("model.safetensors").stat().st_mtime_ns == first
    before = weights.read_bytes()
    ensure_tiny_model(folder, TinyModelSpec(seed=1))
    assert weights.read_bytes() != before
    ensure_tiny_model(folder)
    assert weights.read_bytes() == before
    assert not [entry for entry in tmp_path.iterdir() if entry.name.startswith(".")]


def test_half_a_model_is_replaced(tmp_path):
    pytest.importorskip("transformers")
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "tiny_model.json").write_text("{")
    ensure_tiny_model(folder)
    config = json.loads((folder / "config.json").read_text())
    assert config["layer_types"] == ["linear_attention"] * 6 + ["full_attention"] * 2
