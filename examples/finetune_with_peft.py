"""Train a LoRA adapter on a compressed model with peft alone, save it, and load it again.

make demo                                                            # writes out/demo
python examples/finetune_with_peft.py out/demo README.md adapter     # a model, a text, where the adapter goes
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import AutoTokenizer

import edkm_cli


def train_adapter(
    directory: str | Path, text: str, output: str | Path, *, steps: int = 20, length: int = 128
) -> list[float]:
    """The loss of each step; the adapter is saved to `output`."""
    tokenizer = AutoTokenizer.from_pretrained(directory)
    # Weights stay packed and frozen. A packed linear is an nn.Linear to peft: nothing has to be registered.
    model = edkm_cli.load(directory, dtype=torch.float32)
    model = get_peft_model(model, LoraConfig(r=8, lora_alpha=16, target_modules="all-linear", task_type="CAUSAL_LM"))
    ids = tokenizer(text, return_tensors="pt")["input_ids"][0]
    if len(ids) < length:
        sys.exit(f"the text must have at least {length} tokens, but has {len(ids)}")
    blocks = ids[: len(ids) // length * length].view(-1, length)
    optimizer = torch.optim.AdamW((p for p in model.parameters() if p.requires_grad), lr=1e-3)
    model.train()
    losses = []
    for step in range(steps):
        block = blocks[step % len(blocks)][None]
        loss = model(input_ids=block, labels=block).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    model.save_pretrained(output)
    return losses


if __name__ == "__main__":
    if len(sys.argv) != 4:
        sys.exit(f"usage: {sys.argv[0]} DIRECTORY TEXT_FILE ADAPTER")
    losses = train_adapter(sys.argv[1], Path(sys.argv[2]).read_text(encoding="utf-8"), sys.argv[3])
    print(f"loss {losses[0]:.3f} -> {losses[-1]:.3f}")
    adapted = PeftModel.from_pretrained(edkm_cli.load(sys.argv[1], dtype=torch.float32), sys.argv[3])
    print(f"{sys.argv[3]} is back, with rank {adapted.peft_config['default'].r}")
