"""A GGUF file is read as it was meant, or refused: what transformers passes over in silence is looked at."""

import struct

import numpy as np
import pytest
from gguf import GGUFReader, GGUFWriter
from tokenizers import Tokenizer, pre_tokenizers
from tokenizers.models import BPE
from transformers import PreTrainedTokenizerFast

from edkm_cli import models
from edkm_cli.config import CompressConfig
from edkm_cli.distributed import World
from edkm_cli.errors import UserError
from edkm_cli.export.command import export_model
from edkm_cli.export.formats.options import Options
from edkm_cli.models.gguf import require_known_split
from edkm_cli.preflight import plan_run
from families import family
from helpers import paletted

SIZES = {"context_length": 64, "embedding_length": 32, "block_count": 2, "feed_forward_length": 64}


def written(path, fields=(), tensors=(), family="llama", **sizes):
    """A file without weights that says what a model is, and `fields` and `tensors` beside."""
    writer = GGUFWriter(path, family)
    for name, value in (SIZES | {"attention.head_count": 4} | sizes).items():
        writer.add_uint32(f"{family}.{name}", value)
    for name, value in fields:
        add = {int: writer.add_uint32, float: writer.add_float32, str: writer.add_string}[type(value)]
        add(name.replace("FAMILY", family), value)
    for name in tensors or ("blk.0.attn_norm.weight",):
        writer.add_tensor(name, np.ones(8, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return models.resolve(str(path))


@pytest.mark.parametrize(
    ("fields", "wanted"),
    [
        ([("FAMILY.rope.scale_linear", 4.0)], ("linear", 4.0)),
        ([("FAMILY.rope.scaling.factor", 2.0)], ("linear", 2.0)),  # llama.cpp: linear, where no type is said
        ([("FAMILY.rope.scaling.type", "linear")], ("linear", 1.0)),
        ([("FAMILY.rope.scaling.type", "none")], ("default", None)),
    ],
)
def test_positions_are_scaled_as_llama_cpp_understands_it(fields, wanted, tmp_path):
    rope = models.load_config(written(tmp_path / "x.gguf", fields)).rope_parameters
    assert (rope["rope_type"], rope.get("factor")) == wanted


def test_the_base_of_positions_is_the_files(tmp_path):
    source = written(tmp_path / "x.gguf", [("FAMILY.rope.freq_base", 999999.0)], family="starcoder2")
    assert models.load_config(source).rope_parameters["rope_theta"] == 999999.0


@pytest.mark.parametrize(
    ("family", "fields", "tensors", "rule"),
    [
        ("phi3", [], ["rope_factors_long.weight", "rope_factors_short.weight"], "must have plain positions"),
        ("phi3", [("FAMILY.rope.dimension_count", 6)], [], "must have plain positions"),
        ("llama", [("split.count", 3)], [], "must be one file, but is one of 3"),
    ],
)
def test_what_is_not_read_is_refused(family, fields, tensors, rule, tmp_path):
    source = written(tmp_path / "x.gguf", fields, tensors, family)
    with pytest.raises(UserError, match=rule):
        models.load_config(source)


def test_a_file_of_more_layers_than_any_model_has_is_refused(tmp_path):
    with pytest.raises(UserError, match="num_hidden_layers must be at most"):
        models.load_config(written(tmp_path / "x.gguf", block_count=50_000_000))


def test_a_list_that_goes_on_behind_the_end_of_a_file_is_refused(tmp_path):
    written(tmp_path / "x.gguf", [("tokenizer.ggml.model", "gpt2"), ("some.number", 7)])
    content = bytearray((tmp_path / "x.gguf").read_bytes())
    at = content.index(b"some.number") + len(b"some.number")
    for count in (2**40, 2**62):  # a list of so many numbers, of texts, of something else, where the number was
        for kind in (0, 8, 12, 77):
            content[at : at + 16] = struct.pack("<IIQ", 9, kind, count)
            (tmp_path / "x.gguf").write_bytes(content)
            for read in (models.load_config, models.load_tokenizer):
                with pytest.raises(UserError, match=r"could not be read: .* is damaged"):
                    read(models.resolve(str(tmp_path / "x.gguf")))


def test_attention_of_gemma_2_is_scaled_as_in_its_largest_model(tmp_path):
    sizes = {"attention.key_length": 8, "attention.head_count_kv": 2, "embedding_length": 48}
    small = models.load_config(written(tmp_path / "small.gguf", family="gemma2", **sizes))
    large = models.load_config(written(tmp_path / "large.gguf", family="gemma2", **sizes | {"block_count": 46}))
    assert (small.query_pre_attn_scalar, large.query_pre_attn_scalar) == (8, 12)


def test_tensors_that_have_no_place_are_refused(tmp_path):
    directory = paletted(
        tmp_path / "source", "integers", model=family("llama", hidden_size=64, head_dim=64, intermediate_size=128)
    )[0]
    export_model(directory, "gguf", tmp_path / "out", options=Options())
    plain = tmp_path / "out" / "model.gguf"
    family("llama").save_pretrained(tmp_path / "dense")
    for place, streams in ((plain, False), (tmp_path / "dense", True)):  # a file is decoded in one piece
        config = CompressConfig(model=str(place), data=("builtin",), device="cpu", steps=0)
        assert plan_run(config, World()).streams is streams
    models.load_dense(models.resolve(str(plain)), dtype="float32")
    reader, more = GGUFReader(str(plain)), tmp_path / "more.gguf"
    writer = GGUFWriter(more, "llama")
    for field in reader.fields.values():
        if field.name.startswith("llama."):
            writer.add_key_value(field.name, field.contents(), field.types[0])
    for tensor in reader.tensors:
        writer.add_tensor(tensor.name, tensor.data, raw_dtype=tensor.tensor_type)
    for name in ("q", "k"):
        writer.add_tensor(f"blk.0.attn_{name}_norm.weight", np.ones(512, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(UserError, match="holds tensors that transformers' LlamaForCausalLM has no place for"):
        models.load_dense(models.resolve(str(more)), dtype="float32")


def test_splits_that_transformers_takes_for_gpt_2s_are_refused(tmp_path):
    backend = Tokenizer(BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend)
    for split in ("smollm", "deepseek-llm"):
        written(tmp_path / f"{split}.gguf", [("tokenizer.ggml.pre", split)])
    require_known_split("x", str(tmp_path / "smollm.gguf"), tokenizer)
    written(tmp_path / "none.gguf")  # LLaMA 3's first files
    with pytest.raises(UserError, match="splits text as 'llama'"):
        require_known_split("x", str(tmp_path / "none.gguf"), tokenizer)
    with pytest.raises(UserError, match="splits text as 'deepseek-llm'"):
        require_known_split("x", str(tmp_path / "deepseek-llm.gguf"), tokenizer)
    backend.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Digits(), backend.pre_tokenizer])  # was read
    require_known_split("x", str(tmp_path / "deepseek-llm.gguf"), PreTrainedTokenizerFast(tokenizer_object=backend))
