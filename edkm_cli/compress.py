"""One compression run from the model's name to a verified checkpoint: the steps of `edkm compress`, in order."""

from __future__ import annotations

import copy
import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from edkm_cli import data, models
from edkm_cli.clustering.linear import trains_luts
from edkm_cli.config import CompressConfig, UserError
from edkm_cli.distributed import World, full, local, open_world, peers
from edkm_cli.environment import hardware, peak_memory_bytes, versions
from edkm_cli.evaluate.perplexity import perplexity
from edkm_cli.evaluate.size import footprint
from edkm_cli.export.checkpoint import write_checkpoint
from edkm_cli.export.directory import OutputDirectory, settle
from edkm_cli.export.model_card import model_card
from edkm_cli.format import digest, write_json
from edkm_cli.hf import load
from edkm_cli.initialize.build import swap_linears
from edkm_cli.initialize.compensate import compensate
from edkm_cli.initialize.importance import collect_importance
from edkm_cli.initialize.sharded import build_sharded
from edkm_cli.nn.clustered import Clustering
from edkm_cli.nn.lora import add_lora
from edkm_cli.nn.swap import LINEAR, decoder_bits_per_weight, palettize_embeddings
from edkm_cli.preflight import (
    calibration_batches,
    choose_device,
    choose_dtype,
    choose_mixed_precision,
    compensates,
    evaluation_tokens,
    needed_bytes,
    plan,
    spec_of,
)
from edkm_cli.progress import Observer
from edkm_cli.train.loop import freeze_dense_embeddings, require_trackers, step_sequences, train
from edkm_cli.train.losses import FrozenTeacher
from edkm_cli.train.optimizer import require_optimizer
from edkm_cli.train.state import fingerprint, require_same


class Clock:
    """Seconds by phase."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        start = time.perf_counter()
        yield
        self.seconds[name] = round(self.seconds.get(name, 0.0) + time.perf_counter() - start, 3)


def compress(
    config: CompressConfig, *, overwrite: bool = False, resume: bool = False, observer: Observer | None = None
) -> dict[str, Any]:
    """Run `edkm compress` and return its report (its keys: docs/results.md).

    Where a launcher started several processes, all call this; the first one writes and reports.

    With `resume`, an unfinished run in `DIR.partial` goes on from its newest checkpoint and ends with the same weights
    as if it had not been interrupted; where there is none, the run starts, and a finished one is returned as it is.

    Raises UserError for anything the user can mend, before the first expensive step wherever that is possible, PeerLost
    where another process is gone; the output directory then is as it was.
    """
    world = open_world(choose_device(config.device), sharding=config.sharding, timeout_minutes=config.timeout_minutes)
    watch = observer if observer is not None and world.main else Observer()
    with peers(world):
        finished = world.on_main(lambda: finished_report(config)) if resume else None
        if finished is not None:
            watch.say(f"{config.output} is finished already")
            return finished
        return Run(config, world, watch).run(overwrite=overwrite, resume=resume)


class Run:
    """One run: its settings, what it has measured so far, and its steps in order, each a method."""

    def __init__(self, config: CompressConfig, world: World, watch: Observer):
        require_trackers(config)
        require_optimizer(config, world)
        self.config, self.world, self.watch = config, world, watch
        self.clock = Clock()
        self.perplexity: dict[str, float | None] = dict.fromkeys(("original", "start", "trained", "exported"))
        self.dtype = choose_dtype(config.dtype, world.device, master=world.sharded and not config.lora_rank)
        one_dtype = self.dtype == "float32" or not trains_luts(config.mode, config.iterations) or config.lora_rank
        if world.sharded and not one_dtype:
            raise UserError(
                "--sharding full trains weights and LUT entries in one group, so both must be float32, but --dtype is "
                f"{self.dtype}; leave --dtype out, or use --lora-rank, or --mode soft or hard with --iterations",
                everywhere=True,
            )
        self.source = models.resolve(config.model)
        meta, self.swaps = plan(config)
        self.parameters = sum(parameter.numel() for parameter in meta.parameters())
        self.spec = spec_of(config, self.swaps)

    def run(self, *, overwrite: bool, resume: bool) -> dict[str, Any]:
        config, world = self.config, self.world
        output = self._open_output(overwrite)
        torch.manual_seed(config.seed)
        with self.clock.phase("load"):
            tokenizer = models.load_tokenizer(self.source, trust_remote_code=config.trust_remote_code)
            tokens = data.training_tokens(list(config.data), tokenizer)
            self.held_out = evaluation_tokens(config, tokenizer)
            blocks = data.Blocks(tokens, config.sequence_length, seed=config.seed)
            self.watch.say(f"loading {config.model} ({self.dtype}, {self._where()})")
            dense = self._load_dense()
        unfinished = self._unfinished(output, dense, tokens) if resume else None
        identity = unfinished or self._identity(dense, tokens)
        if unfinished is None:
            self._measure("original", dense)
        model, teacher = self._start(dense, tokens)
        del dense
        if unfinished is None:
            self._measure("start", model)
        staging = Path(world.on_main(lambda: self._begin(output, identity, keep=unfinished is not None)))
        offloaded = self._train(model, teacher, blocks, staging) if config.steps else {}
        del teacher
        with self.clock.phase("export"):
            write_checkpoint(model, tokenizer, staging, self.spec, track=self.watch.track, world=world)
        del model
        return world.on_main(lambda: self._finish(output, staging, offloaded))

    def _where(self) -> str:
        world = self.world
        if world.size == 1:
            return world.device
        return f"{world.size} processes, {'sharded' if world.sharded else 'data parallel'}, {world.device}"

    def _open_output(self, overwrite: bool) -> OutputDirectory | None:
        """The output directory, checked, with room on its disk; on the first process."""
        opened: list[OutputDirectory] = []

        def check() -> None:
            output = OutputDirectory(self.config.output, overwrite=overwrite)
            output.rehearse(needed_bytes(self.config, self.parameters, self.swaps))
            opened.append(output)

        self.world.on_main(check)
        return opened[0] if opened else None

    def _load_dense(self) -> Any:
        config, world = self.config, self.world
        if world.sharded:
            dtype = getattr(torch, choose_dtype(config.dtype, world.device))
            return build_sharded(
                self.source, world, dtype=dtype, trainable=False, trust_remote_code=config.trust_remote_code
            )
        return models.load_dense(
            self.source,
            dtype=self.dtype,
            device=world.device,
            trust_remote_code=config.trust_remote_code,
            progress=False,
        )

    def _identity(self, dense: Any, tokens: Tensor) -> dict[str, Any]:
        # Of whole tensors, and of what `auto` stands for: the same however many processes share the model.
        sha256 = digest((name, full(parameter.detach())) for name, parameter in dense.named_parameters())
        settings = replace(self.config, dtype=self.dtype, mixed_precision=self._mixed_precision)
        return fingerprint(settings, sha256, tokens, processes=self.world.size)

    @property
    def _mixed_precision(self) -> str:
        return choose_mixed_precision(self.config.mixed_precision, self.dtype, self.world.device)

    def _unfinished(self, output: OutputDirectory | None, dense: Any, tokens: Tensor) -> dict[str, Any] | None:
        """What an unfinished run that can be gone on with recorded, or None. Raises UserError if it is another run's."""
        found = self.world.on_main(lambda: output.marked() if output else None)
        if found is None:
            return None
        identity = self._identity(dense, tokens)
        require_same(found["fingerprint"], identity, Path(f"{self.config.output}.partial"))
        self.perplexity.update(found["perplexity"])
        return identity

    def _measure(self, name: str, model: Any, world: World | None = None) -> None:
        with self.clock.phase("evaluate"):
            self.perplexity[name] = perplexity(
                model,
                self.held_out,
                context=self.config.context,
                max_windows=self.config.eval_windows,
                track=self.watch.track,
                description=f"perplexity, {name}",
                world=world or self.world,
            ).perplexity

    def _start(self, dense: Any, tokens: Tensor) -> tuple[Any, Any | None]:
        """(the clustered model, its teacher): linears start at sensitivity-weighted k-means, embeddings are rounded."""
        config, world = self.config, self.world
        with self.clock.phase("start"):
            names = [swap.name for swap in self.swaps if swap.role == LINEAR and not swap.reason]
            batches = calibration_batches(tokens, config) if config.importance != "none" else []
            importance = collect_importance(
                dense, names, batches, kind=config.importance, world=world, track=self.watch.track
            )
            distilled = bool(config.distill and config.steps)
            copied = distilled and not config.lora_rank
            if world.sharded:
                teacher = dense if copied else None
                model = self._sharded_start(importance)
            else:
                teacher = copy.deepcopy(dense).requires_grad_(False) if copied else None
                model = dense
                for _ in self._swap(model, importance, track=True):
                    pass
                palettize_embeddings(model, self.swaps, self.spec)
                if config.lora_rank:
                    self._add_lora(model)
            if compensates(config):
                text = calibration_batches(tokens, config, config.start_tokens)
                compensate(model, text, world=world, track=self.watch.track)
        return model, FrozenTeacher(model) if distilled and config.lora_rank else teacher

    def _swap(self, model: nn.Module, importance: dict[str, Tensor], *, prefix: str = "", track: bool = False) -> Any:
        config = self.config

        def of(name: str) -> Tensor | None:
            value = importance.pop(name, None)
            if value is not None and value.dim() == 2 and self.world.sharded:
                value = self.world.gather_rows(value.to(self.world.device), self._rows[name])
            return value

        clustering = Clustering(
            bits=config.bits,
            granularity=config.granularity,
            lut_dtype=config.lut_dtype,
            method=config.method,
            mode=config.mode,
            iterations=config.iterations,
        )
        swapped = swap_linears(
            model,
            self.swaps,
            clustering,
            importance=of,
            temperature=config.temperature,
            world=self.world,
            prefix=prefix,
        )
        return self.watch.track(swapped, "k-means start", len(self._rows)) if track else swapped

    @property
    def _rows(self) -> dict[str, int]:
        return {swap.name: swap.shape[0] for swap in self.swaps if swap.role == LINEAR and not swap.reason}

    def _sharded_start(self, importance: dict[str, Tensor]) -> Any:
        """The clustered model built from the files again, each block swapped while it is whole, then sharded."""

        def prepare(path: str, block: nn.Module) -> None:
            for _ in self._swap(block, importance, prefix=f"{path}."):
                pass
            if self.config.lora_rank:
                self._add_lora(block)

        return build_sharded(
            self.source,
            self.world,
            dtype=getattr(torch, self.dtype),
            trainable=True,
            trust_remote_code=self.config.trust_remote_code,
            prepare=prepare,
            finish=self._finish_sharded,
        )

    def _finish_sharded(self, model: Any) -> None:
        palettize_embeddings(model, self.swaps, self.spec)
        freeze_dense_embeddings(model)
        if self.config.lora_rank:
            for parameter in model.parameters():
                if local(parameter) is parameter:  # the blocks are sharded, and frozen, already
                    parameter.requires_grad_(False)

    def _add_lora(self, model: nn.Module) -> None:
        rank = self.config.lora_rank
        add_lora(model, rank=rank, alpha=self.config.lora_alpha or 2.0 * rank, seed=self.config.seed)

    def _begin(self, output: OutputDirectory | None, identity: dict[str, Any], *, keep: bool) -> str:
        assert output is not None
        staging = output.begin(keep=keep)
        output.mark({"fingerprint": identity, "perplexity": self.perplexity})
        return str(staging)

    def _train(self, model: Any, teacher: Any | None, blocks: data.Blocks, staging: Path) -> dict[str, Any]:
        with self.clock.phase("train"):
            offloaded = train(
                model,
                teacher,
                blocks,
                self.config,
                world=self.world,
                staging=staging,
                mixed_precision=self._mixed_precision,
                track=self.watch.track,
                show=self.watch.show,
            )
        self._measure("trained", model)
        return offloaded

    def _finish(self, output: OutputDirectory | None, staging: Path, offloaded: dict[str, Any]) -> dict[str, Any]:
        """On the first process: load what was written, measure it, report, and put it in its place."""
        assert output is not None
        config = self.config
        with self.clock.phase("export"):
            exported = load(staging, dtype=getattr(torch, self.dtype), device=self.world.device)
        self._measure("exported", exported, World(device=self.world.device))
        size = footprint(exported)
        result = {
            "model": config.model,
            "output": str(output.path),
            "perplexity": self.perplexity,
            "evaluation": {
                "data": config.eval_data or f"held-out tenth of {config.data[0]}",
                "context": config.context,
                "windows": min(config.eval_windows, max(1, self.held_out.numel() // config.context)),
                "tokens": self.held_out.numel(),
            },
            "weights_bytes": models.weight_files_bytes(staging),
            "original_weights_bytes": 2 * self.parameters,
            "parameters": size.parameters,
            "decoder_bits_per_weight": decoder_bits_per_weight(
                self.swaps, bits=config.bits, granularity=config.granularity, lut_dtype=config.lut_dtype
            ),
            "model_bits_per_weight": size.model_bits_per_weight,
            "steps": config.steps,
            "training_tokens": config.steps * step_sequences(config, self.world) * config.sequence_length,
            "processes": self.world.size,
            "sharded": self.world.sharded,
            "seconds": self.clock.seconds,
            **({"offload": offloaded} if offloaded else {}),
            "peak_memory_bytes": peak_memory_bytes(self.world.device),
            "swapped": [swap.to_mapping() for swap in self.swaps if not swap.reason],
            "skipped": [swap.to_mapping() for swap in self.swaps if swap.reason],
            "config": asdict(config),
            "versions": versions(),
            "hardware": hardware(self.world.device),
        }
        write_json(staging / "report.json", result)
        card = model_card(result, base_model=None if self.source.is_local else self.source.location)
        (staging / "README.md").write_text(card, encoding="utf-8")
        output.commit()
        return result


def finished_report(config: CompressConfig) -> dict[str, Any] | None:
    """The report of a finished run with these settings in `--output`, if there is one; what is left to clear away there
    after a kill is cleared away."""
    path = Path(config.output).expanduser().absolute()
    try:
        report_ = json.loads((path / "report.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    if report_.get("config") != json.loads(json.dumps(asdict(config))):
        return None
    settle(path)
    return report_
