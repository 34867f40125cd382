"""Measure `MarshalSavedTensors` against `torch.autograd.graph.save_on_cpu`, as JSON.

    python scripts/bench_offload.py step --model DIRECTORY_OR_GGUF --json FILE     one training step, CPU, forced copies
    python scripts/bench_offload.py block --json FILE                              a LLaMA-7B block on a GPU

`step` copies on a machine without a GPU too (`force=True`; `save_on_cpu(pin_memory=True)` does so by itself), compares
every gradient bit by bit and times the graph search. `block` compares peak GPU memory and step time.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers

from edkm_cli.environment import hardware, versions
from edkm_cli.memory import MarshalSavedTensors


class CountingSaveOnCpu(torch.autograd.graph.saved_tensors_hooks):
    """`save_on_cpu(pin_memory=True)` with a count of the bytes that it copies."""

    def __init__(self) -> None:
        self.moved_bytes = 0
        self._plain = torch.autograd.graph.save_on_cpu(pin_memory=True)
        super().__init__(self._pack, self._plain.unpack_hook)

    def _pack(self, tensor: torch.Tensor) -> Any:
        self.moved_bytes += tensor.numel() * tensor.itemsize
        return self._plain.pack_hook(tensor)


def load(path: str) -> torch.nn.Module:
    """A causal language model in float32 from a directory or a GGUF file."""
    source, options = Path(path), {}
    if source.suffix == ".gguf":
        options = {
            "gguf_file": source.name,
            "quantization_config": transformers.GgufConfig(dequantize=True),
        }
        source = source.parent
    return transformers.AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32, **options)


def timed_step(loss_of: Callable[[], torch.Tensor], context: Any) -> float:
    """Seconds of one forward and backward under `context`."""
    began = time.perf_counter()
    with context:
        loss_of().backward()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter() - began


def step(arguments: argparse.Namespace) -> dict[str, Any]:
    """One training step of a whole model of `--tokens` tokens under each method."""
    model = load(arguments.model)
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(0, model.config.vocab_size, (1, arguments.tokens), generator=generator)

    def loss_of() -> torch.Tensor:
        return model(input_ids=tokens, labels=tokens).loss

    def gradients() -> list[torch.Tensor]:
        found = [parameter.grad for parameter in model.parameters()]
        model.zero_grad(set_to_none=True)
        return [gradient for gradient in found if gradient is not None]

    timed_step(loss_of, contextlib.nullcontext())
    model.zero_grad(set_to_none=True)
    times: dict[str, list[float]] = {"nothing": [], "save_on_cpu": [], "marshal": []}
    identical, reports = True, []
    for _ in range(arguments.repeats):
        times["nothing"].append(timed_step(loss_of, contextlib.nullcontext()))
        reference = gradients()
        plain = CountingSaveOnCpu()
        times["save_on_cpu"].append(timed_step(loss_of, plain))
        model.zero_grad(set_to_none=True)
        marshal = MarshalSavedTensors(force=True, min_bytes=0)
        times["marshal"].append(timed_step(loss_of, marshal))
        identical &= all(torch.equal(a, b) for a, b in zip(reference, gradients(), strict=True))
        reports.append(marshal.statistics)
        print({name: round(values[-1], 2) for name, values in times.items()}, file=sys.stderr, flush=True)
    counts = reports[-1]
    # What save_on_cpu would move if it, too, left parameters alone.
    activations_bytes = counts.offered_bytes - counts.kept_bytes
    return {
        "tokens": arguments.tokens,
        "gradients_identical": identical,
        "seconds": {name: statistics.median(values) for name, values in times.items()},
        "save_on_cpu_bytes": plain.moved_bytes,
        "save_on_cpu_bytes_without_parameters": activations_bytes,
        "marshal_bytes": counts.moved_bytes,
        "bytes_ratio": counts.moved_bytes / plain.moved_bytes,
        "bytes_ratio_without_parameters": counts.moved_bytes / activations_bytes,
        "search_share_of_step": statistics.median(
            report.search_seconds / seconds for report, seconds in zip(reports, times["marshal"], strict=True)
        ),
        "statistics": counts.as_dict(),
    }


def block(arguments: argparse.Namespace) -> dict[str, Any]:
    """A decoder block of LLaMA-7B's shape in bfloat16 on a GPU: peak memory and step time under each method."""
    if not torch.cuda.is_available():
        sys.exit("block needs a GPU and PyTorch finds none")
    config = transformers.LlamaConfig(num_hidden_layers=arguments.layers, vocab_size=1024)
    model = transformers.LlamaModel(config).to("cuda", torch.bfloat16)
    tokens = torch.randint(0, 1024, (1, arguments.tokens), device="cuda")

    def loss_of() -> torch.Tensor:
        return model(input_ids=tokens, use_cache=False).last_hidden_state.float().square().mean()

    marshal = MarshalSavedTensors()
    methods: dict[str, Callable[[], Any]] = {
        "nothing": contextlib.nullcontext,
        "save_on_cpu": lambda: torch.autograd.graph.save_on_cpu(pin_memory=True),
        "marshal": lambda: marshal,
    }
    rows, reference = [], None
    for name, context in methods.items():
        timed_step(loss_of, context())
        model.zero_grad(set_to_none=True)
        torch.cuda.reset_peak_memory_stats()
        before_bytes = torch.cuda.memory_allocated()
        seconds = [timed_step(loss_of, context()) for _ in range(arguments.repeats)]
        peak_bytes = torch.cuda.max_memory_allocated()
        model.zero_grad(set_to_none=True)
        timed_step(loss_of, context())
        found = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
        model.zero_grad(set_to_none=True)
        reference = reference or found
        rows.append(
            {
                "method": name,
                "seconds": statistics.median(seconds),
                "peak_memory_bytes": peak_bytes,
                "peak_above_start_bytes": peak_bytes - before_bytes,
                "gradients_identical": all(torch.equal(a, b) for a, b in zip(reference, found, strict=True)),
            }
        )
    return {
        "tokens": arguments.tokens,
        "layers": arguments.layers,
        "rows": rows,
        "statistics": marshal.statistics.as_dict(),
    }


def main() -> None:
    """Parse, measure, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("step", "block"))
    parser.add_argument("--model", help="for step: a model directory or a GGUF file")
    parser.add_argument("--tokens", type=int, default=1024)
    parser.add_argument("--layers", type=int, default=1, help="for block")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--threads", type=int, default=0, help="CPU threads; 0 is PyTorch's own choice")
    parser.add_argument("--json", type=Path, help="where the result goes; the default is to print it")
    arguments = parser.parse_args()
    if arguments.json and not arguments.json.parent.is_dir():
        parser.error(f"--json must name a file in a directory that exists, got {arguments.json}")
    if arguments.what == "step" and not arguments.model:
        parser.error("step needs --model")
    if arguments.threads:
        torch.set_num_threads(arguments.threads)
    result = step(arguments) if arguments.what == "step" else block(arguments)
    model = "" if arguments.model is None else f" --model {Path(arguments.model).name}"
    result = {
        "command": f"python scripts/bench_offload.py {arguments.what}{model} --tokens {arguments.tokens} "
        f"--repeats {arguments.repeats}",
        **result,
        "versions": versions(),
        "hardware": hardware("cuda" if arguments.what == "block" else "cpu"),
    }
    text = json.dumps(result, indent=1)
    if arguments.json is None:
        print(text)
    else:
        arguments.json.write_text(text + "\n")


if __name__ == "__main__":
    main()
