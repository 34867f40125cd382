"""From a packed model with an adapter to a clustered one: the tables that were there, and the sum of weight and update."""

import json

import pytest
import torch
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file, save_file

import edkm_cli
from edkm_cli.errors import UserError
from edkm_cli.finetune.merge import cluster_again, decoded_copy, require_mergeable
from edkm_cli.finetune.session import add_adapter, check_adapter, load_adapter, save_adapter
from edkm_cli.format import read_spec
from edkm_cli.nn.clustered import Clustering, clustered_layers
from families import family
from helpers import cluster, export, tiny_llama

FORMATS = [
    {"granularity": "row:1"},
    {"granularity": "block:4x8", "lut_dtype": "float8_e4m3fn"},
    {"granularity": "tensor", "bits": 5},
    {
        "mixed": {
            "module_granularity": {"model.layers.0.mlp.up_proj": "row:2", "model.layers.1.mlp.down_proj": "tensor"}
        }
    },
]


@pytest.mark.parametrize("model_type", ["llama4_text", "phimoe", "olmo", "gemma3n_text"])
def test_all_linears_of_a_family_are_adapted_and_train(model_type, tmp_path):
    packed = edkm_cli.load(export(*cluster(family(model_type)), tmp_path / "out"))
    model, ids = add_adapter(packed, rank=2, alpha=4, targets=("all-linear",)).train(), torch.arange(3, 40)[None]
    model(input_ids=ids, labels=ids).loss.backward()
    learning = {name.partition(".lora_B")[0]: p.grad for name, p in model.named_parameters() if "lora_B" in name}
    assert any(name.endswith("q_proj") for name in learning)
    assert not any("rout" in name or "experts" in name for name in learning if model_type != "gemma3n_text")
    assert all(bool(grad.isfinite().all()) for grad in learning.values() if grad is not None)
    assert (
        sum(grad is None for grad in learning.values()) < len(learning) / 4
    )  # Gemma 3n has linears that it does not call


def again(directory, *, updated, targets=("all-linear",)):
    torch.manual_seed(0)
    packed = edkm_cli.load(directory, dtype=torch.float32)
    model = add_adapter(packed, rank=4, alpha=8, targets=tuple(targets))
    if updated:
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                torch.nn.init.normal_(parameter, std=0.02)
    spec = read_spec(directory)
    return model, lambda: merged(model, Clustering(spec.bits, spec.granularity, spec.lut_dtype))


def merged(model, clustering):
    require_mergeable(model)
    return cluster_again(model.eval(), clustering)


@pytest.mark.parametrize("options", FORMATS)
def test_a_fresh_adapter_gives_the_weights_that_were_there(tmp_path, options):
    export(*cluster(tiny_llama(bias=True), **options), tmp_path)
    before = edkm_cli.load(tmp_path)
    _, merge = again(tmp_path, updated=False, targets=["q_proj", "up_proj"])
    layers = clustered_layers(merge())
    assert len(layers) == 14
    for name, layer in layers.items():
        assert torch.equal(layer.hard_weight(), before.get_submodule(name).dequantize())


@pytest.mark.parametrize("model", [tiny_llama, lambda: family("deepseek_v3"), lambda: family("gemma")])
def test_the_decoded_copy_is_the_adapted_model(tmp_path, ids, model):
    export(*cluster(model()), tmp_path)
    adapted, merge = again(tmp_path, updated=True)
    with torch.no_grad():
        wanted = adapted(ids).logits
        merged = merge()
        teacher = decoded_copy(merged)
        torch.testing.assert_close(teacher(ids).logits, wanted, rtol=1e-4, atol=1e-4)
        assert not torch.allclose(merged(ids).logits, wanted, rtol=1e-3, atol=1e-3)  # rounded to nearest, it is another


@pytest.mark.parametrize("more", [{"modules_to_save": ["v_proj"]}, {"lora_bias": True}])
def test_an_adapter_that_cannot_be_merged_is_refused_with_a_line(tmp_path, more):
    packed = edkm_cli.load(export(*cluster(tiny_llama()), tmp_path), dtype=torch.float32)
    model = get_peft_model(packed, LoraConfig(r=2, target_modules=["q_proj"], **more))
    with pytest.raises(UserError, match="merge"):
        merged(model, Clustering(3, "row:1", "float16"))


def test_one_scale_of_all_tables_stays(tmp_path):
    export(*cluster(tiny_llama(), lut_dtype="float8_e4m3fn", lut_scale=2.0**-4), tmp_path)
    _, merge = again(tmp_path, updated=True)
    assert {layer.clustering.lut_scale for layer in clustered_layers(merge()).values()} == {2.0**-4}


def test_an_adapter_that_is_not_finite_is_refused(tmp_path):
    export(*cluster(tiny_llama()), tmp_path)
    model, merge = again(tmp_path, updated=True)
    next(parameter for name, parameter in model.named_parameters() if "lora_B" in name).data[0, 0] = torch.nan
    with pytest.raises(UserError, match="must be finite"):
        merge()


def test_an_adapter_that_waits_for_certain_tokens_is_refused(tmp_path):
    (tmp_path / "adapter_model.safetensors").touch()
    (tmp_path / "adapter_config.json").write_text('{"peft_type": "LORA", "alora_invocation_tokens": [1]}')
    with pytest.raises(UserError, match=r"must hold a LoRA adapter, but .* holds 'aLoRA'"):
        check_adapter(tmp_path)


@pytest.mark.parametrize("change", ["one lacks", "other names", "fewer modules"])
def test_an_adapter_whose_tensors_are_not_those_of_its_configuration_is_refused(tmp_path, change):
    export(*cluster(tiny_llama()), tmp_path / "model")
    model, _ = again(tmp_path / "model", updated=True)
    (tmp_path / "adapter").mkdir()
    save_adapter(model, tmp_path / "adapter", base="model")
    weights, settings = tmp_path / "adapter" / "adapter_model.safetensors", tmp_path / "adapter" / "adapter_config.json"
    tensors, config = load_file(weights), json.loads(settings.read_text())
    if change == "one lacks":
        tensors.pop(min(tensors))
    elif change == "other names":
        tensors = {f"x.{name}": tensor for name, tensor in tensors.items()}
    else:
        settings.write_text(json.dumps(config | {"target_modules": ["q_proj"]}))
    save_file(tensors, weights, metadata={"format": "pt"})
    with pytest.raises(UserError, match="only one has"):
        load_adapter(edkm_cli.load(tmp_path / "model", dtype=torch.float32), tmp_path / "adapter")


def test_an_update_of_one_of_two_tied_embeddings_is_refused(tmp_path):
    export(*cluster(tiny_llama(), embedding_bits=16), tmp_path)
    _, merge = again(tmp_path, updated=True, targets=["lm_head", "q_proj"])
    with pytest.raises(UserError, match=r"lm_head, .*the other embedding, too"):
        merge()


@pytest.mark.parametrize(("tied", "bits"), [(True, 8), (False, 8), (True, 16), (False, 16)])
def test_an_adapter_of_the_head_that_was_saved_is_loaded(tmp_path, tied, bits):
    export(*cluster(tiny_llama(tied=tied), embedding_bits=bits), tmp_path / "model")
    model, _ = again(tmp_path / "model", updated=True, targets=["lm_head", "q_proj"])
    (tmp_path / "adapter").mkdir()
    save_adapter(model, tmp_path / "adapter", base=str(tmp_path / "model"))
    loaded = load_adapter(edkm_cli.load(tmp_path / "model", dtype=torch.float32), tmp_path / "adapter")
    ids = torch.arange(20)[None]
    assert torch.equal(loaded(ids).logits, model.eval()(ids).logits)
