"""LMCache's tiers under HiState, in this process and in processes that are killed."""

from __future__ import annotations

import sys
from pathlib import Path

_TESTS = Path(__file__).parents[2]
# storage: a real storage manager with our module in it; disk_boxes: what a folder takes on disk.
sys.path[:0] = [str(_TESTS / "unit" / "backends"), str(_TESTS / "unit" / "disk")]
