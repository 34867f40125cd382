"""The entry point by which vLLM finds edkm: it is where pyproject.toml says, and costs nothing where it is not called; and
what vLLM may not do beside packed weights."""

import subprocess
import sys
import tomllib
from contextlib import nullcontext
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from edkm_cli.errors import UserError
from edkm_cli.format import QuantizationSpec

ROOT = Path(__file__).parent.parent


def test_the_entry_point_is_a_function_whose_module_imports_neither_torch_nor_vllm():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    module, name = project["entry-points"]["vllm.general_plugins"]["edkm"].split(":")
    heavy = "{'torch', 'vllm'} & set(sys.modules)"
    program = f"import sys, {module} as plugin; print(callable(plugin.{name}), sorted({heavy}))"
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout == "True []\n"


@pytest.mark.vllm
@pytest.mark.skipif(find_spec("vllm") is None, reason="vLLM has an environment of its own: scripts/check_vllm.sh")
def test_a_draft_that_shares_packed_embeddings_is_refused_before_weights_are_read(monkeypatch):
    from vllm.config import VllmConfig, set_current_vllm_config
    from vllm.model_executor.layers import vocab_parallel_embedding as embedding

    from edkm_cli.serve.vllm_config import EdkmVllmConfig

    monkeypatch.setattr(embedding, "get_tensor_model_parallel_rank", lambda: 0)
    monkeypatch.setattr(embedding, "get_tensor_model_parallel_world_size", lambda: 1)
    vllm_config, ours = VllmConfig(), EdkmVllmConfig(QuantizationSpec(3, "row:1", "float16", 8))
    with set_current_vllm_config(vllm_config):
        for method in ("ngram", "eagle3"):
            eagle = method == "eagle3"
            vllm_config.speculative_config = SimpleNamespace(method=method, use_eagle=lambda eagle=eagle: eagle)
            told = pytest.raises(UserError, match="got method eagle3; compress with") if eagle else nullcontext()
            with told:
                embedding.VocabParallelEmbedding(64, 32, torch.float32, quant_config=ours, prefix="model.embed_tokens")
