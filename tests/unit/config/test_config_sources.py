"""Which source wins, where each value came from, and what a wrong file or variable is told."""

from __future__ import annotations

import pickle
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from lmcache_histate.config import (
    ENVIRONMENT_NAMES,
    SETTINGS,
    Config,
    ConfigError,
    HiStateSettings,
    load_config,
    load_config_or_defaults,
)
from lmcache_histate.config.lmcache_words import IN_PROCESS_WORDS, REMEDIES
from lmcache_histate.config.model import default_of

GOOD = """\
chunk_size: auto            # the model's block size
local_cpu: true
max_local_cpu_size: 96      # GiB
local_disk: file:///mnt/nvme/histate
max_local_disk_size: 150    # GiB
remote_url: redis://cache:6379
histate:
  interval: adaptive
  eviction: cost
  tau: auto
  directory: redis://meta:6379/0
"""


@pytest.fixture
def write(tmp_path: Path):
    def write_file(text: str, name: str = "cache.yaml") -> str:
        path = tmp_path / name
        path.write_text(text)
        return str(path)

    return write_file


def load(path: str, **environ: str) -> Config:
    config = load_config({"LMCACHE_CONFIG": path, **environ})
    assert config is not None
    return config


def problems(path: str, **environ: str) -> str:
    with pytest.raises(ConfigError) as caught:
        load(path, **environ)
    return str(caught.value).replace(str(Path(path).parent) + "/", "")


class TestSources:
    def test_nothing_set_means_not_configured(self) -> None:
        assert load_config({}) is None
        assert load_config({"HISTATE_INTERVAL": "5", "LMCACHE_CONFIG": " "}) is None

    def test_the_word_histate_means_the_defaults(self) -> None:
        config = load("histate")
        assert config == Config()
        assert config.source == "histate"
        assert {config.origin(key) for key in SETTINGS} == {"default"}

    def test_the_documented_example(self, write) -> None:
        path = write(GOOD)
        config = load(path)
        assert config.max_local_cpu_size == 96
        assert config.local_disk == "/mnt/nvme/histate"
        assert config.histate.interval == "adaptive"
        assert config.histate.directory == "redis://meta:6379/0"
        assert config.origin("max_local_cpu_size") == f"{path}:3"
        assert config.origin("histate.interval") == f"{path}:8"
        assert config.origin("http_port") == "default"
        assert config.source == path

    def test_environment_wins_over_the_file_in_both_sections(self, write) -> None:
        config = load(write(GOOD), HISTATE_INTERVAL="512", HISTATE_MAX_LOCAL_CPU_SIZE="1TiB", HISTATE_TAU="auto")
        assert config.histate.interval == 512
        assert config.max_local_cpu_size == 1024
        assert config.origin("histate.interval") == "environment HISTATE_INTERVAL"
        assert config.origin("max_local_cpu_size") == "environment HISTATE_MAX_LOCAL_CPU_SIZE"

    def test_none_switches_an_optional_setting_off_and_empty_means_not_given(self, write) -> None:
        config = load(write(GOOD), HISTATE_REMOTE_URL="none", HISTATE_DIRECTORY="null", HISTATE_INTERVAL="")
        assert config.remote_url is None
        assert config.histate.directory is None
        assert config.origin("histate.interval").endswith("cache.yaml:8")
        assert load("histate", HISTATE_REFRESH="none").histate.refresh == "none"

    def test_lists_in_the_environment(self) -> None:
        config = load(
            "histate",
            HISTATE_L2_ADAPTERS='[{"type": "mock"}]',
            HISTATE_SERVER_ARGS="--max-workers 4 --instance-id 'a b'",
        )
        assert config.l2_adapters == ({"type": "mock"},)
        assert config.server_args == ("--max-workers", "4", "--instance-id", "a b")

    def test_every_setting_has_one_environment_variable(self) -> None:
        assert sorted(ENVIRONMENT_NAMES.values()) == sorted(SETTINGS)
        assert ENVIRONMENT_NAMES["HISTATE_MAX_LOCAL_CPU_SIZE"] == "max_local_cpu_size"
        assert ENVIRONMENT_NAMES["HISTATE_TAU"] == "histate.tau"

    def test_kubernetes_service_variables_are_not_taken_for_settings(self) -> None:
        load(
            "histate",
            HISTATE_SERVICE_HOST="10.0.0.1",
            HISTATE_SERVICE_PORT="5555",
            HISTATE_SERVICE_PORT_HTTP="8080",
            HISTATE_PORT="tcp://10.0.0.1:5555",
            HISTATE_PORT_5555_TCP="tcp://10.0.0.1:5555",
            HISTATE_PORT_5555_TCP_ADDR="10.0.0.1",
            HISTATE_HTTP_PORT="tcp://10.0.0.1:8080",
            HISTATE_META_SERVICE_HOST="10.0.0.2",
            HISTATE_META_PORT_6379_TCP_PROTO="tcp",
        )

        with pytest.raises(ConfigError, match=r"HISTATE_PORT: unknown setting\. Did you mean 'HISTATE_HTTP_PORT'"):
            load("histate", HISTATE_PORT="8080")

    def test_lmcache_config_wins_over_lmcache_config_file(self, write) -> None:
        other = write("histate:\n  interval: 64\n", "other.yaml")
        config = load_config({"LMCACHE_CONFIG": "histate", "LMCACHE_CONFIG_FILE": other})
        assert config is not None
        assert config.histate.interval == "adaptive"

    def test_lmcache_config_file_counts_only_with_a_section(self, write) -> None:
        without = write("chunk_size: 256\n# histate: not a section\n")
        assert load_config({"LMCACHE_CONFIG_FILE": without}) is None
        assert load_config({"LMCACHE_CONFIG_FILE": without + ".missing"}) is None
        for text in ("histate:\n", "histate: {}\n", "histate:\n  interval: 64\n", '"histate": {enabled: true}\n'):
            assert load_config({"LMCACHE_CONFIG_FILE": write(text)}) is not None

    def test_a_broken_file_that_is_lmcaches_alone_is_left_to_lmcache(self, write) -> None:
        assert load_config({"LMCACHE_CONFIG_FILE": write("chunk_size: [\n")}) is None

    def test_lmcaches_other_words_are_ignored_with_a_remedy(self, write) -> None:
        path = write("save_unfull_chunk: true\ncache_policy: LRU\nblocking_timeout_secs: 5\nhistate:\n  interval: 64\n")
        config = load_config({"LMCACHE_CONFIG_FILE": path})
        assert config is not None
        assert len(config.ignored) == 3
        assert config.ignored[0].startswith(f"{path}:1: save_unfull_chunk: ignored")
        assert "histate.eviction" in config.ignored[1]

    def test_the_same_words_are_errors_in_histates_own_file(self, write) -> None:
        text = problems(write("cache_policy: LRU\n"))
        assert "cache.yaml:1: cache_policy:" in text
        assert "Use histate.eviction" in text

    def test_misspelt_words_are_errors_in_either_file(self, write) -> None:
        with pytest.raises(ConfigError, match="Did you mean 'max_local_cpu_size'"):
            load_config({"LMCACHE_CONFIG_FILE": write("max_local_cpu_sise: 4\nhistate:\n")})

    def test_an_empty_file_means_the_defaults(self, write) -> None:
        assert load(write("")) == Config()
        assert load(write("# nothing\nhistate:\n")) == Config()

    def test_anchors_and_merges(self, write) -> None:
        config = load(write("histate:\n  <<: &base {interval: 64, tau: 5}\n  tau: 7\n"))
        assert config.histate.interval == 64
        assert config.histate.tau == 7

    def test_defaults_for_callers_that_were_named_explicitly(self, write) -> None:
        assert load_config_or_defaults({"HISTATE_INTERVAL": "64"}).histate.interval == 64
        path = write("histate:\n  interval: 128\n")
        assert load_config_or_defaults({"LMCACHE_CONFIG_FILE": path}).histate.interval == 128


class TestErrors:
    def test_all_problems_are_reported_at_once_with_file_line_and_key(self, write) -> None:
        text = problems(
            write("max_local_cpu_size: 4 apples\nchunk_sise: 4\nhistate:\n  interval: 0\n  intervall: 5\n  tau: -1\n"),
            HISTATE_EVICTON="lru",
        )
        lines = text.splitlines()
        assert len(lines) == 6
        assert any(line.startswith("cache.yaml:1: max_local_cpu_size: '4 apples' is not a size") for line in lines)
        assert "cache.yaml:2: chunk_sise: unknown setting. Did you mean 'chunk_size'?" in lines
        assert any(line.startswith("cache.yaml:4: histate.interval: 0 is not positive") for line in lines)
        assert "cache.yaml:5: histate.intervall: unknown setting. Did you mean 'histate.interval'?" in lines
        assert any(line.startswith("cache.yaml:6: histate.tau: -1 is not positive") for line in lines)
        assert "environment HISTATE_EVICTON: unknown setting. Did you mean 'HISTATE_EVICTION'?" in lines

    @pytest.mark.parametrize(
        ("text", "message"),
        [
            ("interval: 5\n", "cache.yaml:1: interval: stands in the wrong place. Move it: it belongs in the section"),
            ("histate:\n  chunk_size: 5\n", "cache.yaml:2: histate.chunk_size: stands in the wrong place"),
            ("histate:\n  interval: 5\n  interval: 6\n", "interval: already set in cache.yaml:2"),
            ("chunk_size: 5\nhistate: yes\n", "cache.yaml:2: histate: expected a section"),
            ("chunk_size:\n", "cache.yaml:1: chunk_size: has no value"),
            ("chunk_size: 0\n", "0 is not positive"),
            ("chunk_size: big\n", "'big' is not understood"),
            ("local_disk: /x\n", "cache.yaml:1: local_disk: a folder without a size"),
            ("max_local_disk_size: 5\n", "cache.yaml:1: max_local_disk_size: a size without a folder"),
            ("max_local_cpu_size: 0\n", "needs some CPU memory"),
            ("local_cpu: false\n", "cache.yaml:1: local_cpu: false leaves nothing to cache in"),
            ("local_cpu: 7\n", "neither true nor false"),
            ("http_port: 80800\n", "not a port"),
            ("server_url: cache1\n", "no port"),
            ("remote_url: redis//cache\n", "not a URL"),
            ("l2_adapters: [{path: /x}]\n", "no 'type'"),
            ("server_args: --chunk-size 4\n", "set chunk_size"),
            ("histate:\n  write_through: true\n", "cache.yaml:2: histate.write_through: there is no disk"),
            ("histate:\n  offer_to_remote: everything\n", "cache.yaml:2: histate.offer_to_remote"),
            (
                "local_cpu: false\nremote_url: redis://c\nhistate:\n  offer_to_remote: none\n",
                "cache.yaml:4: histate.offer_to_remote: none leaves nothing to cache in",
            ),
            ("histate:\n  quotas: 5GiB\n", "cache.yaml:2: histate.quotas"),
            ("histate:\n  quotas: {alice: lots}\n", "tenant 'alice': 'lots' is not a size"),
            ("histate:\n  quotas: {a@b: 5}\n", "'a@b' cannot be a tenant"),
            ("histate:\n  directory: http://x\n", "only redis://, rediss://"),
            ("histate:\n  directory: redis://x/db\n", "database number"),
            ("histate:\n  cpu_low_watermark: 0.95\n", "histate.cpu_low_watermark: 0.95 is not below"),
            ("histate:\n  cpu_high_watermark: 90\n", "not between 0 and 1"),
            ("histate:\n  eviction: lfu\n", "Write 'cost' or 'lru'"),
            ("histate:\n  autostart_timeout: soon\n", "number of seconds"),
            ("chunk_size: 5\n  x: 6\n", "cache.yaml:2: not valid YAML"),
            ("- a\n", "cache.yaml:1: expected lines of the form 'key: value'"),
            ("a: !!python/object:os.system x\n", "cache.yaml:1: a: unknown setting"),
            ("local_disk: !!python/object:os.system x\n", "cache.yaml:1: local_disk: not a plain value"),
            ("a: 1\n---\nb: 2\n", "not valid YAML"),
            ("? [a]\n: 1\n", "unknown setting"),
        ],
    )
    def test_a_wrong_file(self, write, text: str, message: str) -> None:
        assert message in problems(write(text))

    def test_files_that_cannot_be_read(self, tmp_path: Path) -> None:
        missing = str(tmp_path / "none.yaml")
        with pytest.raises(ConfigError, match=r"there is no such file.*LMCACHE_CONFIG=histate"):
            load(missing)
        with pytest.raises(ConfigError, match="Did you mean 'histate'"):
            load("histat")
        with pytest.raises(ConfigError, match="this is a folder"):
            load(str(tmp_path))
        (tmp_path / "latin.yaml").write_bytes(b"# caf\xe9\n")
        with pytest.raises(ConfigError, match="UTF-8"):
            load(str(tmp_path / "latin.yaml"))

    def test_wrong_values_in_the_environment_name_the_variable(self) -> None:
        with pytest.raises(ConfigError, match=r"environment HISTATE_INTERVAL: histate\.interval: -5 is not positive"):
            load("histate", HISTATE_INTERVAL="-5")

    def test_a_config_error_is_a_value_error_and_survives_pickling(self) -> None:
        error = ConfigError(["a", "b"])
        again = pickle.loads(pickle.dumps(error))
        assert isinstance(again, ValueError)
        assert again.problems == ("a", "b")
        assert str(again) == "a\nb"

    @settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None, max_examples=150)
    @given(
        st.dictionaries(
            st.sampled_from([*SETTINGS, "histate", "nonsense"]),
            st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=8), st.lists(st.none())),
            max_size=6,
        )
    )
    def test_no_file_leads_to_anything_but_a_config_or_a_config_error(self, write, data) -> None:
        import yaml

        try:
            config = load(write(yaml.safe_dump(data)))
        except ConfigError as error:
            valid = bool(error.problems) and all(": " in problem for problem in error.problems)
        else:
            valid = Config.from_json(config.to_json()) == config
        assert valid


class TestModel:
    def test_it_is_immutable(self) -> None:
        config = Config()
        with pytest.raises(ValidationError):
            config.chunk_size = 5  # type: ignore[misc]
        with pytest.raises(ValidationError):
            config.histate.interval = 5  # type: ignore[misc]

    def test_every_default_is_valid_and_described(self) -> None:
        assert Config.from_json(Config().to_json()) == Config()
        for key, text in SETTINGS.items():
            assert len(text) > 20, key
            assert text.endswith("."), key
            assert Config().value(key) == default_of(key)

    def test_json_round_trip_and_pickling(self, write) -> None:
        config = load(write(GOOD))
        assert Config.from_json(config.to_json()).to_json() == config.to_json()
        again = pickle.loads(pickle.dumps(config))
        assert again.to_json() == config.to_json()
        assert again.origin("local_cpu") == config.origin("local_cpu")

    def test_the_directory_may_come_from_the_environment_of_the_server(self) -> None:
        data = {"histate": {"directory": "redis://meta"}}
        assert Config.from_json(data, {"HISTATE_DIRECTORY": "redis://:pw@meta"}).histate.directory == "redis://:pw@meta"
        assert Config.from_json({}, {"HISTATE_DIRECTORY": "redis://:pw@meta"}).histate.directory is None

    def test_unknown_keys(self) -> None:
        with pytest.raises(KeyError):
            Config().origin("histate.nonsense")
        with pytest.raises(KeyError):
            Config().value("nonsense")
        with pytest.raises(ValidationError):
            HiStateSettings(nonsense=1)  # type: ignore[call-arg]

    def test_replaced_values_are_checked_and_keep_the_other_origins(self, write) -> None:
        config = load(write(GOOD)).replaced("--chunk-size", chunk_size=64)
        assert config.chunk_size == 64
        assert config.origin("chunk_size") == "--chunk-size"
        assert config.origin("local_cpu").endswith("cache.yaml:2")
        with pytest.raises(ValidationError):
            config.replaced("x", chunk_size=-1)

    @pytest.mark.parametrize(
        ("server_url", "autostart", "starts"),
        [
            ("tcp://localhost:5555", True, True),
            ("tcp://127.0.0.1:7", True, True),
            ("tcp://localhost:5555", False, False),
            ("tcp://cache1:5555", True, False),
            ("localhost:1,localhost:2", True, False),
            ("tcp://[::1]:5555", True, False),  # LMCache's autostart knows no IPv6
        ],
    )
    def test_who_starts_the_server(self, server_url: str, autostart: bool, starts: bool) -> None:
        config = Config(server_url=server_url, histate=HiStateSettings(autostart=autostart))
        assert config.starts_server is starts


def test_lmcaches_words_are_all_known() -> None:
    """A new LMCache with a new in-process word must not make an existing LMCACHE_CONFIG_FILE an error."""
    from lmcache.v1 import config as lmcache_config

    theirs = {
        *lmcache_config._CONFIG_DEFINITIONS,
        *lmcache_config._CONFIG_ALIASES,
        *lmcache_config._DEPRECATED_CONFIGS,
    }
    assert theirs - set(SETTINGS) == IN_PROCESS_WORDS
    assert set(REMEDIES) <= theirs
    # And the words that we share must exist there under the same name.
    for key in ("chunk_size", "local_cpu", "max_local_cpu_size", "local_disk", "max_local_disk_size", "remote_url"):
        assert key in theirs
