"""A model that brings Python files of its own: refused in one line, or, with --trust-remote-code, compressed, loaded,
inspected, evaluated and continued, always from the files beside it."""

import json

import pytest

from helpers import byte_tokenizer, compress_arguments, refused, run, tiny_llama

CONFIGURATION = """
from transformers import LlamaConfig

class OwnConfig(LlamaConfig):
    model_type = "own_llama"
"""
MODELING = """
from transformers import LlamaForCausalLM
from .configuration_own import OwnConfig

class OwnForCausalLM(LlamaForCausalLM):
    config_class = OwnConfig
"""


@pytest.fixture
def own(tmp_path, monkeypatch):
    """A directory whose model is none of transformers' own."""
    monkeypatch.setenv("HF_MODULES_CACHE", str(tmp_path / "modules"))
    directory = tmp_path / "own"
    tiny_llama().save_pretrained(directory)
    byte_tokenizer().save_pretrained(directory)
    (directory / "configuration_own.py").write_text(CONFIGURATION)
    (directory / "modeling_own.py").write_text(MODELING)
    config = json.loads((directory / "config.json").read_text())
    config |= {
        "model_type": "own_llama",
        "architectures": ["OwnForCausalLM"],
        "auto_map": {
            "AutoConfig": "configuration_own.OwnConfig",
            "AutoModelForCausalLM": "modeling_own.OwnForCausalLM",
        },
    }
    (directory / "config.json").write_text(json.dumps(config))
    return directory


def test_a_model_with_code_of_its_own_goes_all_the_way_with_the_flag(own, text_file, tmp_path):
    output = tmp_path / "out"
    command = compress_arguments(own, text_file, output, "--start", "kmeans", "--importance", "none")
    assert "--trust-remote-code" in refused(*command)
    status, _, err = run(*command, "--trust-remote-code")
    assert status == 0, err
    assert (output / "modeling_own.py").read_text() == MODELING
    assert (output / "configuration_own.py").read_text() == CONFIGURATION
    others = [
        ("inspect", output, "--verify"),
        ("eval", output, "--data", text_file, "--context", 32, "--max-windows", 1, "--device", "cpu"),
        ("generate", output, "Line", "--max-new-tokens", 2, "--device", "cpu"),
    ]
    for arguments in others:
        assert "--trust-remote-code" in refused(*arguments)
        status, _, err = run(*arguments, "--trust-remote-code")
        assert status == 0, err
