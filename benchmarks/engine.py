"""What HiState costs a real engine: requests that never hit, against stock LMCache; a long prompt, against the interval.

    python -m benchmarks.engine

Both engines live side by side and take turns, request by request, so that the machine's drift cancels in the ratios.
"""

from __future__ import annotations

import json
import random
import statistics
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import track
from rich.table import Table

from lmcache_histate.replay.cache_server import CacheServerSettings, start_cache_server
from lmcache_histate.replay.engine import EngineProcess, EngineSettings
from lmcache_histate.replay.processes import ProcessScope, cache_folder, free_ports
from lmcache_histate.replay.tiny_model import BLOCK_TOKENS, ensure_tiny_model

GIB = 1 << 30
ROUNDS = 24
PROMPT_TOKENS = (1500, 4000)
"""Range of prompt lengths of the workload that never hits."""
LONG_PROMPT_TOKENS = 16_000
INTERVALS: tuple[int | str, ...] = ("final-only", 4096, 2048, 1024, 512, 256)


def set_interval(engine: Any, interval: int | str) -> bool:
    """Called inside the engine's process: change the interval between two requests."""
    engine.engine_core.engine_core.scheduler.connector._placement._setting = interval
    return True


def histate(folder: Path, settings: EngineSettings, **options: Any) -> EngineSettings:
    """An engine with HiState, which starts its own server."""
    port, http_port = free_ports(2)
    config = {
        "max_local_cpu_size": 1,
        "local_disk": str(folder / "disk"),
        "max_local_disk_size": 2,
        "server_url": f"tcp://localhost:{port}",
        "http_port": http_port,
        "histate": options,
    }
    file = folder / "cache.yaml"
    file.write_text(json.dumps(config))  # JSON is YAML
    transfer = {"kv_connector": "LMCacheMPConnector", "kv_role": "kv_both"}
    return replace(settings, kv_transfer=transfer, environment={"LMCACHE_CONFIG": str(file)})


def stock(settings: EngineSettings, port: int) -> EngineSettings:
    """An engine with stock LMCache (and what it needs to run on CPU)."""
    transfer = {
        "kv_connector": "CpuHybridConnector",
        "kv_connector_module_path": "lmcache_histate.connector.cpu",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {
            "lmcache.mp.mp_transfer_mode": "lmcache_driven",
            "lmcache.mp.host": "tcp://localhost",
            "lmcache.mp.port": port,
        },
    }
    return replace(settings, kv_transfer=transfer)


def one(engine: EngineProcess, prompt: list[int]) -> float:
    """Seconds to the first token of one prompt that nothing is cached of."""
    completion = engine.generate([prompt], 4)[0]
    assert completion.cached_tokens == 0
    return completion.ttft_s


def run() -> None:
    """Run both benchmarks and print their tables."""
    console = Console()
    source = random.Random(0)
    settings = EngineSettings(ensure_tiny_model(cache_folder() / "models" / "tiny"), max_model_len=20_000, blocks=1200)

    def prompt(count: int) -> list[int]:
        return [source.randint(2, 257) for _ in range(count)]

    with tempfile.TemporaryDirectory() as name, ProcessScope() as scope:
        folder = Path(name)
        server = start_cache_server(
            scope, folder, CacheServerSettings(chunk_tokens=BLOCK_TOKENS, memory_bytes=GIB, disk_bytes=2 * GIB)
        )
        engines = {
            "stock LMCache": EngineProcess(scope, stock(settings, server.port), folder / "stock.log"),
            "HiState": EngineProcess(scope, histate(folder, settings), folder / "histate.log"),
        }
        engines["stock LMCache"].connect(server.wait)
        engines["HiState"].connect()
        for engine in engines.values():
            for _ in range(3):
                one(engine, prompt(3000))
        ttft: dict[str, list[float]] = {name: [] for name in engines}
        for _ in track(range(ROUNDS), description="requests that never hit", console=console, transient=True):
            length = source.randint(*PROMPT_TOKENS)
            for label, engine in engines.items():
                ttft[label].append(one(engine, prompt(length)))
        table = Table("", "mean TTFT, ms", "p50", "p99", "ratio to stock", title="A workload that never hits")
        base = statistics.fmean(ttft["stock LMCache"])
        for label, values in ttft.items():
            ordered = sorted(values)
            table.add_row(
                label,
                f"{1e3 * statistics.fmean(values):.0f}",
                f"{1e3 * statistics.median(values):.0f}",
                f"{1e3 * ordered[min(len(ordered) - 1, int(0.99 * len(ordered)))]:.0f}",
                f"{statistics.fmean(values) / base:.3f}",
            )
        console.print(table)
        engine = engines["HiState"]
        seconds: dict[int | str, list[float]] = {interval: [] for interval in INTERVALS}
        for _ in track(range(3), description="a long prompt", console=console, transient=True):
            for interval in INTERVALS:
                engine.call("benchmarks.engine:set_interval", interval=interval)
                seconds[interval].append(one(engine, prompt(LONG_PROMPT_TOKENS)))
        table = Table(
            "interval, tokens",
            "stops",
            "TTFT, s",
            "ratio to final-only",
            title=f"Prefill of {LONG_PROMPT_TOKENS:,} tokens",
        )
        least = statistics.median(seconds["final-only"])
        for interval, values in seconds.items():
            stops = LONG_PROMPT_TOKENS // interval if isinstance(interval, int) else 0
            middle = statistics.median(values)
            table.add_row(str(interval), str(stops), f"{middle:.2f}", f"{middle / least:.3f}")
        console.print(table)
        for engine in engines.values():
            engine.stop()


if __name__ == "__main__":
    run()
