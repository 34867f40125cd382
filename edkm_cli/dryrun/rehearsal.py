"""What a run will need, by part: the run itself, from loading to export, on the meta device.

Nothing is guessed that can be counted. The model is built from its configuration without memory, and goes through the
code that a run goes through: perplexity, calibration, swapping, an optimizer step with its losses, gradients and
moments, export. A ledger of tensor storages (`edkm_cli.dryrun.ledger`) notes what is alive, and when most.

Left to arithmetic is what no tensor stands for, each with its reason beside it: copies of files while they are read,
scratch memory of C kernels, what data parallelism and sharding (FSDP2) keep. The process itself is not in here.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from edkm_cli.clustering import kmeans_start
from edkm_cli.config import CompressConfig
from edkm_cli.distributed import World
from edkm_cli.dryrun.ledger import DEVICE, HOST
from edkm_cli.dryrun.meta import (
    CLUSTERING,
    FILES,
    GRADIENTS,
    LOGITS,
    META,
    OPTIMIZER,
    SHARDING,
    TEACHER,
    WEIGHTS,
    Setting,
    Stage,
)
from edkm_cli.evaluate.perplexity import perplexity
from edkm_cli.granularity import Granularity
from edkm_cli.initialize.importance import collect_importance
from edkm_cli.initialize.sharded import decoder_blocks
from edkm_cli.nn.clustered import ClusteredLinear, Clustering, clustered_layers
from edkm_cli.nn.lora import add_lora
from edkm_cli.nn.swap import LINEAR, Swap, palettize_embeddings
from edkm_cli.packing import pack
from edkm_cli.preflight import calibration_batches, choose_dtype, choose_mixed_precision, compensates, spec_of
from edkm_cli.train.loop import freeze_dense_embeddings
from edkm_cli.train.losses import FrozenTeacher, training_loss
from edkm_cli.train.optimizer import parameter_groups

# FSDP2 holds of whole decoder layers: the one in use, the buffer it was gathered into, and the next one on its way.
_GATHERED_LAYERS = 3
# ... and of a layer's gradients: the buffer that is reduced, beside the one of the layer before.
_REDUCED_LAYERS = 2
_DISTINCT = 65536
# bitsandbytes: a byte a moment, and a float32 scale for each block of 256.
_MOMENT_8BIT_BYTES = 1 + 4 / 256


@dataclass(frozen=True)
class Peak:
    """Bytes by part at the moment of the highest total, the phase it is in, the highest total of each phase, and how
    much of that of loading is pages of files."""

    phase: str
    parts: dict[str, int]
    phases: dict[str, int]
    files: int = 0

    @property
    def total(self) -> int:
        return sum(self.parts.values())


class Rehearsal:
    """A planned run of one process. `dense` is the model on the meta device; it is left as it is."""

    def __init__(self, config: CompressConfig, dense: Any, swaps: list[Swap], setting: Setting, *, stored_bytes: int):
        self.config, self.swaps, self.setting = config, swaps, setting
        self._dense, self._stored_bytes = dense, stored_bytes
        self._clustered = [swap for swap in swaps if swap.role == LINEAR and not swap.reason]
        self._stage = Stage(setting, (swap.shape for swap in self._clustered))
        self._ledger = self._stage.ledger
        self._dtype = getattr(torch, choose_dtype(config.dtype, setting.device))

    def run(self) -> dict[str, Peak]:
        """The peaks at the places `device` and `host`; on a CPU everything is in `device`."""
        with self._stage:
            model = self._load()
            importance = self._calibrate(model)
            model, teacher = self._start(model, importance)
            self._evaluate(model)
            if self.config.steps:
                self._train(model, teacher)
            del teacher
            self._export(model)
        return {place: self._peak(place) for place in (DEVICE, HOST)}

    def _peak(self, place: str) -> Peak:
        account = self._ledger.accounts[place]
        phase = max(account.totals, key=account.totals.__getitem__)
        parts = {part: size for part, size in account.peaks[phase].items() if size}
        return Peak(phase, parts, dict(account.totals), account.peaks["load"].get(FILES, 0))

    # Phases.

    def _load(self) -> Any:
        """On a GPU's machine the model is read into host memory first; sharded, a layer at a time."""
        self._ledger.begin("load")
        model = self._dense_model(self._dtype)
        whole = _bytes(model.parameters())
        if self.setting.gpu:
            at_once = self._layer_bytes(model) if self.setting.sharded else whole
            files = 0 if self.setting.sharded else self._stored_bytes
            with self._ledger.more(at_once, WEIGHTS, place=HOST), self._ledger.more(files, FILES, place=HOST):
                pass
        elif not self.setting.sharded:
            # Read as they are stored, then converted one by one; a file of the same dtype is mapped, not copied.
            with self._ledger.more(0 if _close(self._stored_bytes, whole) else self._stored_bytes, FILES):
                pass
        return model

    def _dense_model(self, dtype: torch.dtype) -> Any:
        """The dense model in a dtype, sharded if the run is."""
        with self._ledger.uncounted():
            model = copy.deepcopy(self._dense)
            for parameter in model.parameters():
                parameter.data = parameter.data.to(dtype)
        model.config.dtype = dtype
        self._ledger.move(model.parameters(), WEIGHTS, share=self.setting.share)
        self._ledger.move(model.buffers(), WEIGHTS)
        self._stage.label(model)
        return model.eval()

    def _evaluate(self, model: Any) -> None:
        """One of a run's four perplexities. The others need no more: there is no teacher yet, or not any more."""
        self._ledger.begin("evaluate")
        tokens = torch.empty(self.config.context, dtype=torch.int64, device=META)
        with self._gathered(model):
            perplexity(model, tokens, context=self.config.context, max_windows=1)

    def _calibrate(self, model: Any) -> dict[str, Tensor]:
        self._ledger.begin("calibration")
        config, names = self.config, [swap.name for swap in self._clustered]
        if config.importance == "none":
            return {}
        tokens = torch.empty(2 * max(config.calibration_tokens, 2), dtype=torch.int64, device=META)
        # The second one finds the sums of the first in memory; beside a GPU they are in the host's.
        batches = calibration_batches(tokens, config)[: 1 if self.setting.gpu else 2]
        with self._stage.clustering(), self._gathered(model):
            found = collect_importance(model, names, batches, kind=config.importance, world=World(device="meta"))
        place = HOST if self.setting.gpu else DEVICE
        self._ledger.move(found.values(), CLUSTERING, place=place, share=self.setting.share)
        return found

    def _start(self, dense: Any, importance: dict[str, Tensor]) -> tuple[Any, Any]:
        """As `compress`: (the clustered model, its teacher)."""
        self._ledger.begin("start")
        config = self.config
        distilled = bool(config.distill and config.steps)
        copied = distilled and not config.lora_rank
        model, teacher = dense, None
        if self.setting.sharded:
            if copied:
                teacher = dense.requires_grad_(False)
                self._ledger.move(teacher.parameters(), TEACHER, share=self.setting.share)
            master = not config.lora_rank
            model = self._dense_model(getattr(torch, choose_dtype(config.dtype, self.setting.device, master=master)))
        elif copied:
            with self._ledger.under(TEACHER):
                teacher = copy.deepcopy(dense).requires_grad_(False)
        del dense
        self._swap(model, importance)
        with self._ledger.under(LOGITS), META:
            palettize_embeddings(model, self.swaps, spec_of(config, self.swaps))
            if config.lora_rank:
                add_lora(model, rank=config.lora_rank, alpha=config.lora_alpha or 2.0 * config.lora_rank)
        self._stage.label(model)
        self._ledger.move(model.parameters(), WEIGHTS, share=self.setting.share)
        self._ledger.move(model.buffers(), WEIGHTS)
        if compensates(config):
            self._compensate(model)
        return model, FrozenTeacher(model) if distilled and config.lora_rank else teacher

    @torch.no_grad()
    def _compensate(self, model: Any) -> None:
        """The pass that `compensate` makes, and what it holds before each layer: first the Hessian, its sorted copy and
        four float64 matrices of its factorization, then two of these, the weight three times, and its LUTs."""
        config = self.config
        tokens = torch.empty(2 * config.start_tokens, dtype=torch.int64, device=META)
        batches = calibration_batches(tokens, config, config.start_tokens)

        def hold(layer: Any, inputs: tuple[Tensor, ...]) -> None:
            square, size = layer.in_features**2, layer.out_features * layer.in_features
            converted = 0 if inputs[0].dtype == torch.float32 else 4 * inputs[0].numel()
            factoring = 40 * square + converted
            moving = 16 * square + (8 + layer.weight.element_size()) * size + 4 * layer.centroids.numel()
            with self._ledger.more(max(factoring, moving), CLUSTERING):
                pass

        handles = [layer.register_forward_pre_hook(hold) for layer in clustered_layers(model).values()]
        model.eval()
        with self._gathered(model):
            model(input_ids=torch.cat(batches), use_cache=False, logits_to_keep=1)
        for handle in handles:
            handle.remove()

    def _swap(self, model: Any, importance: dict[str, Tensor]) -> None:
        """`swap_linears`, with one k-means for each shape: layers of a shape need the same."""
        config, seen = self.config, set()
        clustering = Clustering(
            bits=config.bits,
            granularity=config.granularity,
            lut_dtype=config.lut_dtype,
            method=config.method,
            mode=config.mode,
            iterations=config.iterations,
        )
        for swap in self._clustered:
            linear, masses = model.get_submodule(swap.name), importance.pop(swap.name, None)
            if swap.shape not in seen:
                seen.add(swap.shape)
                with self._ledger.under(CLUSTERING):
                    self._kmeans(linear.weight.detach(), masses)
            del masses
            rows, columns = Granularity.parse(config.granularity).tile(*swap.shape)
            groups = swap.shape[0] // rows * (swap.shape[1] // columns)
            layer = ClusteredLinear(
                linear.weight,
                linear.bias,
                torch.empty(groups, 2**config.bits, device=META),
                clustering,
                temperature=config.temperature,
                name=swap.name,
            )
            model.set_submodule(swap.name, layer)

    def _kmeans(self, weight: Tensor, importance: Tensor | None) -> None:
        """In host memory, where a weight on a GPU is copied to, with the scratch memory of kernels/kmeans.c."""
        tile = Granularity.parse(self.config.granularity).tile(*weight.shape)
        # Larger groups go by their distinct values, of which a model that was trained in 16 bits has no more.
        size = min(tile[0] * tile[1], _DISTINCT)
        a_thread = 16 * size + 24 * (size + 1) + (40 + 4 * 2**self.config.bits) * (size + 1)
        scratch = a_thread * min(self.setting.threads, weight.numel() // size)
        copied = _bytes([weight]) if self.setting.gpu else 0
        place = HOST if self.setting.gpu else DEVICE
        with self._stage.on_host(), self._ledger.more(copied + scratch, CLUSTERING, place=place):
            kmeans_start(weight, 2**self.config.bits, granularity=self.config.granularity, importance=importance)

    def _train(self, model: Any, teacher: Any) -> None:
        self._ledger.begin("training")
        config = self.config
        freeze_dense_embeddings(model)
        if config.gradient_checkpointing:
            model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
            model.enable_input_require_grads()
        model.train()
        trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        with ExitStack() as held:
            gradients = held.enter_context(_Gradients(model, trained, self))
            optimizer = self._optimizer(model, trained, held)
            if config.steps > 1 and optimizer is not None:  # the second step has the most: moments from the first one
                gradients.make()
                self._step(optimizer)
            if config.gradient_accumulation > 1:
                gradients.make()
            ids = torch.empty(config.batch_size, config.sequence_length, dtype=torch.int64, device=META)
            held.enter_context(self._gathered(model, teacher))
            precision = choose_mixed_precision(config.mixed_precision, _name(trained[0].dtype), self.setting.device)
            held.enter_context(self._stage.autocast(model, precision == "bf16"))
            with self._stage.offload(model, config.offload == "cpu"):
                weights = {"label_weight": config.label_weight, "hidden_weight": config.hidden_weight}
                loss = training_loss(model, teacher, ids, **weights)
                (loss / config.gradient_accumulation).backward()
            del loss
            if config.mode == "soft":
                self._hard_loss(model, teacher, ids)
            gradients.restore()
            torch.nn.utils.clip_grad_norm_(trained, config.max_grad_norm)
            for layer in clustered_layers(model).values():
                layer.commit()
            if optimizer is not None:
                self._step(optimizer)
            model.zero_grad()
        model.eval()
        for module in model.modules():
            if hasattr(module, "gradient_checkpointing"):
                module.gradient_checkpointing = False

    @torch.no_grad()
    def _hard_loss(self, model: Any, teacher: Any, ids: Tensor) -> None:
        model.eval()
        training_loss(model, teacher, ids)
        model.train()

    def _optimizer(self, model: Any, trained: list[nn.Parameter], held: ExitStack) -> Any:
        """As `build_optimizer`. On a GPU a step needs nothing beside its state: AdamW is fused there."""
        config = self.config
        if self.setting.gpu:
            size = sum(parameter.numel() for parameter in trained)
            moments = {"sgd": 1, "adamw": 2, "adamw-8bit": 2}[config.optimizer]
            a_moment = size * _MOMENT_8BIT_BYTES if config.optimizer == "adamw-8bit" else _bytes(trained)
            held.enter_context(self._ledger.more(int(moments * a_moment * self.setting.share), OPTIMIZER))
            return None
        groups = [group for group in parameter_groups(model, config) if group["params"]]
        return torch.optim.SGD(groups, momentum=0.9) if config.optimizer == "sgd" else torch.optim.AdamW(groups)

    def _step(self, optimizer: Any) -> None:
        with self._ledger.under(OPTIMIZER), self._stage.on_shards():
            optimizer.step()
        optimizer.zero_grad()

    def _export(self, model: Any) -> None:
        """A layer's indices at a time. The exported model, which is loaded next, is smaller than the one it came from."""
        self._ledger.begin("export")
        seen = set()
        for layer in clustered_layers(model).values():
            shape = layer.out_features, layer.in_features
            if shape not in seen:
                seen.add(shape)
                with self._ledger.under(CLUSTERING), self._gathered(model):
                    pack(layer.snapped()[0], self.config.bits)

    # Several processes.

    def _layer_bytes(self, model: Any) -> int:
        """The parameters of the largest decoder layer."""
        return max(_bytes(block.parameters()) for block in decoder_blocks(model).values())

    @contextmanager
    def _gathered(self, *models_: Any) -> Iterator[None]:
        """Where parameters are sharded, the decoder layers that are whole for the moment."""
        sizes = [self._layer_bytes(model) for model in models_ if isinstance(model, nn.Module)]
        gathered = _GATHERED_LAYERS * max(sizes) if self.setting.sharded and sizes else 0
        with self._ledger.more(gathered, SHARDING) if gathered else nullcontext():
            yield


class _Gradients:
    """The gradients of training as one process holds them: alone, in data parallelism's buckets, or reduced to shards."""

    def __init__(self, model: Any, trained: list[nn.Parameter], run: Rehearsal):
        self._trained, self._ledger, self._setting = trained, run._ledger, run.setting
        self._buckets = run.setting.processes > 1 and not run.setting.sharded
        self._layers = self._by_layer(model) if run.setting.sharded else {}
        self._exits = ExitStack()

    def _by_layer(self, model: Any) -> dict[int, list[nn.Parameter]]:
        """Parameter id -> the trained parameters of its decoder layer."""
        found: dict[int, list[nn.Parameter]] = {}
        for block in decoder_blocks(model).values():
            own = [parameter for parameter in block.parameters() if parameter.requires_grad]
            found.update((id(parameter), own) for parameter in own)
        return found

    def __enter__(self) -> _Gradients:
        if self._buckets:  # they are there from the beginning to the end, and gradients are views of them
            self._exits.enter_context(self._ledger.more(_bytes(self._trained), GRADIENTS))
        for parameter in self._trained:
            handle = parameter.register_post_accumulate_grad_hook(self._arrived)
            self._exits.callback(handle.remove)
        return self

    def __exit__(self, *_: object) -> None:
        self._exits.close()

    def make(self) -> None:
        """Gradients as an earlier micro-batch leaves them."""
        for parameter in self._trained:
            parameter.grad = torch.empty_like(parameter)
            self._ledger.move([parameter.grad], GRADIENTS, share=0.0 if self._buckets else self._setting.share)

    def restore(self) -> None:
        """Before the optimizer: what went into buckets is seen again as gradients."""
        if self._buckets:
            self.make()

    def _arrived(self, parameter: Tensor) -> None:
        assert parameter.grad is not None
        if self._buckets:
            parameter.grad = None
            return
        self._ledger.move([parameter.grad], GRADIENTS)
        layer = self._layers.get(id(parameter), [])
        if layer and all(other.grad is not None for other in layer):
            gradients = [other.grad for other in layer if other.grad is not None]
            with self._ledger.more(_REDUCED_LAYERS * _bytes(gradients), SHARDING):
                pass
            self._ledger.move(gradients, GRADIENTS, share=self._setting.share)


def _bytes(tensors: Any) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def _close(first: int, second: int) -> bool:
    return abs(first - second) < 0.01 * second


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
