"""Initialization: dense model -> clustered model, in one place.

In this order: the importance of weights is measured on the dense model; k-means, weighted by it, places each layer's LUT
entries; embeddings are rounded, the errors of a row compensating one another; weights
compensate one another's rounding errors, or are reconstructed decoder layer by decoder layer.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from edkm_cli.clustering import Grid, lut_reach, lut_scale, relative_importance
from edkm_cli.distributed import ALONE, World
from edkm_cli.errors import UserError
from edkm_cli.format import QuantizationSpec
from edkm_cli.granularity import Granularity, Override
from edkm_cli.initialize.compensate import compensate
from edkm_cli.initialize.embeddings import compensating_rounding, output_embedding
from edkm_cli.initialize.importance import collect_by_layer, collect_importance
from edkm_cli.initialize.kept import KeptStart, put, tensors_of
from edkm_cli.initialize.kmeans import shared_kmeans_start
from edkm_cli.initialize.layers import Layers
from edkm_cli.initialize.reconstruct import reconstruct
from edkm_cli.nn.allocation import allocate, choose, rises_of, tried_bits
from edkm_cli.nn.clustered import ClusteredLinear, Clustering
from edkm_cli.nn.held import hold
from edkm_cli.nn.swap import Swap, freeze_dense_embeddings, palettize_embeddings
from edkm_cli.preflight import RunPlan
from edkm_cli.progress import Track, no_progress
from edkm_cli.runtime.palettized import Rounded
from edkm_cli.settings import part_of

# Makes the model that is to be clustered, given `prepare` and `finish` by name: calls `prepare(path, part)` on each part
# while its weights are whole (path "" is the model itself), then `finish(model)`, and returns the model.
Build = Callable[..., Any]


@dataclass(frozen=True)
class Recipe:
    """What a dense model becomes.

    Attributes:
        swaps: the modules that change; embeddings among them are rounded as `spec` says.
        spec, clustering: of the checkpoint, and of the layers in training.
        temperature: of the attention at the first step.
        importance: `gradient`, `activation` or `none`.
        centroid_weighting: of the updates that move tables in training: by `importance`, or `uniform` as in the papers.
        seed: of the order of the text in a reconstruction.
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
    def of(cls, plan: RunPlan) -> Recipe:
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

    def chosen(self, choose: Callable[[list[Swap]], dict[str, int]]) -> dict[str, int]:
        """Module path -> bits: those of overrides, for the other linears what `choose` gives."""
        free = [swap for swap in self.clustered if not Override.of(self.overrides, swap.name).bits]
        return {swap.name: self.spec.bits_of(swap.name) for swap in self.clustered} | choose(free)


@dataclass(frozen=True)
class Steps:
    """The costly steps of a start, for a rehearsal, or whoever needs them done otherwise: called as these functions are."""

    collect: Callable[..., dict[str, Tensor]] = collect_importance
    tables: Callable[..., Tensor] = shared_kmeans_start
    compensate: Callable[..., None] = compensate
    reconstruct: Callable[..., None] = reconstruct
    rounding: Callable[..., dict[str, Rounded]] = compensating_rounding


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
) -> Any:
    """The clustered model. All processes of `world` call this alike.

    Args:
        dense: a dense causal LM. It is changed in place, unless `build` makes another one.
        calibration: token ids, (batch, sequence) int64, that the importance is measured on.
        fitting: token ids that weights are compensated or reconstructed on, all of one shape; None leaves them as they
            are.
        build: makes the model anew part by part, for one that is sharded and never whole.

    Raises UserError where calibration inputs or weights are not finite.
    """
    names = [swap.name for swap in recipe.clustered]
    head = output_embedding(recipe.swaps)
    importance = steps.collect(
        dense, names, list(calibration), kind=recipe.importance, moments=head, world=world, track=track
    )
    rounding = steps.rounding(recipe.swaps, {name: importance.pop(name) for name in head if name in importance})
    average = recipe.average_bits
    if average is not None:
        bits = world.on_main(
            lambda: recipe.chosen(lambda free: allocate(dense, free, importance, recipe.spec, average, track=track))
        )
        recipe = replace(recipe, spec=recipe.spec.with_bits(bits))

    def prepare(path: str, part: nn.Module) -> None:
        prefix = f"{path}." if path else ""
        cluster_linears(
            part,
            recipe,
            importance,
            prefix=prefix,
            world=world,
            start=steps.tables,
            track=no_progress if path else track,
        )

    def finish(model: Any) -> None:
        palettize_embeddings(model, recipe.swaps, recipe.spec, rounding)
        if build is not None:  # it is sharded with what trains in it
            freeze_dense_embeddings(model)

    model = (build or _in_place(dense))(prepare=prepare, finish=finish)
    if fitting is not None and recipe.passes is None:
        steps.compensate(model, list(fitting), world=world, track=track)
    elif fitting is not None:
        steps.reconstruct(model, list(fitting), passes=recipe.passes, seed=recipe.seed, world=world, track=track)
    if recipe.holds:
        hold(model)
    return model


def initialize_by_layer(
    layers: Layers,
    recipe: Recipe,
    *,
    calibration: Sequence[Tensor],
    fitting: Sequence[Tensor],
    world: World = ALONE,
    track: Track = no_progress,
    kept: KeptStart | None = None,
) -> Any:
    """As `initialize`, to the bit, with the dense weights of one decoder layer in memory: for a recipe that reconstructs
    layers and holds assignments. Returns the model.

    A layer that is finished is packed and stays in memory; it goes to `kept`, too. A start that was interrupted goes on from
    what `kept` has of it.
    """
    model = layers.model
    begun = kept.begun() if kept is not None else None
    if begun is None:
        done, states = 0, None
        tables, bits, rounding = _tables(layers, recipe, calibration, world=world, track=track)
    else:
        done, bits, tables, states = begun
        rounding = {}
    recipe = replace(recipe, spec=recipe.spec.with_bits(bits))
    palettize_embeddings(model, recipe.swaps, recipe.spec, rounding)
    inside = tuple(f"{path}." for path in layers.paths)
    outside = {name: value for name, value in tensors_of(model).items() if not name.startswith(inside)}
    if begun is not None:
        put(model, {name: tables.pop(name) for name in outside})
    elif kept is not None:
        kept.begin({**tables, **outside}, bits)

    def start(weight: Tensor, grid: Grid, *, name: str, **_: Any) -> Tensor:
        return tables.pop(f"tables.{name}").to(weight.device)

    def begin(path: str, layer: nn.Module) -> None:
        cluster_linears(layer, recipe, prefix=f"{path}.", world=world, start=start)

    def end(path: str, layer: nn.Module, states: dict[str, Tensor]) -> None:
        hold(layer)
        layers.stay(path)
        if kept is not None:
            kept.add(path, layer, states)

    for path in layers.paths[:done]:
        layer = model.get_submodule(path)
        begin(path, layer)
        hold(layer)
        layers.stay(path)
        assert kept is not None
        kept.fill_layer(path, layer)
    options: dict[str, Any] = {"passes": recipe.passes, "seed": recipe.seed, "world": world, "track": track}
    reconstruct(model, list(fitting), layers=layers, begin=begin, end=end, done=done, states=states, **options)
    return model


def _tables(
    layers: Layers, recipe: Recipe, calibration: Sequence[Tensor], *, world: World, track: Track
) -> tuple[dict[str, Tensor], dict[str, int], dict[str, Rounded]]:
    """What follows from the importance: ("tables.PATH" -> where the tables of a linear start, bits of the linears, how
    embeddings are rounded).

    Nothing of weight size is kept: of each layer tables with each number of bits that a linear may get, and what the loss is
    expected to rise by.
    """
    average = recipe.average_bits
    candidates: dict[str, dict[int, Tensor]] = {}
    rises: dict[str, dict[int, float]] = {}

    def tabulate(path: str, layer: nn.Module, importance: dict[str, Tensor]) -> None:
        for swap in recipe.clustered:
            if not swap.name.startswith(f"{path}."):
                continue
            weight = layers.model.get_submodule(swap.name).weight.detach()
            weighing = importance.pop(swap.name, None)
            room = None if Override.of(recipe.overrides, swap.name).bits else average
            if room is not None:
                found = world.on_main(partial(rises_of, swap.name, weight, weighing, recipe.spec, room))
                rises[swap.name] = {int(bits): rise for bits, rise in found.items()}
            options: dict[str, Any] = {"importance": weighing, "name": swap.name, "world": world}
            candidates[swap.name] = {
                bits: shared_kmeans_start(
                    weight,
                    replace(recipe.clustering.grid, bits=bits),
                    granularity=recipe.spec.granularity_of(swap.name),
                    **options,
                ).cpu()
                for bits in (tried_bits(room) if room is not None else [recipe.spec.bits_of(swap.name)])
            }

    moments: dict[str, Tensor] = {}
    if recipe.importance == "none":
        for path in track(layers.paths, "k-means start", len(layers.paths)):
            with layers.whole(path) as layer:
                tabulate(path, layer, {})
    else:
        moments = collect_by_layer(
            layers,
            [swap.name for swap in recipe.clustered],
            list(calibration),
            tabulate,
            kind=recipe.importance,
            moments=output_embedding(recipe.swaps),
            world=world,
            track=track,
        )
    bits = {swap.name: recipe.spec.bits_of(swap.name) for swap in recipe.clustered}
    if average is not None:
        bits = recipe.chosen(lambda free: choose(free, rises, recipe.spec, average))
    tables = {f"tables.{name}": candidates[name][count] for name, count in bits.items()}
    return tables, bits, compensating_rounding(recipe.swaps, moments)


def restore(dense: Any, recipe: Recipe, kept: KeptStart, **options: Any) -> Any:
    """As `initialize`, with what is kept in place of what it computes. `recipe` has the bits of all linears."""
    nothing = Steps(collect=lambda *_, **__: {}, tables=no_tables, rounding=lambda *_, **__: {})
    model = initialize(dense, recipe, steps=nothing, **options)
    kept.fill(model)
    return model


def no_tables(weight: Tensor, grid: Grid, *, granularity: Granularity, **_: Any) -> Tensor:
    """In place of `shared_kmeans_start`, where tables come from elsewhere or only their shape counts."""
    return torch.zeros(granularity.groups(*weight.shape), grid.numbers, device=weight.device)


def _in_place(dense: Any) -> Build:
    def build(prepare: Callable[[str, nn.Module], None], finish: Callable[[Any], None]) -> Any:
        prepare("", dense)
        finish(dense)
        return dense

    return build


def cluster_linears(
    model: nn.Module,
    recipe: Recipe,
    importance: dict[str, Tensor] | None = None,
    *,
    prefix: str = "",
    world: World = ALONE,
    start: Callable[..., Tensor] = shared_kmeans_start,
    track: Track = no_progress,
) -> None:
    """Replace the planned linears by `ClusteredLinear`, one at a time, in place.

    `model` may be the part of one at `prefix` (a path that ends in a dot): then the swaps below it are done. What
    `importance` holds of a layer is taken out of it. All processes of `world` call this with the same weights; where the
    model is sharded, each has its rows of the importance.
    """
    swaps = [swap for swap in recipe.clustered if swap.name.startswith(prefix)]
    for swap in track(swaps, "k-means start", len(swaps)):
        linear = model.get_submodule(swap.name.removeprefix(prefix))
        assert isinstance(linear, nn.Linear)
        bits, granularity = recipe.spec.bits_of(swap.name), recipe.spec.granularity_of(swap.name)
        clustering = replace(recipe.clustering, bits=bits, granularity=granularity)
        weighing = _whole(importance.pop(swap.name, None) if importance else None, swap, world)
        centroids = start(
            linear.weight.detach(),
            clustering.grid,
            granularity=clustering.granularity,
            importance=weighing,
            name=swap.name,
            world=world,
        )
        _require_range(centroids, clustering, swap.name)
        kept = None
        if weighing is not None and recipe.centroid_weighting == "importance" and not clustering.trains_luts:
            relative = relative_importance(weighing, linear.weight, granularity=clustering.granularity, layer=swap.name)
            kept = world.broadcast(relative)  # processors may differ in the last bit
        clustered = ClusteredLinear(
            linear.weight,
            linear.bias,
            centroids,
            clustering,
            temperature=recipe.temperature,
            name=swap.name,
            importance=kept,
        )
        model.set_submodule(swap.name.removeprefix(prefix), clustered)


def _require_range(centroids: Tensor, clustering: Clustering, name: str) -> None:
    """Raises UserError for tables that a fixed scale of float8 entries does not reach."""
    if clustering.lut_scale is None or centroids.is_meta:
        return
    largest = float(centroids.abs().max())
    reach = lut_reach(clustering.lut_dtype, clustering.lut_scale)
    if largest > reach:
        scale = lut_scale(centroids, clustering.lut_dtype)
        raise UserError(
            f"tables with --lut-scale {clustering.lut_scale:g} reach {reach:g}, but {name} needs {largest:.4g}; use "
            f"--lut-scale {float(scale or 0):g}"
        )


def _whole(importance: Tensor | None, swap: Swap, world: World) -> Tensor | None:
    """All rows of a layer's importance, of which the processes of a sharded model have a share each."""
    if importance is None or importance.dim() == 1 or not world.sharded:
        return importance
    return world.gather_rows(importance.to(world.device), swap.shape[0])
