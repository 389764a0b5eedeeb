"""HiState: a prefix cache for hybrid models, for vLLM deployments that use LMCache."""

__version__ = "0.1.0"
