"""docs/configuration.md says what the code does."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from lmcache_histate.cli.settings_text import with_tables
from lmcache_histate.config import ConfigError, load_config
from lmcache_histate.config.remote import REMOTE_SCHEMES
from lmcache_histate.config.values import RESERVED_FLAGS

DOCUMENT = Path(__file__).parents[3] / "docs" / "configuration.md"
TEXT = DOCUMENT.read_text(encoding="utf-8")
EXAMPLES = re.findall(r"```yaml\n(.*?)```", TEXT, re.DOTALL)


def test_the_tables_are_those_of_the_model() -> None:
    assert with_tables(TEXT) == TEXT, f"run: python -m lmcache_histate.cli.settings_text {DOCUMENT}"


@pytest.mark.parametrize("example", EXAMPLES)
def test_every_example_is_a_valid_file(tmp_path: Path, example: str) -> None:
    path = tmp_path / "cache.yaml"
    path.write_text(example)
    ignorant = "passed over" in example
    config = load_config({"LMCACHE_CONFIG_FILE" if ignorant else "LMCACHE_CONFIG": str(path)})
    assert config is not None
    assert bool(config.ignored) is ignorant


def test_the_errors_shown_are_real_ones(tmp_path: Path) -> None:
    path = tmp_path / "cache.yaml"
    path.write_text("local_cpu: true\nchunk_sise: 5\n\n\ninterval: 5\n")
    with pytest.raises(ConfigError) as caught:
        load_config({"LMCACHE_CONFIG": str(path), "HISTATE_TAU": "-1"})
    for problem in caught.value.problems:
        assert problem.replace(f"{tmp_path}/", "") in TEXT


def test_every_scheme_of_remote_url_is_named() -> None:
    for scheme in REMOTE_SCHEMES:
        assert f"{scheme}://" in TEXT or f"{scheme}:///" in TEXT
    assert "--chunk-size" in RESERVED_FLAGS
    assert "--separate-object-groups" in RESERVED_FLAGS
