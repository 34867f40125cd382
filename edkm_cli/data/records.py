"""A record -> the text a model sees, and which of it is the answer that it is to learn.

Kinds of records, by their fields: `messages` (or ShareGPT's `conversations`), `prompt` and `completion`, Alpaca's
`instruction` and `output`, and `text`. A record with several of these counts as the first that is not null.

A chat template with a generation block (`{% generation %}`) says where the answers of a conversation are. Of any other, an
answer is what the conversation's text up to it has more than the same one that ends with the template's call for an answer.
"""

import copy
import json
import re
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import datetime
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

from edkm_cli.errors import UserError

# ShareGPT's names for those who speak -> the roles that chat templates know.
_ROLES = {
    "system": "system",
    "developer": "developer",
    **dict.fromkeys(("user", "human"), "user"),
    **dict.fromkeys(("assistant", "gpt", "chatgpt", "bing", "bard", "model", "function_call"), "assistant"),
    **dict.fromkeys(("tool", "observation", "function_response"), "tool"),
}
_CHATS = ("messages", "conversations", "conversation")
# What templates take for today: with the real day a run that is resumed tomorrow would have another text.
on_a_fixed_day = patch(
    "transformers.utils.chat_template_utils.datetime", SimpleNamespace(now=lambda: datetime(2024, 7, 26)), create=True
)

Span = tuple[int, int]


@dataclass(frozen=True)
class Document:
    """A text, and the parts of it, (start, end) in characters, that the model is to learn as answers: None where all of
    it is to be learnt. `templated`: a chat template has put the special tokens in."""

    text: str
    answers: tuple[Span, ...] | None = None
    templated: bool = False


def alpaca_prompt(record: Mapping[str, Any]) -> str:
    """The prompt of Alpaca's authors, up to where the answer begins."""
    given = record.get("input") or ""
    paired = ", paired with an input that provides further context" if given else ""
    beside = f"\n\n### Input:\n{given}" if given else ""
    return (
        f"Below is an instruction that describes a task{paired}. Write a response that appropriately completes the "
        f"request.\n\n### Instruction:\n{record['instruction']}{beside}\n\n### Response:\n"
    )


@dataclass(frozen=True)
class _Chat:
    """Messages that a chat template is to render, and the first of them that may be an answer."""

    messages: list[dict[str, Any]]
    first_answer: int = 0


def render(
    record: Any, where: str, *, tokenizer: Any = None, column: str | None = None, whole: bool = False
) -> list[Document]:
    """The documents of a record: one, but for conversations whose template shows earlier answers in another way than
    it has them written.

    Args:
        tokenizer: its chat template renders messages.
        column: the field that holds the text (or the messages); None: the kind is seen from the fields.
        whole: all of the text is to be learnt, so that no answers are looked for.

    Raises UserError for a record of no known kind, and where a chat template is missing or refuses it.
    """
    content = _content_of(record, where, column)
    documents = [content] if isinstance(content, Document) else _rendered(content, record, where, tokenizer, whole)
    # Halves of surrogate pairs, which JSON can hold and UTF-8 cannot, are replaced.
    clean = [(one, one.text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")) for one in documents]
    return [replace(one, text=text, answers=None if whole else one.answers) for one, text in clean]


@on_a_fixed_day
def _rendered(chat: _Chat, record: Mapping[str, Any], where: str, tokenizer: Any, whole: bool) -> list[Document]:
    if not chat.messages:
        return []
    if not getattr(tokenizer, "chat_template", None):
        rule = f"{where} is a conversation, but the model's tokenizer has no chat template"
        raise UserError(f"{rule}; use an instruction-tuned model, or records with 'prompt' and 'completion'")
    tools = _object(_present(record.get("tools"))) or None
    try:
        if any(turn.get("tool_calls") for turn in chat.messages):
            chat = replace(chat, messages=_with_calls(tokenizer, chat.messages, tools))
        if whole:
            return [Document(render_text(tokenizer, chat.messages, tools), templated=True)]
        return render_chat(tokenizer, chat, tools)
    except TemplateError as error:
        raise UserError(f"the model's chat template cannot render {where}: {error}; mend or leave it out") from error


def _content_of(record: Any, where: str, column: str | None) -> Document | _Chat:
    """What a record holds; no messages where it is of a known kind, and null."""
    if isinstance(record, str):
        return Document(record)
    if not isinstance(record, Mapping):
        raise UserError(f"a record must be a string or an object with fields, but {where} is a {type(record).__name__}")
    if column is not None and column not in record:
        raise UserError(f"--data-column must be a field of the records, which are {_fields(record)}, got {column!r}")
    if column is not None:
        value, is_chat = record[column], isinstance(record[column], list)
        return _Chat(_messages(value, column, where, record)) if is_chat else Document(_text(value, column, where))
    for name in _CHATS:
        if record.get(name) is not None:
            return _Chat(_messages(record[name], name, where, record))
    known = any(name in record for name in ("text", *_CHATS))
    for fields in (("prompt", "completion"), ("instruction", "output")):
        if not all(name in record for name in fields):
            continue
        known = True
        prompt, answer = (record[name] for name in fields)
        if isinstance(prompt, list) and isinstance(answer, list) and fields[0] == "prompt":
            asked, answered = _messages(prompt, "prompt", where, record), _messages(answer, "completion", where)
            return _Chat(asked + answered, len(asked))
        if prompt is not None or answer is not None:
            names = fields if fields[0] == "prompt" else (*fields, "input")
            texts = {name: _text(record.get(name), name, where) for name in names}
            before, said = texts["prompt"] if "prompt" in texts else alpaca_prompt(texts), texts[fields[1]]
            return Document(before + said, ((len(before), len(before + said)),) if said else ())
    if record.get("text") is not None:
        return Document(_text(record["text"], "text", where))
    if known:
        return _Chat([])
    rule = "a record must be a string, or have 'text', 'messages', 'conversations', 'prompt' and 'completion'"
    given = f"{where} has {_fields(record)}; name the field with --data-column in training"
    raise UserError(f"{rule}, or Alpaca's 'instruction' and 'output'; but {given}")


def _fields(record: Mapping[str, Any]) -> str:
    return ", ".join(map(repr, list(record)[:12])) or "no fields"


def _text(value: Any, name: str, where: str, *, of: str = "record") -> str:
    """A field as text; null is empty. Raises UserError for anything else."""
    if value is None:
        return ""
    if not isinstance(value, str):
        raise UserError(f"{name!r} of a {of} must be a text, but in {where} it is a {type(value).__name__}")
    return value


def _messages(turns: Any, name: str, where: str, beside: Mapping[str, Any] | None = None) -> list[dict[str, Any]]:
    """The messages of a field, after the `system` text that may stand beside it. Raises UserError where they are none."""
    if not isinstance(turns, list) or not all(isinstance(turn, Mapping) for turn in turns):
        raise UserError(f"{name!r} must be a list of messages with 'role' and 'content', but in {where} it is not")
    said, system = [_turn(turn, where) for turn in turns], (beside or {}).get("system")
    first = [{"role": "system", "content": system}] if isinstance(system, str) and system else []
    return said if not said or said[0]["role"] == "system" else [*first, *said]


def _present(value: Any) -> Any:
    """Without nulls inside of objects: Arrow gives each object the fields of all."""
    if isinstance(value, Mapping):
        return {name: _present(part) for name, part in value.items() if part is not None}
    return [_present(part) for part in value] if isinstance(value, list) else value


def _turn(turn: Mapping[str, Any], where: str) -> dict[str, Any]:
    """A message with `role` and `content`; ShareGPT's `from` and `value` in their places, empty fields left out."""
    if "from" in turn and "value" in turn:
        if (role := _ROLES.get(str(turn["from"]).lower())) is None:
            raise UserError(f"a turn must be from one of {', '.join(_ROLES)}, one in {where} is from {turn['from']!r}")
        turn = {**turn, "role": role, "content": turn["value"] or ""}
    if isinstance(call := turn.get("function_call"), Mapping):  # OpenAI's former names
        turn = {**turn, "function_call": None, "tool_calls": [{"type": "function", "function": call}]}
    turn = {**turn, "role": "tool"} if turn.get("role") == "function" else turn
    message = {name: _present(value) for name, value in turn.items() if value is not None or name == "content"}
    if not isinstance(message.get("role"), str) or not ("content" in message or "tool_calls" in message):
        raise UserError(f"a message must have 'role' and 'content', but one in {where} has {_fields(turn)}")
    if message.get("content") is not None or not message.get("tool_calls"):
        message["content"] = _content(message.get("content"), where)
    return message


def _content(value: Any, where: str) -> str:
    """The text of a message, which may come as a list of its parts."""
    if isinstance(value, list):
        if not all(isinstance(part, Mapping) and isinstance(part.get("text"), str) for part in value):
            raise UserError(f"messages must be text, but one in {where} has parts of another kind; leave it out")
        return "".join(part["text"] for part in value)
    return _text(value, "content", where, of="message")


def _object(value: Any) -> Any:
    """What JSON text says, where a value is that."""
    with suppress(ValueError):
        return json.loads(value) if isinstance(value, str) else value
    return value


def _with_calls(tokenizer: Any, messages: list[dict[str, Any]], tools: Any) -> list[dict[str, Any]]:
    """Messages whose calls have arguments as objects, as most templates take them, or as given: OpenAI's are JSON text,
    which such templates would write as JSON once more. A template that shows an object as Python does wants text."""
    objects, shown = copy.deepcopy(messages), []
    for call in [call for turn in objects for call in turn.get("tool_calls") or () if isinstance(call, dict)]:
        function = call.get("function", call)
        if isinstance(function, dict) and function.get("arguments"):
            function["arguments"] = _object(function["arguments"])
            shown.append(str(function["arguments"]))
    try:
        text = render_text(tokenizer, objects, tools)
    except TemplateError:
        return messages
    return messages if any(one in text for one in shown) else objects


class TemplateError(Exception):
    """A conversation that the template does not take, or whose answers cannot be found in its text."""


def render_chat(tokenizer: Any, chat: _Chat, tools: Any) -> list[Document]:
    """The text of a conversation with its answers: one, or one for each answer where the template writes an
    answer in another way once the conversation has gone on (as reasoning models' do: they leave out old thoughts).

    An answer ends with what ends its turn. Turns before `first_answer`, empty ones, and those with a `weight` of 0 are
    prompt. Raises TemplateError.
    """
    messages = chat.messages
    whole = render_text(tokenizer, messages, tools)
    assistant = [index for index, turn in enumerate(messages) if turn["role"] == "assistant"]
    turns = [index for index in assistant if index >= chat.first_answer and _is_answer(messages[index])]
    marked = _generation_spans(tokenizer, messages, tools, whole)
    if marked is not None and (len(marked) == len(assistant) or len(turns) == len(assistant)):
        if len(turns) < len(assistant):
            marked = [span for index, span in zip(assistant, marked, strict=True) if index in turns]
        return [Document(whole, tuple(marked), templated=True)]
    spans, texts = [], []
    for index in turns:
        after = render_text(tokenizer, messages[: index + 1], tools)
        spans.append((_prompt_length(tokenizer, messages[:index], tools, after), len(after)))
        texts.append(after)
    if all(whole.startswith(text) for text in texts):
        return [Document(whole, tuple(spans), templated=True)]
    return [Document(text, (span,), templated=True) for text, span in zip(texts, spans, strict=True)]


def _is_answer(turn: dict[str, Any]) -> bool:
    """Whether there is something to learn in a turn, and it is not to be left out (`weight`, as OpenAI's format has it)."""
    said = ("content", "tool_calls", "reasoning_content", "thinking")
    return any(turn.get(name) for name in said) and turn.get("weight") != 0


def _prompt_length(tokenizer: Any, before: list[dict[str, Any]], tools: Any, text: str) -> int:
    """How many characters of a text that ends with an answer are what came before it. Raises TemplateError."""
    if before:
        if text.startswith(prompt := render_text(tokenizer, before, tools, ask=True)):
            return len(prompt)
    else:  # many templates refuse a conversation without messages: their call for an answer is what they add to any other
        question = [{"role": "user", "content": "?"}]
        asked, plain = (render_text(tokenizer, question, tools, ask=ask) for ask in (True, False))
        call = asked.removeprefix(plain)
        if call and asked != call and call in text:
            return text.index(call) + len(call)
    rule = f"the text before message {len(before) + 1} is not the beginning of the text with it"
    raise TemplateError(f"{rule}, so that the answer cannot be told from the prompt; use --train-on all")


def render_text(tokenizer: Any, messages: list[dict[str, Any]], tools: Any, *, ask: bool = False) -> str:
    """The text of a conversation; `ask`: with the template's call for an answer. A template that leaves texts out, as those
    of some models with images do, gets them as lists of parts. Raises TemplateError, also where it still does."""
    given = messages
    for _ in range(2):
        try:
            text = tokenizer.apply_chat_template(given, tools=tools, tokenize=False, add_generation_prompt=ask)
        except Exception as error:  # whatever a template raises
            raise TemplateError(" ".join(str(error).split()) or type(error).__name__) from error
        if (speaker := _left_out(messages, text)) is None:
            return text
        given = [{**turn, "content": [{"type": "text", "text": turn.get("content") or ""}]} for turn in messages]
    raise TemplateError(f"it leaves out what the {speaker} says")


def _left_out(messages: list[dict[str, Any]], text: str) -> str | None:
    """Who of user and assistant says something whose last word is not in the text of a conversation; thoughts may be."""
    for turn in messages:
        words = re.findall(r"\w+", (turn.get("content") or "").rpartition("</think>")[2][-99:])
        if words and words[-1] not in text and turn["role"] in ("user", "assistant") and not turn.get("tool_calls"):
            return str(turn["role"])
    return None


def _generation_spans(tokenizer: Any, messages: list[dict[str, Any]], tools: Any, whole: str) -> list[Span] | None:
    """What the template's own generation blocks cover; None where it has none."""
    templates = tokenizer.chat_template
    text = " ".join(map(str, templates.values() if isinstance(templates, dict) else [templates]))
    if "{% generation" not in text and "{%- generation" not in text:
        return None
    from transformers.utils.chat_template_utils import render_jinja_template

    how = {"chat_template": tokenizer.get_chat_template(None, tools), "return_assistant_tokens_mask": True}
    texts, spans = render_jinja_template(conversations=[messages], tools=tools, **how, **tokenizer.special_tokens_map)
    if texts[0] != whole or not spans or not spans[0]:
        return None
    return [(int(start), int(end)) for start, end in spans[0]]
