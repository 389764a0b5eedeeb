"""The example of a fleet runs by one command."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "examples" / "fleet" / "loopback.py"


@pytest.mark.engine
def test_the_example_runs_and_shows_where_the_session_is(tmp_path: Path) -> None:
    if shutil.which("redis-server") is None:
        pytest.skip("needs redis-server")
    done = subprocess.run(
        [sys.executable, str(SCRIPT)], cwd=tmp_path, capture_output=True, text=True, timeout=550, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    first, second, third = done.stdout.split("$ histate locate")[1:]
    assert "http://a:8000" in first
    assert "http://b:8000" not in first
    assert "b serves a prompt of 2,174 tokens: 1,984 come from the cache" in first
    assert "http://a:8000" in second
    assert "http://b:8000" in second
    assert "http://a:8000" not in third
    assert "http://b:8000" in third
    assert list(tmp_path.iterdir()) == [], "it leaves nothing behind"


@pytest.mark.slow
def test_without_redis_server_the_example_says_what_is_missing(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, str(SCRIPT)],
        env={"PATH": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 2
    assert "needs redis-server" in done.stderr
    assert "Traceback" not in done.stderr
