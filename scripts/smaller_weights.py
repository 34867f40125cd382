"""Write a LLaMA-like model with the same function and smaller weights: `python scripts/smaller_weights.py MODEL DIRECTORY`.

Weights of larger models are a tenth of SmolLM2's; what trains them well is tried on a small model so (docs/log.md, 30
November 2026). Norms, and `rms_norm_eps`, take up what is divided out; by a power of two the logits are equal to the bit.
"""

import argparse

import torch

from edkm_cli import models
from edkm_cli.hf import load_source


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", help="an alias, a hub id or a directory of a LLaMA")
    parser.add_argument("directory", help="where it goes")
    parser.add_argument("--divisor", type=float, default=8.0, help="of weights; a power of two")
    options = parser.parse_args()

    source = models.resolve(options.model)
    model = load_source(source, dequantize=False, dtype="float32")
    if model.config.model_type != "llama" or not model.config.tie_word_embeddings:
        raise SystemExit(f"{options.model} must be a LLaMA whose head is its embedding; give another")
    ids = torch.arange(3, 67)[None]
    with torch.no_grad():
        before = model(input_ids=ids).logits
        for parameter in model.parameters():
            norm = parameter.dim() == 1  # what goes into matrices is larger by as much as these are smaller
            parameter.mul_(options.divisor if norm else 1 / options.divisor)
        model.config.rms_norm_eps /= options.divisor**2  # the residual stream is smaller, too
        for module in model.modules():
            if hasattr(module, "variance_epsilon"):
                module.variance_epsilon /= options.divisor**2
        difference = float((model(input_ids=ids).logits - before).abs().max())
    model.save_pretrained(options.directory)
    models.load_tokenizer(source).save_pretrained(options.directory)
    print(f"{options.directory}: largest difference of a logit {difference:g}")


if __name__ == "__main__":
    main()
