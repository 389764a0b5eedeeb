"""The ``vllm.general_plugins`` entry point: switches HiState on in an existing deployment through ``LMCACHE_CONFIG``."""

from __future__ import annotations


def register() -> None:
    """Called by vLLM once in every process, before an engine is built."""
