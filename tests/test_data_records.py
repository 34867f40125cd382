"""Records of every kind: the text a model sees, and which of it is its answer."""

import pytest

from edkm_cli.config import UserError
from edkm_cli.data.records import render
from helpers import byte_tokenizer

CHATML = (
    "{% for m in messages %}{{ '<|' + m.role + '|>\n' + m.content + '<end>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>\n' }}{% endif %}"
)
MARKED = (
    "{% for m in messages %}{{ '<|' + m.role + '|>\n' }}{% if m.role == 'assistant' %}{% generation %}"
    "{{ m.content + '<end>' }}{% endgeneration %}{{ '\n' }}{% else %}{{ m.content + '<end>\n' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>\n' }}{% endif %}"
)
# Old thoughts are left out once the conversation has gone on, as reasoning models' templates do.
FORGETFUL = (
    "{% for m in messages %}{{ '<|' + m.role + '|>\n' }}{% if m.role == 'assistant' and loop.last %}{{ '(thought)' }}"
    "{% endif %}{{ m.content + '<end>\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<|assistant|>\n' }}{% endif %}"
)
TURNS = [
    {"role": "system", "content": "Be short."},
    {"role": "user", "content": "One?"},
    {"role": "assistant", "content": "Yes."},
    {"role": "user", "content": "Two?"},
    {"role": "assistant", "content": "No."},
]


def tokenizer(template=CHATML):
    made = byte_tokenizer()
    made.chat_template = template
    return made


def answers(document):
    return [document.text[start:stop] for start, stop in document.answers]


def only(record, **options):
    (document,) = render(record, "here", **options)
    return document


def test_a_text_is_learnt_as_a_whole():
    for record in ("Hello", {"text": "Hello"}, {"text": "Hello", "url": "x"}):
        assert (only(record).text, only(record).answers) == ("Hello", None)


def test_of_prompt_and_completion_the_completion_is_learnt():
    document = only({"prompt": "2 + 2 =", "completion": " 4"})
    assert (document.text, answers(document)) == ("2 + 2 = 4", [" 4"])


def test_of_alpaca_the_output_is_learnt_also_beside_a_text():
    record = {"instruction": "Add", "input": "1 2", "output": "3", "text": "all of it"}
    document = only(record)
    assert document.text.endswith("### Instruction:\nAdd\n\n### Input:\n1 2\n\n### Response:\n3")
    assert answers(document) == ["3"]


@pytest.mark.parametrize(
    "record",
    [
        {"messages": TURNS},
        {
            "conversations": [
                {"from": name, "value": turn["content"]}
                for name, turn in zip(("system", "human", "gpt", "human", "gpt"), TURNS, strict=True)
            ]
        },
    ],
    ids=["messages", "sharegpt"],
)
@pytest.mark.parametrize(("template", "end"), [(CHATML, "<end>\n"), (MARKED, "<end>")], ids=["plain", "generation"])
def test_of_a_conversation_every_answer_is_learnt_with_its_end(record, template, end):
    document = only(record, tokenizer=tokenizer(template))
    assert document.text.startswith("<|system|>\nBe short.<end>\n<|user|>\nOne?<end>\n<|assistant|>\nYes.<end>\n")
    assert answers(document) == [f"Yes.{end}", f"No.{end}"]
    assert document.templated


def test_of_a_conversational_completion_only_its_turns_are_learnt():
    for template in (CHATML, MARKED):
        document = only({"prompt": TURNS[:4], "completion": TURNS[4:]}, tokenizer=tokenizer(template))
        assert [text.strip() for text in answers(document)] == ["No.<end>"]


def test_a_template_that_rewrites_old_answers_gives_a_document_for_each():
    found = render({"messages": TURNS}, "here", tokenizer=tokenizer(FORGETFUL))
    assert [answers(document) for document in found] == [["(thought)Yes.<end>\n"], ["(thought)No.<end>\n"]]
    assert "(thought)Yes." not in found[1].text
    assert found[1].text.startswith(found[0].text.replace("(thought)Yes.<end>\n", "Yes.<end>\n"))


def test_asked_for_everything_a_record_is_learnt_as_a_whole():
    for record in ({"prompt": "a", "completion": "b"}, {"messages": TURNS}):
        (document,) = render(record, "here", tokenizer=tokenizer(), whole=True)
        assert document.answers is None


def test_a_column_is_what_it_holds():
    record = {"text": "no", "body": "yes", "chat": TURNS}
    assert only(record, column="body").text == "yes"
    assert len(only(record, column="chat", tokenizer=tokenizer()).answers) == 2
    with pytest.raises(UserError, match="which are 'text', 'body', 'chat', got 'other'"):
        render(record, "here", column="other")


def test_half_a_surrogate_pair_is_replaced():
    assert only({"text": "a \ud800 b"}).text == "a \ufffd b"


@pytest.mark.parametrize(
    ("record", "message"),
    [
        (None, "is a NoneType"),
        (1, "is a int"),
        ({}, "has no fields"),
        ({"a": 1}, "has 'a'; name the field with --data-column"),
        ({"text": ["a"]}, "is a list"),
        ({"prompt": 1, "completion": "a"}, "'prompt' of a record must be a text"),
        ({"messages": TURNS, "odd": True}, "no chat template"),
    ],
)
def test_a_record_of_no_known_kind_gets_one_line(record, message):
    with pytest.raises(UserError, match=message):
        render(record, "here", tokenizer=byte_tokenizer())


def test_a_template_that_refuses_says_so():
    strict = "{{ raise_exception('roles must alternate') }}"
    with pytest.raises(UserError, match=r"cannot render here: .*roles must alternate"):
        render({"messages": TURNS}, "here", tokenizer=tokenizer(strict))
    with pytest.raises(UserError, match="must have 'role' and 'content'"):
        render({"messages": [{"content": "a"}]}, "here", tokenizer=tokenizer())
