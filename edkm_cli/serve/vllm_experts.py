"""Packed experts inside vLLM: each matrix of each expert is one of vLLM's linears, packed like any other (vllm_layers.py).

vLLM computes with the weights of all experts at once, dense or in formats that its kernels know. Here the experts that a
step's tokens chose are called one after another, as in `edkm_cli.runtime.experts`, and no others are read. Who gets which
token is not known when vLLM traces its graphs, so all of this is one operator. Routers and shared experts are vLLM's own.
"""

from collections.abc import Iterable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from vllm.config import get_current_vllm_config
from vllm.forward_context import get_forward_context
from vllm.model_executor.layers.fused_moe import FusedMoEMethodBase, FusedMoEQuantConfig, MoEActivation
from vllm.model_executor.layers.linear import MergedColumnParallelLinear, RowParallelLinear
from vllm.model_executor.layers.quantization.base_config import QuantizationConfig

from edkm_cli.serve.vllm_layers import refused

# Architecture of vLLM -> parts of the names in our files, and in its model. Others have not been tried.
RENAMED: dict[str, dict[str, str]] = {
    "MixtralForCausalLM": {".mlp.": ".block_sparse_moe.", ".experts.w2.": ".experts.down_proj."},  # as vLLM renamed it
    "Qwen3MoeForCausalLM": {},
}
_LIBRARY = torch.library.Library("edkm", "FRAGMENT")
_LIBRARY.define("routed_experts(Tensor x, Tensor weights, Tensor chosen, str layer) -> Tensor")


def routed_experts(layer: Any, x: Tensor, weights: Tensor, chosen: Tensor) -> Tensor:
    """Of tokens (n, hidden) the sum of what the experts `chosen` (n, experts a token) give for them, by `weights`."""
    output = torch.zeros_like(x)
    for expert in chosen.unique().tolist():
        tokens, places = (chosen == expert).nonzero(as_tuple=True)
        gate, up = layer.gate_up_proj[expert](x[tokens])[0].chunk(2, dim=-1)
        given = layer.down_proj[expert](functional.silu(gate) * up)[0]
        output.index_add_(0, tokens, (given * weights[tokens, places, None]).to(output.dtype))
    return output


def _by_name(x: Tensor, weights: Tensor, chosen: Tensor, layer: str) -> Tensor:
    return routed_experts(get_forward_context().no_compile_layers[layer].routed_experts, x, weights, chosen)


_LIBRARY.impl("routed_experts", _by_name, "CompositeExplicitAutograd")


@torch.library.register_fake("edkm::routed_experts", lib=_LIBRARY)
def _fake(x: Tensor, weights: Tensor, chosen: Tensor, layer: str) -> Tensor:
    return torch.empty_like(x)


class PackedExpertsMethod(FusedMoEMethodBase):
    """The experts of a block. Raises UserError for a block or a way of serving that it cannot compute."""

    def __init__(self, config: QuantizationConfig, layer: Any):
        moe = layer.moe_config
        super().__init__(moe)
        self._config = config
        self.moe_quant_config = FusedMoEQuantConfig.make()
        faults = {
            "--enable-expert-parallel": moe.moe_parallel_config.use_ep,
            "--data-parallel-size": moe.dp_size > 1,
            "--enable-lora": moe.is_lora_enabled,
            "biases of experts": moe.has_bias,
            f"the activation {moe.activation.value}": moe.activation != MoEActivation.SILU,
            "experts whose inputs are weighted": layer.apply_router_weight_on_input,
            # Who gets which token is known on the host only.
            "CUDA graphs (give --enforce-eager)": torch.cuda.is_available()
            and not get_current_vllm_config().model_config.enforce_eager,
        }
        for what in (what for what, given in faults.items() if given):
            raise refused(f"{layer.layer_name} holds packed experts, which edkm serves without {what}", remedy="")

    def create_weights(
        self, layer: Any, num_experts: int, hidden_size: int, intermediate_size_per_partition: int, **extra: Any
    ) -> None:
        """Make a linear for each matrix, which finds its piece for this process."""
        inner = intermediate_size_per_partition * self.moe.tp_size
        more: dict[str, Any] = {"bias": False, "quant_config": self._config, "params_dtype": extra["params_dtype"]}
        gates, downs = (f"{layer.layer_name}.{leaf}" for leaf in ("gate_up_proj", "down_proj"))
        layer.gate_up_proj = nn.ModuleList(
            MergedColumnParallelLinear(hidden_size, [inner, inner], prefix=f"{gates}.{expert}", **more)
            for expert in range(num_experts)
        )
        layer.down_proj = nn.ModuleList(
            RowParallelLinear(inner, hidden_size, reduce_results=False, prefix=f"{downs}.{expert}", **more)
            for expert in range(num_experts)
        )
        layer.load_weights = partial(_load, layer)

    def get_fused_moe_quant_config(self, layer: Any) -> FusedMoEQuantConfig | None:
        """For vLLM's kernels, none of which is used."""
        return self.moe_quant_config

    def apply(self, layer: Any, x: Tensor, topk_weights: Tensor, topk_ids: Tensor, *more: Any, **extra: Any) -> Tensor:
        """What the chosen experts give for tokens x (n, hidden)."""
        return torch.ops.edkm.routed_experts(x, topk_weights, topk_ids, layer.layer_name)


def _load(layer: Any, weights: Iterable[tuple[str, Tensor]]) -> Iterator[str]:
    """Take tensors of experts from the files, by their names in the block."""
    modules = dict(layer.named_modules())
    for name, stored in weights:
        path, _, leaf = name.rpartition(".")
        if (parameter := getattr(modules.get(path), leaf, None)) is None:
            raise refused(f"{layer.layer_name}.{name} is not known")
        parameter.weight_loader(parameter, stored)
        yield name
