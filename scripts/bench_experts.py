"""One token through a mixture-of-experts layer, packed against dense bfloat16: seconds, and the bytes that are read.

python scripts/bench_experts.py --experts 16 --hidden 2048 --inner 768 --json FILE
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from pathlib import Path
from typing import Any

import torch

from edkm_cli.environment import hardware, versions
from edkm_cli.format import QuantizationSpec
from edkm_cli.nn.swap import palettize_skeleton
from edkm_cli.runtime.experts import is_expert
from edkm_cli.runtime.palettized import PalettizedLinear


def models(args: argparse.Namespace) -> tuple[Any, Any]:
    """(dense bfloat16, packed) with one layer of experts; what packed indices say does not matter here."""
    from transformers import AutoModelForCausalLM, Qwen3MoeConfig

    config = Qwen3MoeConfig(
        vocab_size=256, hidden_size=args.hidden, intermediate_size=args.inner, moe_intermediate_size=args.inner,
        num_hidden_layers=1, num_attention_heads=8, num_key_value_heads=2, head_dim=64, num_experts=args.experts,
        num_experts_per_tok=args.active,
    )  # fmt: skip
    torch.manual_seed(0)
    dense = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval()
    packed = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval()
    packed.load_state_dict(dense.state_dict())
    spec = QuantizationSpec(args.bits, "row:1", "float16", 8, ["model.layers.0.mlp.gate"], split_experts=True)
    palettize_skeleton(packed, spec)
    for module in packed.modules():
        if isinstance(module, PalettizedLinear):
            module.indices.random_(0, 256)
            module.lut.normal_(std=0.02)
    return dense, packed


def read_bytes(packed: Any, x: torch.Tensor) -> dict[str, int]:
    """Bytes of indices and tables of the experts' matrices that one pass calls, and of all."""
    experts = {name: m for name, m in packed.named_modules() if is_expert(name) and isinstance(m, PalettizedLinear)}
    sizes = {name: m.indices.nbytes + m.lut.nbytes for name, m in experts.items()}
    called: set[str] = set()
    handles = [m.register_forward_hook(lambda *_, name=name: called.add(name)) for name, m in experts.items()]
    packed.model.layers[0].mlp(x)
    for handle in handles:
        handle.remove()
    return {"read_bytes": sum(sizes[name] for name in called), "all_bytes": sum(sizes.values())}


def seconds(block: Any, tokens: list[torch.Tensor]) -> float:
    """Median of a token's time; each token goes to experts of its own."""
    for x in tokens[:10]:
        block(x)
    taken = []
    for x in tokens:
        begin = time.perf_counter()
        block(x)
        taken.append(time.perf_counter() - begin)
    return statistics.median(taken)


@torch.no_grad()
def main() -> None:
    """Measure, print, and write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, value in (("experts", 16), ("active", 4), ("hidden", 2048), ("inner", 768), ("bits", 3), ("tokens", 200)):
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    if args.json and not args.json.parent.is_dir():
        parser.error(f"--json must name a file in a directory that exists, got {args.json}")
    dense, packed = models(args)
    tokens = [torch.randn(1, 1, args.hidden, dtype=torch.bfloat16) for _ in range(args.tokens)]
    result: dict[str, Any] = {
        "dense_bf16_seconds": seconds(dense.model.layers[0].mlp, tokens),
        "packed_seconds": seconds(packed.model.layers[0].mlp, tokens),
        **read_bytes(packed, tokens[0]),
        **{key: value for key, value in vars(args).items() if key != "json"},
        "threads": torch.get_num_threads(),
        "versions": versions(),
        "hardware": hardware(),
    }
    print(json.dumps({key: value for key, value in result.items() if key not in ("versions", "hardware")}, indent=1))
    if args.json:
        args.json.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
