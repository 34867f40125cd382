"""Tiny random LLaMA-shaped models and a byte tokenizer: whole runs in seconds, nothing downloaded."""

from __future__ import annotations

import os
from pathlib import Path

os.environ.setdefault("HF_HUB_OFFLINE", "1")  # a test that needs the hub is wrong

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

from edkm_cli.export.checkpoint import write_checkpoint
from edkm_cli.format import QuantizationSpec
from edkm_cli.initialize.build import swap_linears
from edkm_cli.nn.clustered import Clustering
from edkm_cli.nn.swap import palettize_embeddings, plan_swaps


def byte_tokenizer() -> PreTrainedTokenizerFast:
    """One token a byte, and an end-of-sequence token: vocabulary of 257."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {symbol: index for index, symbol in enumerate(alphabet)} | {"<eos>": 256}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<eos>")


def tiny_llama(*, tied: bool = True, bias: bool = False, hidden: int = 24, inner: int = 40, seed: int = 0, **more):
    """LLaMA with grouped-query attention (4 heads, 2 key-value heads) and widths that are no multiples of 16."""
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=257,
        hidden_size=hidden,
        intermediate_size=inner,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=128,
        tie_word_embeddings=tied,
        attention_bias=bias,
        mlp_bias=bias,
        bos_token_id=None,
        eos_token_id=256,
        pad_token_id=None,
        initializer_range=0.3,  # sharp enough predictions that compression can hurt
        **more,
    )
    model = LlamaForCausalLM(config)
    with torch.no_grad():  # biases start at zero and norms at one: make them matter
        for name, parameter in model.named_parameters():
            if name.endswith("bias") or "norm" in name:
                parameter.add_(0.1 * torch.randn_like(parameter))
    return model.eval()


def tiny_qwen():
    """Another family: biases on q, k and v only."""
    torch.manual_seed(1)
    config = Qwen2Config(
        vocab_size=257,
        hidden_size=24,
        intermediate_size=40,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=128,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=256,
    )
    return Qwen2ForCausalLM(config).eval()


def cluster(model, *, bits=3, granularity="row:1", lut_dtype="float16", embedding_bits=8, skip=(), **options):
    """Swap a model in place as `compress` does; returns (model in evaluation mode, spec)."""
    swaps = plan_swaps(model, embedding_bits=embedding_bits, skip=skip)
    spec = QuantizationSpec(bits, granularity, lut_dtype, embedding_bits, [s.name for s in swaps if s.reason])
    for _ in swap_linears(model, swaps, Clustering(bits, granularity, lut_dtype, **options), temperature=0.05):
        pass
    palettize_embeddings(model, swaps, spec)
    return model.eval(), spec


def export(model, spec, directory: Path, **options) -> Path:
    directory.mkdir(parents=True, exist_ok=True)
    write_checkpoint(model, None, directory, spec, **options)
    return directory


@pytest.fixture
def ids() -> torch.Tensor:
    return torch.randint(0, 257, (2, 17), generator=torch.Generator().manual_seed(3))


@pytest.fixture(scope="session")
def model_directory(tmp_path_factory) -> Path:
    """A dense tiny LLaMA with its tokenizer, as a local Hugging Face directory."""
    directory = tmp_path_factory.mktemp("models") / "tiny"
    tiny_llama().save_pretrained(directory)
    byte_tokenizer().save_pretrained(directory)
    return directory


@pytest.fixture(scope="session")
def text_file(tmp_path_factory) -> Path:
    """About 20,000 characters of varied text."""
    path = tmp_path_factory.mktemp("texts") / "text.txt"
    lines = [f"Line {i}: the {['quick', 'slow', 'odd'][i % 3]} fox counted {i * 7919 % 1000} hens." for i in range(400)]
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path
