"""What a user can set, read from ``LMCACHE_CONFIG``, ``LMCACHE_CONFIG_FILE`` and ``HISTATE_*``.

Imports neither vllm, lmcache nor torch.
"""

from lmcache_histate.config.errors import ConfigError
from lmcache_histate.config.machine import check_machine
from lmcache_histate.config.model import SETTINGS, Config, HiStateSettings
from lmcache_histate.config.sources import ENVIRONMENT_NAMES, load_config, load_config_or_defaults

__all__ = [
    "ENVIRONMENT_NAMES",
    "SETTINGS",
    "Config",
    "ConfigError",
    "HiStateSettings",
    "check_machine",
    "load_config",
    "load_config_or_defaults",
]
