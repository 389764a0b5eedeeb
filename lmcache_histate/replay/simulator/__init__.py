"""A discrete-event simulator of one serving instance, with HiState's own objects and every baseline as policies."""

from lmcache_histate.replay.simulator.engine import StuckError
from lmcache_histate.replay.simulator.policies.registry import POLICIES, Policy
from lmcache_histate.replay.simulator.simulation import SimulationSettings, simulate

__all__ = ["POLICIES", "Policy", "SimulationSettings", "StuckError", "simulate"]
