"""vLLM's own parser takes the flags. Importing vLLM takes long, hence apart and marked."""

from __future__ import annotations

from pathlib import Path

import pytest

from lmcache_histate.backends.arguments import vllm_arguments
from lmcache_histate.config import Config


@pytest.mark.engine
def test_vllm_reads_the_flags(tmp_path: Path) -> None:
    from vllm.engine.arg_utils import EngineArgs
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    parser = EngineArgs.add_cli_args(FlexibleArgumentParser())
    parsed = EngineArgs.from_cli_args(parser.parse_args(["--model", str(tmp_path), *vllm_arguments(Config())]))
    assert parsed.enable_prefix_caching is True
    transfer = parsed.kv_transfer_config
    assert transfer.kv_connector == "HiStateConnector"
    assert transfer.kv_connector_module_path == "lmcache_histate.connector.histate_connector"
    assert transfer.is_kv_producer
    assert transfer.is_kv_consumer
