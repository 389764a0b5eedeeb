"""The ``vllm.general_plugins`` entry point: switches HiState on in an existing deployment through ``LMCACHE_CONFIG``."""

from __future__ import annotations

import logging
import os

logger = logging.getLogger("vllm.histate")  # vLLM shows what is logged below its own name

STOCK_CONNECTOR = "LMCacheMPConnector"


def register() -> None:
    """Let every engine that names ``LMCacheMPConnector`` get ``HiStateConnector``, when HiState is configured.

    vLLM calls this once in every process, before an engine is built. Without ``LMCACHE_CONFIG`` (or an
    ``LMCACHE_CONFIG_FILE`` that holds a ``histate:`` section) nothing is imported and nothing changes.

    Raises:
        lmcache_histate.config.ConfigError: The configuration cannot be read; the engine does not start.
    """
    if not (os.environ.get("LMCACHE_CONFIG") or os.environ.get("LMCACHE_CONFIG_FILE")):
        return
    from lmcache_histate.config import load_config

    config = load_config(os.environ)
    if config is None or not config.histate.enabled:
        return
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

    def load() -> type:
        from lmcache_histate.connector.histate_connector import HiStateConnector

        return HiStateConnector

    KVConnectorFactory._registry[STOCK_CONNECTOR] = load
    logger.info("HiState takes the place of %s (LMCACHE_CONFIG=%s)", STOCK_CONNECTOR, os.environ.get("LMCACHE_CONFIG"))
