"""An instance in a process: `directory_worker.py URL NAME`, then one JSON command a line on standard input."""

from __future__ import annotations

import json
import sys
from typing import Any

from fleet_box import Instance


def answer(instance: Instance, what: str, arguments: list[Any]) -> Any:
    if what == "hold":
        return instance.hold(range(*arguments[:2]), *arguments[2:])
    if what == "sees":
        return [sorted(names) for names in instance.sees(range(*arguments))]
    if what == "p99":
        return instance.p99_put_us()
    if what == "state":
        return instance.writer.state.name
    return instance.writer.instance


def main() -> None:
    instance = Instance(sys.argv[1], sys.argv[2])
    for line in sys.stdin:
        what, *arguments = json.loads(line)
        print("> " + json.dumps(answer(instance, what, arguments)), flush=True)


main()
