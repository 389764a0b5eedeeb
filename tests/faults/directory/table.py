"""Runs the directory's fault tests and writes what they measured into a document.

    python tests/faults/directory/table.py docs/directory.md

The table goes between the two marks that the document has for it.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

BEGIN, END = "<!-- faults: begin -->", "<!-- faults: end -->"


def rows(results: Path) -> list[str]:
    """One row for each fault; of repeated ones, the slowest."""
    worst: dict[str, dict[str, float | str]] = {}
    for line in results.read_text().splitlines():
        measured = json.loads(line)
        known = worst.get(measured["fault"])
        if known is None or measured["seconds"] > known["seconds"]:
            worst[measured["fault"]] = measured
    return [
        "| {fault} | {happens} | {seconds:.1f} s ({leases:.2f} leases) | {before_us:.0f} / {during_us:.0f} us |".format(
            leases=float(row["seconds"]) / float(row["lease"]), **row
        )
        for row in worst.values()
    ]


def main() -> int:
    document = Path(sys.argv[1])
    before, begin, rest = document.read_text().partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        print(f"{document} lacks the marks {BEGIN} and {END}", file=sys.stderr)
        return 2
    with tempfile.TemporaryDirectory() as folder:
        results = Path(folder) / "results"
        results.touch()
        done = subprocess.run(
            [sys.executable, "-m", "pytest", "-q", str(Path(__file__).parent)],
            env={**os.environ, "HISTATE_FAULT_RESULTS": str(results)},
            check=False,
        )
        head = [
            "| fault | what happens | healed after | `put`, p99 before / during |",
            "|---|---|---|---|",
        ]
        if done.returncode == 0:
            document.write_text(f"{before}{BEGIN}\n" + "\n".join([*head, *rows(results)]) + f"\n{END}{after}")
        return done.returncode


if __name__ == "__main__":
    sys.exit(main())
