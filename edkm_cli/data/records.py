"""A record -> the text a model sees, and which of it is the answer that it is to learn.

Kinds of records, by their fields: `messages` (or ShareGPT's `conversations`), `prompt` and `completion`, Alpaca's
`instruction` and `output`, and `text`. A record with several of these counts as the first.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from edkm_cli.config import UserError
from edkm_cli.data.chat import TemplateError, render_chat, render_whole

_ALPACA_PROMPT = (
    "Below is an instruction that describes a task{with_input}. Write a response that appropriately completes the "
    "request.\n\n### Instruction:\n{instruction}{input}\n\n### Response:\n"
)
_ROLES = {"human": "user", "gpt": "assistant", "chatgpt": "assistant", "bing": "assistant", "bard": "assistant"}


@dataclass(frozen=True)
class Document:
    """A text, and the parts of it, (start, end) in characters, that the model is to learn as answers: None where all of
    it is to be learnt. `templated`: a chat template has put the special tokens in."""

    text: str
    answers: tuple[tuple[int, int], ...] | None = None
    templated: bool = False


def alpaca_prompt(record: Mapping[str, Any]) -> str:
    """The prompt of Alpaca's authors, up to where the answer begins.

    >>> print(alpaca_prompt({"instruction": "Name a colour.", "output": "Blue."}) + "Blue.")
    Below is an instruction that describes a task. Write a response that appropriately completes the request.
    <BLANKLINE>
    ### Instruction:
    Name a colour.
    <BLANKLINE>
    ### Response:
    Blue.
    """
    given = record.get("input") or ""
    return _ALPACA_PROMPT.format(
        with_input=", paired with an input that provides further context" if given else "",
        instruction=record["instruction"],
        input=f"\n\n### Input:\n{given}" if given else "",
    )


def render(
    record: Any, where: str, *, tokenizer: Any = None, column: str | None = None, whole: bool = False
) -> list[Document]:
    """The documents of a record: one, but for conversations whose template shows earlier answers in another way than
    it has them written.

    Args:
        where: names the record in errors.
        tokenizer: its chat template renders messages.
        column: the field that holds the text (or the messages); None: the kind is seen from the fields.
        whole: all of the text is to be learnt, so that no answers are looked for.

    Raises UserError for a record of no known kind, and where a chat template is missing or refuses it.
    """
    found = _render(record, where, tokenizer, column, whole)
    return [replace(document, answers=None) for document in found] if whole else found


def _render(record: Any, where: str, tokenizer: Any, column: str | None, whole: bool) -> list[Document]:
    if isinstance(record, str):
        return [Document(_clean(record))]
    if not isinstance(record, Mapping):
        raise UserError(f"a record must be a string or an object with fields, but {where} is a {type(record).__name__}")
    if column is not None:
        return _column(record, column, where, tokenizer, whole)
    messages = _messages(record)
    if messages is not None:
        return _conversation(messages, None, record, where, tokenizer, whole)
    if "prompt" in record and "completion" in record:
        return _completion(record, where, tokenizer, whole)
    if isinstance(record.get("instruction"), str):
        return [_answered(alpaca_prompt(record), _text(record.get("output"), "output", where))]
    if "text" in record:
        return [Document(_text(record["text"], "text", where))]
    raise UserError(
        "a record must be a string, or have 'text', 'messages', 'conversations', 'prompt' and 'completion', or Alpaca's "
        f"'instruction' and 'output'; but {where} has {_fields(record)}; name the field with --data-column"
    )


def _column(record: Mapping[str, Any], column: str, where: str, tokenizer: Any, whole: bool) -> list[Document]:
    if column not in record:
        raise UserError(f"--data-column must be a field of the records, which are {_fields(record)}, got {column!r}")
    value = record[column]
    if isinstance(value, list) and all(isinstance(turn, Mapping) for turn in value):
        return _conversation([_turn(turn) for turn in value], None, record, where, tokenizer, whole)
    return [Document(_text(value, column, where))]


def _fields(record: Mapping[str, Any]) -> str:
    return ", ".join(map(repr, list(record)[:12])) or "no fields"


def _text(value: Any, name: str, where: str) -> str:
    """A field as text; null is empty. Raises UserError for anything else."""
    if value is None:
        return ""
    if not isinstance(value, str):
        raise UserError(f"{name!r} of a record must be a text, but in {where} it is a {type(value).__name__}")
    return _clean(value)


def _clean(text: str) -> str:
    """Without halves of surrogate pairs, which JSON can hold and UTF-8 cannot."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    return text


def _answered(prompt: str, completion: str) -> Document:
    prompt = _clean(prompt)
    return Document(prompt + completion, ((len(prompt), len(prompt) + len(completion)),) if completion else ())


def _completion(record: Mapping[str, Any], where: str, tokenizer: Any, whole: bool) -> list[Document]:
    prompt, completion = record["prompt"], record["completion"]
    if isinstance(prompt, list) and isinstance(completion, list):
        before, after = [_turn(turn) for turn in prompt], [_turn(turn) for turn in completion]
        return _conversation(before + after, len(before), record, where, tokenizer, whole)
    return [_answered(_text(prompt, "prompt", where), _text(completion, "completion", where))]


def _messages(record: Mapping[str, Any]) -> list[dict[str, Any]] | None:
    for name in ("messages", "conversations", "conversation"):
        turns = record.get(name)
        if isinstance(turns, list) and turns and all(isinstance(turn, Mapping) for turn in turns):
            return [_turn(turn) for turn in turns]
    return None


def _turn(turn: Mapping[str, Any]) -> dict[str, Any]:
    """A message with `role` and `content`; ShareGPT's `from` and `value` in their places, empty fields left out."""
    if "from" in turn and "value" in turn:
        return {"role": _ROLES.get(str(turn["from"]), turn["from"]), "content": _cleaned(turn["value"] or "")}
    return {name: _cleaned(value) for name, value in turn.items() if value is not None or name == "content"}


def _cleaned(value: Any) -> Any:
    return _clean(value) if isinstance(value, str) else value


def _conversation(
    messages: list[dict[str, Any]],
    first_answer: int | None,
    record: Mapping[str, Any],
    where: str,
    tokenizer: Any,
    whole: bool,
) -> list[Document]:
    """Rendered by the chat template. `first_answer`: only messages from there on are answers."""
    if tokenizer is None or not getattr(tokenizer, "chat_template", None):
        raise UserError(
            f"{where} is a conversation, but the model's tokenizer has no chat template; use an instruction-tuned model, "
            "or records with 'prompt' and 'completion'"
        )
    for turn in messages:
        if not isinstance(turn.get("role"), str):
            raise UserError(f"a message must have 'role' and 'content', but one in {where} has {_fields(turn)}")
    tools = record.get("tools") or None
    try:
        if whole:
            return [Document(render_whole(tokenizer, messages, tools=tools), templated=True)]
        rendered = render_chat(tokenizer, messages, tools=tools, first_answer=first_answer)
    except TemplateError as error:
        raise UserError(f"the model's chat template cannot render {where}: {error}") from error
    return [Document(text, answers, templated=True) for text, answers in rendered]
