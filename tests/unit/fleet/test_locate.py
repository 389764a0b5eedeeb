"""`histate locate`, its Python function and its HTTP route, against a real directory."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from fastapi import FastAPI
from fastapi.testclient import TestClient
from lmcache.v1.multiprocess.token_hasher import TokenHasher
from typer.testing import CliRunner

from lmcache_histate.backends.http_api import PATH, add_routes
from lmcache_histate.backends.locate import LocateError, Locator, chunk_hashes_of
from lmcache_histate.cli.main import app
from lmcache_histate.config import load_config
from lmcache_histate.replay.processes import free_ports
from lmcache_histate.state_store.directory.protocol import ChunkHeld, NamespaceFacts, Unreachable, held_bit
from lmcache_histate.state_store.directory.redis_directory import RedisDirectory
from lmcache_histate.state_store.directory.url import parse_directory_url
from lmcache_histate.state_store.objects import Kind, Tier

CHUNK = 4
TOKENS = list(range(100, 119))
"""Four whole chunks and three tokens."""
HASHES = TokenHasher(CHUNK).compute_chunk_hashes(TOKENS)
FACTS = NamespaceFacts(CHUNK, 1000, 4000)
KV_CPU, STATE_DISK = held_bit(Kind.KV, Tier.CPU), held_bit(Kind.SNAPSHOT, Tier.DISK)
KV_SHARED, STATE_SHARED = held_bit(Kind.KV, Tier.REMOTE), held_bit(Kind.SNAPSHOT, Tier.REMOTE)
SHARED = "shared:redis://shared:6379"


def held(bits: list[int]) -> list[ChunkHeld]:
    parents = [b"", *HASHES]
    return [ChunkHeld(HASHES[place], bit, parents[place], CHUNK * (place + 1)) for place, bit in enumerate(bits)]


@pytest.fixture
def url(redis_port: int) -> Iterator[str]:
    """A directory in which instance a holds three chunks and the shared tier two."""
    address = f"redis://127.0.0.1:{redis_port}"
    now = time.monotonic()
    directory = RedisDirectory(parse_directory_url(address), "a", "http://a:8000", SHARED, lease_s=600.0)
    for space in ("m/x@1@", "m/x@1@tenant", "m/y@1@", "m/y@2@"):
        directory.register(space, FACTS, now)
    directory.publish("m/x@1@", held([KV_CPU | KV_SHARED, KV_CPU | KV_SHARED | STATE_SHARED, KV_CPU | STATE_DISK]), now)
    yield address
    directory.close()


def histate(*arguments: str, prompt: object = TOKENS, **environment: str) -> Any:
    text = prompt if isinstance(prompt, str) else json.dumps(prompt)
    return CliRunner().invoke(app, ["locate", *arguments], input=text, env={"COLUMNS": "200", **environment})


EXPECTED = [
    {
        "name": "a",
        "address": "http://a:8000",
        "shared_tier": False,
        "cpu_tokens": 0,
        "disk_tokens": 3 * CHUNK,
        "tokens": 3 * CHUNK,
    },
    {"name": SHARED, "address": "", "shared_tier": True, "cpu_tokens": 0, "disk_tokens": 0, "tokens": 2 * CHUNK},
]


def test_every_way_of_asking_gives_the_same(url: str, tmp_path: Path) -> None:
    with Locator(url) as locator:
        answer = locator.locate("m/x", TOKENS).to_json()
        assert answer["locations"] == EXPECTED
        assert (answer["chunk_tokens"], answer["prompt_tokens"]) == (CHUNK, 4 * CHUNK)
        assert locator.locate("m/x", chunk_hashes=HASHES).to_json() == answer
        assert locator.locate("m/x", TOKENS, world_size=1, cache_salt="tenant").locations == ()
        assert locator.locate("m/x", TOKENS[:3]).locations == ()
        assert locator.locate("m/x", TOKENS[: 2 * CHUNK]).locations[0].tokens == 2 * CHUNK
    asked = ("--directory", url, "--model", "m/x", "--json")
    file = tmp_path / "prompt.json"
    file.write_text(json.dumps(TOKENS))
    for done in (
        histate(*asked),
        histate(*asked, "-"),
        histate(*asked, str(file), prompt=""),
        histate(*asked, prompt={"count": 19, "tokens": TOKENS}),
        histate(*asked, prompt={"prompt_token_ids": TOKENS}),
        histate(*asked, prompt=" ".join(map(str, TOKENS))),
        histate(*asked, prompt=", ".join(map(str, TOKENS)) + "\n"),
        histate(*asked, "--hashes", prompt=[chunk.hex() for chunk in HASHES]),
        histate(*asked, "--hashes", prompt="\n".join(chunk.hex() for chunk in HASHES)),
    ):
        assert done.exit_code == 0, done.output
        assert json.loads(done.stdout) == answer
    config = tmp_path / "cache.yaml"
    config.write_text(yaml.safe_dump({"histate": {"directory": url}}))
    assert json.loads(histate("-c", str(config), "-m", "m/x", "--json").stdout) == answer
    assert json.loads(histate("-m", "m/x", "--json", LMCACHE_CONFIG=str(config)).stdout) == answer


def test_the_table_is_for_people(url: str) -> None:
    shown = histate("--directory", url, "-m", "m/x").output
    assert "m/x: 19 tokens, 4 whole chunks of 4 tokens" in shown
    for text in ("http://a:8000", "12 (75%)", "8 (50%)", "(shared tier)", "redis://shared:6379"):
        assert text in shown
    assert "No instance can restore any of it." in histate("--directory", url, "-m", "m/x", prompt=TOKENS[::-1]).output


def test_what_cannot_be_answered_says_what_to_ask(url: str, tmp_path: Path) -> None:
    directory = ("--directory", url)
    alone = tmp_path / "alone.yaml"
    alone.write_text("max_local_cpu_size: 1\n")
    (nowhere,) = free_ports(1)
    cases: list[tuple[tuple[str, ...], object, int, str]] = [
        ((*directory, "-m", "m/z"), TOKENS, 2, "the model 'm/z' is not known. Known are m/x, m/y."),
        ((*directory, "-m", "m/x", "--salt", "other"), TOKENS, 2, "cache salt 'other'"),
        ((*directory, "-m", "m/y"), TOKENS, 2, "world sizes of 1 and 2. Say which"),
        ((*directory, "-m", "m/y", "--world-size", "3"), TOKENS, 2, "world size of 1 and 2, not 3"),
        ((*directory, "-m", "m/x"), "[1, 2", 2, "standard input: not valid JSON"),
        ((*directory, "-m", "m/x"), {"prompt": "text"}, 2, "has no token_ids or prompt_token_ids or tokens"),
        ((*directory, "-m", "m/x"), "some words", 2, "expected token ids"),
        ((*directory, "-m", "m/x"), [1.5], 2, "expected a list of token ids"),
        ((*directory, "-m", "m/x"), [-1] * CHUNK, 2, "-1, number 0 of the prompt, is not a token id"),
        ((*directory, "-m", "m/x"), "", 2, "it is empty"),
        ((*directory, "-m", "m/x", "--hashes"), ["xy"], 2, "'xy', number 0 of the chunk hashes"),
        ((*directory, "-m", "m/x", "/no/such/file"), "", 2, "/no/such/file: cannot be read"),
        (("--directory", "http://meta", "-m", "m/x"), TOKENS, 2, "--directory: http:// is not known"),
        (("-c", str(alone), "-m", "m/x"), TOKENS, 2, "has no histate.directory"),
        (("-m", "m/x"), TOKENS, 2, "no directory is named"),
        (("--directory", f"redis://u:secret@127.0.0.1:{nowhere}", "-m", "m/x"), TOKENS, 1, f"127.0.0.1:{nowhere}"),
    ]
    for arguments, prompt, code, text in cases:
        done = histate(*arguments, prompt=prompt, LMCACHE_CONFIG="", LMCACHE_CONFIG_FILE="")
        assert done.exit_code == code, (arguments, done.output)
        assert text in done.output.replace("\n", " "), (arguments, done.output)
        assert "Traceback" not in done.output
        assert "secret" not in done.output
        assert done.exception is None or isinstance(done.exception, SystemExit)
    with Locator(f"redis://127.0.0.1:{nowhere}") as locator, pytest.raises(Unreachable):
        locator.locate("m/x", TOKENS)
    with Locator(url) as locator, pytest.raises(LocateError, match="either"):
        locator.locate("m/x")


def test_an_empty_directory_knows_no_model(redis_port: int) -> None:
    done = histate("--directory", f"redis://127.0.0.1:{redis_port}", "-m", "m/x")
    assert done.exit_code == 2
    assert "nothing was served so far" in done.output


def test_the_hashes_are_lmcaches_own() -> None:
    tokens = list(range(1000))
    assert chunk_hashes_of(tokens, 64) == TokenHasher(64).compute_chunk_hashes(tokens)
    assert len(chunk_hashes_of(tokens, 64)) == 15


def test_a_server_answers_from_its_own_view(url: str) -> None:
    directory = RedisDirectory(parse_directory_url(url), "b", shared_tier=SHARED, lease_s=600.0)
    served: dict[str, NamespaceFacts] = {}
    application = FastAPI()
    add_routes(application, directory, lambda: served)
    client = TestClient(application)
    body: dict[str, Any] = {"model": "m/x", "token_ids": TOKENS}
    unknown = client.post(PATH, json=body)
    assert (unknown.status_code, "not known" in unknown.json()["detail"]) == (400, True)
    served["m/x@1@"] = FACTS
    early = client.post(PATH, json=body)
    assert (early.status_code, "has not answered yet" in early.json()["detail"]) == (503, True)
    directory.register("m/x@1@", FACTS, time.monotonic())
    while directory.age(time.monotonic()) == float("inf"):
        directory.poll(time.monotonic())
    answer = client.post(PATH, json=body)
    assert answer.status_code == 200
    assert 0.0 <= answer.json()["age_s"] < 600.0
    b = {**EXPECTED[1], "name": "b", "shared_tier": False}
    assert answer.json()["locations"] == [EXPECTED[0], b, EXPECTED[1]]
    hashes = {"model": "m/x", "chunk_hashes": [chunk.hex() for chunk in HASHES]}
    assert client.post(PATH, json=hashes).json()["locations"] == answer.json()["locations"]
    for wrong in ({"model": "m/x"}, {**hashes, "chunk_hashes": ["zz"]}, {**body, **hashes}):
        assert client.post(PATH, json=wrong).status_code == 400
    for wrong in ({"token_ids": TOKENS}, {**body, "token_ids": [-1]}, {**body, "tokens": []}):
        assert client.post(PATH, json=wrong).status_code == 422
    directory.close()


def test_only_a_directory_in_redis_needs_the_redis_package() -> None:
    code = """
import sys
sys.modules["redis"] = None
import lmcache_histate.backends.server_module
from lmcache_histate.backends.directory_setup import make_directory
from lmcache_histate.config import Config, HiStateSettings
make_directory(Config())
try:
    make_directory(Config(histate=HiStateSettings(directory="redis://meta")))
except ValueError as error:
    print(error)
from lmcache_histate.cli.main import app
app(["locate", "--directory", "redis://meta", "-m", "m"])
"""
    done = subprocess.run(
        [sys.executable, "-c", code], input="1 2 3", capture_output=True, text=True, timeout=120, check=False
    )
    assert "histate.directory needs the Python package redis" in done.stdout, done.stderr
    assert done.returncode == 2
    assert "needs the Python package redis: pip install" in done.stderr
    assert "Traceback" not in done.stderr


def test_the_examples_are_valid() -> None:
    folder = Path(__file__).parents[3] / "examples" / "fleet"
    compose = yaml.safe_load((folder / "compose.yaml").read_text())
    for name in ("gpu-0", "gpu-1"):
        environment = compose["services"][name]["environment"]
        config = load_config({**environment, "LMCACHE_CONFIG": str(folder / "cache.yaml")})
        assert config is not None
        assert config.histate.instance == name
        assert config.histate.directory == "redis://directory:6379/0"
        assert config.remote_url == "redis://shared:6379"
        assert {"directory", "shared"} <= compose["services"].keys()
