"""The vLLM side: the only package that imports `vllm`."""
