#!/usr/bin/env bash
# Whether an installed wheel does its work without a compiler and without a cache for what one makes: a tiny model is drawn,
# compressed, used, and packed products are measured. Runs `edkm` of the environment whose PATH is first.
set -euo pipefail
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT
bin=$(dirname "$(command -v edkm)")
cd "$scratch"
mkdir -p path cache/edkm
touch cache/edkm/kernels # nothing can be compiled into it
for tool in bash cat dirname env ls mkdir rm uname; do ln -s "$(command -v $tool)" path/; done
export PATH="$bin:$scratch/path" XDG_CACHE_HOME="$scratch/cache" HF_HUB_OFFLINE=1
for compiler in cc gcc clang; do
    if command -v "$compiler"; then echo "a compiler is on PATH: $compiler" >&2; exit 1; fi
done
python - <<'PYTHON'
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from edkm_cli.kernels import build
from edkm_cli.runtime import lut_linear_c

library = lut_linear_c.library()
assert build.library() is not None and library is not None, "no compiled kernels in this wheel for this processor"
print("kernels:", library._name)
torch.manual_seed(0)
sizes = dict(hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=2)
LlamaForCausalLM(LlamaConfig(vocab_size=256, **sizes)).save_pretrained("tiny")
letters = {letter: number for number, letter in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
tokenizer = Tokenizer(models.BPE(vocab=letters, merges=[]))
tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
PreTrainedTokenizerFast(tokenizer_object=tokenizer).save_pretrained("tiny")
PYTHON
edkm-compress --model tiny --bits 3 --data builtin --steps 2 --sequence-length 64 --batch-size 1 --eval-windows 2 --context 64 --output out
edkm generate out "Once" --max-new-tokens 8
edkm bench runtime --shape 576x576 --tokens 1 --tokens 16 --bits 3
