"""Fixtures of the end-to-end tests."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import harness
import pytest

from lmcache_histate.replay.engine import Completion, EngineSettings
from lmcache_histate.replay.outcome import LOGPROB_TOLERANCE, output_difference
from lmcache_histate.replay.processes import cache_folder, unwinding_on_signals
from lmcache_histate.replay.tiny_model import ensure_tiny_model


@pytest.fixture(scope="session", autouse=True)
def _end_in_order_on_sigterm() -> Iterator[None]:
    """A test run that is told to stop unwinds its process scopes first."""
    with unwinding_on_signals():
        yield


@pytest.fixture(scope="session")
def tiny_model() -> Path:
    """Folder of the tiny hybrid model; built once and kept in the cache folder."""
    if importlib.util.find_spec("vllm") is None:
        pytest.skip("needs the `cpu` extra")
    return ensure_tiny_model(cache_folder() / "models" / "tiny")


@pytest.fixture(scope="session")
def engine_settings(tiny_model: Path) -> EngineSettings:
    """An engine without a connector; `dataclasses.replace` and `harness.with_connector` make variants."""
    return EngineSettings(model=tiny_model, blocks=600)


@pytest.fixture(scope="module")
def reference(
    engine_settings: EngineSettings, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Callable[[list[int], Completion], None]]:
    """Judges outputs by a vLLM without any cache, in one engine run at the end of the module.

    Steps end elsewhere there, so the log-probabilities must agree within what rounding explains (`LOGPROB_TOLERANCE`).
    """
    wanted: list[tuple[list[int], Completion]] = []
    yield lambda prompt, completion: wanted.append((prompt, completion))
    if not wanted:
        return
    cold = replace(engine_settings, arguments={**engine_settings.arguments, "enable_prefix_caching": False})
    with harness.engine(tmp_path_factory.mktemp("reference"), cold) as engine:
        right = [engine.generate([prompt], len(given.tokens), logprobs=harness.LOGPROBS)[0] for prompt, given in wanted]
    differences = [output_difference(given, other) for (_, given), other in zip(wanted, right, strict=True)]
    assert max(differences) <= LOGPROB_TOLERANCE, [round(difference, 3) for difference in differences]
