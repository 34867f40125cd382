"""Measure how fast a randomly initialised LLaMA reads and writes, dense in bfloat16 and packed, as JSON.

    python scripts/bench_decode.py --shape llama-7b --device cuda --json FILE
    python scripts/bench_decode.py --shape smollm2-135m    on a CPU; without --shape a tiny one: the same code

Nothing is downloaded; the numbers of tables and indices are random, which changes no time. Both models write with the same
harness: `generate` of transformers, as everybody runs it, and, on a GPU, one step with a static cache in a CUDA graph, where
the time is the GPU's alone and not that of transformers' Python. `peak_memory_bytes` is what PyTorch held on the GPU at most
while writing, the cache of keys and values included.
"""

from __future__ import annotations

import argparse
import gc
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM, StaticCache

from edkm_cli.environment import hardware, versions
from edkm_cli.evaluate.command import decode_speed, prefill_speed, resident_bytes
from edkm_cli.format import QuantizationSpec
from edkm_cli.granularity import Granularity
from edkm_cli.nn.swap import palettize_embeddings, plan_swaps
from edkm_cli.runtime.palettized import PalettizedLinear

SHAPES = {
    "tiny": {
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "vocab_size": 64,
    },
    "smollm2-135m": {
        "hidden_size": 576,
        "intermediate_size": 1536,
        "num_hidden_layers": 30,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
        "vocab_size": 49152,
        "tie_word_embeddings": True,
    },
    "llama-7b": {},  # LlamaConfig's own defaults
}
_PROMPT = 16


def pack(model: Any, bits: int) -> None:
    """Every linear of the decoder gets random codes and tables, the embeddings 8 bits; one matrix at a time."""
    spec = QuantizationSpec(bits, Granularity.parse("row:1"), "float16", 8)
    swaps = plan_swaps(model, embedding_bits=8)
    for swap in swaps:
        if not swap.clustered:
            continue
        dense = model.get_submodule(swap.name)
        with torch.device(dense.weight.device):
            packed = PalettizedLinear(dense, spec, name=swap.name)
        packed.indices.random_(0, 256)
        packed.lut.copy_(torch.randn(packed.lut.shape, device=packed.lut.device).mul_(0.02).sort(1).values)
        model.set_submodule(swap.name, packed)
    palettize_embeddings(model, swaps, spec, {})


def step_of(model: Any, tokens: int) -> Callable[[], None]:
    """A function that writes the next token into memory of its own: nothing in it depends on the host."""
    device = model.device
    cache = StaticCache(config=model.config, max_cache_len=_PROMPT + tokens)
    ids = torch.arange(_PROMPT, device=device)[None] % model.config.vocab_size
    model(ids, past_key_values=cache, cache_position=torch.arange(_PROMPT, device=device))
    token, place = ids[:, -1:].clone(), torch.tensor([_PROMPT], device=device)

    def step() -> None:
        logits = model(
            token, past_key_values=cache, cache_position=place, position_ids=place[None], logits_to_keep=1
        ).logits
        token.copy_(logits[:, -1:].argmax(-1))
        place.add_(1)

    return step


def graph_speed(model: Any, tokens: int) -> float | None:
    """Tokens per second of steps in a CUDA graph; None where they cannot be captured."""
    warm_up = 3
    try:
        step, side = step_of(model, tokens + warm_up + 1), torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(warm_up):
                step()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            step()
        torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(tokens):
            graph.replay()
        torch.cuda.synchronize()
        return tokens / (time.perf_counter() - start)
    except RuntimeError as error:
        print(f"no CUDA graph: {str(error).splitlines()[0]}")
        return None


def measure(model: Any, tokens: int) -> dict[str, Any]:
    """The JSON's keys of one model."""
    gc.collect()
    on_gpu = model.device.type == "cuda"
    if on_gpu:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    with torch.no_grad():
        prompt = torch.arange(_PROMPT) % model.config.vocab_size
        found: dict[str, Any] = {
            "prefill_tokens_per_second": prefill_speed(model, torch.arange(512) % model.config.vocab_size),
            "generate_tokens_per_second": decode_speed(model, prompt, new_tokens=tokens),
            "graph_tokens_per_second": graph_speed(model, tokens) if on_gpu else None,
        }
        if not on_gpu:  # the step of the graph, so that a machine without a GPU tries the same code
            step = step_of(model, 2)
            step()
            step()
    found["weights_resident_bytes"] = resident_bytes(model)
    found["peak_memory_bytes"] = torch.cuda.max_memory_allocated() if on_gpu else None
    print(found)
    return found


def main() -> None:
    """Parse, measure the dense model, pack it, measure again, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=sorted(SHAPES), default="tiny")
    parser.add_argument("--bits", type=int, default=3)
    parser.add_argument("--tokens", type=int, default=64, help="tokens that are written")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    if arguments.json and not arguments.json.parent.is_dir():
        parser.error(f"--json must name a file in a directory that exists, got {arguments.json}")
    torch.manual_seed(0)
    torch.set_default_dtype(torch.bfloat16)
    with torch.device(arguments.device):
        model = LlamaForCausalLM(LlamaConfig(**SHAPES[arguments.shape])).eval()
    torch.set_default_dtype(torch.float32)
    dense = measure(model, arguments.tokens)
    pack(model, arguments.bits)
    packed = measure(model, arguments.tokens)
    result = {
        "command": f"python scripts/bench_decode.py --shape {arguments.shape} --bits {arguments.bits} "
        f"--tokens {arguments.tokens} --device {arguments.device}",
        "dense_bf16": dense,
        "packed": packed,
        "ratio": {
            key: packed[key] / dense[key] if packed[key] and dense[key] else None
            for key in packed
            if key != "peak_memory_bytes"
        },
        "versions": versions(),
        "hardware": hardware(arguments.device),
    }
    print(json.dumps(result["ratio"]))
    if arguments.json is not None:
        arguments.json.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
