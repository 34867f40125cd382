"""The paper's two memory tables on this machine (eDKM, arXiv 2309.00964, section 2 and Table 1).

Table 1 moves two views of one tensor to host memory, with and without marshaling. The ablation runs forward and
backward of one clustered projection (width x width) in `learners` real processes under each set of techniques and
counts the bytes that one learner keeps for backward. The dense layer is DKM in plain PyTorch; what it saves, tensor by
tensor, is in the result under `saved_tensors` and explained in docs/memory.md.
"""

import json
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from edkm_cli.clustering import clustered_linear
from edkm_cli.environment import hardware, versions
from edkm_cli.errors import UserError
from edkm_cli.files import digest
from edkm_cli.memory import MarshalSavedTensors, Shard, Uniquify
from edkm_cli.report.charts import bars, save
from edkm_cli.research.bench.config import Ablation
from edkm_cli.settings import command_line
from edkm_cli.summaries import table

TECHNIQUES = ("none", "M", "M+S", "M+U", "M+U+S", "closed-form")
TEMPERATURE = 0.05  # relative to the variance of the weights
TOKENS = 4
TIMEOUT_SECONDS = 3600.0


def dense_attention_weight(weight: Tensor, centroids: Tensor, *, iterations: int) -> Tensor:
    """DKM on a 16-bit weight (out, in) with centroids (k,), in the weight's dtype: the clustered weight (out, in).

    The centroids move by the attention-weighted mean of the differences, which is the weighted mean of the weights
    without its cancellation in 16 bits.
    """
    tau = TEMPERATURE * float(weight.detach().float().var())
    for _ in range(iterations):
        difference = weight.unsqueeze(-1) - centroids  # (out, in, k)
        attention = torch.softmax(difference * difference / -tau, dim=-1)  # (out, in, k)
        shift = (attention * difference).sum((0, 1))  # (k,)
        centroids = centroids + shift / attention.sum((0, 1))
    return attention @ centroids


def run(settings: Ablation, *, log: Callable[[str], None] = print) -> dict[str, Any]:
    """Measure both tables; the result is what `edkm ablate --json` writes.

    Learners talk by gloo, or by nccl where each has a GPU of its own. On the device "cpu" tensors are copied as if they left
    a device. `rows` holds `bytes` kept by one learner, `reduction`, `seconds` of forward and backward, and `gradient` as a
    checksum. Raises UserError for learners that failed or did not finish in time.
    """
    setting, device = asdict(settings), settings.device
    log("table 1: two views of one tensor")
    table1 = measure_table1(device)
    log(f"ablation: {settings.learners} learners, {settings.width} x {settings.width}, {settings.bits} bits")
    reports = _run_learners(setting)
    rows = [_merge(name, [one["rows"][name] for one in reports if name in one["rows"]]) for name in TECHNIQUES]
    for row in rows:
        row["reduction"] = rows[0]["bytes"] / max(row["bytes"], 1)
    dense = [row["gradient"] for row in rows if row["technique"] != "closed-form"]
    return {
        "command": command_line("edkm ablate", settings, *setting),
        "setting": setting | {"temperature": TEMPERATURE, "tokens": TOKENS},
        "rows": rows,
        "gradients_identical": all(gradient == dense[0] for gradient in dense),
        "table1": table1,
        "saved_tensors": reports[0]["saved_tensors"],
        "versions": versions(),
        "hardware": hardware(device),
    }


def measure_table1(device: str = "cpu") -> dict[str, int]:
    """The paper's Table 1: `x0` (1024, 1024) float32 and `x1 = x0.view(-1)`, saved on the device and moved to the CPU."""
    moved = {}
    for name, hops, identity in (("plain", None, False), ("marshaled", 4, True)):
        x0 = torch.ones(1024, 1024, device=device, requires_grad=True) * 1.0
        marshal = MarshalSavedTensors(hops=hops, identity=identity, force=True)
        with marshal:
            x1 = x0.view(-1)
            loss = x0.square().sum() + x1.square().sum()
        moved[name] = marshal.statistics.stored_bytes
        device_bytes = x0.untyped_storage().nbytes()
        loss.backward()
    return {"device_bytes": device_bytes, "cpu_bytes_plain": moved["plain"], "cpu_bytes_marshaled": moved["marshaled"]}


def saved_tensors(output: Tensor, names: dict[int, str]) -> Iterator[dict[str, Any]]:
    """Every tensor that the graph of `output` keeps: the operation, its argument, shape, bytes and storage.

    Storages are numbered in order of appearance, or called what `names` calls them (by `data_ptr`).
    """
    names = dict(names)
    queue, seen = [output.grad_fn], set()
    while queue:
        if (node := queue.pop(0)) is None or node in seen:
            continue
        seen.add(node)
        queue += [following for following, _ in node.next_functions]
        for attribute in dir(node):
            tensor = getattr(node, attribute, None) if attribute.startswith("_saved_") else None
            if isinstance(tensor, Tensor):
                yield {
                    "operation": node.name(),
                    "argument": attribute.removeprefix("_saved_"),
                    "shape": list(tensor.shape),
                    "dtype": str(tensor.dtype).removeprefix("torch."),
                    "bytes": tensor.nbytes,
                    "storage": names.setdefault(tensor.untyped_storage().data_ptr(), f"storage {len(names)}"),
                }


def format_table(result: dict[str, Any]) -> str:
    """Both tables as text."""
    mib = 1 << 20
    views = {"on the device": "device_bytes", "on the CPU, plain": "cpu_bytes_plain"}
    views["on the CPU, marshaled"] = "cpu_bytes_marshaled"
    rows = [
        [row["technique"], f"{row['bytes']:,}", f"{row['bytes'] / mib:.4f}", f"{row['reduction']:,.1f}x",
         f"{row['seconds']:.2f}"]
        for row in result["rows"]
    ]  # fmt: skip
    first = table([[name, f"{result['table1'][key] / mib:.2f}"] for name, key in views.items()],
                  header=["two views of one tensor", "MiB"])  # fmt: skip
    return first + "\n\n" + table(rows, header=["technique", "bytes", "MiB", "reduction", "seconds"])


def plot(result: dict[str, Any], path: str | Path) -> None:
    """The ablation as a chart, an SVG file."""
    setting = result["setting"]
    text = f"{setting['width']} x {setting['width']}, {setting['bits']} bits, {setting['learners']} learners"
    figures = ((row["technique"], max(row["bytes"], 1), row["reduction"]) for row in result["rows"])
    rows = [(name, [("", size, "c1")], f"bytes, {less:,.1f}x less") for name, size, less in figures]
    drawn = bars(rows, title=f"Bytes kept for backward: {text}", caption=f"kept for backward by one learner, {text}")
    save(drawn, path)


def _merge(technique: str, reports: list[dict[str, Any]]) -> dict[str, Any]:
    """One row from the learners that measured it: most bytes, slowest time, and the gradient if they agree on one."""
    same = all(report["gradient"] == reports[0]["gradient"] for report in reports)
    return {
        "technique": technique,
        **reports[0],
        "bytes": max(report["bytes"] for report in reports),
        "seconds": max(report["seconds"] for report in reports),
        "learners_measured": len(reports),
        "gradient": reports[0]["gradient"] if same else None,
    }


def _run_learners(setting: dict[str, Any]) -> list[dict[str, Any]]:
    """Start the processes, wait for them within bounds, read their reports. None outlives this call."""
    learners = setting["learners"]
    with tempfile.TemporaryDirectory(prefix="edkm-ablate-") as folder:
        # A server that has imported what a learner needs is forked for each: eight imports of torch take half a minute.
        torch.multiprocessing.set_forkserver_preload([__name__])
        how: dict[str, Any] = {"nprocs": learners, "join": False, "start_method": "forkserver"}
        processes = torch.multiprocessing.start_processes(_learner, (setting, folder), **how)
        deadline = time.monotonic() + TIMEOUT_SECONDS
        try:
            while not processes.join(timeout=1.0):
                if time.monotonic() > deadline:
                    raise UserError(f"{learners} learners did not finish in {TIMEOUT_SECONDS:.0f} s; lower --width")
        except (torch.multiprocessing.ProcessExitedException, torch.multiprocessing.ProcessRaisedException) as error:
            rule = f"learner {error.error_index} of {learners} failed ({str(error).strip().splitlines()[-1]})"
            raise UserError(f"{rule}, often for lack of memory; use a smaller width or fewer learners") from error
        finally:
            for process in processes.processes:
                if process.is_alive():
                    process.kill()
                process.join()
        return [json.loads((Path(folder) / f"{rank}.json").read_text()) for rank in range(learners)]


def _learner(rank: int, setting: dict[str, Any], folder: str) -> None:
    """One process: every technique in turn. Without sharding learners have nothing to say to each other and do the same
    work on the same weight: learner 0 measures while the others wait, which bounds memory and keeps times honest."""
    torch.set_num_threads(1)
    device, learners = torch.device(setting["device"]), setting["learners"]
    own_gpus = device.type == "cuda" and torch.cuda.device_count() >= learners
    if device.type == "cuda":
        device = torch.device("cuda", (rank + (device.index or 0)) % torch.cuda.device_count())
        torch.cuda.set_device(device)
    backend, meeting = "nccl" if own_gpus else "gloo", f"file://{folder}/rendezvous"
    dist.init_process_group(backend, init_method=meeting, rank=rank, world_size=learners)
    report: dict[str, Any] = {"rows": {}, "saved_tensors": []}
    try:
        layer = _Layer(setting, device)
        for technique in TECHNIQUES:
            if "S" in technique or rank == 0:
                report["rows"][technique] = layer.measure(technique)
            dist.barrier()
        if rank == 0:
            report["saved_tensors"] = layer.account()
        (Path(folder) / f"{rank}.json").write_text(json.dumps(report))
        dist.barrier()
    finally:
        dist.destroy_process_group()


class _Layer:
    """The projection under test: the same weight, start and input in every process."""

    def __init__(self, setting: dict[str, Any], device: torch.device) -> None:
        width, count = setting["width"], 2 ** setting["bits"]
        dtype = getattr(torch, setting["dtype"])
        generator = torch.Generator().manual_seed(0)
        self.weight = torch.nn.Parameter(torch.randn(width, width, generator=generator).mul_(0.02).to(dtype).to(device))
        self.centroids = torch.linspace(-0.04, 0.04, count).to(device, dtype)
        self.x = torch.randn(TOKENS, width, generator=generator).to(device, dtype).requires_grad_()
        self._iterations = setting["iterations"]

    def dense(self) -> Tensor:
        clustered = dense_attention_weight(self.weight, self.centroids, iterations=self._iterations)
        return torch.nn.functional.linear(self.x, clustered)

    def closed_form(self) -> Tensor:
        options: dict[str, Any] = {"temperature": TEMPERATURE, "iterations": self._iterations}
        return clustered_linear(self.x, self.weight, self.centroids.float()[None], granularity="tensor", **options)

    def measure(self, technique: str) -> dict[str, Any]:
        """Forward and backward once: bytes kept between the two, seconds, checksum of the gradient."""
        uniquify = Uniquify([self.weight]) if "U" in technique else None
        codecs = [codec for codec in (uniquify, Shard() if "S" in technique else None) if codec is not None]
        sharing: dict[str, Any] = {"hops": None, "identity": False} if technique == "none" else {}
        marshal = MarshalSavedTensors(codecs=codecs, keep=(self.x,), min_bytes=0, force=True, **sharing)
        self.weight.grad = self.x.grad = None
        if technique == "closed-form":
            with torch.no_grad():
                self.closed_form()  # kernels are compiled at their first use
        began = time.perf_counter()
        with marshal:
            output = self.closed_form() if technique == "closed-form" else self.dense()
            kept_bytes = marshal.statistics.stored_bytes
            output.float().square().sum().backward()
        if self.weight.is_cuda:
            torch.cuda.synchronize()
        seconds = time.perf_counter() - began
        assert self.weight.grad is not None
        counted = ("packed", "refused", "index_bytes", "table_bytes")
        counts = None if uniquify is None else {name: getattr(uniquify, name) for name in counted}
        return {
            "bytes": kept_bytes,
            "seconds": seconds,
            "gradient": digest([("", self.weight.grad)]),
            "statistics": marshal.statistics.as_dict(),
            "uniquify": counts,
        }

    def account(self) -> list[dict[str, Any]]:
        """The dense layer's saved tensors by name."""
        names = {self.x.data_ptr(): "x (input)", self.weight.data_ptr(): "weight (parameter)"}
        return list(saved_tensors(self.dense(), names | {self.centroids.data_ptr(): "centroids"}))
