"""What a run will need, by part: the run itself, from loading to export, on the meta device.

The model is built from its configuration without memory, and goes through the code of a run: perplexity, calibration,
swapping, an optimizer step with its losses, gradients and moments, export. A ledger of tensor storages
(`edkm_cli.dryrun.ledger`) records what is alive and the highest total.

Memory that no tensor represents is computed, with the reason beside it: copies of files while they are read, scratch memory
of C kernels, what data parallelism and sharding (FSDP2) keep. The process itself is counted elsewhere.
"""

import copy
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from edkm_cli.allocator import HUGE_BYTES
from edkm_cli.clustering.grids import Grid, search_bytes
from edkm_cli.distributed import World
from edkm_cli.dryrun.held import Gradients, OneExpert, Taught, compensated_bytes, layer_bytes, rounded_bytes, size_bytes
from edkm_cli.dryrun.ledger import DEVICE, HEAP, HOST, Peak, stands_for
from edkm_cli.dryrun.meta import ACTIVATIONS, CLUSTERING, FILES, LOGITS, OPTIMIZER, SHARDING, TEACHER, WEIGHTS, Stage
from edkm_cli.evaluate.perplexity import perplexity
from edkm_cli.granularity import FREE, Granularity, table_numbers
from edkm_cli.initialize.build import Recipe, Steps, initialize
from edkm_cli.initialize.corrections import Corrections
from edkm_cli.initialize.embeddings import cost_of_errors
from edkm_cli.initialize.importance import Take, collect
from edkm_cli.initialize.layers import Layers
from edkm_cli.initialize.reconstruct import reconstruct
from edkm_cli.nn.allocation import tried_bits
from edkm_cli.nn.clustered import clustered_layers
from edkm_cli.nn.hooks import LAST, decoder_layers, hooked
from edkm_cli.nn.parts import Parts
from edkm_cli.nn.swap import Swap
from edkm_cli.packing import pack
from edkm_cli.precision import multiplies_bfloat16
from edkm_cli.preflight import RunPlan, calibration_text, needed_tokens, start_batches
from edkm_cli.runtime.embeddings import Rounding, to_nearest
from edkm_cli.self_text import rehearse_text
from edkm_cli.train.loop import prepare
from edkm_cli.train.losses import Objective
from edkm_cli.train.optimizer import build_optimizer, state_bytes

# FSDP2 holds of whole decoder layers: the one in use, the buffer it was gathered into, and the next one on its way.
_GATHERED_LAYERS = 3
_HOLES = 0.5  # of what training has in the heap: what is kept for the gradients splits the free blocks


class _NoText:
    """Text of which only the shapes are there."""

    def calibration_batches(self, length: int, *, limit: int, seed: int) -> list[Tensor]:
        length = min(length, max(limit, 2))
        return [torch.empty(1, length, dtype=torch.int64, device="meta")] * max(1, limit // length)


class Rehearsal:
    """A planned run of one process; `stored_bytes` is the size of the model's files."""

    def __init__(self, plan: RunPlan, *, stored_bytes: int):
        self._stage = Stage(plan.world, {swap.shape for swap in plan.clustered})
        self._ledger, self._host = self._stage.ledger, HOST if plan.world.gpu else DEVICE
        self._experts = OneExpert(plan, self._ledger)
        self.plan, self.config, self.world = self._experts.plan, plan.config, plan.world
        self._stored_bytes, self._skeleton = stored_bytes, self.plan.skeleton
        self._seen: set[tuple[int, int]] = set()  # shapes that went through k-means
        self._tables: list[Tensor] = []  # of linears that wait for their turn
        # The start has one decoder layer's dense weights in memory, wherever it can.
        self._streams = plan.streams
        if plan.by_layer and not plan.world.gpu:
            self._ledger.accounts[DEVICE].kept_below = HUGE_BYTES
        self._rounds = not plan.world.gpu and multiplies_bfloat16("cpu") and plan.dense_dtype == "float32"

    def run(self) -> dict[str, Peak]:
        """The peaks at the places `device` and `host`; on a CPU everything is in `device`."""
        with self._stage, self._experts.counted():
            if self.plan.writes_text:
                self._write()
            dense = self._load(whole=not self._streams)
            teacher = self._teacher(dense) if self.plan.distills else None
            model = self._start(dense)
            del dense
            self._evaluate(model)
            if self.config.steps:
                self._train(model, Objective(teacher, label_weight=self.config.label_weight or 0.0))
            del teacher
            self._export(model)
        return {place: self._peak(place) for place in (DEVICE, HOST)}

    def _peak(self, place: str) -> Peak:
        account = self._ledger.accounts[place]
        phase = max(account.totals, key=account.totals.__getitem__)
        parts = {part: size for part, size in account.peaks[phase].items() if size and part != HEAP}
        waiting = account.peaks[phase].get(HEAP, 0) if account.kept_below else None
        tensors = {name: total - account.peaks[name].get(HEAP, 0) for name, total in account.totals.items()}
        return Peak(phase, parts, tensors, account.peaks["load"].get(FILES, 0), waiting)

    def _load(self, *, whole: bool) -> Any:
        """On a GPU's machine the model is read into host memory first; sharded, or not `whole`, a layer at a time."""
        self._ledger.begin("load")
        model = self._dense_model(self.plan.dense_dtype, whole=whole)
        size = size_bytes(model.parameters())
        if self.world.gpu:
            by_layer = self._streams or self.world.sharded
            at_once = layer_bytes(model) if by_layer else size
            files = 0 if by_layer else self._stored_bytes
            with self._ledger.more(at_once, WEIGHTS, place=HOST), self._ledger.more(files, FILES, place=HOST):
                pass
        elif not self._streams and not self.world.sharded:
            # Read as they are stored, then converted one by one; a file of the same dtype is mapped, not copied.
            mapped = abs(self._stored_bytes - size) < 0.01 * size
            with self._ledger.more(0 if mapped else self._stored_bytes, FILES):
                pass
        return model

    def _enter_weights(self, model: Any, *, in_turn: bool) -> None:
        """Enter what a model is made of. Of the weights that decoder layers have `in_turn`, count one layer's, and all of
        what they are packed to."""
        self._stage.label(model)
        shared: set[int] = set()
        if in_turn:
            layers = decoder_layers(model).values()
            weights = [value for layer in layers for name, value in layer.named_parameters() if name.endswith("weight")]
            packed = self.plan.spec.bits / 8 / weights[0].element_size() if clustered_layers(model) else 0.0
            self._ledger.move(weights, WEIGHTS, share=1 / len(layers) + packed)
            shared = set(map(id, weights))
        rest = [parameter for parameter in model.parameters() if id(parameter) not in shared]
        self._ledger.move(rest, WEIGHTS, share=self.world.share)
        self._ledger.move(model.buffers(), WEIGHTS)

    def _dense_model(self, dtype: str, *, whole: bool = True) -> Any:
        """The dense model in a dtype, sharded if the run is; of its layers one, where they are not needed `whole`."""
        with self._ledger.uncounted():
            model = copy.deepcopy(self._skeleton)
            for parameter in model.parameters():
                parameter.data = parameter.data.to(getattr(torch, dtype))
        model.config.dtype = getattr(torch, dtype)
        self._enter_weights(model, in_turn=not whole)
        return model.eval()

    def _write(self) -> None:
        """Two tokens of the text that the model writes itself, in a cache that has room for all. Layers that are read one by
        one are rounded as soon as they are there."""
        self._ledger.begin("text")
        with self._ledger.more(rounded_bytes(self._skeleton, alone=self._streams) if self._rounds else 0, WEIGHTS):
            model = self._dense_model(self.plan.dense_dtype)
            rehearse_text(model, tokens=needed_tokens(self.plan, written=True), device=self.world.device)
            del model  # what is rounded of it is taken off until here

    def _evaluate(self, model: Any) -> None:
        """One of a run's four perplexities. The others need no more."""
        self._ledger.begin("evaluate")
        tokens = torch.empty(self.config.context, dtype=torch.int64, device="meta")
        with self._gathered(model):
            perplexity(model, tokens, context=self.config.context, max_windows=1)

    def _teacher(self, dense: Any) -> Taught:
        """A pass of one sequence, and the copy of the head that is kept."""
        self._ledger.begin("teacher")
        with self._ledger.under(TEACHER), torch.device("meta"):
            parts = Parts(dense, frozen=True)
        with torch.no_grad(), self._gathered(dense):
            ids = torch.empty(1, self.config.sequence_length, dtype=torch.int64, device="meta")
            parts.states(input_ids=ids, use_cache=False)
        parts.release()
        return Taught(parts)

    def _start(self, dense: Any) -> Any:
        """As the run's: `initialize`, with its costly steps counted instead of done."""
        plan = self.plan
        text: Any = _NoText()
        # The second batch finds the sums of the first in memory; of a whole model beside a GPU they are in the host's.
        batches = calibration_text(text, plan)[: 1 if self.world.gpu and not plan.by_layer else 2]
        steps = Steps(self._collect, self._kmeans, self._compensate, self._reconstruct, self._rounding_of)
        self._ledger.begin("calibration")
        with self._ledger.under(LOGITS), torch.device("meta"):
            recipe, build = replace(Recipe.of(plan), average_bits=None), self._rebuild if self.world.sharded else None
            texts: dict[str, Any] = {"calibration": batches, "fitting": start_batches(text, plan)}
            model = initialize(dense, recipe, build=build, world=World(device="meta"), steps=steps, **texts)
        self._tables.clear()
        self._settle(model)
        return model

    def _collect(
        self, layers: Layers, names: list[str], batches: list[Tensor], take: Take, *, by_layer: bool, **options: Any
    ) -> dict[str, Tensor]:
        """`collect`; then the start begins, tables included where they are not a layer's at a time."""
        average, spec = self.plan.average_bits, self.plan.spec
        shapes = {swap.name: swap.shape for swap in self.plan.clustered if average}
        entries = sum(table_numbers(spec.palette, bits) for bits in tried_bits(average or 1))

        def done(path: str, part: nn.Module, importance: dict[str, Tensor]) -> None:
            self._ledger.move(self._experts.for_all(importance), CLUSTERING, place=self._host, share=self.world.share)
            for name in importance.keys() & shapes.keys():  # tables with the other numbers of bits that it may get
                others = entries - table_numbers(spec.palette, spec.bits_of(name))
                tables = torch.empty(spec.granularity_of(name).groups(*shapes[name]), others, device="meta")
                self._ledger.move(self._experts.for_all({name: tables}), CLUSTERING, place=self._host)
                self._tables.append(tables)
            if by_layer:
                take(path, part, importance)

        with self._ledger.under(ACTIVATIONS), self._stage.clustering(), self._gathered(layers.model):
            found = collect(layers, names, batches, done, by_layer=by_layer, **options)
        self._ledger.begin("start")
        if not by_layer:
            take("", layers.model, found)
        return found

    def _rounding_of(self, swaps: Sequence[Swap], moments: dict[str, Tensor], tokens: int) -> dict[str, Rounding]:
        """`compensating_rounding`: four float64 matrices factor the products; the weight is held in units of its factors, in
        another order, and as a result, the entries of its rows as they are sorted, with their places."""

        def rounded(held: Tensor, weight: Tensor, scale: Tensor, *about: Any) -> tuple[Tensor, Tensor]:
            entries = 2 * (about[-1] + 1) * size_bytes([scale])
            with self._ledger.more(3 * size_bytes([weight]) + 4 * entries, CLUSTERING):
                pass
            return to_nearest(weight, scale, *about)

        found: dict[str, Rounding] = {}
        for name, (moment, _) in cost_of_errors(swaps, moments).items():
            with self._ledger.more(36 * moment.numel(), CLUSTERING):
                found[name] = Rounding(partial(rounded, moment.clone()))
        return found

    def _rebuild(self, prepare: Callable[[str, nn.Module], None], finish: Callable[[Any], None]) -> Any:
        """As `build_sharded`."""
        model = self._dense_model(self.config.dtype)
        for path, block in decoder_layers(model).items():
            prepare(path, block)
        finish(model)
        return model

    def _settle(self, model: Any) -> None:
        """What the clustered model is made of belongs to the weights; all tables are there at once."""
        self._enter_weights(model, in_turn=self._streams and bool(clustered_layers(model)))

    def _kmeans(
        self, weight: Tensor, grid: Grid, widths: Sequence[int], *, granularity: Granularity, **options: Any
    ) -> list[Tensor]:
        """One k-means for each shape, in host memory, where a weight on a GPU is copied to, with the scratch memory of
        kernels/kmeans.c. Layers of a shape need the same."""
        shape, grid = (weight.shape[0], weight.shape[1]), replace(grid, bits=max(widths))
        if shape not in self._seen:
            self._seen.add(shape)
            tile = granularity.tile(*shape)
            # Larger groups go by their distinct values, of which a model that was trained in 16 bits has no more.
            size = min(tile[0] * tile[1], 2**16)
            a_thread = 16 * size + 24 * (size + 1) + (40 + 4 * 2**grid.bits) * (size + 1)
            threads = min(torch.get_num_threads(), weight.numel() // size)
            scratch = a_thread * threads if grid.palette == FREE else search_bytes(grid, weight.numel(), size)
            copied = size_bytes([weight]) if self.world.gpu else 0
            held = self._ledger.more(copied + scratch, CLUSTERING, place=self._host)
            with self._ledger.under(CLUSTERING), self._stage.on_host(), held:
                grid.start(weight, granularity=granularity, importance=options["importance"])
        numbers = [table_numbers(grid.palette, bits) for bits in widths]
        return [torch.empty(granularity.groups(*shape), count, device="meta") for count in numbers]

    def _compensation(self, corrections: Corrections | None, layer: Any, inputs: tuple[Tensor, ...]) -> None:
        """A hook in place of `Compensation`, which counts what that holds."""
        average = self.plan.average_bits
        bits = max(tried_bits(average)) if average else layer.clustering.bits  # any matrix may get the most
        hidden = getattr(self._skeleton.config, "hidden_size", 0)
        corrected = corrections is not None and inputs[0].dim() == 3  # experts get a choice of the tokens
        size = compensated_bytes(layer, inputs[0], bits, hidden, corrected=corrected, gpu=self.world.gpu)
        with self._ledger.more(size, CLUSTERING):
            pass
        if corrections is not None:
            corrections.forget(layer)
            self._ledger.accounts[DEVICE].return_free()

    @torch.no_grad()
    def _compensate(self, model: Any, batches: list[Tensor], **options: Any) -> None:
        """The pass that `compensate` makes."""
        self._settle(model)
        model.eval()
        holding = hooked(clustered_layers(model).values(), partial(self._compensation, None))
        with self._ledger.under(ACTIVATIONS), self._gathered(model), holding:
            model(input_ids=torch.cat(batches), use_cache=False, logits_to_keep=LAST)

    def _reconstruct(
        self, model: Any, batches: list[Tensor], *, passes: int, begin: Callable[..., None], **options: Any
    ) -> None:
        """`reconstruct`, of two decoder layers for two steps each: from then on all hold the same."""
        for path, layer in decoder_layers(model).items():
            begin(path, layer)
        self._settle(model)
        with self._ledger.under(ACTIVATIONS), self._stage.autocast(model, self._rounds):
            about: dict[str, Any] = {"world": World(device="meta"), "at_most_layers": 2, "at_most_steps": 2}
            about["compensating"] = lambda world, corrections: partial(self._compensation, corrections)
            reconstruct(model, batches, passes=passes, **about)

    def _train(self, model: Any, objective: Objective) -> None:
        """The step that needs the most of a training: the second one, or the only one."""
        self._ledger.accounts[DEVICE].holes = _HOLES
        self._ledger.begin("training")
        config = self.config
        prepare(model, config, World(device="meta"))
        trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        with ExitStack() as held:
            gradients = Gradients(model, trained, self._ledger, self.world, held)
            optimizer = self._optimizer(model, trained, held)
            if config.steps > 1 and optimizer is not None:  # the second step has the most: moments from the first one
                gradients.make()
                self._step(optimizer)
            if config.gradient_accumulation > 1:
                gradients.make()
            ids = torch.empty(config.batch_size, config.sequence_length, dtype=torch.int64, device="meta")
            held.enter_context(self._gathered(model))
            held.enter_context(self._stage.autocast(model, self.config.mixed_precision == "bf16"))
            parts = Parts(model, whole=self.world.sharded)
            with self._stage.offload(model, config.offload == "cpu"):
                (objective.loss(parts, ids) / config.gradient_accumulation).backward()
            if config.mode == "soft":  # the loss with weights as they are exported is measured, too
                model.eval()
                with torch.no_grad():
                    objective.loss(parts, ids)
                model.train()
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

    def _optimizer(self, model: Any, trained: list[nn.Parameter], held: ExitStack) -> Any:
        """As `build_optimizer`. On a GPU a step needs nothing beside its state: AdamW is fused there."""
        if self.world.gpu:
            state, scratch = state_bytes([one for one in trained for _ in range(stands_for(one))])
            held.enter_context(self._ledger.more(int(state * self.world.share + scratch), OPTIMIZER))
            return None
        return build_optimizer(model, self.config, World(device="meta"))

    def _step(self, optimizer: Any) -> None:
        with self._ledger.under(OPTIMIZER), self._stage.on_shards():
            optimizer.step()
        optimizer.zero_grad()

    def _export(self, model: Any) -> None:
        """A layer's indices at a time. The exported model, which is loaded next, is smaller than the one it came from."""
        self._ledger.begin("export")
        first_of_shape: dict[tuple[int, int], Any] = {}
        for layer in clustered_layers(model).values():
            first_of_shape.setdefault((layer.out_features, layer.in_features), layer)
        for layer in first_of_shape.values():
            with self._ledger.under(CLUSTERING), self._gathered(model):
                pack(layer.snapped()[0], layer.clustering.bits)

    def _gathered(self, model: Any) -> AbstractContextManager[None]:
        """Where parameters are sharded, the decoder layers that are whole for the moment."""
        return self._ledger.more(_GATHERED_LAYERS * layer_bytes(model) if self.world.sharded else 0, SHARDING)
