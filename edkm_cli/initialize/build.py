"""Initialization: dense model -> clustered model, in one place.

In this order: the importance of weights is measured on the dense model; k-means, weighted by it, places each layer's LUT
entries; embeddings are rounded, the errors of a row compensating one another; weights
compensate one another's rounding errors, or are reconstructed decoder layer by decoder layer.

A start that reconstructs works layer by layer from the beginning: wherever the layers come from, the dense weights of one
are in memory. Other starts, which any model can have, take the model as one part, and a sharded one as it is read.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from edkm_cli.clustering import Grid, lut_scale, relative_importance
from edkm_cli.distributed import ALONE, World
from edkm_cli.errors import UserError
from edkm_cli.format import QuantizationSpec
from edkm_cli.granularity import Granularity, Override
from edkm_cli.initialize.compensate import compensate
from edkm_cli.initialize.embeddings import compensating_rounding, rounded_embeddings
from edkm_cli.initialize.importance import collect
from edkm_cli.initialize.kept import Begun, KeptStart, tensors_of
from edkm_cli.initialize.layers import Layers
from edkm_cli.initialize.reconstruct import reconstruct
from edkm_cli.nn.allocation import choose, rises_of, tried_bits
from edkm_cli.nn.clustered import ClusteredLinear, Clustering, hold
from edkm_cli.nn.swap import Swap, freeze_dense_embeddings, palettize_embeddings
from edkm_cli.preflight import RunPlan
from edkm_cli.progress import Track, no_progress
from edkm_cli.runtime.embeddings import Rounding
from edkm_cli.settings import part_of


@torch.no_grad()
def shared_kmeans_starts(
    weight: Tensor,
    grid: Grid,
    widths: Sequence[int],
    *,
    granularity: Granularity,
    importance: Tensor | None,
    name: str,
    world: World,
) -> list[Tensor]:
    """`grid.starts(weight, widths)`: the same centroids (groups, numbers) on all processes, at 1/N of the time.

    Groups are independent, and those of a band of tile rows are consecutive, so each process clusters a band of rows.
    All hold the whole weight (out, in). Where there are fewer bands than processes (`tensor`), the first clusters all.
    """
    options: dict[str, Any] = {"granularity": granularity, "name": name}
    tile_rows, tile_columns = granularity.tile(*weight.shape, layer=name)
    bands = weight.shape[0] // tile_rows
    if world.size == 1 or bands < world.size:
        # Computed everywhere, taken from the first: processors may differ in the last bit.
        return [world.broadcast(each) for each in grid.starts(weight, widths, importance=importance, **options)]
    mine, groups = world.share_of(weight.shape[0], tile_rows), weight.shape[1] // tile_columns
    if mine.start < mine.stop:
        rows = importance[mine] if importance is not None and importance.dim() == 2 else importance
        shares = [each.float() for each in grid.starts(weight[mine], widths, importance=rows, **options)]
    else:
        shares = [torch.zeros(0, replace(grid, bits=bits).numbers, device=weight.device) for bits in widths]
    return [world.gather_rows(share, bands * groups) for share in shares]


# Makes the model that is to be clustered, given `prepare` and `finish` by name: calls `prepare(path, part)` on each part
# while its weights are whole, then `finish(model)`, and returns the model.
Build = Callable[..., Any]


@dataclass(frozen=True)
class Recipe:
    """What a dense model becomes.

    Attributes:
        swaps: the modules that change; embeddings among them are rounded as `spec` says.
        spec, clustering: of the checkpoint, and of the layers in training.
        centroid_weighting: of the updates that move tables in training: by `importance`, or `uniform` as in the papers.
        average_bits: linears get bits by sensitivity, in the room of so many for each; None: those of `spec`.
        passes: of the reconstruction over its text; None: weights are compensated only.
        holds: weights stay with their entries from then on, packed: `HeldLinear`.
    """

    swaps: Sequence[Swap]
    spec: QuantizationSpec
    clustering: Clustering
    temperature: float = 1.0
    importance: str = "none"
    centroid_weighting: str = "uniform"
    seed: int = 0
    average_bits: float | None = None
    passes: int | None = None
    holds: bool = False
    overrides: tuple[str, ...] = ()

    @classmethod
    def of(cls, plan: RunPlan) -> "Recipe":
        config = plan.config
        return part_of(
            cls,
            config,
            swaps=plan.swaps,
            spec=plan.spec,
            clustering=plan.clustering,
            average_bits=plan.average_bits,
            passes=config.start_passes if config.start == "reconstructed" else None,
            holds=config.assignments == "held" or plan.by_layer,
        )

    @property
    def clustered(self) -> list[Swap]:
        return [swap for swap in self.swaps if swap.clustered]

    def linears(self, path: str, part: nn.Module) -> Iterator[tuple[Swap, nn.Linear]]:
        """Those to be clustered in the part of a model that is at `path`, and not clustered yet."""
        prefix = f"{path}." if path else ""
        for swap in self.clustered:
            if swap.name.startswith(prefix):
                linear = part.get_submodule(swap.name.removeprefix(prefix))
                if isinstance(linear, nn.Linear):
                    yield swap, linear


@dataclass(frozen=True)
class Steps:
    """The costly steps of a start, for a rehearsal, or whoever needs them done otherwise: called as these functions are."""

    collect: Callable[..., dict[str, Tensor]] = collect
    tables: Callable[..., list[Tensor]] = shared_kmeans_starts
    compensate: Callable[..., None] = compensate
    reconstruct: Callable[..., None] = reconstruct
    rounding: Callable[..., dict[str, Rounding]] = compensating_rounding


def initialize(
    dense: Any,
    recipe: Recipe,
    *,
    calibration: Sequence[Tensor] = (),
    fitting: Sequence[Tensor] | None = None,
    build: Build | None = None,
    world: World = ALONE,
    track: Track = no_progress,
    steps: Steps = Steps(),
    kept: KeptStart | None = None,
) -> Any:
    """The clustered model. All processes of `world` call this alike.

    Args:
        dense: a dense causal LM, or its `Layers`. It is changed in place, unless `build` makes another one.
        calibration: token ids, (batch, sequence) int64, that the importance is measured on.
        fitting: token ids that weights are compensated or reconstructed on, all of one shape; None leaves them as they
            are.
        build: makes the model anew part by part, for one that is sharded and never whole.
        kept: where layers that are reconstructed and held go to, and a start that was interrupted goes on from.

    Raises UserError where calibration inputs or weights are not finite.
    """
    layers = dense if isinstance(dense, Layers) else Layers(dense)
    reconstructs = fitting is not None and recipe.passes is not None
    inside = tuple(f"{path}." for path in layers.paths) if reconstructs else ()
    by_layer = reconstructs and all(swap.name.startswith(inside) for swap in recipe.clustered)
    tables = Tables(recipe, world, steps.tables, track)
    begun = kept.begun() if kept is not None else None
    done, bits, _, states = begun or (0, {}, {}, None)
    importance: dict[str, Tensor] = {}
    ends = [swap.name for swap in rounded_embeddings(recipe.swaps).values()]
    if begun is None:
        options: dict[str, Any] = {"kind": recipe.importance, "moments": ends, "world": world, "track": track}
        # A model that is built anew has no part whose weights are whole yet.
        names, take = [swap.name for swap in recipe.clustered], tables.add if build is None else lambda *_: None
        importance = steps.collect(layers, names, list(calibration), take, by_layer=by_layer, **options)
        bits = tables.choose()
    recipe = tables.recipe = replace(recipe, spec=recipe.spec.with_bits(bits))
    moments = {name: importance.pop(name) for name in ends if name in importance}
    rounding = steps.rounding(recipe.swaps, moments, sum(batch.numel() for batch in calibration))

    def prepare(path: str, part: nn.Module) -> None:
        tables.add(path, part, importance)
        tables.swap(path, part)

    def finish(model: Any) -> None:
        palettize_embeddings(model, recipe.swaps, recipe.spec, rounding)
        if build is not None:  # it is sharded with what trains in it
            freeze_dense_embeddings(model)

    def end(path: str, layer: nn.Module, states: dict[str, Tensor]) -> None:
        if recipe.holds:
            hold(layer)
        layers.stay(path)
        if kept is not None:
            kept.add(path, layer, states)

    if build is not None:
        model = build(prepare=prepare, finish=finish)
    else:
        model = layers.model
        finish(model)
        if not by_layer:
            tables.swap("", model)
    if kept is not None:
        _go_on(kept, begun, bits, layers, tables)
    if fitting is not None and recipe.passes is None:
        steps.compensate(model, list(fitting), world=world, track=track)
    elif fitting is not None:
        options = {"passes": recipe.passes, "seed": recipe.seed, "world": world, "track": track}
        where: dict[str, Any] = {"layers": layers, "begin": tables.swap, "end": end, "done": done, "states": states}
        steps.reconstruct(model, list(fitting), **where, **options)
    if recipe.holds:
        hold(model)
    return model


def _go_on(kept: KeptStart, begun: Begun | None, bits: dict[str, int], layers: Layers, tables: "Tables") -> None:
    """Keep what comes before the layers; or take it, and the layers that are done, from what is kept."""
    model, inside = layers.model, tuple(f"{path}." for path in layers.paths)
    outside = {name: value for name, value in tensors_of(model).items() if not name.startswith(inside)}
    if begun is None:
        kept.begin({**tables.named(), **outside}, bits)
        return
    done, _, tensors, _ = begun
    tables.take(tensors)
    for name, value in outside.items():
        value.copy_(tensors[name])
    for path in layers.paths[:done]:
        layer = model.get_submodule(path)
        tables.swap(path, layer)
        hold(layer)
        layers.stay(path)
        kept.fill(layer, path)


class Tables:
    """Where the tables of linears start, which follows from the importance of their weights.

    Kept are, of each linear, tables with each number of bits that it may get and what the loss is expected to rise by; of
    the weight's size only what updates of tables in training are weighted by.
    """

    def __init__(self, recipe: Recipe, world: World, start: Callable[..., list[Tensor]], track: Track = no_progress):
        self.recipe, self._world, self._start, self._track = recipe, world, start, track
        self._candidates: dict[str, dict[int, Tensor]] = {}
        self._rises: dict[str, dict[int, float]] = {}
        self._relative: dict[str, Tensor] = {}

    def add(self, path: str, part: nn.Module, importance: dict[str, Tensor]) -> None:
        """Those of the linears in the part of the model at `path`, whose importance is taken out of `importance`. All
        processes call this with the same weights; where the model is sharded, each has its rows of the importance."""
        recipe, world = self.recipe, self._world
        linears, track = list(recipe.linears(path, part)), no_progress if path else self._track
        for swap, linear in track(linears, "k-means start", len(linears)):
            name, weight, granularity = swap.name, linear.weight.detach(), recipe.spec.granularity_of(swap.name)
            weighing, widths = importance.pop(name, None), [recipe.spec.bits_of(name)]
            if weighing is not None and weighing.dim() == 2 and world.sharded:
                weighing = world.gather_rows(weighing.to(world.device), swap.shape[0])
            if recipe.average_bits is not None and not Override.of(recipe.overrides, name).bits:
                widths = list(tried_bits(recipe.average_bits))
            options: dict[str, Any] = {"granularity": granularity, "importance": weighing, "name": name, "world": world}
            by_bits = dict(zip(widths, self._start(weight, recipe.clustering.grid, widths, **options), strict=True))
            if len(widths) > 1:
                self._rises[name] = world.on_main(partial(rises_of, name, weight, weighing, recipe.spec, by_bits))
            self._candidates[name] = {bits: start.cpu() for bits, start in by_bits.items()}
            if weighing is not None and recipe.centroid_weighting == "importance" and not recipe.clustering.trains_luts:
                relative = relative_importance(weighing, weight, granularity=granularity, layer=name)
                self._relative[name] = world.broadcast(relative)  # processors may differ in the last bit

    def choose(self) -> dict[str, int]:
        """Module path -> bits of a linear: those of overrides, or of all, else by sensitivity."""
        bits = {swap.name: self.recipe.spec.bits_of(swap.name) for swap in self.recipe.clustered}
        free = [swap for swap in self.recipe.clustered if swap.name in self._rises]
        if self.recipe.average_bits is not None:
            bits |= choose(free, self._rises, self.recipe.spec, self.recipe.average_bits)
        return bits

    def named(self) -> dict[str, Tensor]:
        """Those with the bits of the recipe, by names for a file."""
        return {f"tables.{name}": tables[self.recipe.spec.bits_of(name)] for name, tables in self._candidates.items()}

    def take(self, tensors: dict[str, Tensor]) -> None:
        """Those that `named` gave."""
        for swap in self.recipe.clustered:
            if (tables := tensors.get(f"tables.{swap.name}")) is not None:
                self._candidates[swap.name] = {self.recipe.spec.bits_of(swap.name): tables}

    def swap(self, path: str, part: nn.Module) -> None:
        """Replace the linears in the part of the model at `path` by `ClusteredLinear`, one at a time, in place."""
        for swap, linear in self.recipe.linears(path, part):
            name, spec = swap.name, self.recipe.spec
            bits, granularity = spec.bits_of(name), spec.granularity_of(name)
            clustering = replace(self.recipe.clustering, bits=bits, granularity=granularity)
            centroids = self._candidates.pop(name)[bits].to(linear.weight.device).contiguous()  # of `no_tables`, too
            _require_range(centroids, clustering, name)
            about: dict[str, Any] = {"name": name, "importance": self._relative.pop(name, None)}
            tensors, temperature = (linear.weight, linear.bias, centroids), self.recipe.temperature
            clustered = ClusteredLinear(*tensors, clustering, temperature=temperature, **about)
            part.set_submodule(name.removeprefix(f"{path}."), clustered)


def restore(dense: Any, recipe: Recipe, kept: KeptStart, **options: Any) -> Any:
    """As `initialize`, with what is kept in place of what it computes. `recipe` has the bits of all linears."""
    model = initialize(dense, replace(recipe, importance="none"), steps=Steps(tables=no_tables), **options)
    kept.fill(model)
    return model


def no_tables(weight: Tensor, grid: Grid, widths: Sequence[int], *, granularity: Granularity, **_: Any) -> list[Tensor]:
    """In place of `shared_kmeans_starts`, where tables come from elsewhere or only their shape counts; no memory."""
    groups = granularity.groups(*weight.shape)
    return [torch.zeros((), device="cpu").expand(groups, replace(grid, bits=bits).numbers) for bits in widths]


def _require_range(centroids: Tensor, clustering: Clustering, name: str) -> None:
    """Raises UserError for tables that their number format, or a fixed scale of float8 entries, does not reach."""
    if centroids.is_meta:
        return
    centroids = clustering.grid.scaled_numbers(centroids)
    if clustering.lut_scale is None:
        if clustering.lut_dtype == "float16" and not (largest := float(centroids.abs().max())) <= 65504:
            raise UserError(f"float16 tables reach 65504, but {name} needs {largest:.4g}; use --lut-dtype bfloat16")
        return
    largest, scale = float(centroids.abs().max()), lut_scale(centroids, clustering.lut_dtype)
    if largest > (reach := torch.finfo(getattr(torch, clustering.lut_dtype)).max * clustering.lut_scale):
        rule = f"tables with --lut-scale {clustering.lut_scale:g} reach {reach:g}, but {name} needs {largest:.4g}"
        raise UserError(f"{rule}; use --lut-scale {float(scale or 0):g}")
