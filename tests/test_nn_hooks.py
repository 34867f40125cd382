"""Hooks that are gone at the end of a block, and what decoder layers are called with."""

import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoConfig, AutoModelForCausalLM, LlamaModel

from edkm_cli.integrity import stored_skeleton
from edkm_cli.nn.hooks import decoder_layers, hooked, layer_calls, layers_form_a_chain, without_dropout
from families import FAMILIES, family
from helpers import cluster, export, tiny_llama, tiny_qwen


def test_hooks_are_called_in_the_block_and_gone_after_it_even_after_an_error():
    layer, seen = torch.nn.Linear(2, 2), []
    with hooked([layer], lambda module, args: seen.append(args[0])), pytest.raises(RuntimeError):
        layer(torch.ones(1, 3))
    layer(torch.ones(1, 2))
    assert len(seen) == 1
    with hooked([layer], lambda module, args, output: output + 1, after=True):
        above = layer(torch.ones(1, 2))
    assert torch.equal(above, layer(torch.ones(1, 2)) + 1)


@pytest.mark.parametrize("make", [tiny_llama, tiny_qwen])
@torch.no_grad()
def test_layers_called_with_what_was_noted_give_what_the_model_gives(make):
    model, ids = make(), torch.arange(12)[None]
    layers = list(model.model.layers)
    calls = layer_calls(lambda: model(input_ids=ids, use_cache=False), layers)
    hidden = calls[0].hidden
    assert torch.equal(hidden, model.get_input_embeddings()(ids))
    for layer, call in zip(layers, calls, strict=True):
        assert torch.equal(hidden, call.hidden)
        hidden = layer(hidden, *call.args, **call.kwargs)
    assert torch.equal(model.model.norm(hidden), model.model(ids).last_hidden_state)


def test_a_pass_is_left_at_the_last_layer_that_is_wanted():
    model, reached = tiny_llama(), []
    with hooked([model.model.layers[1]], lambda module, args: reached.append(module)):
        (call,) = layer_calls(lambda: model(input_ids=torch.arange(5)[None]), [model.model.layers[0]])
    assert call.hidden.shape[:2] == (1, 5)
    assert not reached


@pytest.mark.parametrize("kind", sorted(FAMILIES))
def test_layers_of_all_families_but_one_get_nothing_of_a_text_but_hidden_states(kind):
    with torch.device("meta"):
        model = family(kind)
    assert layers_form_a_chain(model) is (kind != "gemma3n_text")


def test_layers_that_nothing_is_known_of_are_no_chain():
    with torch.device("meta"):
        model = tiny_llama()
    model.model.forward = lambda input_ids, **_: input_ids.tolist()
    assert not layers_form_a_chain(model)


class _Twice(LlamaModel):
    def forward(self, *args, **kwargs):
        return [super(_Twice, self).forward(*args, **kwargs) for _ in range(2)][-1]


def test_layers_that_run_twice_are_no_chain():
    with torch.device("meta"):
        plain, twice = tiny_llama(), tiny_llama()
    assert layers_form_a_chain(plain)
    twice.model.__class__ = _Twice
    assert not layers_form_a_chain(twice)


def test_parts_that_a_family_names_beside_its_layers_are_none():
    model = tiny_llama()
    model._no_split_modules = ["LlamaDecoderLayer", "LlamaMLP"]
    assert list(decoder_layers(model)) == ["model.layers.0", "model.layers.1"]


def test_a_familys_dropout_is_taken_away_and_an_adapters_stays():
    model = family("opt", dropout=0.3, attention_dropout=0.3)
    lora = LoraConfig(target_modules=["q_proj"], lora_dropout=0.5)
    model = get_peft_model(model, lora).train()
    without_dropout(model)
    kept = [
        module.p for path, module in model.named_modules() if isinstance(module, torch.nn.Dropout) and "lora" in path
    ]
    assert kept
    assert set(kept) == {0.5}
    ids = torch.arange(12)[None]
    with model.disable_adapter():
        assert torch.equal(model(input_ids=ids).logits, model(input_ids=ids).logits)


def test_layers_that_get_embeddings_beside_are_no_chain_when_these_are_packed_either(tmp_path):
    kinds = ["mamba", "hybrid", "mamba", "hybrid", "mamba"]
    sizes = {
        "vocab_size": 257,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_attention_heads": 4,
        "n_mamba_heads": 2,
    }
    sizes |= {"num_key_value_heads": 4, "attention_head_dim": 16, "num_hidden_layers": len(kinds)}
    config = AutoConfig.for_model("zamba", layers_block_type=kinds, pad_token_id=None, **sizes)
    directory = export(*cluster(AutoModelForCausalLM.from_config(config)), tmp_path / "packed")
    assert not layers_form_a_chain(stored_skeleton(directory))
    assert layers_form_a_chain(stored_skeleton(export(*cluster(tiny_llama()), tmp_path / "llama")))
