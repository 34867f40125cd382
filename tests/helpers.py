"""What several test modules use: tiny models, a byte tokenizer, whole runs of them, and the commands in this process."""

from __future__ import annotations

import contextlib
import io
import json
import os
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

from edkm_cli.cli import main
from edkm_cli.config import CompressConfig
from edkm_cli.evaluate.reference import CHUNK_TOKENS
from edkm_cli.export.checkpoint import write_checkpoint
from edkm_cli.format import QuantizationSpec
from edkm_cli.initialize.build import Recipe, initialize
from edkm_cli.initialize.importance import collect
from edkm_cli.initialize.layers import Layers
from edkm_cli.memory import MarshalSavedTensors
from edkm_cli.nn.clustered import ClusteredLinear, Clustering
from edkm_cli.nn.swap import plan_swaps
from edkm_cli.packing import unpack
from edkm_cli.research.baselines import SHARED
from edkm_cli.research.baselines.outcome import Task
from edkm_cli.research.compare import command as compare_module
from edkm_cli.research.compare import worker as compare_worker
from edkm_cli.runtime.experts import Experts, split_experts
from edkm_cli.train import losses


def importance_of(
    model: torch.nn.Module, names: list[str], batches: list[torch.Tensor], **how
) -> dict[str, torch.Tensor]:
    """What `collect` finds of a whole model."""
    return collect(Layers(model), names, batches, lambda path, part, found: None, by_layer=False, **how)


def byte_tokenizer() -> PreTrainedTokenizerFast:
    """One token a byte, and an end-of-sequence token: vocabulary of 257."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {symbol: index for index, symbol in enumerate(alphabet)} | {"<eos>": 256}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<eos>")


def tiny_llama(
    *, tied: bool = True, bias: bool = False, hidden: int = 24, inner: int = 40, layers: int = 2, seed: int = 0, **more
):
    """LLaMA with grouped-query attention (4 heads, 2 key-value heads) and widths that are no multiples of 16."""
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=257,
        hidden_size=hidden,
        intermediate_size=inner,
        num_hidden_layers=layers,
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


def cluster(
    model,
    *,
    bits=3,
    granularity="row:1",
    lut_dtype="float16",
    embedding_bits=8,
    skip=(),
    mixed=None,
    experts=True,
    **options,
):
    """Swap a model in place as `compress` does; returns (model in evaluation mode, spec). `mixed`: more of the spec; without
    `experts` these stay dense."""
    if experts:
        split_experts(model)
    swaps = plan_swaps(model, embedding_bits=embedding_bits, skip=skip)
    skipped = [s.name for s in swaps if s.reason]
    mixed = {**(mixed or {}), "split_experts": any(isinstance(module, Experts) for module in model.modules())}
    spec = QuantizationSpec(bits, granularity, lut_dtype, embedding_bits, skipped, **mixed)
    initialize(model, Recipe(swaps, spec, Clustering(bits, granularity, lut_dtype, **options), temperature=0.05))
    return model.eval(), spec


def clustered_linear_of(linear, clustering, *, importance=None, temperature=1.0, name="weight"):
    """A layer whose centroids start at the importance-weighted k-means of a linear's weight."""
    about = {"granularity": clustering.granularity, "importance": importance, "name": name}
    centroids = clustering.grid.start(linear.weight.detach(), **about)
    return ClusteredLinear(linear.weight, linear.bias, centroids, clustering, temperature=temperature, name=name)


def export(model, spec, directory: Path, **options) -> Path:
    directory.mkdir(parents=True, exist_ok=True)
    write_checkpoint(model, None, directory, spec, **options)
    return directory


def run(*arguments):
    """(exit status, stdout, stderr) of the application in this process."""
    out, err = io.StringIO(), io.StringIO()
    status = 0
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            main([str(argument) for argument in arguments])
        except SystemExit as stop:
            status = stop.code or 0
    return status, out.getvalue(), err.getvalue()


def refused(*arguments):
    """The one line of a user error."""
    status, out, err = run(*arguments)
    assert status == 2, err
    assert out == ""
    lines = [line for line in err.splitlines() if line.strip()]
    assert len(lines) == 1, err
    assert lines[0].startswith("edkm: error: ")
    assert "Traceback" not in err
    return lines[0]


def compress_arguments(model, text, output, *more):
    return ["compress", "--model", model, "--data", text, "-o", output, "--steps", 2, "--sequence-length", 32,
            "--context", 32, "--eval-windows", 1, "--calibration-tokens", 64, "--device", "cpu", *more]  # fmt: skip


def settings(model_directory, text_file, output, **changes):
    values = {
        "model": str(model_directory),
        "output": str(output),
        "data": (str(text_file),),
        "calibration_tokens": 256,
        "start_tokens": 1024,
        "sequence_length": 48,
        "context": 64,
        "eval_windows": 2,
        "steps": 4,
        "learning_rate": 1e-3,
        "lut_learning_rate": 1e-3,
        "device": "cpu",
        "mixed_precision": "no",  # the same on every processor
    }
    return CompressConfig(**{**values, **changes})


def weights_of(directory):
    return (directory / "model.safetensors").read_bytes()


def metrics_of(directory, name="loss"):
    return [json.loads(line)[name] for line in (directory / "metrics.jsonl").read_text().splitlines()]


def assert_same_run(found, wanted):
    """The same weights bit for bit, the same perplexities, losses and files."""
    assert weights_of(found) == weights_of(wanted)
    reports = [json.loads((path / "report.json").read_text()) for path in (found, wanted)]
    assert reports[0]["perplexity"] == reports[1]["perplexity"]
    assert reports[0]["texts"] == reports[1]["texts"]
    assert metrics_of(found) == metrics_of(wanted)
    assert sorted(os.listdir(found)) == sorted(os.listdir(wanted))


def assert_same_to_rounding(found, wanted, columns=24):
    """Sums over processes are added in another order: gradients differ in the last bits, Adam may turn the sign of an
    update whose gradient is nearly zero, and a weight on the border of two entries may fall to the other side. Over 20
    steps at a learning rate of 1e-3: entries and norms within 1e-3 of the largest, at most 1 weight in 1,000 elsewhere.
    """
    ours, reference = load_file(found / "model.safetensors"), load_file(wanted / "model.safetensors")
    assert ours.keys() == reference.keys()
    changed = total = 0
    for name, tensor in reference.items():
        if name.endswith("indices") and "proj" in name:
            width = tensor.shape[1] * 8 // 3
            changed += int((unpack(ours[name], 3, width) != unpack(tensor, 3, width)).sum())
            total += tensor.shape[0] * width
        elif name.endswith("indices"):
            assert torch.equal(ours[name], tensor), name  # embeddings do not train
        else:
            torch.testing.assert_close(
                ours[name].float(), tensor.float(), rtol=0, atol=1e-3 * float(tensor.float().abs().max())
            )
    assert changed <= total / 1000, f"{changed} of {total} weights"
    perplexities = [json.loads((path / "report.json").read_text())["perplexity"] for path in (found, wanted)]
    for stage, value in perplexities[1].items():
        assert perplexities[0][stage] == pytest.approx(value, rel=1e-3), stage


class States:
    """A teacher whose states are logits."""

    @staticmethod
    def logits(states):
        return states


def kl_divergence(student, teacher, *, ids=None, label_weight=0.0, labels=None):
    """The training loss of logits (..., vocabulary) against a teacher's, as `Objective` computes it of a model's states."""
    masked = labels is not None
    if labels is None:
        labels = (
            torch.full(student.shape[:-1], -1)
            if ids is None
            else torch.cat((ids[:, 1:], -torch.ones_like(ids[:, :1])), 1)
        )
    weights = losses._Weights.of(labels.flatten(), taught=True, label_weight=label_weight, masked=masked)
    student, teacher = student.flatten(0, -2), teacher.detach().flatten(0, -2)
    differentiate = torch.is_grad_enabled() and student.requires_grad
    return losses._ChunkedLoss.apply(student, States.logits, teacher, States(), weights, differentiate)


def forced(**options):
    """Marshaling that also moves small tensors, and those that are on the target device already."""
    return MarshalSavedTensors(**{"force": True, "min_bytes": 0} | options)


def same(found, expected):
    """Whether two sequences of tensors are equal to the bit."""
    return all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


def logits_of(model):
    """A causal LM as a reference, run beside the model that is measured."""
    return lambda ids: model(input_ids=ids, use_cache=False).logits[0].split(CHUNK_TOKENS)


def quantized(method, model, batches, **options):
    """A baseline's outcome on a task of these settings; the other options are the method's own."""
    shared = {name: options.pop(name) for name in SHARED if name in options}
    return method.quantize(Task(model, batches, **shared), **options)


PALETTED = {
    "affine": ("bfloat16", 3),
    "integers": ("float16", 4),
    "iq4_nl": ("float16", 4),
    "e2m1": ("float8_e4m3fn", 4),
}


def paletted(folder, palette, *, model=None, tile=32, embedding_bits=8, start="compensated", **mixed):
    """(directory, model) of a tiny model with tables of a palette, exported, and its tokenizer."""
    dtype, bits = PALETTED[palette]
    shape = {"granularity": f"block:1x{tile}", "lut_dtype": dtype, "bits": bits, "embedding_bits": embedding_bits}
    more = {"palette": palette, "embedding_group": tile, **mixed}
    model, spec = cluster(model or tiny_llama(bias=True, hidden=64, inner=128), palette=palette, mixed=more, **shape)
    byte_tokenizer().save_pretrained(folder)
    return export(model, spec, folder), model


@contextlib.contextmanager
def workers_in_this_process():
    """Spares each worker of `edkm compare` the seconds that importing torch takes."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(compare_module, "_worker", lambda *arguments: compare_worker.main([*map(str, arguments)]))
        yield
