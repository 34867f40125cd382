"""Load a compressed model and generate text with it. Nothing but the directory that `edkm compress` wrote is needed.

make demo                                                            # writes out/demo
python examples/load_and_generate.py out/demo "The capital of France is"
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from transformers import AutoTokenizer

import edkm_cli
from edkm_cli.errors import UserError


def continue_text(directory: str | Path, prompt: str, *, max_new_tokens: int = 40) -> str:
    """The prompt and its most probable continuation, token by token (greedy decoding)."""
    # `load` checks the files against their checksums and keeps the weights packed in memory. With transformers' own
    # `AutoModelForCausalLM.from_pretrained(directory)`, write `import edkm_cli.hf` first: it registers the format.
    model = edkm_cli.load(directory, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(directory)
    ids = tokenizer(prompt, return_tensors="pt")["input_ids"]
    written = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=max_new_tokens, do_sample=False)
    return tokenizer.decode(written[0], skip_special_tokens=True)


if __name__ == "__main__":
    if len(sys.argv) != 3:
        sys.exit(f"usage: {sys.argv[0]} DIRECTORY PROMPT")
    try:
        print(continue_text(sys.argv[1], sys.argv[2]))
    except UserError as error:  # one line: the rule, the value, the remedy
        sys.exit(str(error))
