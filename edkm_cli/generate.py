"""`edkm generate`: load anything and let it write; tokens appear as they come."""

import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from edkm_cli import model_files, models
from edkm_cli.config import known_positions
from edkm_cli.data.records import render_text
from edkm_cli.errors import UserError, brief, explained
from edkm_cli.hf import load_any
from edkm_cli.nn.swap import dequantize_model
from edkm_cli.runtime import dispatch
from edkm_cli.runtime.palettized import PalettizedLinear


@dataclass(frozen=True)
class Manner:
    """How a model writes: the likeliest token each time, or with a `temperature` one at random by their probabilities, among
    the likeliest of total probability `top_p` (and as many as its generation_config.json has for `top_k`, 50 without).
    `system` begins a conversation; `emit` gets the text as it comes."""

    max_new_tokens: int
    temperature: float | None = None
    top_p: float = 1.0
    system: str | None = None
    emit: Callable[[str], None] = lambda text: None

    @property
    def opening(self) -> list[dict[str, str]]:
        return [] if self.system is None else [{"role": "system", "content": self.system}]


@dataclass(frozen=True)
class Writer:
    """A model with its tokenizer."""

    name: str
    model: Any
    tokenizer: Any
    packed: bool


def load_writer(
    source: models.ModelSource, *, chat: bool, dequantize: bool | None, dtype: str, device: str, seed: int = 0
) -> Writer:
    """A model that writes. `dequantize` None: weights stay packed where a kernel computes from them, which is faster.

    Raises UserError for a model that cannot be had, or that has no chat template though `chat` asks for one.
    """
    name, tokenizer = source.name, models.load_tokenizer(source)
    if chat and not tokenizer.chat_template:
        rule = f"a conversation needs a chat template, but {name} has none"
        raise UserError(f"{rule}; give a prompt without --chat and --system")
    model = load_any(source, dtype=dtype, device=device)
    model_files.check_tokenizer(name, tokenizer, model.config)
    linear = next((m for m in model.modules() if isinstance(m, PalettizedLinear)), None)
    if linear is not None and (dequantize or (dequantize is None and not dispatch.computes_packed(linear.packed()))):
        dequantize_model(model, getattr(torch, dtype))
        linear = None
    torch.manual_seed(seed)
    return Writer(name, model, tokenizer, linear is not None)


class _Stream:
    """What transformers hands new tokens to: decodes them, after those of `ids`, and emits the text that is settled."""

    def __init__(self, tokenizer: Any, emit: Callable[[str], None], ids: list[int]):
        self._tokenizer, self._emit, self._ids = tokenizer, emit, ids
        self._prompt_seen, self.before = False, tokenizer.decode(ids, skip_special_tokens=True)
        self._shown = self.before

    def put(self, value: Tensor) -> None:
        if not self._prompt_seen:  # the first call brings the prompt
            self._prompt_seen = True
            return
        self._ids.extend(value.reshape(-1).tolist())
        text = self._tokenizer.decode(self._ids, skip_special_tokens=True)
        if not text.endswith("\ufffd"):  # else a character whose other bytes are still to come
            self._show(text)

    def end(self) -> None:
        self._show(self._tokenizer.decode(self._ids, skip_special_tokens=True))

    def _show(self, text: str) -> None:
        if text.startswith(self._shown):
            self._emit(text[len(self._shown) :])
            self._shown = text


# Whatever a model's generation_config.json says: one text, whose tokens can be shown as they come.
_ONE_ANSWER = {"do_sample": False, "num_beams": 1, "num_return_sequences": 1, "return_dict_in_generate": False}


def _write(writer: Writer, inputs: dict[str, Tensor], manner: Manner, *, joined: bool = False) -> tuple:
    """(answer, new tokens, seconds). `joined` to the prompt: some decoders drop a space where a text begins."""

    def numbers(_ids: Tensor, scores: Tensor) -> Tensor:
        if not bool((scores < math.inf).all()):  # a NaN is not less, either
            raise UserError(f"{writer.name}: logits must be numbers, but are NaN or Inf; use --dtype float32")
        return scores

    length, room = inputs["input_ids"].shape[1], _room(writer, inputs)
    if room < 1:
        rule = f"{writer.name} knows {length + room} positions, but what it is to continue has {length}"
        raise UserError(f"{rule}; shorten it")
    options = {"max_new_tokens": min(manner.max_new_tokens, room), "logits_processor": [numbers], **_ONE_ANSWER}
    if manner.temperature is not None:
        options |= {"do_sample": True, "temperature": manner.temperature, "top_p": manner.top_p}
    start = time.perf_counter()
    last = inputs["input_ids"][0, -1:].tolist() if joined else []
    streamer = _Stream(writer.tokenizer, manner.emit, [*last])
    try:
        written = writer.model.generate(**inputs, streamer=streamer, tokenizer=writer.tokenizer, **options)[0, length:]
    except (TypeError, ValueError) as error:
        raise UserError(f"{writer.name}: correct generation_config.json, which fails ({brief(error)})") from error
    seconds, text = time.perf_counter() - start, writer.tokenizer.decode([*last, *written], skip_special_tokens=True)
    return text.removeprefix(streamer.before), len(written), seconds


def _room(writer: Writer, inputs: dict[str, Tensor]) -> float:
    """For how many more tokens the model has positions."""
    return (known_positions(writer.model.config) or math.inf) - inputs["input_ids"].shape[1]


def _encode(writer: Writer, given: str | list[dict[str, str]]) -> dict[str, Tensor]:
    """The model's inputs for a text, or for the messages of a conversation."""
    plain = isinstance(given, str)
    try:
        if not isinstance(given, str):
            given = render_text(writer.tokenizer, given, None, ask=True)
    except Exception as error:  # whatever a model's own template runs into, such as a role that it does not know
        rule = f"{writer.name}: its chat template fails ({brief(error)})"
        raise UserError(f"{rule}; leave --chat and --system out") from error
    with explained("a prompt must be text in UTF-8 that the tokenizer takes", "; give another"):
        inputs = writer.tokenizer(given, return_tensors="pt", add_special_tokens=plain).to(writer.model.device)
    rows, ids = writer.model.config.get_text_config(decoder=True).vocab_size, inputs["input_ids"]
    if not ids.numel() or int(ids.max()) >= rows:
        raise UserError(f"a prompt must be tokens below {rows} of {writer.name}, got {ids[0, :9].tolist()}; change it")
    inputs.pop("token_type_ids", None)
    return dict(inputs)


def generate_text(writer: Writer, prompt: str, manner: Manner, *, chat: bool) -> dict[str, Any]:
    """The result of `edkm generate` with a prompt."""
    inputs = _encode(writer, [*manner.opening, {"role": "user", "content": prompt}] if chat else prompt)
    if not chat:
        manner.emit(prompt)
    answer, tokens, seconds = _write(writer, inputs, manner, joined=not chat)
    return _result(writer, tokens, seconds, prompt=prompt, text=answer if chat else prompt + answer)


def converse(writer: Writer, manner: Manner, *, ask: Callable[[], str | None]) -> dict[str, Any]:
    """A conversation until `ask` gives None, or its positions end: its messages, and how fast the model wrote."""
    messages, tokens, seconds = manner.opening, 0, 0.0
    while (message := ask()) is not None:
        if not message.strip():
            continue
        messages.append({"role": "user", "content": message})
        inputs = _encode(writer, messages)
        if tokens and _room(writer, inputs) < 1:
            manner.emit(f"the conversation ends here: {writer.name} has no positions left\n")
            messages.pop()
            break
        answer, count, took = _write(writer, inputs, manner)
        manner.emit("\n")
        messages.append({"role": "assistant", "content": answer})
        tokens, seconds = tokens + count, seconds + took
    return _result(writer, tokens, seconds, messages=messages)


def _result(writer: Writer, tokens: int, seconds: float, **texts: Any) -> dict[str, Any]:
    """What was written, and how fast; None for the speed where nothing was."""
    speed = tokens / seconds if seconds else None
    return {"model": writer.name, **texts, "packed": writer.packed, "new_tokens": tokens, "tokens_per_second": speed}
