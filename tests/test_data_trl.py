"""The tokens and masks that TRL makes of the same records. Runs where TRL is installed (the extra `trl`)."""

import pytest

pytest.importorskip("trl")

import datasets
import torch
from trl import SFTConfig, SFTTrainer

from edkm_cli.config import TextSettings
from edkm_cli.data.encode import Encoder
from edkm_cli.data.reading import Part
from helpers import byte_tokenizer, tiny_llama

CHATML = (
    "{% for m in messages %}{{ '<|' + m.role + '|>\n' + m.content + '<eos>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>\n' }}{% endif %}"
)
MARKED = (
    "{% for m in messages %}{{ '<|' + m.role + '|>\n' }}{% if m.role == 'assistant' %}{% generation %}"
    "{{ m.content + '<eos>' }}{% endgeneration %}{{ '\n' }}{% else %}{{ m.content + '<eos>\n' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>\n' }}{% endif %}"
)
TURNS = [
    {"role": "user", "content": "Is it?"},
    {"role": "assistant", "content": "It is.\n\nTruly."},
    {"role": "user", "content": "Why, ü?"},
    {"role": "assistant", "content": "Because."},
]
SHAREGPT = [{"from": "user", "value": "Is it?"}, {"from": "assistant", "value": "It is."}]
CALL = [
    {"role": "user", "content": "Add 1 and 2."},
    {
        "role": "assistant",
        "content": None,
        "tool_calls": [{"type": "function", "function": {"name": "add", "arguments": {}}}],
    },
    {"role": "tool", "content": "3"},
    {"role": "assistant", "content": "Three."},
]
MARKED_CALLS = MARKED.replace("m.content", "(m.content or m.tool_calls[0].function.name)")

CASES = {
    "text": ([{"text": "One text.\n"}, {"text": " Another, with ü."}], "", {}),
    "prompt and completion": (
        [{"prompt": "2 + 2 =", "completion": " 4"}, {"prompt": "A:", "completion": "\nB"}],
        "",
        {},
    ),
    "conversational completion": ([{"prompt": TURNS[:3], "completion": TURNS[3:]}], CHATML, {}),
    "messages": ([{"messages": TURNS}, {"messages": TURNS[:2]}], MARKED, {"assistant_only_loss": True}),
    "sharegpt, all learnt": ([{"conversations": SHAREGPT}, {"conversations": SHAREGPT * 2}], CHATML, {}),
    "a call of a tool": ([{"messages": CALL}], MARKED_CALLS, {"assistant_only_loss": True}),
    "an answer first": ([{"messages": TURNS[1:]}], MARKED, {"assistant_only_loss": True}),
    "messages, all learnt": ([{"messages": TURNS}], CHATML, {}),
}


@pytest.mark.parametrize("case", CASES)
def test_tokens_and_masks_are_those_of_trl(tmp_path, case):
    records, template, options = CASES[case]
    tokenizer = byte_tokenizer()
    tokenizer.pad_token = "<eos>"
    tokenizer.chat_template = template or None
    config = SFTConfig(output_dir=str(tmp_path), report_to=[], use_cpu=True, bf16=False, max_length=None, **options)
    trainer = SFTTrainer(
        model=tiny_llama(), args=config, train_dataset=datasets.Dataset.from_list(records), processing_class=tokenizer
    )
    rows = list(trainer.train_dataset)
    wanted = [row["input_ids"] for row in rows]
    everything = "all learnt" in case or case == "text"
    masks = [[label != -100 for label in row["labels"]] for row in rows]
    found = Encoder(tokenizer, TextSettings(train_on="all" if everything else "completions")).encode(
        Part("", 0, records)
    )
    ids = torch.from_numpy(found.ids.astype("int64")).split(found.lengths.tolist())
    assert [row.tolist() for row in ids] == wanted
    if everything:
        assert found.trained.size == found.ids.size
        assert found.trained.all()
        assert all(all(mask) for mask in masks)
    else:
        assert found.trained.tolist() == [one for mask in masks for one in mask]
