"""What a model writes beside what a reference writes: prompts of eight kinds that come with the package, greedy.

Texts of two models part sooner or later, and each token after that differs for good. So the token at which they part says
how near the models are, and how the rest reads is counted: whether it repeats itself, whether it ends, how long it is.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import takewhile
from operator import eq
from pathlib import Path
from statistics import fmean, median
from typing import Any

import torch
from transformers import GenerationConfig

from edkm_cli.data.records import on_a_fixed_day, render_text
from edkm_cli.errors import explained
from edkm_cli.nn.hooks import changed
from edkm_cli.progress import Track, no_progress

_NEW_TOKENS = 48
_AT_ONCE = 16  # prompts in a batch
_REPEATED = 4  # tokens in a row that stand in the same text before
_SHOWN = 8  # pairs of texts in the result, one of each kind


@dataclass(frozen=True)
class Prompt:
    """A text to continue, or a message to answer, and its tokens."""

    kind: str
    text: str
    ids: list[int]


@on_a_fixed_day
def prompts(count: int, tokenizer: Any) -> list[Prompt]:
    """The first so many prompts, one of each kind after the other. Messages have the tokenizer's chat template, where it
    has one. Raises UserError where that fails."""
    kinds = json.loads(Path(__file__).with_name("prompts.json").read_text(encoding="utf-8"))
    turns = zip(*([(kind["name"], text, kind["asked"]) for text in kind["prompts"]] for kind in kinds), strict=True)
    some = [entry for turn in turns for entry in turn][:count]
    with explained("the model's chat template cannot render a question", "; mend it, or give --prompts 0"):
        return [Prompt(kind, text, _ids(tokenizer, text, asked)) for kind, text, asked in some]


@torch.no_grad()
def write(model: Any, asked: Sequence[Prompt], *, track: Track = no_progress) -> list[list[int]]:
    """The tokens that a model writes after each prompt, to its end of text (with it) or 48, the likeliest one each time."""
    ids, ends = [prompt.ids for prompt in asked], _ends(model)
    plain = GenerationConfig(do_sample=False, max_new_tokens=_NEW_TOKENS, pad_token_id=0, eos_token_id=ends or None)
    written: dict[int, list[int]] = {}
    order = sorted(range(len(ids)), key=lambda index: len(ids[index]))  # those of a batch are of nearly the same length
    batches = [order[first : first + _AT_ONCE] for first in range(0, len(order), _AT_ONCE)]
    for batch in track(batches, "writing", len(batches)):
        width = max(len(ids[index]) for index in batch)
        rows = [[0] * (width - len(ids[index])) + ids[index] for index in batch]
        mask = [[0] * (width - len(ids[index])) + [1] * len(ids[index]) for index in batch]
        given, attended = (torch.tensor(value, device=model.device) for value in (rows, mask))
        with changed(model, generation_config=plain):  # transformers fills in from the model's own what is not given
            output = model.generate(given, attention_mask=attended)
        for index, row in zip(batch, output[:, width:].tolist(), strict=True):
            written[index] = row[: next((place for place, token in enumerate(row) if token in ends), len(row)) + 1]
    return [written[index] for index in range(len(ids))]


def compare_writing(
    asked: Sequence[Prompt], ours: list[list[int]], theirs: list[list[int]], tokenizer: Any, model: Any
) -> dict[str, Any]:
    """The JSON of two models' texts.

    `prompts`, `identical` (share), `parts_at` (median number of equal tokens before the first that differs; texts that are
    identical count whole), `by_kind` (the same), of `model` and `reference` each `repetition` (share of 4 tokens in a row
    that stood in the text before), `stopped` (share of texts that ended) and `tokens` (mean length), and some `examples`.
    """
    ends, parted = _ends(model), [sum(takewhile(bool, map(eq, a, b))) for a, b in zip(ours, theirs, strict=True)]
    same = [a == b for a, b in zip(ours, theirs, strict=True)]
    kinds = list(dict.fromkeys(prompt.kind for prompt in asked))
    places = {kind: [index for index, prompt in enumerate(asked) if prompt.kind == kind] for kind in kinds}

    def figures(some: Sequence[int]) -> dict[str, Any]:
        share = fmean(same[index] for index in some)
        return {"prompts": len(some), "identical": share, "parts_at": median(parted[index] for index in some)}

    def style(texts: list[list[int]]) -> dict[str, float]:
        stopped = fmean(text[-1] in ends for text in texts)
        return {"repetition": fmean(map(_repetition, texts)), "stopped": stopped, "tokens": fmean(map(len, texts))}

    def example(index: int) -> dict[str, Any]:
        texts = {"model": ours[index], "reference": theirs[index]}
        shown = {name: tokenizer.decode(ids, skip_special_tokens=True) for name, ids in texts.items()}
        return {"kind": asked[index].kind, "prompt": asked[index].text, "parts_at": parted[index], **shown}

    return {
        **figures(range(len(asked))),
        "by_kind": [{"kind": kind, **figures(places[kind])} for kind in kinds],
        "model": style(ours),
        "reference": style(theirs),
        "examples": [example(index) for index in range(min(_SHOWN, len(asked)))],
    }


def _ids(tokenizer: Any, text: str, asked: bool) -> list[int]:
    if asked and tokenizer.chat_template:
        text = render_text(tokenizer, [{"role": "user", "content": text}], None, ask=True)
        return tokenizer(text, add_special_tokens=False)["input_ids"]
    return tokenizer(text)["input_ids"]


def _ends(model: Any) -> list[int]:
    given = model.generation_config.eos_token_id
    return given if isinstance(given, list) else [] if given is None else [given]


def _repetition(text: list[int]) -> float:
    runs = [tuple(text[start : start + _REPEATED]) for start in range(len(text) - _REPEATED + 1)]
    return 1 - len(set(runs)) / len(runs) if runs else 0.0
