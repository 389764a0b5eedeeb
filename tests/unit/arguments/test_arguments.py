"""The command lines, read back by LMCache's own parsers and by shells."""

from __future__ import annotations

import argparse
import json
import shlex
import subprocess
import sys
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lmcache_histate.backends.arguments import (
    adapter_specs,
    connector_extra_config,
    disk_adapter_spec,
    forget_secrets,
    server_arguments,
    server_environment,
    server_module_spec,
    vllm_arguments,
)
from lmcache_histate.config import Config, HiStateSettings
from lmcache_histate.config.values import RESERVED_FLAGS

GIB = 1 << 30
FULL = Config(
    max_local_cpu_size="1536MiB",
    local_disk="/mnt/my disk/it's $HOME",
    max_local_disk_size=150,
    remote_url="redis://us%20er:p%40ss@cache:6380",
    l2_adapters=({"type": "mock", "max_size_gb": 1, "mock_bandwidth_gb": 10},),
    http_port=9080,
    server_args=("--max-workers", "4", "--instance-id", "two words"),
    histate=HiStateSettings(interval=1024, directory="redis://:secret@meta:6379/3"),
)


@pytest.fixture(scope="module")
def lmcache_parser() -> argparse.ArgumentParser:
    """The parser of ``lmcache server`` and of the module that autostart runs."""
    from lmcache.v1.distributed.config import add_storage_manager_args
    from lmcache.v1.mp_observability.config import add_observability_args
    from lmcache.v1.multiprocess.config import (
        add_coordinator_args,
        add_http_frontend_args,
        add_mp_server_args,
        add_p2p_args,
    )

    parser = argparse.ArgumentParser(exit_on_error=False)
    for add in (
        add_mp_server_args,
        add_p2p_args,
        add_storage_manager_args,
        add_http_frontend_args,
        add_observability_args,
        add_coordinator_args,
    ):
        add(parser)
    return parser


class TestServerArguments:
    def test_lmcache_reads_back_what_was_meant(self, lmcache_parser: argparse.ArgumentParser) -> None:
        from lmcache.v1.distributed.config import parse_args_to_config
        from lmcache.v1.multiprocess.config import parse_args_to_http_frontend_config, parse_args_to_mp_server_config

        args = lmcache_parser.parse_args(server_arguments(FULL, 528))
        server = parse_args_to_mp_server_config(args)
        storage = parse_args_to_config(args)
        assert server.chunk_size == 528
        assert server.separate_object_groups is True
        assert server.max_workers == 4
        assert server.instance_id == "two words"
        assert parse_args_to_http_frontend_config(args).http_port == 9080
        assert storage.l1_manager_config.memory_config.size_in_bytes == 1536 << 20
        assert storage.eviction_config.eviction_policy == "noop"
        adapters = storage.l2_adapter_config.adapters
        assert adapters[0].adapter_params == {"base_path": "/mnt/my disk/it's $HOME", "max_capacity_gb": 150}
        assert (adapters[1].host, adapters[1].port, adapters[1].shared) == ("cache", 6380, True)
        assert len(adapters) == 3
        (module,) = server.server_modules
        assert (module.module_path, module.factory_name) == (
            "lmcache_histate.backends.server_module",
            "build_server_module",
        )
        assert Config.from_json(module.config).histate.interval == 1024
        assert module.config["chunk_size"] == 528

    @pytest.mark.parametrize(
        "url",
        [
            "redis://cache",
            "rediss://u:p@cache",
            "redis://cache/3",
            "s3://bucket?region=eu-west-1",
            "s3://b.minio:9000?region=x&disable_tls=true&s3_num_io_threads=8",
            "file:///mnt/share",
        ],
    )
    def test_lmcache_knows_every_remote_tier(self, lmcache_parser: argparse.ArgumentParser, url: str) -> None:
        from lmcache.v1.distributed.config import parse_args_to_config

        args = lmcache_parser.parse_args(server_arguments(Config(remote_url=url), 64))
        (adapter,) = parse_args_to_config(args).l2_adapter_config.adapters
        assert adapter.shared is True

    def test_every_flag_is_an_exact_one_and_reserved_ones_exist(self, lmcache_parser: argparse.ArgumentParser) -> None:
        known = set(lmcache_parser._option_string_actions)
        ours = {word for word in server_arguments(FULL.replaced("", local_cpu=False), 528) if word.startswith("--")}
        assert ours <= known
        assert set(RESERVED_FLAGS) <= known
        # What we set ourselves must not be set a second time by a user's server_args.
        assert ours - {"--server-module", "--max-workers", "--instance-id"} <= set(RESERVED_FLAGS)

    def test_no_flag_of_lmcache_is_refused_because_it_looks_like_an_abbreviation(
        self, lmcache_parser: argparse.ArgumentParser
    ) -> None:
        for flag in lmcache_parser._option_string_actions:
            if flag.startswith("--") and flag not in RESERVED_FLAGS:
                assert Config(server_args=[flag]).server_args == (flag,)

    def test_the_disk_tier_accepts_its_settings(self) -> None:
        from lmcache_histate.backends.disk.adapter import HiStateDiskConfig

        assert HiStateDiskConfig.from_dict(disk_adapter_spec(FULL)["adapter_params"]) is not None

    def test_without_disk_and_remote_there_is_no_adapter(self) -> None:
        assert adapter_specs(Config()) == []
        assert "--l2-adapter" not in server_arguments(Config(), 528)
        with pytest.raises(ValueError, match="no local_disk"):
            disk_adapter_spec(Config())

    def test_the_disk_comes_first(self) -> None:
        """The server module takes the first adapter for its disk tier."""
        assert adapter_specs(FULL)[0] == disk_adapter_spec(FULL)
        assert [spec["type"] for spec in adapter_specs(FULL)][1:] == ["resp", "mock"]

    def test_cpu_memory_as_a_buffer_only(self) -> None:
        config = Config(local_cpu=False, l2_adapters=[{"type": "mock"}])
        arguments = server_arguments(config, 64)
        assert arguments[arguments.index("--l2-store-policy") + 1] == "skip_l1"
        # What the server module is handed must be a valid configuration by itself.
        assert Config.from_json(server_module_spec(config, 64)["config"]).local_cpu is False

    @pytest.mark.parametrize("chunk_size", [0, -1])
    def test_a_chunk_size_must_be_positive(self, chunk_size: int) -> None:
        with pytest.raises(ValueError, match="positive"):
            server_arguments(Config(), chunk_size)

    @pytest.mark.parametrize(("size", "text"), [(5, "5"), (0.1, "0.1"), ("100MiB", "0.09765625"), (1536, "1536")])
    def test_sizes_are_plain_decimals(self, size: Any, text: str) -> None:
        arguments = server_arguments(Config(max_local_cpu_size=size), 64)
        assert arguments[arguments.index("--l1-size-gb") + 1] == text

    @settings(deadline=None)
    @given(st.floats(min_value=1e-4, max_value=1e5))
    def test_sizes_lose_less_than_ten_bytes(self, size: float) -> None:
        arguments = server_arguments(Config(max_local_cpu_size=size), 64)
        assert abs(float(arguments[arguments.index("--l1-size-gb") + 1]) - size) * GIB < 10


class TestSecrets:
    def test_no_password_is_on_the_command_line(self) -> None:
        line = shlex.join(server_arguments(FULL, 528))
        assert "p@ss" not in line
        assert "p%40ss" not in line
        assert "secret" not in line
        assert server_environment(FULL) == {
            "LMCACHE_RESP_USERNAME": "us er",
            "LMCACHE_RESP_PASSWORD": "p@ss",
            "HISTATE_DIRECTORY": "redis://:secret@meta:6379/3",
        }

    def test_the_server_gets_the_directory_back(self) -> None:
        spec = server_module_spec(FULL, 528)
        config = Config.from_json(spec["config"], server_environment(FULL))
        assert config.histate.directory == "redis://:secret@meta:6379/3"

    def test_the_server_forgets_them(self) -> None:
        environ = {**server_environment(FULL), "HISTATE_REMOTE_URL": "redis://:secret@x", "PATH": "/bin"}
        forget_secrets(environ)
        assert environ == {"PATH": "/bin"}

    def test_without_passwords_the_environment_is_empty(self) -> None:
        assert (
            server_environment(Config(remote_url="redis://cache", histate=HiStateSettings(directory="redis://m"))) == {}
        )

    def test_lmcaches_valkey_client_takes_its_password_from_the_flags_only(self) -> None:
        config = Config(remote_url="rediss://u:p%40ss@cache")
        assert adapter_specs(config)[0]["password"] == "p@ss"
        assert server_environment(config) == {}


class TestConnectorConfig:
    def test_lmcaches_launcher_accepts_it(self) -> None:
        from lmcache.integration.vllm.mp_server_launcher import MPServerAutostartConfig

        extra = connector_extra_config(FULL, 528)
        launch = MPServerAutostartConfig.from_extra_config(extra, extra["lmcache.mp.host"], extra["lmcache.mp.port"])
        assert launch.enabled
        assert list(launch.server_args) == server_arguments(FULL, 528)
        assert launch.wait_timeout == FULL.histate.autostart_timeout
        assert (launch.host, launch.port) == ("localhost", 5555)

    def test_a_remote_server_is_joined_not_started(self) -> None:
        extra = connector_extra_config(Config(server_url="cache1:6000"), 528)
        assert extra["lmcache.mp.host"] == "tcp://cache1"
        assert extra["lmcache.mp.port"] == 6000
        assert extra["lmcache.mp.autostart"] is False
        assert "lmcache.mp.autostart.server_args" not in extra

    def test_several_servers(self) -> None:
        extra = connector_extra_config(Config(server_url="a:1,b:2"), 528)
        assert extra["lmcache.mp.server_urls"] == ["tcp://a:1", "tcp://b:2"]
        assert "lmcache.mp.host" not in extra

    def test_ipv6(self) -> None:
        extra = connector_extra_config(Config(server_url="tcp://[fe80::1]:6000"), 528)
        assert f"{extra['lmcache.mp.host']}:{extra['lmcache.mp.port']}" == "tcp://[fe80::1]:6000"

    @pytest.mark.parametrize("save", [True, False])
    def test_answers(self, save: bool) -> None:
        config = Config(histate=HiStateSettings(save_answers=save))
        assert connector_extra_config(config, 64)["lmcache.mp.save_decode_cache"] is save

    @settings(deadline=None, max_examples=200)
    @given(
        st.text(st.characters(exclude_characters="\0,", exclude_categories=["Cs"]), min_size=1),
        st.lists(
            st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"]), min_size=2).map("x".__add__)
        ),
    )
    def test_any_path_and_any_word_survive_the_shell_quoting(self, folder: str, words: list[str]) -> None:
        config = Config(local_disk=f"/{folder}/x", max_local_disk_size=1, server_args=words)
        line = connector_extra_config(config, 64)["lmcache.mp.autostart.server_args"]
        back = shlex.split(line)
        assert back == server_arguments(config, 64)
        assert json.loads(back[back.index("--l2-adapter") + 1]) == disk_adapter_spec(config)


class TestVllmArguments:
    def test_vllm_is_told_of_the_connector(self) -> None:
        arguments = vllm_arguments(Config())
        transfer = json.loads(arguments[arguments.index("--kv-transfer-config") + 1])
        assert transfer == {
            "kv_connector": "HiStateConnector",
            "kv_connector_module_path": "lmcache_histate.connector.histate_connector",
            "kv_role": "kv_both",
        }
        assert "--enable-prefix-caching" in arguments

    def test_switched_off_nothing_changes(self) -> None:
        assert vllm_arguments(Config(histate=HiStateSettings(enabled=False))) == []


def test_arguments_and_configuration_import_no_engine() -> None:
    code = (
        "import sys, lmcache_histate.backends.arguments, lmcache_histate.cli.main\n"
        "print(sorted({name.split('.')[0] for name in sys.modules} & {'lmcache', 'vllm', 'torch', 'zmq'}))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout.strip() == "[]"
