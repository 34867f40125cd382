"""peft on a packed model: what it adapts, that it trains, is saved and comes back; what cannot be done is refused."""

import subprocess
import warnings

import pytest
import torch
from peft import AutoPeftModelForCausalLM, LoraConfig, PeftModel, get_peft_model, prepare_model_for_kbit_training
from peft.tuners.lora import LoraLayer
from transformers import AutoModelForCausalLM, Trainer, TrainingArguments

import edkm_cli
import edkm_cli.hf  # registers the format
from edkm_cli.errors import UserError
from families import family
from helpers import cluster, export, tiny_llama


@pytest.fixture(scope="module")
def packed(tmp_path_factory):
    """A checkpoint with biases, whose q, k, v and gate, up share calls."""
    return export(*cluster(tiny_llama(bias=True)), tmp_path_factory.mktemp("packed") / "tiny")


def adapted(directory, dtype=torch.float32, targets="all-linear", loader=None, **options):
    """A peft model on the checkpoint, with updates that matter."""
    model = (loader or edkm_cli.load)(directory, dtype=dtype)
    torch.manual_seed(7)  # peft draws A
    with warnings.catch_warnings():
        warnings.filterwarnings("error", "Unsupported layer type")
        model = get_peft_model(model, LoraConfig(r=4, target_modules=targets, task_type="CAUSAL_LM", **options))
    generator = torch.Generator().manual_seed(9)
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.05, generator=generator)
    return model.eval()


def adapters(model):
    return {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("targets", "layers"), [("all-linear", 14), (["q_proj", "down_proj"], 4), (["lm_head"], 1)])
@pytest.mark.parametrize("loader", [edkm_cli.load, AutoModelForCausalLM.from_pretrained])
def test_exactly_the_targets_are_adapted_by_float32_updates_and_a_fresh_one_changes_nothing(
    packed, ids, dtype, targets, layers, loader
):
    base = loader(packed, dtype=dtype)
    with torch.no_grad():
        before = base(ids).logits
        model = get_peft_model(base, LoraConfig(r=4, target_modules=targets, task_type="CAUSAL_LM"))
        assert torch.equal(model(ids).logits, before)
    found = [module for module in model.modules() if isinstance(module, LoraLayer)]
    assert len(found) == layers
    assert {parameter.dtype for parameter in adapters(model).values()} == {torch.float32}
    assert all("lora_" in name for name in adapters(model))
    assert all(layer.weight.dtype == dtype for layer in found)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_fifty_steps_lower_the_loss_and_leave_the_packed_weights(packed, ids, dtype):
    model = adapted(packed, dtype).train()
    before = {name: buffer.clone() for name, buffer in model.named_buffers()}
    optimizer = torch.optim.AdamW(adapters(model).values(), lr=5e-3)
    losses = []
    for _ in range(50):
        losses.append(model(input_ids=ids, labels=ids).loss)
        losses[-1].backward()
        optimizer.step()
        optimizer.zero_grad()
    assert losses[-1] < 0.5 * losses[0]
    assert all(torch.equal(buffer, before[name]) for name, buffer in model.named_buffers())


def test_gradients_are_those_of_the_same_adapter_on_the_decoded_model_also_checkpointed(packed, ids):
    models = [adapted(packed).train() for _ in range(3)]
    models[0].base_model.model.dequantize()
    models[2].gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    models[2].enable_input_require_grads()
    for model in models:
        model(input_ids=ids, labels=ids).loss.backward()
    wanted, plain, checkpointed = (adapters(model) for model in models)
    for name in plain:
        torch.testing.assert_close(plain[name].grad, wanted[name].grad, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(checkpointed[name].grad, plain[name].grad, rtol=1e-5, atol=1e-7)


RELOAD = """
import sys, torch, edkm_cli.hf
from peft import AutoPeftModelForCausalLM
model = AutoPeftModelForCausalLM.from_pretrained(sys.argv[1], dtype=torch.float32)
ids = torch.randint(0, 257, (2, 17), generator=torch.Generator().manual_seed(3))
with torch.no_grad():
    torch.save(model(ids).logits, sys.argv[2])
"""


def test_a_saved_adapter_gives_the_same_logits_in_a_new_process(packed, ids, tmp_path, python):
    model = adapted(packed)
    model.save_pretrained(tmp_path / "adapter")
    (tmp_path / "reload.py").write_text(RELOAD)
    subprocess.run([python, tmp_path / "reload.py", tmp_path / "adapter", tmp_path / "logits"], check=True)
    with torch.no_grad():
        assert torch.equal(torch.load(tmp_path / "logits"), model(ids).logits)
    again = PeftModel.from_pretrained(edkm_cli.load(packed), tmp_path / "adapter", is_trainable=True)
    assert adapters(again).keys() == adapters(model).keys()


def test_of_a_model_with_dense_experts_the_adapter_comes_back_too(tmp_path, ids):
    export(*cluster(family("deepseek_v3"), experts=False), tmp_path / "packed")
    model = adapted(tmp_path / "packed")
    model.save_pretrained(tmp_path / "adapter")
    again = AutoPeftModelForCausalLM.from_pretrained(tmp_path / "adapter", dtype=torch.float32)
    with torch.no_grad():
        assert torch.equal(again(ids).logits, model(ids).logits)


@pytest.mark.parametrize("safe", [False, True])
def test_merging_into_packed_weights_is_refused_and_into_decoded_ones_exact(packed, ids, safe):
    model = adapted(packed)
    with torch.no_grad():
        before = model(ids).logits
        with pytest.raises(UserError, match="edkm merge"):
            model.merge_adapter(safe_merge=safe)
        assert torch.equal(model(ids).logits, before)
        model.base_model.model.dequantize()
        merged = model.merge_and_unload(safe_merge=safe)
        torch.testing.assert_close(merged(ids).logits, before, rtol=1e-4, atol=1e-4)


def test_preparing_for_training_keeps_tables_and_scales(packed, ids):
    model = edkm_cli.load(packed, dtype=torch.bfloat16)
    before = {name: buffer.clone() for name, buffer in model.named_buffers()}
    model = get_peft_model(prepare_model_for_kbit_training(model), LoraConfig(target_modules="all-linear"))
    for name, buffer in model.base_model.model.named_buffers():
        wanted = before[name.replace(".base_layer", "")]
        assert buffer.dtype == wanted.dtype
        assert torch.equal(buffer, wanted)
    model(input_ids=ids, labels=ids).loss.backward()
    assert all(parameter.grad is not None for parameter in adapters(model).values())


@pytest.mark.parametrize("checkpointing", [False, True])
def test_transformers_trainer_trains_it(packed, ids, tmp_path, checkpointing):
    model = adapted(packed).train()
    before = {name: parameter.detach().clone() for name, parameter in adapters(model).items()}
    options = TrainingArguments(
        tmp_path, max_steps=2, use_cpu=True, report_to=[], save_strategy="no", gradient_checkpointing=checkpointing
    )
    rows = [{"input_ids": row, "labels": row} for row in ids]
    Trainer(model, options, train_dataset=rows).train()
    assert all(not torch.equal(parameter, before[name]) for name, parameter in adapters(model).items())
    with pytest.raises(ValueError, match="purely quantized"):
        Trainer(edkm_cli.load(packed), options, train_dataset=rows)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_model_decoded_to_another_dtype_is_as_if_loaded_in_it(packed, ids, dtype):
    model, wanted = edkm_cli.load(packed, dtype=torch.float32), edkm_cli.load(packed, dtype=dtype)
    model.dequantize(dtype)
    wanted.dequantize()
    assert model.dtype == model.config.dtype == dtype
    assert model.model.rotary_emb.inv_freq.dtype == torch.float32
    assert torch.equal(model(ids).logits, wanted(ids).logits)


@pytest.mark.parametrize(("loaded", "to"), [("bfloat16", "float32"), ("float32", "bfloat16")])
def test_what_was_cast_is_decoded_to_one_dtype(packed, ids, loaded, to):
    model = edkm_cli.load(packed, dtype=loaded).to(getattr(torch, to))
    model.dequantize()
    assert {parameter.dtype for parameter in model.parameters()} == {model.config.dtype}
    model(ids)
    again = edkm_cli.load(packed, dtype=loaded).to(getattr(torch, to))
    again.dequantize(getattr(torch, to))
    assert {parameter.dtype for parameter in again.parameters()} == {again.config.dtype} == {getattr(torch, to)}


def test_what_an_adapter_that_was_deleted_leaves_is_not_saved(packed, tmp_path):
    model = edkm_cli.load(packed)
    model.add_adapter(LoraConfig(target_modules=["down_proj"]))
    model.delete_adapter("default")
    with pytest.raises(UserError, match=r"down_proj\.base_layer is inside an adapter's layer"):
        model.save_pretrained(tmp_path / "saved")


@pytest.mark.parametrize("options", [{"device": "gpu"}, {"dtype": "bf16"}, {"dtype": "int8"}, {"device": "cuda:99"}])
def test_a_dtype_or_device_that_is_none_is_told_before_the_files_are_read(options, tmp_path):
    with pytest.raises(UserError, match="dtype and device must be torch's"):
        edkm_cli.load(tmp_path, **options)


def test_transforms_of_functions_get_what_a_plain_call_gets(packed, ids):
    model = edkm_cli.load(packed, dtype=torch.float32)
    linear, embedding = model.model.layers[0].self_attn.q_proj, model.model.embed_tokens
    x = torch.randn(3, linear.in_features)
    with torch.no_grad():
        for transform in (torch.func.functionalize, torch.func.vmap):
            torch.testing.assert_close(transform(linear)(x), linear(x), rtol=1e-5, atol=1e-5)
            torch.testing.assert_close(transform(embedding)(ids), embedding(ids))
