"""All benchmarks, one after another: ``python -m benchmarks``."""

from __future__ import annotations

import subprocess
import sys

MODULES = ("core", "disk", "eviction", "directory", "scheduler_step", "simulator", "engine")


def main() -> int:
    """Run each in a process of its own, so that none warms or slows another; the worst exit code is ours."""
    worst = 0
    for module in MODULES:
        print(f"\n== benchmarks.{module}", flush=True)
        worst = max(worst, subprocess.call([sys.executable, "-m", f"benchmarks.{module}"]))
    return worst


if __name__ == "__main__":
    sys.exit(main())
