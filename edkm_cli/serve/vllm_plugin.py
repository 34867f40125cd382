"""vLLM's way in: the entry point `vllm.general_plugins`, called in each of its processes.

It tells vLLM what `"quant_method": "edkm"` in a config.json means. Importing this module imports neither vLLM nor torch,
and nothing imports it but vLLM.
"""


def register() -> None:
    """Make vLLM serve compressed directories. May be called several times."""
    from vllm.model_executor.layers.quantization import register_quantization_config

    from edkm_cli.format import QUANT_METHOD
    from edkm_cli.serve.vllm_config import EdkmVllmConfig

    register_quantization_config(QUANT_METHOD)(EdkmVllmConfig)
