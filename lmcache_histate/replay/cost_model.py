"""The simulator's cost model as a file: what `histate calibrate` writes, and `simulate` and `sweep` read."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import yaml

from lmcache_histate.config.values import parse_number
from lmcache_histate.replay.simulator.hardware import StepTimes

FORMAT = "histate-cost-model-1"


class CostModelError(ValueError):
    """A cost model file that cannot be used; the message says where and why."""


@dataclass(frozen=True)
class CostModel:
    """What the simulator needs to know of an engine.

    Attributes:
        times: Of scheduler steps.
        restore_token_s: Seconds that a hit takes for each token that it restores from behind the engine's own cache; None
            if not measured.
        restore_fixed_s: Seconds that such a hit takes besides, with a step for its new tokens; None if not measured.
        measured_on: Words for reports.
    """

    times: StepTimes
    restore_token_s: float | None = None
    restore_fixed_s: float | None = None
    measured_on: str = ""

    def settings(self, kv_bytes_per_token: float) -> dict[str, Any]:
        """What it changes in `SimulationSettings`: the times, and the speed of the link to CPU memory if it was measured.

        Args:
            kv_bytes_per_token: Of the model that is simulated; a token of it takes as long as one that was measured.
        """
        found: dict[str, Any] = {"times": self.times}
        if self.restore_token_s:
            found["pcie_bytes_per_second"] = kv_bytes_per_token / self.restore_token_s
        return found


def write_cost_model(path: Path, model: CostModel) -> None:
    """Write a cost model as YAML, with a comment for every figure."""
    lines = [f"# Cost model for `histate simulate --cost-model`, measured on {model.measured_on}.", f"format: {FORMAT}"]
    lines.append(f"measured_on: {model.measured_on!r}")
    lines += ["times:  # seconds"]
    lines += [f"  {name}: {value:.5e}  # {_MEANING[name]}" for name, value in asdict(model.times).items()]
    if model.restore_token_s is not None and model.restore_fixed_s is not None:
        lines += [
            "restore:  # seconds",
            f"  token_s: {model.restore_token_s:.5e}  # of a hit, for each token restored",
            f"  fixed_s: {model.restore_fixed_s:.5e}  # of a hit, besides",
        ]
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")


def read_cost_model(path: Path) -> CostModel:
    """Read a cost model.

    Raises:
        CostModelError: Not such a file, or a figure is missing or cannot be.
    """
    try:
        value = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise CostModelError(f"{path}: {error}") from None
    if not isinstance(value, dict) or value.get("format") != FORMAT:
        raise CostModelError(f"{path}: not a cost model (format: {FORMAT}). `histate calibrate` writes one")
    times = _figures(path, value, "times", [field.name for field in fields(StepTimes)])
    restore = _figures(path, value, "restore", ["token_s", "fixed_s"]) if "restore" in value else None
    return CostModel(
        StepTimes(**times),
        restore["token_s"] if restore else None,
        restore["fixed_s"] if restore else None,
        str(value.get("measured_on", path)),
    )


def _figures(path: Path, value: dict[str, Any], section: str, names: Sequence[str]) -> dict[str, float]:
    found = value.get(section)
    if not isinstance(found, dict):
        raise CostModelError(f"{path}: {section}: is missing; it holds {', '.join(names)}")
    if unknown := sorted(set(map(str, found)) - set(names)):
        raise CostModelError(f"{path}: {section}.{unknown[0]}: no such figure; there are {', '.join(names)}")
    figures = {}
    for name in names:
        try:
            figures[name] = parse_number(found.get(name))
        except ValueError:
            figures[name] = math.nan
        if not figures[name] >= 0:
            raise CostModelError(
                f"{path}: {section}.{name}: must be a number of seconds of at least 0, found {found.get(name)!r}"
            )
    if section == "times" and figures["step_s"] + figures["weights_s"] + figures["token_s"] <= 0:
        raise CostModelError(f"{path}: times: a step must take some time, but step_s, weights_s and token_s are all 0")
    return figures


_MEANING = {
    "step_s": "fixed part of a scheduler step",
    "weights_s": "least time of a step's matrix products: reading the weights",
    "token_s": "matrix products of one token",
    "attention_s": "attention of one prefilled token, for each token before it",
    "context_s": "attention of one decoded token, for each token before it",
    "state_s": "recurrent state of one decoded token",
}
