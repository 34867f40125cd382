"""Tokens of documents, and which of them are learnt, exact at the borders."""

import numpy as np
import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from edkm_cli.config import TextSettings
from edkm_cli.data import tokenize
from edkm_cli.data.encode import Counts, Encoder, split_long
from edkm_cli.data.reading import Part
from helpers import byte_tokenizer

ALPACA = {"instruction": "Add", "output": "Three."}


def merging_tokenizer(**special):
    """Byte-level BPE with merges, blank lines among them."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    text = ["the answer is yes\n\nno\n\n", "Answer: yes and no", "the   the  answer"] * 20
    trainer = trainers.BpeTrainer(vocab_size=320, special_tokens=["<eos>", "<bos>"], show_progress=False)
    tokenizer.train_from_iterator(text, trainer)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<eos>", **special)


def encode(records, tokenizer=None, **encoding):
    return Encoder(tokenizer or byte_tokenizer(), TextSettings(**encoding)).encode(Part("here", 0, records))


def learnt(encoded, tokenizer):
    return tokenizer.decode(encoded.ids[encoded.trained].tolist())


def test_tokens_of_large_numbers_are_kept_whatever_their_count():
    tokenizer = byte_tokenizer()
    tokenizer.get_vocab = lambda: {"<eos>": 70_000}
    assert Encoder(tokenizer, TextSettings()).dtype == np.uint32
    assert Encoder(byte_tokenizer(), TextSettings()).dtype == np.uint16


def test_of_an_answered_record_the_answer_and_its_end_are_learnt():
    tokenizer = byte_tokenizer()
    encoded = encode([ALPACA, {"prompt": "a", "completion": "b"}])
    assert learnt(encoded, tokenizer) == "Three.<eos>b<eos>"
    assert tokenizer.decode(encoded.ids.tolist()).endswith("### Response:\nThree.<eos>ab<eos>")
    assert encoded.counts == Counts(2, encoded.ids.size, 9, encoded.ids.size - 9, 0)
    assert encoded.lengths.tolist() == [encoded.ids.size - 3, 3]


def test_asked_for_all_every_token_is_learnt():
    for encoded in (encode([ALPACA], train_on="all"), encode(["text"])):
        assert encoded.trained.tolist() == [True] * encoded.ids.size


@pytest.mark.parametrize("completion", [" yes", "yes", "\nno", "\n\nno", " ", "\n"])
@pytest.mark.parametrize("prompt", ["Answer:", "Answer: ", "the answer is\n", "the", ""])
def test_a_token_is_learnt_where_all_of_it_is_answer(prompt, completion):
    """Tokens are those of the whole text; one that begins in the prompt is the prompt's."""
    tokenizer = merging_tokenizer()
    encoded = encode([{"prompt": prompt, "completion": completion}], tokenizer)
    if not (prompt + completion).strip():
        assert encoded.counts.empty == 1
        return
    whole = tokenizer(prompt + completion)["input_ids"]
    assert encoded.ids.tolist() == [*whole, tokenizer.eos_token_id]
    at, wanted = 0, []
    for token in whole:  # bytes are characters here, so lengths of tokens are places in the text
        wanted.append(at >= len(prompt))
        at += len(tokenizer.decode([token]))
    assert at == len(prompt + completion)
    assert encoded.trained.tolist() == [*wanted, True]


def test_a_tokenizer_that_begins_texts_begins_every_document():
    tokenizer = merging_tokenizer(bos_token="<bos>")
    from tokenizers.processors import TemplateProcessing

    bos = ("<bos>", tokenizer.bos_token_id)
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(single="<bos> $A", special_tokens=[bos])
    encoded = encode(["yes", {"prompt": "no", "completion": " yes"}], tokenizer)
    assert tokenizer.decode(encoded.ids.tolist()) == "<bos>yes<eos><bos>no yes<eos>"
    assert learnt(encoded, tokenizer) == "<bos>yes<eos> yes<eos>"
    assert tokenizer.decode(encode(["<bos>yes"], tokenizer).ids.tolist()) == "<bos>yes<eos>"
    for text in ("yes", "<bos>yes"):  # what a chat template began has its own
        assert tokenizer.decode(tokenize([text, "no"], tokenizer)) == "<bos>yes\n\nno"


def test_records_without_text_or_answer_are_left_out_and_counted():
    encoded = encode(["", " \n", {"text": None}, "a", {"prompt": "b", "completion": ""}])
    assert encoded.counts == Counts(documents=1, tokens=2, trained=2, masked=0, empty=4)


@pytest.mark.parametrize("make", [byte_tokenizer, merging_tokenizer])
def test_the_library_of_tokenizers_gives_what_transformers_gives(make):
    texts = ["", "Answer: yes\n\nno <eos> the", "ü\u0301 \U0001f642  the   the", "<eos><eos>", "\t the\r\n" * 50]
    encoder = Encoder(make())
    assert encoder._direct
    direct = encoder._ids(texts)
    encoder._direct = False
    assert direct == encoder._ids(texts)


def test_what_a_tokenizer_was_told_before_does_not_matter():
    tokenizer = byte_tokenizer()
    encoder = Encoder(tokenizer)
    tokenizer("Hello", truncation=True, max_length=2)
    assert encoder.encode(Part("here", 0, ["Hello"])).ids.size == 6


def test_what_is_held_out_is_counted():
    encoded = Encoder(byte_tokenizer()).encode(Part("here", 0, ["a"], held_out=7))
    assert encoded.counts == Counts(1, 2, 2, 0, 0, 7)


def test_a_long_document_is_tokenized_in_pieces_and_loses_nothing(monkeypatch):
    monkeypatch.setattr("edkm_cli.data.encode.PART_BYTES", PART_BYTES := 1000)
    text = "word " * (PART_BYTES // 2)
    pieces = split_long(text)
    assert "".join(pieces) == text
    assert len(pieces) == 3
    assert max(map(len, pieces)) <= PART_BYTES
    assert "".join(split_long("x" * (2 * PART_BYTES + 1))) == "x" * (2 * PART_BYTES + 1)
    encoded = encode([text])
    assert encoded.lengths.tolist() == [len(text) + 1]
