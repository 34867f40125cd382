"""What model files may not say, told before anything is built of them."""

import json
import os
import re
import shutil
from functools import partial

import pytest
import torch
from safetensors.torch import load_file, save_file

from edkm_cli import model_files, models
from edkm_cli.errors import UserError
from edkm_cli.hf import load, load_any
from edkm_cli.model_files import check_model_files, check_numbers
from helpers import byte_tokenizer, cluster, compress_arguments, export, refused, run, tiny_llama


@pytest.fixture
def directory(model_directory, tmp_path):
    copied = tmp_path / "model"
    shutil.copytree(model_directory, copied)
    return copied


def configure(directory, **changes):
    path = directory / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def divide(directory, *, twice=None, elsewhere=None, **places):
    """Two files and an index: `twice` is a tensor in both, `elsewhere` the name of the second file, `places` go on top."""
    tensors = load_file(directory / "model.safetensors")
    names = sorted(tensors)
    parts = {"model-00001-of-00002.safetensors": names[:8], "model-00002-of-00002.safetensors": names[8:]}
    placed = {name: file for file, held in parts.items() for name in held}
    for file, held in parts.items():
        part = {name: tensors[name] for name in held} | ({twice: tensors[twice] + 1} if twice else {})
        save_file(part, directory / file, metadata={"format": "pt"})
    os.unlink(directory / "model.safetensors")
    if elsewhere:
        shutil.move(directory / "model-00002-of-00002.safetensors", directory.parent / "stolen.safetensors")
        placed = {name: file if file.startswith("model-00001") else elsewhere for name, file in placed.items()}
    index = {"metadata": {}, "weight_map": placed | places}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_hidden_layers": 10**9}, "num_hidden_layers must be at most 100000, got 1000000000"),
        ({"num_hidden_layers": 90_000}, "describes a model far larger than its 20 tensors"),
        ({"vocab_size": 10**12}, "describes a model far larger than its 15.* weights"),
        ({"hidden_act": "nosuch"}, "config.json describes none (KeyError: 'nosuch')"),
        ({"head_dim": -8}, "config.json describes none (RuntimeError"),
        ({"dtype": "int8"}, "config.json describes none (ValueError"),
        ({"rope_parameters": {"rope_type": "zigzag", "rope_theta": 1e4}}, "config.json describes none (KeyError"),
        ({"model_type": "t5", "architectures": ["T5Model"]}, "transformers has none of the kind 't5'"),
    ],
)
def test_a_configuration_that_cannot_be_built_is_refused_in_one_line(directory, text_file, tmp_path, changes, message):
    configure(directory, **changes)
    line = refused(*compress_arguments(directory, text_file, tmp_path / "out"))
    assert re.search(re.escape(message).replace(r"\.\*", ".*"), line), line


def test_a_vocabulary_of_layers_may_be_as_large_as_any(tmp_path):
    check_numbers(tmp_path, {"vocab_size_per_layer_input": 262_144})
    with pytest.raises(UserError, match="num_layers must be at most 100000, got 262144"):
        check_numbers(tmp_path, {"num_layers": 262_144})


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"elsewhere": "../stolen.safetensors"}, "must name files of its own directory, got '../stolen.safetensors'"),
        ({"elsewhere": "/tmp/stolen.safetensors"}, "must name files of its own directory"),
        (
            {"twice": "model.norm.weight"},
            "holds model.norm.weight in model-00001-of-00002.safetensors and in model-0000",
        ),
        (
            {"model.norm.weight": "model-00009.safetensors"},
            "lacks model-00009.safetensors, which model.safetensors.index",
        ),
        ({"x.weight": "model-00001-of-00002.safetensors"}, "lacks x.weight, which model.safetensors.index.json names"),
        ({"model.norm.weight": 3}, "must map tensors to files"),
    ],
)
def test_an_index_that_misleads_is_refused(directory, changes, message):
    divide(directory, **changes)
    source = models.resolve(str(directory))
    for read in (models.load_config, partial(load_any, dtype="float32", device="cpu")):  # of compress; of eval
        with pytest.raises(UserError, match=re.escape(message)):
            read(source)


def test_divided_files_count_like_one(directory):
    whole = check_model_files(directory)
    assert whole.numbers == sum(parameter.numel() for parameter in tiny_llama().parameters())
    divide(directory)
    divided = check_model_files(directory)
    assert (divided.tensors.keys(), divided.numbers) == (whole.tensors.keys(), whole.numbers)
    assert models.load_config(models.resolve(str(directory))).hidden_size == 24


@pytest.mark.parametrize("dtype", [torch.int8, torch.complex64])
def test_weights_that_are_no_real_numbers_are_refused(directory, dtype):
    tensors = {name: tensor.to(dtype) for name, tensor in load_file(directory / "model.safetensors").items()}
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(UserError, match="must hold weights of real numbers, but"):
        models.load_dense(models.resolve(str(directory)), dtype="float32")


def test_what_the_files_lack_is_told_in_one_line_and_no_table(directory, text_file, tmp_path):
    configure(directory, num_hidden_layers=3)
    status, _, said = run(*compress_arguments(directory, text_file, tmp_path / "out"))
    assert status == 2
    assert "9 missing (model.layers.2.input_layernorm.weight" in said
    assert len(said.splitlines()) == 2, said  # that it loads, and that it cannot


def test_a_tokenizer_of_another_model_is_refused(directory, text_file, tmp_path):
    file = directory / "tokenizer.json"
    tokenizer = json.loads(file.read_text())
    tokenizer["model"]["vocab"] = {token: number + 1000 for token, number in tokenizer["model"]["vocab"].items()}
    file.write_text(json.dumps(tokenizer))
    line = refused(*compress_arguments(directory, text_file, tmp_path / "out"))
    assert "has token 1256, but the model has 257 rows of embeddings" in line


def test_added_tokens_that_nothing_uses_may_lie_beyond_the_model():
    tokenizer = byte_tokenizer()
    tokenizer.add_special_tokens({"pad_token": "<pad>"})
    model_files.check_tokenizer("tiny", tokenizer, tiny_llama().config)


def test_an_adapter_beside_a_model_is_refused_where_transformers_would_add_it(model_directory, tmp_path):
    dense, packed = shutil.copytree(model_directory, tmp_path / "dense"), tmp_path / "packed"
    export(*cluster(tiny_llama()), packed)
    for directory in (dense, packed):
        (directory / "adapter_config.json").write_text("{}")
        assert "holds an adapter beside the model" in refused("eval", directory, "--data", "builtin")
    with pytest.raises(UserError, match="holds an adapter beside the model"):
        load(packed)
