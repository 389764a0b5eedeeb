"""Where the disk tier's tests find what they share."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(
    0, str(Path(__file__).parents[2] / "unit" / "disk")
)  # disk_boxes: one set of moves for all tests of the tier
