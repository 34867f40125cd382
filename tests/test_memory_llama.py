"""Marshaling a whole Hugging Face LLaMA: the gradients of `save_on_cpu` and of no hooks, at fewer bytes."""

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from edkm_cli.memory import MarshalSavedTensors


class SaveOnCpu(torch.autograd.graph.saved_tensors_hooks):
    """`save_on_cpu(pin_memory=True)`, which copies on a CPU too, with a count of bytes."""

    def __init__(self):
        self.moved_bytes = 0
        plain = torch.autograd.graph.save_on_cpu(pin_memory=True)

        def pack(tensor):
            self.moved_bytes += tensor.numel() * tensor.itemsize
            return plain.pack_hook(tensor)

        super().__init__(pack, plain.unpack_hook)


def gradients(model, tokens, context=None):
    model.zero_grad(set_to_none=True)
    if context is None:
        model(input_ids=tokens, labels=tokens).loss.backward()
    else:
        with context:
            model(input_ids=tokens, labels=tokens).loss.backward()
    found = {name: parameter.grad for name, parameter in model.named_parameters() if parameter.grad is not None}
    model.zero_grad(set_to_none=True)
    return found


def assert_same(found, expected):
    assert found.keys() == expected.keys()
    different = [name for name in expected if not torch.equal(found[name], expected[name])]
    assert not different


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
@pytest.mark.parametrize("checkpointing", [None, False, True])
def test_a_llama_has_the_same_gradients_bit_for_bit(attention, checkpointing):
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=97,
        hidden_size=48,
        intermediate_size=80,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        attn_implementation=attention,
    )
    model = LlamaForCausalLM(config).train()
    if checkpointing is not None:
        model.gradient_checkpointing_enable({"use_reentrant": checkpointing})
    tokens = torch.randint(0, 97, (2, 24))
    expected = gradients(model, tokens)
    marshal, plain = MarshalSavedTensors(force=True, min_bytes=0), SaveOnCpu()
    assert_same(gradients(model, tokens, plain), expected)
    assert_same(gradients(model, tokens, marshal), expected)
    assert 0 < marshal.statistics.moved_bytes <= plain.moved_bytes
    assert marshal.statistics.offered_bytes == plain.moved_bytes
    assert marshal.statistics.stored_bytes == 0


def test_a_step_of_smollm2s_shape_moves_at_most_0_6_of_save_on_cpu_with_the_same_gradients():
    heads = {"num_attention_heads": 9, "num_key_value_heads": 3}
    shape = {"hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 4, "vocab_size": 4096, **heads}
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**shape, tie_word_embeddings=True)).train()
    tokens = torch.randint(0, model.config.vocab_size, (1, 256))
    expected = gradients(model, tokens)
    marshal, plain = MarshalSavedTensors(force=True, min_bytes=0), SaveOnCpu()
    assert_same(gradients(model, tokens, plain), expected)
    assert_same(gradients(model, tokens, marshal), expected)
    assert marshal.statistics.moved_bytes <= 0.6 * plain.moved_bytes
