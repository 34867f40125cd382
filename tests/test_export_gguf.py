"""A GGUF file is the checkpoint it was made from, whoever gave its tokenizer, and reads back with its scaled positions."""

import numpy as np
import pytest
import torch
from tokenizers import pre_tokenizers

import edkm_cli
from edkm_cli import models
from edkm_cli.errors import UserError
from edkm_cli.export.command import export_model
from edkm_cli.export.formats.gguf_model import _split, _tokens, tokenizer_fault
from edkm_cli.export.formats.options import Options
from families import family
from helpers import byte_tokenizer, compress_arguments, paletted, refused, run

LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
          "original_max_position_embeddings": 8192, "rope_theta": 5e5}  # fmt: skip
SIZES = {"vocab_size": 257, "hidden_size": 64, "intermediate_size": 128, "head_dim": 64, "num_attention_heads": 4}


def checkpoint(directory, rope, **sizes):
    more = {"rope_parameters": rope} if rope else {}
    return paletted(directory, "integers", model=family("llama", torch.float32, **SIZES | sizes, **more))[0]


@pytest.mark.parametrize("rope", [None, LLAMA3, {"rope_type": "linear", "factor": 4.0, "rope_theta": 1e4}])
def test_a_file_is_read_with_the_positions_it_was_written_with(rope, ids, tmp_path):
    directory = checkpoint(tmp_path / "source", rope)
    export_model(directory, "gguf", tmp_path / "out", options=Options())
    source = models.resolve(str(tmp_path / "out" / "model.gguf"))
    read, ours = models.load_dense(source, dtype="float32"), edkm_cli.load(directory, dtype=torch.float32)
    wanted = ours.config.rope_parameters["rope_type"]
    assert read.config.rope_parameters["rope_type"] == models.load_config(source).rope_parameters["rope_type"] == wanted
    with torch.no_grad():
        expected, got = ours(ids % 257).logits, read(ids % 257).logits
        ours.model.rotary_emb.inv_freq.mul_(0.5)  # other angles are told apart
        other = ours(ids % 257).logits
    assert (got - expected).norm() < 0.05 * expected.norm() < (other - expected).norm()


def test_positions_that_are_scaled_in_another_way_are_refused(tmp_path):
    directory = checkpoint(tmp_path / "source", LLAMA3 | {"low_freq_factor": 2.0})
    export_model(directory, "gguf", tmp_path / "out", options=Options())
    with pytest.raises(UserError, match="safetensors"):
        models.load_config(models.resolve(str(tmp_path / "out" / "model.gguf")))


def test_biases_that_are_not_read_are_refused(tmp_path):
    directory = checkpoint(tmp_path / "source", None, attention_bias=True, mlp_bias=True)
    export_model(directory, "gguf", tmp_path / "out", options=Options())
    with pytest.raises(UserError, match=r"must have no biases, but has blk\.0.*safetensors"):
        models.load_config(models.resolve(str(tmp_path / "out" / "model.gguf")))


def test_biases_of_norms_are_read(tmp_path):
    from gguf import GGUFWriter

    writer = GGUFWriter(tmp_path / "x.gguf", "nemotron")
    for name, value in (
        ("context_length", 64),
        ("embedding_length", 8),
        ("block_count", 1),
        ("feed_forward_length", 8),
    ):
        writer.add_uint32(f"nemotron.{name}", value)
    writer.add_uint32("nemotron.attention.head_count", 2)
    writer.add_tensor("blk.0.ffn_norm.bias", np.zeros(8, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    config = models.load_config(models.resolve(str(tmp_path / "x.gguf")))
    assert (config.model_type, config.attention_bias) == ("nemotron", False)


def test_options_that_a_format_has_no_use_for_are_refused(tmp_path):
    directory = checkpoint(tmp_path / "source", None)
    for given, message in (
        (["--dtype", "bfloat16"], "writes number formats of its own, whatever --dtype"),
        (["--cache"], "cache is for --to coreml"),
        (["--sequence-length", "7-9"], "sequence_length is for --to coreml"),
    ):
        assert message in refused("export", directory, "--to", "gguf", *given, "-o", tmp_path / "out")
    base = ["--base-gguf", tmp_path / "x.gguf"]
    assert "base_gguf is for --to gguf" in refused("export", directory, "--to", "dense", *base, "-o", tmp_path / "out")


def test_another_models_file_gives_its_tokenizer_and_nothing_else(ids, text_file, tmp_path):
    directory = checkpoint(tmp_path / "source", None)
    other = checkpoint(tmp_path / "other", {"rope_type": "default", "rope_theta": 777.0}, intermediate_size=192)
    export_model(other, "gguf", tmp_path / "base", options=Options())
    base, more = tmp_path / "base" / "model.gguf", ["--verify", "perplexity", "--data", text_file, "--context", 32]
    assert run("export", directory, "--to", "gguf", "-o", tmp_path / "out", "--base-gguf", base, *more)[0] == 0
    config = models.load_config(models.resolve(str(tmp_path / "out" / "model.gguf")))
    assert config.intermediate_size == 128
    assert config.rope_parameters["rope_theta"] != 777.0
    line = refused("export", directory, "--to", "gguf", "-o", base.parent, "--overwrite", "--base-gguf", base)
    assert "contains --base-gguf" in line
    (directory / "tokenizer.json").write_text('{"model": {"type": "BPE", "byte_fallback": true}}')
    assert "not understood" in refused("export", directory, "--to", "gguf", "-o", tmp_path / "none")


def test_a_window_is_the_context_and_no_path_is_the_name(tmp_path):
    from gguf import GGUFReader

    model = family("mistral", torch.float32, **SIZES, sliding_window=16)
    directory = paletted(tmp_path / "source", "integers", model=model)[0]
    export_model(directory, "gguf", tmp_path / "out", options=Options())
    fields = GGUFReader(tmp_path / "out" / "model.gguf").fields
    assert fields["llama.context_length"].contents() == 16
    assert "/" not in fields["general.name"].contents()


def test_a_file_of_another_vocabulary_or_with_broken_text_gives_no_tokenizer(tmp_path):
    directory = checkpoint(tmp_path / "source", None)
    export_model(directory, "gguf", tmp_path / "base", options=Options())
    base = tmp_path / "base" / "model.gguf"
    arguments = ["export", directory, "--to", "gguf", "-o", tmp_path / "out", "--base-gguf", base]
    whole = base.read_bytes()
    at = whole.index(b"tokenizer.ggml.tokens") + len("tokenizer.ggml.tokens") + 4 + 4 + 8 + 8
    base.write_bytes(whole[:at] + b"\xff" + whole[at + 1 :])  # the first token's only byte
    assert "utf-8" in refused(*arguments)
    other = checkpoint(tmp_path / "other", None, vocab_size=258)
    base.write_bytes(whole)
    assert "other sizes" in refused("export", other, *arguments[2:])


def test_only_splits_that_are_known_whole_are_named():
    for numbers, name in (("{1,3}", "llama-bpe"), ("", "qwen2")):
        pattern = (
            r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}"
            + numbers
            + r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
        )
        steps = [{"type": "Split", "pattern": {"Regex": pattern}}, {"type": "ByteLevel", "use_regex": False}]
        assert _split({"type": "Sequence", "pretokenizers": steps}) == name
        steps[0]["pattern"]["Regex"] = pattern.replace("]+[", "]+[/")  # Tekken's ends so
        with pytest.raises(UserError, match="does not know how this tokenizer splits"):
            _split({"type": "Sequence", "pretokenizers": steps})


def test_gemma_s_scale_of_attention_is_llama_cpp_s(ids, tmp_path):
    model = family("gemma3_text", torch.float32, **SIZES, query_pre_attn_scalar=64)
    directory = paletted(tmp_path / "source", "integers", model=model)[0]
    export_model(directory, "gguf", tmp_path / "out", options=Options())
    source = models.resolve(str(tmp_path / "out" / "model.gguf"))
    read, ours = models.load_dense(source, dtype="float32"), edkm_cli.load(directory, dtype=torch.float32)
    with torch.no_grad():
        expected, got = ours(ids % 257).logits, read(ids % 257).logits
    assert read.config.query_pre_attn_scalar == 64
    assert (got - expected).norm() < 0.02 * expected.norm()


def test_tokens_of_the_user_are_text_as_it_is_searched_for():
    added = [{"id": 2, "content": "\u2581\u2581", "special": False}, {"id": 1, "content": "<\u2581>", "special": True}]
    assert _tokens({"vocab": {"\u2581a": 0}}, added, 4)[0] == ["\u2581a", "<\u2581>", "  ", "[PAD3]"]


def test_a_tokenizer_that_files_cannot_hold_is_warned_of_before_the_work(text_file, tmp_path):
    model, tokenizer = family("llama", **SIZES), byte_tokenizer()
    assert tokenizer_fault(tokenizer) == ""
    backend = tokenizer.backend_tokenizer
    backend.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Punctuation(), backend.pre_tokenizer])
    model.save_pretrained(tmp_path / "model")
    tokenizer.save_pretrained(tmp_path / "model")
    fault = tokenizer_fault(tokenizer)
    assert "gguf does not know how this tokenizer splits text" in fault
    settings = ("--target", "gguf:q4_0", "--steps", 0, "--start", "kmeans", "--importance", "none")
    status, text, err = run(*compress_arguments(tmp_path / "model", text_file, tmp_path / "out", *settings))
    assert status == 0, err
    assert f"WARNING: edkm export will need --base-gguf: {fault}" in text + err
