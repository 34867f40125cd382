"""A record -> the text a model sees, and which of it is the answer that it is to learn.

Kinds of records, by their fields: `messages` (or ShareGPT's `conversations`), `prompt` and `completion`, Alpaca's
`instruction` and `output`, and `text`. A record with several of these counts as the first that is not null.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from edkm_cli.data.chat import TemplateError, render_chat, render_whole
from edkm_cli.errors import UserError

_ALPACA_PROMPT = (
    "Below is an instruction that describes a task{with_input}. Write a response that appropriately completes the "
    "request.\n\n### Instruction:\n{instruction}{input}\n\n### Response:\n"
)
# ShareGPT's names for those who speak, by the roles that chat templates know.
_SPEAKERS = {
    "system": ("system",),
    "developer": ("developer",),
    "user": ("user", "human"),
    "assistant": ("assistant", "gpt", "chatgpt", "bing", "bard", "model", "function_call"),
    "tool": ("tool", "observation", "function_response"),
}
_ROLES = {name: role for role, names in _SPEAKERS.items() for name in names}
_CHATS = ("messages", "conversations", "conversation")


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
    for name in _CHATS:
        if record.get(name) is not None:
            return _conversation(_messages(record[name], name, where), None, record, where, tokenizer, whole)
    if _has(record, "prompt", "completion"):
        return _completion(record, where, tokenizer, whole)
    if _has(record, "instruction", "output"):
        fields = {name: _text(record.get(name), name, where) for name in ("instruction", "input", "output")}
        return [_answered(alpaca_prompt(fields), fields["output"])]
    if record.get("text") is not None:
        return [Document(_text(record["text"], "text", where))]
    if _is_null(record):
        return []
    raise UserError(
        "a record must be a string, or have 'text', 'messages', 'conversations', 'prompt' and 'completion', or Alpaca's "
        f"'instruction' and 'output'; but {where} has {_fields(record)}; name the field with --data-column"
    )


def _has(record: Mapping[str, Any], first: str, second: str) -> bool:
    """Whether a record has both fields, one of them not null."""
    return first in record and second in record and (record[first] is not None or record[second] is not None)


def _is_null(record: Mapping[str, Any]) -> bool:
    """Whether a record is of a known kind, and null."""
    pairs = (("prompt", "completion"), ("instruction", "output"))
    return any(name in record for name in ("text", *_CHATS)) or any(a in record and b in record for a, b in pairs)


def _column(record: Mapping[str, Any], column: str, where: str, tokenizer: Any, whole: bool) -> list[Document]:
    if column not in record:
        raise UserError(f"--data-column must be a field of the records, which are {_fields(record)}, got {column!r}")
    value = record[column]
    if isinstance(value, list):
        return _conversation(_messages(value, column, where), None, record, where, tokenizer, whole)
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
        before, after = _messages(prompt, "prompt", where), _messages(completion, "completion", where)
        return _conversation(before + after, len(before), record, where, tokenizer, whole)
    return [_answered(_text(prompt, "prompt", where), _text(completion, "completion", where))]


def _messages(turns: Any, name: str, where: str) -> list[dict[str, Any]]:
    """The messages of a field. Raises UserError where they are none."""
    if not isinstance(turns, list) or not all(isinstance(turn, Mapping) for turn in turns):
        raise UserError(f"{name!r} must be a list of messages with 'role' and 'content', but in {where} it is not")
    return [_turn(turn, where) for turn in turns]


def _turn(turn: Mapping[str, Any], where: str) -> dict[str, Any]:
    """A message with `role` and `content`; ShareGPT's `from` and `value` in their places, empty fields left out."""
    if "from" in turn and "value" in turn:
        role = _ROLES.get(str(turn["from"]).lower())
        if role is None:
            raise UserError(
                f"a turn must be from one of {', '.join(_ROLES)}, but one in {where} is from {turn['from']!r}"
            )
        turn = {"role": role, "content": turn["value"] or ""}
    message = {name: _cleaned(value) for name, value in turn.items() if value is not None or name == "content"}
    if not isinstance(message.get("role"), str) or not ("content" in message or "tool_calls" in message):
        raise UserError(f"a message must have 'role' and 'content', but one in {where} has {_fields(turn)}")
    if "content" in message:
        message["content"] = _content(message["content"], where)
    return message


def _content(value: Any, where: str) -> str | None:
    """The text of a message, which may come as a list of its parts; null beside calls of tools."""
    if isinstance(value, list):
        if not all(isinstance(part, Mapping) and isinstance(part.get("text"), str) for part in value):
            raise UserError(f"messages must be text, but one in {where} has parts of another kind; leave it out")
        return "".join(part["text"] for part in value)
    if value is not None and not isinstance(value, str):
        raise UserError(f"'content' of a message must be a text, but in {where} it is a {type(value).__name__}")
    return value


def _cleaned(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {name: _cleaned(item) for name, item in value.items()}
    if isinstance(value, list):
        return [_cleaned(item) for item in value]
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
    if not messages:
        return []
    if tokenizer is None or not getattr(tokenizer, "chat_template", None):
        raise UserError(
            f"{where} is a conversation, but the model's tokenizer has no chat template; use an instruction-tuned model, "
            "or records with 'prompt' and 'completion'"
        )
    tools = record.get("tools") or None
    try:
        if whole:
            return [Document(render_whole(tokenizer, messages, tools=tools), templated=True)]
        rendered = render_chat(tokenizer, messages, tools=tools, first_answer=first_answer)
    except TemplateError as error:
        raise UserError(
            f"the model's chat template cannot render {where}: {error}; mend that record or leave it out"
        ) from error
    return [Document(text, answers, templated=True) for text, answers in rendered]
