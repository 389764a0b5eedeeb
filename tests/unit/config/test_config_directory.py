"""Settings of the directory: what is accepted, what is refused with which remedy, and that no password is shown."""

from __future__ import annotations

from pathlib import Path

import pytest

from lmcache_histate.backends.arguments import server_environment, server_module_spec, settings_digest
from lmcache_histate.backends.directory_setup import instance_name, make_directory, shared_tier_of
from lmcache_histate.config import Config, ConfigError, HiStateSettings, load_config
from lmcache_histate.config.values import hide_password
from lmcache_histate.state_store.directory.local import LocalDirectory
from lmcache_histate.state_store.directory.redis_directory import RedisDirectory


def config(folder: Path, *lines: str) -> Config:
    path = folder / "cache.yaml"
    path.write_text("\n".join(["histate:", *(f"  {line}" for line in lines)]))
    loaded = load_config({"LMCACHE_CONFIG": str(path)})
    assert loaded is not None
    return loaded


@pytest.mark.parametrize(
    "url",
    [
        "redis://meta",
        "redis://meta:6379/3",
        "rediss://user:p%40ss@meta:6380?ca_file=/etc/ca.pem",
        "redis+sentinel://s1,s2:26380/mymaster/0?sentinel_password=hunter2",
        "redis+cluster://n1:7000,n2:7000",
        "valkey://meta",
    ],
)
def test_every_kind_of_server_is_accepted_and_reaches_the_server_process(tmp_path: Path, url: str) -> None:
    loaded = config(tmp_path, f"directory: {url}")
    assert loaded.histate.directory == url
    spec = server_module_spec(loaded, 64)["config"]
    for secret in ("p%40ss", "hunter2"):
        assert secret not in str(spec)
        assert secret not in hide_password(url)
    # What is left out of the command line comes back through the environment.
    assert Config.from_json(spec, server_environment(loaded)).histate.directory == url


@pytest.mark.parametrize(
    ("line", "text"),
    [
        ("directory: meta:6379", "is not a URL. Write it like redis://meta:6379/0"),
        ("directory: http://meta", "http:// is not known"),
        ("directory_lease: 0", "is not positive"),
        ("directory_lease: 0.5", "too short"),
        ("directory_lease: soon", "Write a number of seconds"),
        ("instance: ''", "is no name for an instance"),
        (f"instance: {'x' * 201}", "is no name for an instance"),
        ("instance_address: 'http://a b'", "is no address"),
        ("instances: a", "Did you mean 'histate.instance'"),
    ],
)
def test_what_cannot_be_used_is_refused_with_a_remedy(tmp_path: Path, line: str, text: str) -> None:
    with pytest.raises(ConfigError) as caught:
        config(tmp_path, line)
    assert text in str(caught.value)
    assert "cache.yaml:2" in str(caught.value)


def test_names_of_instances() -> None:
    assert instance_name(Config(histate=HiStateSettings(instance="gpu-7"))) == "gpu-7"
    name = instance_name(Config(server_url="tcp://localhost:6555"))
    assert name.endswith(":6555")
    assert len(name) > len(":6555")


def test_the_shared_tier_is_what_all_with_the_same_settings_reach() -> None:
    redis = Config(remote_url="redis://user:secret@cache:6379")
    assert (
        shared_tier_of(redis) == shared_tier_of(Config(remote_url="redis://cache:6379")) == "shared:redis://cache:6379"
    )
    assert shared_tier_of(Config(remote_url="file:///mnt/share/")) == "shared:file:///mnt/share"
    assert shared_tier_of(Config()) == ""
    own = {"type": "raw_block", "device_path": "/dev/nvme1n1"}
    mooncake = {"type": "mooncake_store", "shared": True, "password": "secret"}
    assert shared_tier_of(Config(l2_adapters=(own,))) == ""
    assert shared_tier_of(Config(remote_url="redis://cache", l2_adapters=(own,))) == "", "they are one tier to the core"
    both = shared_tier_of(Config(remote_url="redis://cache", l2_adapters=(mooncake,)))
    assert both.startswith("shared:redis://cache+shared:mooncake_store:")
    assert "secret" not in both
    assert shared_tier_of(Config(l2_adapters=(mooncake,))) != shared_tier_of(
        Config(l2_adapters=({**mooncake, "a": 1},))
    )
    assert len(shared_tier_of(Config(remote_url="file:///" + "x" * 300))) < 130


def test_which_directory_it_becomes() -> None:
    alone = make_directory(Config(histate=HiStateSettings(instance="a")))
    assert isinstance(alone, LocalDirectory)
    settings = HiStateSettings(directory="redis://meta", directory_lease=7.0, instance="a")
    shared = make_directory(Config(remote_url="redis://cache", histate=settings))
    assert isinstance(shared, RedisDirectory)
    assert (shared.name, shared.lease_s, shared.remote_is_shared) == ("a", 7.0, True)


def test_a_server_with_another_directory_is_another_server() -> None:
    digests = {
        settings_digest(server_module_spec(Config(histate=HiStateSettings(directory=url)), 64)["config"])
        for url in (None, "redis://one", "redis://other")
    }
    assert len(digests) == 3
