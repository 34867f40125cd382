"""`edkm generate`: the pieces are what the model says, packed or dense; conversations keep their turns."""

from dataclasses import replace

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from edkm_cli.errors import UserError
from edkm_cli.generate import Manner, converse, generate_text, load_writer
from edkm_cli.kernels import build
from edkm_cli.models import resolve
from helpers import byte_tokenizer, cluster, export, tiny_llama

TEMPLATE = "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}assistant: "


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    directory = tmp_path_factory.mktemp("generate") / "packed"
    export(*cluster(tiny_llama()), directory)
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(directory)
    return directory


def writer_of(checkpoint, **options):
    return load_writer(
        resolve(str(checkpoint)), **{"chat": False, "dequantize": None, "dtype": "float32", "device": "cpu"} | options
    )


def test_pieces_add_up_to_the_text_that_the_model_generates(checkpoint):
    writer, pieces = writer_of(checkpoint), []
    result = generate_text(writer, "Once", Manner(12, emit=pieces.append), chat=False)
    ids = writer.tokenizer("Once", return_tensors="pt").input_ids
    written = writer.model.generate(ids, max_new_tokens=12, do_sample=False)[0, ids.shape[1] :]
    assert result["text"] == "Once" + writer.tokenizer.decode(written, skip_special_tokens=True)
    assert "".join(pieces) == result["text"]
    assert result["new_tokens"] == len(written)


def test_a_models_own_settings_do_not_change_what_an_answer_is(checkpoint):
    writer = writer_of(checkpoint)
    plain = generate_text(writer, "Once", Manner(5), chat=False)
    writer.model.generation_config.update(
        return_dict_in_generate=True, output_scores=True, num_beams=3, num_return_sequences=2
    )
    assert generate_text(writer, "Once", Manner(5), chat=False)["text"] == plain["text"]


def test_weights_stay_packed_unless_they_are_asked_for(checkpoint):
    assert writer_of(checkpoint).packed == (build.library() is not None)
    assert writer_of(checkpoint, dequantize=False).packed
    dense = writer_of(checkpoint, dequantize=True)
    assert not dense.packed
    assert type(dense.model.lm_head) is torch.nn.Linear


def test_a_conversation_keeps_its_turns_and_its_system_message(checkpoint):
    messages, pieces = iter(["Hi", " ", "And you?"]), []
    manner = Manner(3, 0.9, 0.8, "Be brief.", pieces.append)
    result = converse(writer_of(checkpoint, chat=True), manner, ask=lambda: next(messages, None))
    assert [m["role"] for m in result["messages"]] == ["system", "user", "assistant", "user", "assistant"]
    answers = [m["content"] for m in result["messages"] if m["role"] == "assistant"]
    assert "".join(pieces) == "".join(answer + "\n" for answer in answers)
    assert result["new_tokens"] <= 6


def test_a_conversation_that_fills_the_models_positions_is_kept(checkpoint):
    messages, pieces = iter(["Hi", "b" * 128]), []
    result = converse(writer_of(checkpoint, chat=True), Manner(3, emit=pieces.append), ask=lambda: next(messages, None))
    assert [m["role"] for m in result["messages"]] == ["user", "assistant"]
    assert "the conversation ends here" in pieces[-1]


def test_the_seed_decides_what_is_sampled(checkpoint):
    def sampled(seed):
        writer = writer_of(checkpoint, seed=seed)
        return generate_text(writer, "One", Manner(8, 2.0), chat=False)["text"]

    assert sampled(1) == sampled(1)
    assert len({sampled(seed) for seed in range(4)}) > 1


def test_a_conversation_without_a_template_is_refused(model_directory):
    with pytest.raises(UserError, match="needs a chat template"):
        writer_of(model_directory, chat=True)


def test_what_a_models_own_files_ask_for_is_done_or_named_in_one_line(checkpoint):
    writer = writer_of(checkpoint)
    writer.model.generation_config.stop_strings = ["zzz"]
    assert generate_text(writer, "Once", Manner(3), chat=False)["new_tokens"] > 0
    writer.model.generation_config.repetition_penalty = 0.0
    with pytest.raises(UserError, match=r"generation_config\.json"):
        generate_text(writer, "Once", Manner(3), chat=False)
    writer.tokenizer.chat_template = "{{ raise_exception('System role not supported') }}"
    with pytest.raises(UserError, match="System role not supported"):
        generate_text(writer, "Once", Manner(3, system="Be brief."), chat=True)
    writer.tokenizer.chat_template = " "
    writer.tokenizer.add_tokens(["<far>"])
    for prompt, chat in (("<far>", False), ("", False)):
        with pytest.raises(UserError, match="must be tokens below 257"):
            generate_text(writer, prompt, Manner(3), chat=chat)


@pytest.mark.parametrize("temperature", [None, 0.9])
def test_logits_that_are_no_numbers_are_refused(checkpoint, temperature):
    writer = writer_of(checkpoint)
    writer.model.model.norm.weight.data[0] = torch.nan
    with pytest.raises(UserError, match="logits must be numbers"):
        generate_text(writer, "Once", Manner(5, temperature), chat=False)


def test_a_text_ends_where_the_models_positions_do(checkpoint):
    writer = writer_of(checkpoint)
    known = writer.model.config.max_position_embeddings
    writer.model.generation_config.eos_token_id = None
    assert generate_text(writer, "b" * (known - 3), Manner(9), chat=False)["new_tokens"] == 3
    with pytest.raises(UserError, match=f"knows {known} positions, but what it is to continue has {known}; shorten"):
        generate_text(writer, "b" * known, Manner(9), chat=False)


@pytest.mark.parametrize("chat", [False, True])
def test_bytes_that_are_no_text_are_refused(checkpoint, chat):
    with pytest.raises(UserError, match="a prompt must be text"):
        generate_text(writer_of(checkpoint), "\udcff\udcfe", Manner(5), chat=chat)


def test_a_word_that_follows_the_prompt_keeps_its_space(checkpoint):
    """LLaMA's decoder takes the space off a text's first word."""
    writer, words = writer_of(checkpoint), {f"\u2581w{number}": number for number in range(257)}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="\u2581w0"))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Sequence([decoders.Replace("\u2581", " "), decoders.Fuse(), decoders.Strip(" ", 1, 0)])
    writer, pieces = replace(writer, tokenizer=PreTrainedTokenizerFast(tokenizer_object=tokenizer)), []
    text = generate_text(writer, "w1 w2", Manner(5, emit=pieces.append), chat=False)["text"]
    assert text == "".join(pieces)
    assert len(text.split(" ")) == 7
    assert text.startswith("w1 w2 w")
