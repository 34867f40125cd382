"""Serving a compressed directory with other programs: vLLM finds it by the entry point `vllm.general_plugins`."""
