"""A mixture of experts that means something, made of a LLaMA: each MLP copied and noised, and a router that is trained.

    python scripts/upcycle.py smollm2-135m DIRECTORY --text wikitext2-valid.tokens.txt

Writes a Mixtral whose tensors are those of the model, but for the experts (copies of its MLPs, with noise of a share of each
matrix's root mean square) and the routers (random, then trained for some steps to predict the text and to use all experts
alike; nothing else moves). What compression of the two costs can be compared: docs/models.md has the commands.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from statistics import fmean
from typing import Any

import torch

from edkm_cli import models


def upcycled(dense: Any, args: argparse.Namespace) -> Any:
    """A float32 Mixtral of a LLaMA's tensors."""
    from transformers import MixtralConfig, MixtralForCausalLM

    kept = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "head_dim",
            "num_key_value_heads", "rms_norm_eps", "rope_parameters", "max_position_embeddings", "tie_word_embeddings",
            "bos_token_id", "eos_token_id", "pad_token_id", "hidden_act")  # fmt: skip
    config = MixtralConfig(
        **{name: getattr(dense.config, name) for name in kept},
        num_local_experts=args.experts, num_experts_per_tok=args.active, sliding_window=None,
        output_router_logits=True, router_aux_loss_coef=args.balance,
    )  # fmt: skip
    model = MixtralForCausalLM(config).float()
    odd = [
        name for name in model.load_state_dict(dense.state_dict(), strict=False).unexpected_keys if ".mlp." not in name
    ]
    if odd or any(name.endswith(".bias") for name in dense.state_dict()):
        raise SystemExit(f"a Mixtral has no place for all of this model, such as {(odd or ['its biases'])[0]}")
    with torch.no_grad():
        for layer, one in zip(model.model.layers, dense.model.layers, strict=True):
            matrices = {
                layer.mlp.experts.gate_up_proj: torch.cat([one.mlp.gate_proj.weight, one.mlp.up_proj.weight]),
                layer.mlp.experts.down_proj: one.mlp.down_proj.weight,
            }
            for experts, matrix in matrices.items():
                size = args.noise * matrix.square().mean().sqrt()
                experts.copy_(matrix + size * torch.randn(experts.shape))
    return model


def train_routers(model: Any, ids: torch.Tensor, args: argparse.Namespace) -> dict[str, float]:
    """Train the routers, one sequence a step. Returns the loss of the first and the last ten steps."""
    model.requires_grad_(False)
    routers = [layer.mlp.gate.weight.requires_grad_() for layer in model.model.layers]
    optimizer = torch.optim.AdamW(routers, lr=args.learning_rate, weight_decay=0.0)
    losses = []
    for step in range(args.steps):
        first = step * args.length % (len(ids) - args.length)
        batch = ids[None, first : first + args.length]
        with torch.autocast("cpu", torch.bfloat16):
            loss = model(input_ids=batch, labels=batch).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
        if step % 20 == 19:
            print(f"step {step + 1}: {sum(losses[-20:]) / 20:.4f}", flush=True)
    return {"first_loss": fmean(losses[:10] or [0.0]), "last_loss": fmean(losses[-10:] or [0.0])}


@torch.no_grad()
def shares(model: Any, ids: torch.Tensor) -> list[list[float]]:
    """Layer by layer, the share of the choices that each expert gets."""
    logits = model(input_ids=ids[None], output_router_logits=True).router_logits
    active, count = model.config.num_experts_per_tok, model.config.num_local_experts
    chosen = (layer.topk(active).indices.flatten().bincount(minlength=count) for layer in logits)
    return [[round(float(share), 3) for share in counts / counts.sum()] for counts in chosen]


def main() -> None:
    """Make, train, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("directory", type=Path)
    parser.add_argument("--text", type=Path, required=True, help="a plain text, to train the routers on")
    for name, value in (("experts", 4), ("active", 2), ("noise", 0.02), ("balance", 0.02), ("steps", 200),
                        ("length", 128), ("learning-rate", 1e-3), ("seed", 0)):  # fmt: skip
        parser.add_argument(f"--{name}", type=type(value), default=value)
    args = parser.parse_args()
    begin = time.perf_counter()
    torch.manual_seed(args.seed)
    source = models.resolve(args.model)
    tokenizer = models.load_tokenizer(source)
    model = upcycled(models.load_dense(source, dtype="float32"), args)
    needed = (args.steps + 4) * args.length
    ids = tokenizer(args.text.read_text(encoding="utf-8")[: 8 * needed], return_tensors="pt").input_ids[0]
    result: dict[str, Any] = train_routers(model, ids, args)
    result["shares"] = shares(model, ids[-4 * args.length :])
    model.config.output_router_logits = False
    model.to(torch.bfloat16).save_pretrained(args.directory)
    tokenizer.save_pretrained(args.directory)
    result |= {**vars(args), "directory": None, "text": args.text.name, "seconds": time.perf_counter() - begin}
    (args.directory / "upcycle.json").write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    print(json.dumps({key: value for key, value in result.items() if key != "shares"}))


if __name__ == "__main__":
    main()
