"""What lasts as long as a block: hooks, attributes, evaluation; where decoder layers are, and what they are called with."""

import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._pytree import tree_leaves

from edkm_cli.errors import UserError
from edkm_cli.runtime.experts import with_one_expert

LAST = torch.tensor([-1])
"""The last token, as `logits_to_keep`: told by a number, Gemma 4 cuts its states to it, too."""


@contextmanager
def hooked(
    modules: Iterable[nn.Module], hook: Callable[..., Any], *, after: bool = False, with_kwargs: bool = False
) -> Iterator[None]:
    """Call `hook` before each forward pass of the modules, or `after` it, as long as the block lasts.

    `hook` gets (module, args), with `with_kwargs` (module, args, kwargs), and after the pass its output as well.
    """
    register = "register_forward_hook" if after else "register_forward_pre_hook"
    handles = [getattr(module, register)(hook, with_kwargs=with_kwargs) for module in modules]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


@contextmanager
def changed(*targets: Any, **values: Any) -> Iterator[None]:
    """Attributes of the targets have these values as long as the block lasts."""
    before = [(target, name, getattr(target, name)) for target in targets for name in values]
    try:
        for target, name, _ in before:
            setattr(target, name, values[name])
        yield
    finally:
        for target, name, value in before:
            setattr(target, name, value)


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """The model is in evaluation mode as long as the block lasts."""
    was_training = model.training
    model.eval()
    try:
        yield
    finally:
        model.train(was_training)


@contextmanager
def frozen(model: nn.Module) -> Iterator[None]:
    """No parameter of the model asks for a gradient as long as the block lasts, unless somebody makes it ask."""
    trained = [name for name, parameter in model.named_parameters() if parameter.requires_grad]
    model.requires_grad_(False)
    try:
        yield
    finally:
        model.requires_grad_(False)
        for name in trained:
            model.get_parameter(name).requires_grad_(True)


def without_dropout(model: nn.Module) -> None:
    """Take away the dropout of a family, noise beside what a teacher says; an adapter keeps its own. Layers of transformers
    hold it as numbers that their forward reads, but Falcon's and Persimmon's, which ask the configuration."""
    for module in (module for path, module in model.named_modules() if "lora" not in path):
        for name, value in vars(module).items():
            if isinstance(value, float) and ("drop" in name or (name == "p" and isinstance(module, nn.Dropout))):
                setattr(module, name, 0.0)


def language_model(model: Any) -> str:
    """The path, with a dot at its end, of what computes with text in a model that reads images, too; "" in others."""
    if model.config.get_text_config(decoder=True) is model.config:
        return ""
    decoder = model.get_decoder()
    return next((f"{path}." for path, module in model.named_modules() if module is decoder and path), "")


def decoder_layers(model: Any) -> dict[str, nn.Module]:
    """The model's decoder layers, in order: module path -> module.

    They are of the classes that its family names (`_no_split_modules`); where it names none, the one list of as many
    modules of one class as the configuration has layers. Raises UserError where there is no such list.
    """
    kinds, inside = set(getattr(model, "_no_split_modules", None) or ()), language_model(model)
    modules = {name: module for name, module in model.named_modules() if name.startswith(inside)}
    if named := {name: module for name, module in modules.items() if type(module).__name__ in kinds}:
        # Some families name parts of their layers, too.
        return {path: module for path, module in named.items() if not any(path.startswith(f"{one}.") for one in named)}
    count = getattr(model.config.get_text_config(decoder=True), "num_hidden_layers", None)
    lists = {
        name: module
        for name, module in modules.items()
        if isinstance(module, nn.ModuleList) and len(module) == count and len({type(layer) for layer in module}) == 1
    }
    if len(lists) != 1:
        rule = "--sharding full and methods that work layer by layer must know the decoder layers"
        found = f"{type(model).__name__} does not name them (_no_split_modules)"
        raise UserError(f"{rule}, but {found}; use --sharding none, or another method")
    ((path, layers),) = lists.items()
    return {f"{path}.{index}": layer for index, layer in enumerate(layers)}


class LayerCall(NamedTuple):
    """One call of a decoder layer: `layer(hidden, *args, **kwargs)`; hidden states are (batch, sequence, hidden)."""

    hidden: Tensor
    args: tuple[Any, ...]
    kwargs: dict[str, Any]


def hidden_of(output: Any) -> Tensor:
    """What a decoder layer gives, (batch, sequence, hidden), of which some make a tuple."""
    return output[0] if isinstance(output, tuple) else output


class Reached(Exception):
    """Raised by a hook to leave a forward pass of which no more is wanted."""


def entering(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    """The hidden states that a decoder layer, or a part of one, is called with."""
    return kwargs["hidden_states"] if "hidden_states" in kwargs else args[0]


def layer_calls(run: Callable[[], Any], layers: Sequence[nn.Module]) -> list[LayerCall]:
    """What `run`, a pass of a model, calls each of the decoder layers with; it is left when the last one is reached."""
    calls: dict[nn.Module, LayerCall] = {}

    def keep(layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        rest = {name: value for name, value in kwargs.items() if name != "hidden_states"}
        calls[layer] = LayerCall(entering(args, kwargs), args if "hidden_states" in kwargs else args[1:], rest)
        if len(calls) == len(layers):
            raise Reached

    with hooked(layers, keep, with_kwargs=True), suppress(Reached):
        run()
    return [calls[layer] for layer in layers]


@lru_cache(maxsize=1)  # asked again for each setting that a dry run tries
@torch.enable_grad()
def layers_form_a_chain(skeleton: Any) -> bool:
    """Whether the decoder layers of a model on the meta device are known to get nothing of a text but hidden states, each
    once those of the layer before it.

    Where they get more of it, as gemma3n's an embedding of each token, that comes from parameters and carries a gradient;
    masks and positions are the same for all texts of a shape.
    """
    model = with_one_expert(skeleton).eval()  # a copy: a pass may leave tensors in it
    layers, ids = decoder_layers(model).values(), torch.zeros(1, 4, dtype=torch.int64, device="meta")
    # A packed embedding has no parameter: what comes from it tells so by a gradient, too.
    model.get_input_embeddings().register_forward_hook(lambda module, args, output: output.requires_grad_())

    def passes(tuples: bool) -> bool:
        entered, given = list[Tensor](), list[Any]()

        def pass_on(*args: Any, **kwargs: Any) -> Any:
            entered.append(entering(args, kwargs))
            given.extend(tree_leaves((args, kwargs)))
            return (entered[-1],) if tuples else entered[-1]

        for layer in layers:
            layer.forward = pass_on
        try:
            with FakeTensorMode(allow_non_fake_inputs=True), warnings.catch_warnings(action="ignore"):
                model(input_ids=ids, use_cache=False)
        except Exception:  # the other kind, or code that came with a model and looks at values
            return False
        once = len(entered) == len(layers) and all(hidden is entered[0] for hidden in entered)
        beside = [x for x in given if isinstance(x, Tensor) and x is not entered[0]]
        return once and entered[0].dim() == 3 and not any(x is ids or x.requires_grad for x in beside)

    return passes(False) or passes(True)
