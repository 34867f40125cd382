"""Conversations as a model's chat template writes them, and where in that text the model's own turns are.

A template with a generation block (`{% generation %}`) says so itself. Of any other, an answer is what the text of the
conversation up to it has more than the same conversation that ends with the template's call for an answer.
"""

from __future__ import annotations

from typing import Any

Span = tuple[int, int]


class TemplateError(Exception):
    """A conversation that the template does not take, or whose answers cannot be found in its text."""


def render_chat(
    tokenizer: Any, messages: list[dict[str, Any]], *, tools: Any = None, first_answer: int = 0
) -> list[tuple[str, tuple[Span, ...]]]:
    """(text, the answers' spans in it) of a conversation: one, or one for each answer where the template writes an
    answer in another way once the conversation has gone on (as reasoning models' do: they leave out old thoughts).

    An answer ends with what ends its turn. Turns before `first_answer`, empty ones, and those with a `weight` of 0 are
    prompt. Raises TemplateError.
    """
    whole = render_text(tokenizer, messages, tools)
    assistant = [index for index, turn in enumerate(messages) if turn["role"] == "assistant"]
    turns = [index for index in assistant if index >= first_answer and _is_answer(messages[index])]
    marked = _generation_spans(tokenizer, messages, tools, whole)
    if marked is not None and (len(marked) == len(assistant) or len(turns) == len(assistant)):
        if len(turns) < len(assistant):
            marked = [span for index, span in zip(assistant, marked, strict=True) if index in turns]
        return [(whole, tuple(marked))]
    spans, texts = [], []
    for index in turns:
        after = render_text(tokenizer, messages[: index + 1], tools)
        spans.append((_prompt_length(tokenizer, messages[:index], tools, after), len(after)))
        texts.append(after)
    if all(whole.startswith(text) for text in texts):
        return [(whole, tuple(spans))]
    return [(text, (span,)) for text, span in zip(texts, spans, strict=True)]


def _is_answer(turn: dict[str, Any]) -> bool:
    """Whether there is something to learn in a turn, and it is not to be left out (`weight`, as OpenAI's format has it)."""
    said = ("content", "tool_calls", "reasoning_content", "thinking")
    return any(turn.get(name) for name in said) and turn.get("weight") != 0


def _prompt_length(tokenizer: Any, before: list[dict[str, Any]], tools: Any, text: str) -> int:
    """How many characters of a text that ends with an answer are what came before it. Raises TemplateError."""
    if before:
        prompt = render_text(tokenizer, before, tools, ask=True)
        if text.startswith(prompt):
            return len(prompt)
    else:  # many templates refuse a conversation without messages: their call for an answer is what they add to any other
        question = [{"role": "user", "content": "?"}]
        asked, plain = (render_text(tokenizer, question, tools, ask=ask) for ask in (True, False))
        call = asked.removeprefix(plain)
        if call and asked != call and call in text:
            return text.index(call) + len(call)
    raise TemplateError(
        f"the text before message {len(before) + 1} is not the beginning of the text with it, so that the answer cannot be "
        "told from the prompt; use --train-on all"
    )


def render_text(tokenizer: Any, messages: list[dict[str, Any]], tools: Any, *, ask: bool = False) -> str:
    """The text of a conversation; `ask`: with the template's call for an answer. Raises TemplateError."""
    try:
        return tokenizer.apply_chat_template(messages, tools=tools, tokenize=False, add_generation_prompt=ask)
    except Exception as error:  # whatever a template raises
        raise TemplateError(" ".join(str(error).split()) or type(error).__name__) from error


def _generation_spans(tokenizer: Any, messages: list[dict[str, Any]], tools: Any, whole: str) -> list[Span] | None:
    """What the template's own generation blocks cover; None where it has none."""
    if "generation" not in _template_text(tokenizer):
        return None
    from transformers.utils.chat_template_utils import render_jinja_template

    template = tokenizer.get_chat_template(None, tools)
    texts, spans = render_jinja_template(
        conversations=[messages],
        tools=tools,
        chat_template=template,
        return_assistant_tokens_mask=True,
        continue_final_message=False,
        add_generation_prompt=False,
        **tokenizer.special_tokens_map,
    )
    if texts[0] != whole or not spans or not spans[0]:
        return None
    return [(int(start), int(end)) for start, end in spans[0]]


def _template_text(tokenizer: Any) -> str:
    template = tokenizer.chat_template
    if isinstance(template, dict):
        return " ".join(map(str, template.values()))
    text = str(template)
    return text if "{% generation" in text or "{%- generation" in text else ""
