"""Write a LLaMA with random weights and a byte tokenizer, as a Hugging Face directory.

    python scripts/random_model.py DIRECTORY --hidden 256 --layers 4
    python scripts/random_model.py DIRECTORY --shape llama-7b --layers 2

For trying whole runs where there is no hub and no patience. Its text is noise, and so are its perplexities. Tensors are
made and written one by one, so a model may be larger than the memory.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedTokenizerFast

from edkm_cli.files import safetensors_writer
from edkm_cli.models import aliases


def byte_tokenizer() -> PreTrainedTokenizerFast:
    """One token a byte, and an end-of-sequence token: a vocabulary of 257."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {symbol: index for index, symbol in enumerate(alphabet)} | {"<eos>": 256}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<eos>")


def small(hidden: int) -> dict[str, Any]:
    """A shape of its own, for any `hidden` that is a multiple of 8."""
    return {
        "vocab_size": 257,
        "hidden_size": hidden,
        "intermediate_size": hidden * 11 // 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 2048,
        "tie_word_embeddings": True,
    }


def main() -> None:
    """Parse, build, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("directory", type=Path)
    shapes = {name: known["architecture"] for name, known in aliases().items() if "architecture" in known}
    parser.add_argument("--shape", choices=shapes, metavar="ALIAS", help="of configs/models.yaml, such as llama-7b")
    parser.add_argument("--hidden", type=int, default=64, help="without --shape: a multiple of 8")
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    if arguments.hidden <= 0 or arguments.hidden % 8 or arguments.layers <= 0:
        parser.error(
            f"--hidden must be a multiple of 8 and --layers positive, got {arguments.hidden}, {arguments.layers}"
        )
    generator = torch.Generator().manual_seed(arguments.seed)
    shape = shapes[arguments.shape] if arguments.shape else small(arguments.hidden)
    hidden = shape["hidden_size"]
    config = LlamaConfig(
        **{key: value for key, value in shape.items() if key != "model_type"} | {"num_hidden_layers": arguments.layers},
        bos_token_id=None,
        eos_token_id=256,
        pad_token_id=None,
        initializer_range=0.3 * (24 / hidden) ** 0.5,  # predictions sharp enough that compression can hurt
        architectures=["LlamaForCausalLM"],
        dtype="bfloat16",
    )
    with torch.device("meta"):
        tensors = dict(AutoModelForCausalLM.from_config(config).named_parameters())
    arguments.directory.mkdir(parents=True, exist_ok=True)
    announced = {name: (torch.bfloat16, tuple(tensor.shape)) for name, tensor in tensors.items()}
    with safetensors_writer(arguments.directory / "model.safetensors", announced) as write:
        for name, (dtype, size) in announced.items():
            random = torch.randn(size, generator=generator) * config.initializer_range
            write(name, (torch.ones(size) if len(size) == 1 else random).to(dtype))
    config.save_pretrained(arguments.directory)
    byte_tokenizer().save_pretrained(arguments.directory)


if __name__ == "__main__":
    main()
