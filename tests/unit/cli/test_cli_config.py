"""``histate config`` as a user runs it."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from lmcache_histate import __version__
from lmcache_histate.backends.arguments import server_arguments, vllm_arguments
from lmcache_histate.cli.common import hide_secrets
from lmcache_histate.cli.config_command import PLACEHOLDER, format_command
from lmcache_histate.cli.main import app
from lmcache_histate.cli.settings_text import show
from lmcache_histate.config import SETTINGS, Config, load_config

CLEAN = {name: None for name in os.environ if name.startswith(("HISTATE_", "LMCACHE_"))}


def run(*arguments: str, **environ: str):
    return CliRunner().invoke(app, list(arguments), env={**CLEAN, **environ})


@pytest.fixture
def file(tmp_path: Path) -> str:
    path = tmp_path / "my cache.yaml"
    path.write_text(
        f"max_local_cpu_size: 100MiB\nlocal_disk: file://{tmp_path}/di sk\nmax_local_disk_size: 10MiB\n"
        "remote_url: redis://user:hunter2@cache\nhistate:\n  interval: 1024\n  directory: redis://:hunter2@meta\n"
    )
    return str(path)


def commands(output: str) -> list[list[str]]:
    """The shell commands in the output, split as a shell splits them."""
    text = output[output.index("\n#") :].replace("\\\n", " ")
    return [shlex.split(line) for line in text.splitlines() if line and not line.startswith("#")]


class TestConfig:
    def test_every_setting_is_shown_with_its_origin(self, file: str) -> None:
        done = run("config", "-c", file)
        assert done.exit_code == 0, done.output
        for key in SETTINGS:
            assert key in done.output
        row = next(line for line in done.output.splitlines() if line.startswith("histate.interval"))
        assert "1024" in row
        assert "my cache.yaml:6" in row

    def test_the_commands_can_be_pasted(self, file: str) -> None:
        config = load_config({"LMCACHE_CONFIG": file})
        assert config is not None
        done = run("config", "-c", file, "--chunk-size", "528", "--show-secrets")
        found = commands(done.output)
        server = next(words for words in found if words[:2] == ["lmcache", "server"])
        assert server[2:8] == ["--host", "localhost", "--port", "5555", "--http-host", "localhost"]
        assert server[8:] == server_arguments(config, 528)
        vllm = next(words for words in found if words[:2] == ["vllm", "serve"])
        assert vllm[3:] == vllm_arguments(config)
        assert ["export", f"LMCACHE_CONFIG={file}"] in found
        assert ["export", "LMCACHE_RESP_PASSWORD=hunter2"] in found

    def test_overrides_of_the_environment_are_part_of_the_commands(self) -> None:
        words = "--max-workers 3 --instance-id 'a b'"
        found = commands(run("config", "-c", "histate", HISTATE_INTERVAL="512", HISTATE_SERVER_ARGS=words).output)
        assert ["export", "HISTATE_INTERVAL=512"] in found
        (argument,) = [line[1] for line in found if line[1].startswith("HISTATE_SERVER_ARGS=")]
        assert shlex.split(argument.partition("=")[2]) == shlex.split(words)
        assert ["export", "LMCACHE_CONFIG=histate"] in found

    def test_an_unknown_block_size_is_a_placeholder(self, file: str) -> None:
        done = run("config", "-c", file)
        assert f"--chunk-size {PLACEHOLDER}" in done.output
        assert "Setting attention block size to N tokens" in done.output
        assert PLACEHOLDER not in run("config", "-c", file, "--chunk-size", "528").output

    def test_json(self, file: str) -> None:
        done = run("config", "-c", file, "--json", "--chunk-size", "528")
        data = json.loads(done.stdout)
        assert set(data["settings"]) == set(SETTINGS)
        assert data["settings"]["histate.interval"] == {"value": 1024, "origin": f"{file}:6"}
        assert data["settings"]["chunk_size"] == {"value": 528, "origin": "--chunk-size"}
        assert data["server_command"][:2] == ["lmcache", "server"]
        assert data["vllm_arguments"] == vllm_arguments(Config())
        assert data["connector_extra_config"]["lmcache.mp.port"] == 5555

    @pytest.mark.parametrize("form", [(), ("--json",)])
    def test_passwords_are_hidden_unless_asked_for(self, file: str, form: tuple[str, ...]) -> None:
        adapters = json.dumps([{"type": "valkey", "startup_nodes": "h:1", "password": "hunter2"}])
        hidden = run("config", "-c", file, *form, HISTATE_L2_ADAPTERS=adapters)
        assert hidden.exit_code == 0
        assert "hunter2" not in hidden.output
        assert "***" in hidden.output
        assert "hunter2" in run("config", "-c", file, *form, "--show-secrets", HISTATE_L2_ADAPTERS=adapters).output

    def test_the_environment_names_the_configuration(self, file: str) -> None:
        assert "1024" in run("config", LMCACHE_CONFIG=file).output
        assert "512" in run("config", LMCACHE_CONFIG=file, HISTATE_INTERVAL="512").output
        assert "HiState configuration: histate" in run("config", "-c", "histate", LMCACHE_CONFIG=file).output

    def test_lmcaches_own_file_keeps_its_variable_and_its_words(self, tmp_path: Path) -> None:
        path = tmp_path / "lmcache.yaml"
        path.write_text("cache_policy: LRU\nhistate:\n")
        done = run("config", LMCACHE_CONFIG_FILE=str(path))
        assert done.exit_code == 0
        assert "Warning:" in done.stderr
        assert "cache_policy: ignored" in done.stderr
        assert ["export", f"LMCACHE_CONFIG_FILE={path}"] in commands(done.stdout)

    def test_switched_off(self) -> None:
        done = run("config", "-c", "histate", HISTATE_ENABLED="false")
        assert done.exit_code == 0
        assert "switched off" in done.output
        assert "lmcache server" not in done.output

    @pytest.mark.parametrize(
        ("server_url", "words"),
        [
            ("localhost:5555", "vLLM starts this server itself"),
            ("cache1:5555", "Run this server before vLLM"),
            ("a:1,b:2", "at each address"),
        ],
    )
    def test_who_starts_the_server(self, server_url: str, words: str) -> None:
        assert words in run("config", "-c", "histate", HISTATE_SERVER_URL=server_url).output

    def test_a_laptop_may_look_at_a_servers_configuration(self) -> None:
        huge = {"HISTATE_MAX_LOCAL_CPU_SIZE": "900TiB"}
        done = run("config", "-c", "histate", **huge)
        assert done.exit_code == 2
        assert "HISTATE_MAX_LOCAL_CPU_SIZE: max_local_cpu_size: 900 TiB is more than" in done.stderr
        assert run("config", "-c", "histate", "--no-machine-check", **huge).exit_code == 0


class TestErrors:
    def test_wrong_files_are_messages_not_tracebacks(self, tmp_path: Path) -> None:
        path = tmp_path / "cache.yaml"
        path.write_text("chunk_sise: 4\nhistate:\n  tau: -1\n")
        done = run("config", "-c", str(path))
        assert done.exit_code == 2
        assert done.stdout == ""
        lines = done.stderr.splitlines()
        assert lines[0] == f"Error: {path}:1: chunk_sise: unknown setting. Did you mean 'chunk_size'?"
        assert lines[1].startswith(f"Error: {path}:3: histate.tau: -1 is not positive.")
        assert len(lines) == 2

    def test_nothing_configured(self, tmp_path: Path) -> None:
        done = run("config")
        assert done.exit_code == 2
        assert "HiState is not configured. Use -c FILE" in done.stderr
        path = tmp_path / "lmcache.yaml"
        path.write_text("chunk_size: 256\n")
        assert "has no histate: section" in run("config", LMCACHE_CONFIG_FILE=str(path)).stderr
        assert "name of the file is empty" in run("config", "-c", " ").stderr

    def test_two_block_sizes(self) -> None:
        done = run("config", "-c", "histate", "--chunk-size", "64", HISTATE_CHUNK_SIZE="528")
        assert done.exit_code == 2
        assert "environment HISTATE_CHUNK_SIZE: chunk_size: 528, but --chunk-size says 64" in done.stderr

    def test_wrong_options(self) -> None:
        for arguments in (["config", "--chunk-size", "0"], ["config", "--nonsense"], ["nonsense"]):
            assert run(*arguments).exit_code == 2


class TestHelp:
    def test_versions(self) -> None:
        done = run("--version")
        assert done.exit_code == 0
        assert done.output.splitlines()[0] == f"histate {__version__}"
        assert "lmcache 0.5" in done.output

    def test_help_names_the_commands_and_shows_examples(self) -> None:
        for arguments in (["--help"], ["config", "--help"], ["server", "-h"]):
            done = run(*arguments)
            assert done.exit_code == 0
            assert "Examples:" in done.output
            assert "histate server -c cache.yaml" in done.output or "histate config -c cache.yaml" in done.output

    def test_help_describes_every_setting(self) -> None:
        output = " ".join(run("config", "--help").output.split())
        for key, text in SETTINGS.items():
            assert f"{key} (default " in output
            assert text in output

    def test_as_a_program(self) -> None:
        """The installed entry point, from a plain shell, without a terminal."""
        environ = {name: value for name, value in os.environ.items() if name not in CLEAN}
        done = subprocess.run(
            [Path(sys.executable).with_name("histate"), "config", "-c", "/none.yaml"],
            capture_output=True,
            text=True,
            env=environ,
            timeout=60,
        )
        assert done.returncode == 2
        assert done.stderr.startswith("Error: /none.yaml: there is no such file.")
        assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (None, "none"),
        (True, "true"),
        (5.0, "5"),
        (1234567.0, "1234567"),
        (0.1, "0.1"),
        ("a", "a"),
        ((), "none"),
        (("--a", "b c"), "--a 'b c'"),
        (({"type": "fs"},), '{"type": "fs"}'),
    ],
)
def test_values_are_shown_as_a_user_writes_them(value: Any, text: str) -> None:
    assert show(value) == text


def test_commands_are_broken_into_lines_that_a_shell_joins_again() -> None:
    words = ["lmcache", "server", "--a", "it's", "--b=c d", "--flag", "--json", '{"x": "$HOME"}']
    assert shlex.split(format_command(words).replace("\\\n", "")) == words


def test_hiding_reaches_every_depth_and_changes_nothing_else() -> None:
    value = {
        "a": [{"password": "x", "port": 1}],
        "url": "s3://h",
        "aws_secret_access_key": "y",
        "token": None,
        "n": 1.5,
    }
    assert hide_secrets(value) == {
        "a": [{"password": "***", "port": 1}],
        "url": "s3://h",
        "aws_secret_access_key": "***",
        "token": None,
        "n": 1.5,
    }
