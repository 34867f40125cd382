"""Measure how much memory building a sharded model and exporting it takes, as JSON.

    python scripts/bench_export.py --json FILE                 two processes (FSDP2 over gloo), then one, a 2 GB model
    python scripts/bench_export.py --layers 4 --hidden 512 --inner 1408      a small one

A randomly initialised LLaMA is written as several safetensors files in a temporary directory. Each process then does
what a run does at its ends, without the training between them: build the clustered model (`build_sharded`; alone,
`load_dense` and the same swaps) and write the checkpoint (`write_checkpoint`). The k-means start is unweighted.

The bound: resident memory while exporting, beyond the runtime's, is at most 1.2 times what the process holds of the model
plus one decoder layer. The runtime is what a process holds after it has done all this with a model of one tiny layer.
Peaks are the kernel's (VmHWM, reset before each phase), so nothing is missed between two looks; what of them is
anonymous memory and what maps files (which the kernel can drop) is sampled. Linux only.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import nn

from edkm_cli import models
from edkm_cli.allocator import return_large_blocks
from edkm_cli.config import CompressConfig
from edkm_cli.distributed import ALONE, World, launched, local, open_world
from edkm_cli.environment import hardware, versions
from edkm_cli.export.checkpoint import write_checkpoint
from edkm_cli.format import QuantizationSpec
from edkm_cli.initialize.build import Recipe, initialize
from edkm_cli.initialize.sharded import build_sharded
from edkm_cli.preflight import plan_run

_BAR = 1.2


class Resident:
    """This process's resident memory since the last `reset`, in bytes."""

    def __init__(self) -> None:
        self._most: dict[str, int] = {}
        threading.Thread(target=self._watch, daemon=True).start()

    @staticmethod
    def now() -> dict[str, int]:
        lines = Path("/proc/self/status").read_text().splitlines()
        fields = dict(line.split(":", 1) for line in lines if line.startswith(("VmHWM", "VmRSS", "RssAnon", "RssFile")))
        return {name: int(value.split()[0]) * 1024 for name, value in fields.items()}

    def reset(self) -> dict[str, int]:
        """Forget the peak; returns what is resident now."""
        gc.collect()
        Path("/proc/self/clear_refs").write_text("5")
        self._most = {}
        return self.now()

    def peak(self) -> dict[str, int]:
        return {
            "resident_bytes": self.now()["VmHWM"],
            "anonymous_bytes": self._most.get("RssAnon", 0),
            "mapped_bytes": self._most.get("RssFile", 0),
        }

    def _watch(self) -> None:
        while True:
            self._most = {name: max(value, self._most.get(name, 0)) for name, value in self.now().items()}
            time.sleep(0.002)


def generate(directory: Path, *, layers: int, hidden: int, inner: int, vocabulary: int) -> int:
    """Write a random float32 LLaMA, a file for each few layers; returns the bytes of its weights."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=vocabulary,
        hidden_size=hidden,
        intermediate_size=inner,
        num_hidden_layers=layers,
        num_attention_heads=hidden // 64,
        num_key_value_heads=hidden // 64,
        tie_word_embeddings=False,
    )
    directory.mkdir(parents=True)
    config.save_pretrained(directory)
    with torch.device("meta"):
        shapes = {name: tensor.shape for name, tensor in LlamaForCausalLM(config).state_dict().items()}
    generator = torch.Generator().manual_seed(0)
    weight_map: dict[str, str] = {}
    pending: dict[str, torch.Tensor] = {}
    total_bytes = 0
    for place, (name, shape) in enumerate(shapes.items(), 1):
        pending[name] = torch.ones(shape) if len(shape) == 1 else 0.02 * torch.randn(shape, generator=generator)
        total_bytes += pending[name].nbytes
        if place == len(shapes) or sum(tensor.nbytes for tensor in pending.values()) > 400e6:
            file = f"model-{len(set(weight_map.values())) + 1:05d}.safetensors"
            save_file(pending, directory / file, metadata={"format": "pt"})
            weight_map.update(dict.fromkeys(pending, file))
            pending.clear()
    (directory / "model.safetensors.index.json").write_text(
        json.dumps({"metadata": {"total_size": total_bytes}, "weight_map": weight_map})
    )
    return total_bytes


def build(directory: Path, world: World) -> tuple[Any, QuantizationSpec]:
    """The clustered model as a run trains it, in float32: sharded, or whole where this process is alone."""
    config = CompressConfig(model=str(directory), data=("builtin",), dtype="float32", importance="none", start="kmeans")
    plan = plan_run(config, world)
    rebuild = partial(build_sharded, plan.source, world, dtype=torch.float32, trainable=True)
    dense = None
    if not world.sharded:
        dense = models.load_dense(plan.source, dtype="float32", device="cpu", progress=False)
    model = initialize(dense, Recipe.of(plan), build=rebuild if world.sharded else None, world=world)
    return model, plan.spec


def held_bytes(module: nn.Module) -> int:
    """Bytes that this process holds of a module's parameters and buffers."""
    return sum(local(tensor).nbytes for tensor in (*module.parameters(), *module.buffers()))


def whole_bytes(module: nn.Module) -> int:
    """Bytes of a module's parameters and buffers over all processes."""
    return sum(tensor.numel() * tensor.itemsize for tensor in (*module.parameters(), *module.buffers()))


def work(folder: Path) -> None:
    """One process: everything once with the tiny model, then measured; the figures go to `folder`."""
    return_large_blocks()  # as `--memory small`
    world = open_world("cpu", sharding="full", timeout_minutes=10) if launched() > 1 else ALONE
    memory = Resident()
    figures: dict[str, Any] = {"rank": world.rank}
    for name in ("tiny", "model"):
        figures["runtime_bytes"] = memory.reset()["VmRSS"]
        start = time.perf_counter()
        model, spec = build(folder / name, world)
        figures["build_seconds"] = round(time.perf_counter() - start, 1)
        figures["build_peak"] = memory.peak()
        figures["shard_bytes"] = held_bytes(model)
        figures["model_bytes"] = whole_bytes(model)
        figures["layer_bytes"] = max(whole_bytes(block) for block in model.model.layers)
        figures["before_export_bytes"] = memory.reset()["VmRSS"]
        output = folder / f"{name}-out-{world.size}"
        output.mkdir(exist_ok=True)
        start = time.perf_counter()
        write_checkpoint(model, None, output, spec, world=world)
        figures["export_seconds"] = round(time.perf_counter() - start, 1)
        figures["export_peak"] = memory.peak()
        del model
    beyond_bytes = figures["export_peak"]["resident_bytes"] - figures["runtime_bytes"]
    figures["export_beyond_runtime_bytes"] = beyond_bytes
    figures["export_growth_bytes"] = figures["export_peak"]["resident_bytes"] - figures["before_export_bytes"]
    figures["bar_bytes"] = int(_BAR * figures["shard_bytes"] + figures["layer_bytes"])
    figures["of_bar"] = round(beyond_bytes / figures["bar_bytes"], 4)
    figures["build_beyond_runtime_bytes"] = figures["build_peak"]["resident_bytes"] - figures["runtime_bytes"]
    (folder / f"figures-{world.size}-{world.rank}.json").write_text(json.dumps(figures))


def measure(folder: Path, processes: int) -> list[dict[str, Any]]:
    """Run that many workers and return their figures."""
    script = [str(Path(__file__).resolve()), "--work", str(folder)]
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(processes)]
    package = str(Path(__file__).resolve().parent.parent)
    path = os.pathsep.join(filter(None, (package, os.environ.get("PYTHONPATH"))))
    subprocess.run(
        [sys.executable, *(launcher if processes > 1 else []), *script],
        check=True,
        env={"OMP_NUM_THREADS": "1", **os.environ, "PYTHONPATH": path},
    )
    return [json.loads((folder / f"figures-{processes}-{rank}.json").read_text()) for rank in range(processes)]


def same_files(first: Path, second: Path) -> bool:
    """Whether two checkpoints have the same weights."""
    return (first / "checksums.json").read_text() == (second / "checksums.json").read_text()


def main() -> None:
    """Generate, measure, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--layers", type=int, default=16)
    parser.add_argument("--hidden", type=int, default=1536)
    parser.add_argument("--inner", type=int, default=4096)
    parser.add_argument("--vocabulary", type=int, default=16384)
    parser.add_argument("--json", type=Path, help="where the result goes; the default is to print it")
    parser.add_argument("--work", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.json and not arguments.json.parent.is_dir():
        parser.error(f"--json must name a file in a directory that exists, got {arguments.json}")
    if arguments.work:
        work(arguments.work)
        return
    shape = {name: getattr(arguments, name) for name in ("layers", "hidden", "inner", "vocabulary")}
    with tempfile.TemporaryDirectory(prefix="edkm-export-") as folder:
        generate(Path(folder) / "tiny", layers=1, hidden=64, inner=128, vocabulary=256)
        stored_bytes = generate(Path(folder) / "model", **shape)
        sharded, alone = measure(Path(folder), arguments.processes), measure(Path(folder), 1)
        outputs = [Path(folder) / f"model-out-{count}" for count in (arguments.processes, 1)]
        result = {
            "command": "python scripts/bench_export.py "
            + " ".join(f"--{name} {value}" for name, value in {"processes": arguments.processes, **shape}.items()),
            "stored_bytes": stored_bytes,
            "sharded": sharded,
            "alone": alone[0],
            "of_bar": max(figures["of_bar"] for figures in sharded),
            "same_files": same_files(*outputs),
            "versions": versions(),
            "hardware": hardware(),
        }
    text = json.dumps(result, indent=1)
    print(text) if arguments.json is None else arguments.json.write_text(text + "\n")


if __name__ == "__main__":
    main()
