"""How long a run takes on this machine: `--dry-run --time`.

A model of one decoder layer, with the planned one's shapes and random weights, goes through the whole of a run, twice: with
few tokens for its start and with more, so that what the start does for each weight and for each token are told apart. What
takes longer with every layer is multiplied by the number of layers; passes through all layers and the head, by weights."""

import copy
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedTokenizerFast

from edkm_cli.compress import compress
from edkm_cli.model_files import build
from edkm_cli.nn.hooks import changed, decoder_layers
from edkm_cli.preflight import RunPlan, needed_tokens
from edkm_cli.progress import Observer, quiet_bars
from edkm_cli.self_text import at_once, cache_dtype, text_shape, write_text
from edkm_cli.train import teacher

_FEW_TOKENS, _MORE_TOKENS, _STEPS, _WRITTEN = 1024, 8192, 2, 8
_OF_LAYERS = ("reconstruction", "compensation", "k-means start")  # loops over decoder layers or their linears


def seconds_by_phase(plan: RunPlan) -> dict[str, float]:
    """About how many seconds each phase of a run of one process takes here. Takes the memory of one layer's run."""
    config, started = plan.config, plan.config.start_tokens or 0
    layers = decoder_layers(plan.skeleton)
    in_layers = sum(weight.numel() for layer in layers.values() for weight in layer.parameters())
    head = plan.skeleton.get_input_embeddings().weight.numel()
    across = (in_layers + head) / (in_layers / len(layers) + head)  # a pass through the model, by one through its copy
    with tempfile.TemporaryDirectory() as folder, quiet_bars():
        model = _write_one_layer(plan, Path(folder))
        text = across * _text_seconds(plan, model) if plan.writes_text else 0.0
        with changed(teacher, cache_directory=lambda: Path(folder)):  # its states are of no use to another run
            few, more = (_measured(plan, Path(folder), min(count, started)) for count in (_FEW_TOKENS, _MORE_TOKENS))
    tokens, in_loops = max(0, started - _MORE_TOKENS) / (_MORE_TOKENS - _FEW_TOKENS), more["calibration"]
    by_layer = 0.0
    for loop in _OF_LAYERS:  # a straight line through both numbers of tokens
        by_layer += more[loop] + tokens * max(0.0, more[loop] - few[loop])
        in_loops += more[loop]
    each, measured = across / _STEPS * config.steps, across * config.eval_windows * max(1, len(config.eval_data))
    taught = max(few["teacher"], more["teacher"])  # the second run finds the first one's states
    windows = sum(seconds for loop, seconds in more.items() if loop.startswith("perplexity"))
    found = {"load": text + more["load"], "evaluate": measured * windows, "teacher": each * taught}
    found["start"] = len(layers) * by_layer + across * more["calibration"] + max(0.0, more["start"] - in_loops)
    found |= {"train": each * more["train"], "dense": each * more["dense"], "export": across * more["export"]}
    return {name: round(seconds, 3) for name, seconds in found.items() if seconds}


def _write_one_layer(plan: RunPlan, folder: Path) -> Any:
    """The model of one layer, which is in `folder` with a tokenizer of bytes and a text."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    architecture = copy.deepcopy(plan.architecture)
    config = architecture.get_text_config(decoder=True)
    count = config.num_hidden_layers
    for name, value in {**vars(config), "num_hidden_layers": 1, "first_k_dense_replace": 0}.items():
        if isinstance(value, list) and len(value) == count:  # what differs from layer to layer
            setattr(config, name, value[-1:])
        elif hasattr(config, name):
            setattr(config, name, value)
    architecture.bos_token_id, architecture.eos_token_id = None, 256
    model = build(architecture, dtype=torch.bfloat16)
    model.save_pretrained(folder / "model")
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({symbol: index for index, symbol in enumerate([*alphabet, "<eos>"])}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<eos>").save_pretrained(folder / "model")
    (folder / "text.txt").write_text("\n".join(map(str, range(20_000))), encoding="ascii")
    return model


def _text_seconds(plan: RunPlan, model: Any) -> float:
    """Of the text that the model writes, from a few tokens of as many sequences as it writes together."""
    sequences, length = text_shape(plan.architecture, needed_tokens(plan, written=True))
    model = model.to(plan.world.device, getattr(torch, plan.dense_dtype))
    batches = -(-sequences // at_once(plan.skeleton, length, cache_dtype(model, model.device.type)))
    begin = time.perf_counter()
    write_text(model, [0], sequences=-(-sequences // batches), length=_WRITTEN + 1, seed=0)
    return (time.perf_counter() - begin) / _WRITTEN * batches * length


def _measured(plan: RunPlan, folder: Path, start_tokens: int) -> dict[str, float]:
    """Seconds of a run of the model of one layer, by phase and by loop."""
    seconds: dict[str, float] = defaultdict(float)

    def track(items: Iterable[Any], description: str, total: int) -> Iterator[Any]:
        begin = time.perf_counter()
        try:
            yield from items
        finally:  # also where a loop is left before its end
            seconds[description] += time.perf_counter() - begin

    kept = ("bits", "embedding_bits", "label_weight", "assignments", "start", "allocation", "lut_dtype", "dtype")
    values: dict[str, Any] = {name: getattr(plan.config, name) for name in (*kept, "calibration_tokens")}
    values |= {"model": str(folder / "model"), "revision": None, "output": str(folder / "out")}
    values |= {"data": (str(folder / "text.txt"),), "eval_data": (), "eval_windows": 1, "eval_every": 0, "log_with": ()}
    values |= {"steps": min(_STEPS, plan.config.steps), "start_tokens": max(2, start_tokens), "save_every": 0}
    values |= {"text_tokens": None, "keep_best": False, "max_perplexity_ratio": 0.0, "long_records": "split"}
    config = replace(plan.asked, skip=(), overrides=(), target_size=None, **values)
    seconds.update(compress(config, observer=Observer(track), overwrite=True)["seconds"])
    return seconds
