"""What vLLM asks about a compressed model: which layers are packed, and how; and whether its directory is whole.

vLLM does not track which tensors of a quantized model were loaded: what a file lacks would stay as the memory was. So the
directory is checked before anything is loaded, as `edkm_cli.load` checks it, and each packed layer checks itself when its
tensors are there (vllm_layers.py).
"""

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn
from vllm.config import get_current_vllm_config
from vllm.model_executor.layers import vocab_parallel_embedding as embedding
from vllm.model_executor.layers.fused_moe import GateLinear, RoutedExperts
from vllm.model_executor.layers.linear import LinearBase, UnquantizedLinearMethod
from vllm.model_executor.layers.quantization.base_config import QuantizationConfig, QuantizeMethodBase
from vllm.model_executor.models.utils import WeightsMapper

from edkm_cli.errors import UserError
from edkm_cli.files import read_json, verify_checksums
from edkm_cli.format import QUANT_METHOD, QuantizationSpec
from edkm_cli.granularity import FREE
from edkm_cli.integrity import AGAIN, check_checkpoint
from edkm_cli.model_files import TensorFiles
from edkm_cli.serve.vllm_experts import RENAMED, PackedExpertsMethod
from edkm_cli.serve.vllm_layers import PackedEmbeddingMethod, PackedLinearMethod, pack_embeddings, refused

# What vLLM joins where a model does not say it otherwise, and what files may hold joined already.
_JOINED = {"qkv_proj": ["q_proj", "k_proj", "v_proj"], "gate_up_proj": ["gate_proj", "up_proj"]}
# Queries, keys and values of one head after another, which vLLM puts in another order as it reads: of dense weights alone.
_IN_TURNS = ("BloomForCausalLM", "FalconForCausalLM", "GPTNeoXForCausalLM", "RWForCausalLM", "PersimmonForCausalLM",
             "Llama4ForCausalLM")  # fmt: skip
_EMBEDDINGS = ("embed_tokens", "wte", "word_embeddings", "tok_embeddings", "embeddings")  # vLLM gives most no name


class EdkmVllmConfig(QuantizationConfig):
    """`"quant_method": "edkm"` of a config.json, for vLLM. Raises UserError for a broken one."""

    def __init__(self, spec: QuantizationSpec):
        super().__init__()
        self.spec, self._architecture = spec, ""
        self._packed = frozenset[str]()  # the packed modules of a local directory

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.spec})"

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> "EdkmVllmConfig":
        """Read the `quantization_config` of a checkpoint."""
        try:
            if (spec := QuantizationSpec.from_mapping(config)).palette != FREE:
                raise UserError(f"vllm serves free tables, not palette {spec.palette}; see edkm export")
            return cls(spec)
        except UserError as error:
            raise refused(str(error), remedy="") from None

    def get_name(self) -> str:
        return QUANT_METHOD

    def get_supported_act_dtypes(self) -> list[torch.dtype]:
        return [torch.float32, torch.bfloat16, torch.float16]

    @classmethod
    def get_min_capability(cls) -> int:
        """Any GPU that Triton compiles for."""
        return 70

    @staticmethod
    def get_config_filenames() -> list[str]:
        return []

    def apply_vllm_mapper(self, hf_to_vllm_mapper: Any) -> None:
        """Name modules as vLLM's model does, where it has other names than the files."""
        mapper = hf_to_vllm_mapper | self.get_checkpoint_weight_mapper()
        self.spec = replace(
            self.spec,
            skipped=mapper.apply_list(self.spec.skipped),
            module_bits=mapper.apply_dict(self.spec.module_bits),
            module_granularity=mapper.apply_dict(self.spec.module_granularity),
        )
        self._packed = frozenset(mapper.apply_list(sorted(self._packed)))
        if self.spec.packs_embeddings:
            pack_embeddings()

    def get_checkpoint_weight_mapper(self) -> WeightsMapper:  # type: ignore[override]
        """Names in the files -> names in vLLM's model, where transformers has others of a mixture of experts."""
        return WeightsMapper(orig_to_new_substr=dict(RENAMED.get(self._architecture, {})))

    def maybe_update_config(self, model_name: str, hf_config: Any = None, revision: str | None = None) -> None:
        """Check a local directory. Raises UserError for one that is not whole, or of experts that are not known. A model of
        the hub is not here yet: its packed layers are checked when they are loaded."""
        self._architecture = (getattr(hf_config, "architectures", None) or [""])[0]
        directory = Path(model_name)
        try:
            if self.spec.split_experts and self._architecture not in RENAMED:
                rule = f"vllm serves packed experts of {' and '.join(RENAMED)}, got {self._architecture}"
                raise UserError(f"{rule}; use transformers, edkm export --to dense, or compress with --experts dense")
            faults = {"reads images, too": hasattr(hf_config, "vision_config")}
            faults |= {"stores queries, keys and values of each head in turn": self._architecture in _IN_TURNS}
            for fault in (fault for fault, found in faults.items() if found):
                rule = f"vllm serves packed text models with rows in its order, but {self._architecture} {fault}"
                raise UserError(f"{rule}; use transformers, or edkm export --to dense")
            if not directory.is_dir():
                return
            if "auto_map" in read_json(directory / "config.json", remedy=AGAIN):
                verify_checksums(directory)  # its tensors are known to Python files that would have to be run
            else:
                check_checkpoint(directory)
            names = TensorFiles(directory, remedy=AGAIN).tensors
            self._packed = frozenset(name.removesuffix(".indices") for name in names if name.endswith(".indices"))
        except UserError as error:
            raise refused(str(error), remedy="") from None

    def get_quant_method(self, layer: nn.Module, prefix: str) -> QuantizeMethodBase | None:
        """How a layer of vLLM's model keeps its weights; None for layers that have none of ours."""
        parent, _, leaf = prefix.rpartition(".")
        if isinstance(layer, embedding.ParallelLMHead):  # an embedding, too: asked first
            return self._of_embedding(prefix, (leaf,))
        if isinstance(layer, embedding.VocabParallelEmbedding):
            return self._of_embedding(prefix, _EMBEDDINGS)
        if isinstance(layer, RoutedExperts) and self.spec.split_experts:
            return PackedExpertsMethod(self, layer)
        if not isinstance(layer, LinearBase):
            return None
        # The modules of the checkpoint that a layer of vLLM stands for: three for `qkv_proj`, mostly.
        leaves = self.packed_modules_mapping.get(leaf) or (_JOINED.get(leaf) if self._packed else None) or [leaf]
        if prefix in self._packed or prefix in self.spec.skipped:  # the files hold it joined
            leaves = [leaf]
        names = [f"{parent}.{name}" if parent else name for name in leaves]
        if isinstance(layer, GateLinear) or all(name in self.spec.skipped for name in names):  # routers stay dense
            return UnquantizedLinearMethod()
        return PackedLinearMethod(self.spec, names)

    def _of_embedding(self, prefix: str, leaves: tuple[str, ...]) -> QuantizeMethodBase:
        dense = prefix in self.spec.skipped or any(name.rpartition(".")[2] in leaves for name in self.spec.skipped)
        if dense or not self.spec.packs_embeddings:
            return embedding.UnquantizedEmbeddingMethod()
        if (draft := get_current_vllm_config().speculative_config) is not None and draft.use_eagle():
            rule = f"vllm serves packed embeddings beside no draft that shares them, got method {draft.method}"
            raise refused(rule, "compress with --embedding-bits 16, or give another method, such as ngram")
        return PackedEmbeddingMethod(self.spec, prefix or "embed_tokens")
