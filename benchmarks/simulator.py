"""How fast the simulator is: requests a second of CPU time, and what tuning tau takes of it.

    python -m benchmarks.simulator [TRACE] [--requests N]

The baseline of every row is `cpu-disk` in the same run. The bar: 9,185 requests of public agent traces, 102K tokens a prompt
in the median, in 60 s on one core with less than 2 GiB; the built-in workload's prompts are as long.
"""

from __future__ import annotations

import argparse
import resource
import sys
import time

from lmcache_histate.replay.simulator import SimulationSettings, simulate
from lmcache_histate.replay.traces.load import load_trace

POLICIES = ("vllm", "cpu-disk", "gdsf", "histate-lru", "histate")
BAR_SECONDS, BAR_REQUESTS, BAR_MIB = 60.0, 9_185, 2048


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("trace", nargs="?", default="builtin:agents")
    parser.add_argument("--requests", type=int, default=1500)
    arguments = parser.parse_args()
    trace = load_trace(arguments.trace, limit=arguments.requests)
    print(f"{trace.name}: {len(trace.requests):,} requests")
    print(f"{'policy':14} {'CPU s':>8} {'requests/s':>12} {'ratio':>7}")
    seconds = {}
    for policy in POLICIES:
        began = time.process_time()
        simulate(trace, SimulationSettings(policy=policy))
        seconds[policy] = time.process_time() - began
    for policy, taken in seconds.items():
        rate = len(trace.requests) / taken
        print(f"{policy:14} {taken:8.2f} {rate:12.0f} {taken / seconds['cpu-disk']:7.2f}")
    share = 1.0 - seconds["histate-lru"] / seconds["histate"]
    print(f"tuning tau: {share:.0%} of histate's time")
    whole = seconds["histate"] * BAR_REQUESTS / len(trace.requests)
    memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    met = whole <= BAR_SECONDS and memory <= BAR_MIB
    bar = f"{whole:.0f} s for {BAR_REQUESTS:,} requests (at most {BAR_SECONDS:.0f}), {memory:.0f} MiB"
    print(f"bar {'met' if met else 'MISSED'}: {bar}")
    return 0 if met else 1


if __name__ == "__main__":
    sys.exit(main())
