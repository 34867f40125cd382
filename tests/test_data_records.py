"""Records of every kind: the text a model sees, and which of it is its answer."""

import pytest

from edkm_cli.data.records import render
from edkm_cli.errors import UserError
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
# As SmolLM2's: a text of its own before the first message.
PREFACED = "{% if messages[0].role != 'system' %}<|system|>\nBe kind.<end>\n{% endif %}" + CHATML
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
    prompt = "Below is an instruction that describes a task. Write a response that appropriately completes the request."
    document = only({"instruction": "Name a colour.", "output": "Blue."})
    assert document.text == f"{prompt}\n\n### Instruction:\nName a colour.\n\n### Response:\nBlue."
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
        {"messages": TURNS[1:], "system": "Be short."},
    ],
    ids=["messages", "sharegpt", "system beside them"],
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


@pytest.mark.parametrize("template", [CHATML, PREFACED, MARKED])
def test_an_answer_without_a_question_is_learnt_from_where_the_template_calls_for_it(template):
    document = only({"messages": TURNS[2:]}, tokenizer=tokenizer(template))
    assert [text.strip() for text in answers(document)] == ["Yes.<end>", "No.<end>"]


@pytest.mark.parametrize("template", [CHATML, MARKED])
@pytest.mark.parametrize("change", [{"content": ""}, {"weight": 0}])
def test_empty_answers_and_those_of_no_weight_are_not_learnt(template, change):
    turns = [*TURNS[:2], {**TURNS[2], **change}, *TURNS[3:]]
    shared = [{**turn, "from": turn["role"], "value": turn["content"]} for turn in turns]  # as ShareGPT has them
    for record in ({"messages": turns}, {"conversations": shared}):
        document = only(record, tokenizer=tokenizer(template))
        assert [text.strip() for text in answers(document)] == ["No.<end>"]
        assert document.text.count("<|assistant|>") == 2


@pytest.mark.parametrize("template", [CHATML, MARKED])
def test_a_template_that_names_the_day_gives_the_same_text_on_every_day(template):
    document = only({"messages": TURNS}, tokenizer=tokenizer("{{ strftime_now('%d %b %Y') }}" + template))
    assert document.text.startswith("26 Jul 2024<|system|>")
    assert [text.strip() for text in answers(document)] == ["Yes.<end>", "No.<end>"]


def test_a_call_of_a_tool_is_an_answer_and_its_result_is_not():
    template = CHATML.replace("m.content +", "(m.content or m.tool_calls | string) +")
    call = {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "add"}}]}
    turns = [TURNS[1], call, {"role": "tool", "content": "3"}, TURNS[2]]
    first, second = answers(only({"messages": turns}, tokenizer=tokenizer(template)))
    assert "'add'" in first
    assert second == "Yes.<end>\n"


def test_an_empty_message_is_no_word_and_a_system_text_stands_beside_lists_too():
    turns = [{"role": "system", "content": None}, TURNS[1], TURNS[2]]
    assert "None" not in only({"messages": turns}, tokenizer=tokenizer()).text
    record = {"system": "Be kind.", "prompt": [TURNS[1]], "completion": [TURNS[2]]}
    assert only(record, tokenizer=tokenizer()).text.startswith("<|system|>\nBe kind.<end>\n<|user|>")


def test_a_system_text_beside_messages_that_have_one_is_left_out():
    text = only({"messages": TURNS, "system": "Be long."}, tokenizer=tokenizer()).text
    assert text.count("<|system|>") == 1
    assert "Be short." in text


def test_roles_of_sharegpt_are_those_of_templates():
    turns = zip(("SYSTEM", "Human", "function_call", "observation", "GPT"), "abcde", strict=True)
    record = {"conversations": [{"from": name, "value": value} for name, value in turns]}
    document = only(record, tokenizer=tokenizer())
    assert [line for line in document.text.split("\n") if line.startswith("<|")] == [
        f"<|{role}|>" for role in ("system", "user", "assistant", "tool", "assistant")
    ]
    assert answers(document) == ["c<end>\n", "e<end>\n"]


def test_a_message_in_parts_is_their_text():
    parts = [{"type": "text", "text": "One"}, {"type": "text", "text": "?\ud800"}]
    turns = [{"role": "user", "content": parts}, TURNS[2]]
    assert "\nOne?\ufffd<end>" in only({"messages": turns}, tokenizer=tokenizer()).text


@pytest.mark.parametrize(
    "record",
    [
        {"messages": None},
        {"messages": []},
        {"conversations": [], "id": 1},
        {"prompt": None, "completion": None},
        {"instruction": None, "output": None},
        {"prompt": [], "completion": []},
    ],
)
def test_a_record_of_a_known_kind_without_anything_in_it_is_no_document(record):
    assert render(record, "here", tokenizer=tokenizer()) == []


def test_fields_that_are_null_do_not_decide_what_a_record_is():
    """As tables have them that were put together of several kinds."""
    nothing = {"messages": None, "prompt": None, "completion": None, "instruction": None, "output": None}
    assert only({**nothing, "text": "Hello"}).text == "Hello"
    assert answers(only({**nothing, "text": None, "prompt": "a", "completion": "b"})) == ["b"]


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
        ({"messages": "Hello"}, "'messages' must be a list of messages"),
        ({"messages": ["Hello"]}, "'messages' must be a list of messages"),
        ({"messages": [{"role": "user"}]}, "must have 'role' and 'content', but one in here has 'role'"),
        (
            {"messages": [{"role": "user", "content": 1}]},
            "'content' of a message must be a text, but in here it is a int",
        ),
        ({"messages": [{"role": "user", "content": [{"type": "image"}]}]}, "parts of another kind"),
        ({"conversations": [{"from": "narrator", "value": "a"}]}, "one in here is from 'narrator'"),
        ({"instruction": "a", "context": "b", "response": "c"}, "has 'instruction', 'context', 'response'"),
        ({"instruction": "a", "input": 1, "output": "b"}, "'input' of a record must be a text"),
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


def test_fields_that_arrow_gives_to_all_objects_are_not_learnt():
    calls = [{"type": "function", "function": {"name": "f", "arguments": {"city": "X", "path": None}}}]
    messages = [{"role": "user", "content": "?"}, {"role": "assistant", "content": None, "tool_calls": calls}]
    tools = [{"type": "function", "function": {"name": "f", "parameters": {"city": {"type": "string"}, "path": None}}}]
    template = "{{ tools }}{% for message in messages %}{{ message }}{% endfor %}"
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = template
    (document,) = render({"messages": messages, "tools": tools}, "record 1", tokenizer=tokenizer, whole=True)
    assert "path" not in document.text
    assert "city" in document.text


CALLS = (
    "{% for m in messages %}{{ '<|' + m.role + '|>' }}{% for call in m.tool_calls or [] %}"
    "{{ '{\"name\": ' + call.function.name | tojson + ', \"arguments\": ' + ARGUMENTS + '}' }}{% endfor %}"
    "{{ m.content or '' }}<end>{% endfor %}"
)


@pytest.mark.parametrize("arguments", ["call.function.arguments | tojson", "call.function.arguments"])
@pytest.mark.parametrize("former", [False, True])
def test_arguments_of_calls_are_json_once(arguments, former):
    """OpenAI's are text; templates write an object as JSON (Qwen's, LLaMA 3.1's) or join text (DeepSeek's)."""
    call = {"name": "find", "arguments": '{"city": "Paris"}'}
    said = {"function_call": call} if former else {"tool_calls": [{"type": "function", "function": call}]}
    result = {"role": "function" if former else "tool", "content": "here"}
    messages = [{"role": "user", "content": "?"}, {"role": "assistant", "content": None, **said}, result]
    made = tokenizer(CALLS.replace("ARGUMENTS", arguments))
    (document,) = render({"messages": messages, "tools": "[]"}, "record 1", tokenizer=made, whole=True)
    wanted = '<|assistant|>{"name": "find", "arguments": {"city": "Paris"}}<end><|tool|>here<end>'
    assert document.text == "<|user|>?<end>" + wanted


def test_what_is_said_beside_a_call_may_be_left_out():
    said = "{{ m.tool_calls | string if m.tool_calls else m.content }}<end>"
    silent = tokenizer("{% for m in messages %}" + said + "{% endfor %}")
    call = {"role": "assistant", "content": "Looking", "tool_calls": [{"function": {"name": "add"}}]}
    assert "add" in only({"messages": [TURNS[1], call]}, tokenizer=silent, whole=True).text


IN_PARTS = (
    "{% for m in messages %}{{ '<|' + m.role + '|>' }}{% for part in m.content %}{% if part.type == 'text' %}"
    "{{ part.text }}{% endif %}{% endfor %}<end>{% endfor %}"
)


def test_a_template_of_parts_gets_parts_and_one_that_leaves_texts_out_is_refused():
    (document,) = render({"messages": TURNS}, "record 1", tokenizer=tokenizer(IN_PARTS), whole=True)
    assert document.text.startswith("<|system|>Be short.<end><|user|>One?<end><|assistant|>Yes.<end>")
    deaf = tokenizer("{% for m in messages if m.role != 'user' %}{{ m.content }}{% endfor %}")
    with pytest.raises(UserError, match="it leaves out what the user says"):
        render({"messages": TURNS}, "record 1", tokenizer=deaf, whole=True)


def test_thoughts_that_a_template_leaves_out_are_no_answer_left_out():
    thinking = tokenizer(CHATML.replace("m.content +", "m.content.split('</think>')[-1] +"))
    turns = [TURNS[1], {"role": "assistant", "content": "<think>deep thought</think>"}]
    assert "deep" not in only({"messages": turns}, tokenizer=thinking).text


def test_a_template_without_a_call_for_an_answer_is_refused():
    silent = tokenizer("{% for m in messages %}{{ m.role }}: {{ m.content }}{% endfor %}")
    with pytest.raises(UserError, match="the answer cannot be told from the prompt"):
        render({"messages": TURNS[2:3]}, "here", tokenizer=silent)


PARTS = "{% for part in m.content %}{% if part.type == 'text' %}{{ part.text }}{% endif %}{% endfor %}<end>"
MARKED_PARTS = (
    "{% for m in messages %}{{ '<|' + m.role + '|>' }}{% if m.role == 'assistant' %}{% generation %}"
    + PARTS
    + "{% endgeneration %}{% else %}"
    + PARTS
    + "{% endif %}{% endfor %}{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)


def test_marks_of_another_text_than_is_learnt_count_for_nothing():
    assert answers(only({"messages": TURNS}, tokenizer=tokenizer(MARKED_PARTS))) == ["Yes.<end>", "No.<end>"]


def test_marks_of_some_answers_do_not_tell_which_to_leave_out():
    some = MARKED.replace("m.role == 'assistant' %}{% gen", "m.role == 'assistant' and loop.last %}{% gen")
    turns = [*TURNS[:2], {**TURNS[2], "weight": 0}, *TURNS[3:]]
    assert [text.strip() for text in answers(only({"messages": turns}, tokenizer=tokenizer(some)))] == ["No.<end>"]
