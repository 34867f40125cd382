"""Every family of models: read whole, swapped, exported, loaded and decoded again, the same tensors and logits."""

import copy
import os

import pytest
import torch
from transformers import AutoModel, AutoModelForCausalLM

from edkm_cli import hf, models
from edkm_cli.compress import compress
from edkm_cli.config import CompressConfig
from edkm_cli.errors import UserError
from edkm_cli.nn.hooks import language_model
from edkm_cli.nn.swap import OTHER, fall_back, is_tied, plan_swaps
from edkm_cli.runtime.experts import Experts, fuse_experts, is_expert, split_experts
from families import FAMILIES, SEEING, family, seeing_family
from helpers import byte_tokenizer, cluster, export

# Of these, `make check` tests some by themselves; the slow tests of all families leave them out.
SEEN = ("llava", "gemma3")
COMPRESSED = ("gemma3_text", "deepseek_v2", "jamba", "biogpt", "falcon", "falcon_h1", "gemma3n_text")
# `make test` compresses a fifth of the others with default data and takes half of all through bfloat16, `make families` all.
FIFTH, HALF = (1, 1) if "EDKM_FAMILIES" in os.environ else (5, 2)
FAST = ("gemma", "gemma3_text", "minicpm3", "llama4_text", "deepseek_v3", "mixtral", "falcon", "olmo")


def check(model_type, dtype, folder):
    model = family(model_type, dtype)
    tied = is_tied(model)
    ids = torch.randint(0, 256, (2, 17), generator=torch.Generator().manual_seed(3))
    limit = 1e-4 if dtype == torch.float32 else 0.05
    model.save_pretrained(folder / "dense")
    with torch.no_grad():
        original = model(ids).logits
        dense = models.load_dense(models.resolve(str(folder / "dense")), dtype=str(dtype).removeprefix("torch."))
        fused = copy.deepcopy(dense)
        fuse_experts(fused)
        read = fused.state_dict()
        assert all(torch.equal(tensor, read[name]) for name, tensor in model.state_dict().items())
        # Where a tensor lies in memory may decide how experts' products are summed.
        assert (dense(ids).logits.float() - original.float()).norm() <= limit * original.float().norm()
        clustered, spec = cluster(dense)
        snapped = clustered(ids).logits
        loaded = hf.load(export(clustered, spec, folder / "out"), dtype=dtype)
        assert is_tied(loaded) is tied
        packed = loaded(ids).logits  # sums in another order than the dense model's
        assert (packed.float() - snapped.float()).norm() <= limit * snapped.float().norm()
        loaded.save_pretrained(folder / "again")
        assert torch.equal(hf.load(folder / "again", dtype=dtype)(ids).logits, packed)
        written = loaded.generate(ids[:1], max_new_tokens=2, min_new_tokens=2, do_sample=False)
        assert written.shape == (1, 19)
        loaded.dequantize()
        decoded = loaded(ids).logits
        assert (decoded.float() - snapped.float()).norm() <= limit * snapped.float().norm()
        loaded.save_pretrained(folder / "decoded")  # as its family stores it
        again = AutoModelForCausalLM.from_pretrained(folder / "decoded", dtype=dtype)(ids).logits
        assert (again.float() - decoded.float()).norm() <= limit * decoded.float().norm()


@pytest.mark.parametrize("model_type", FAST)
def test_a_family_round_trips(model_type, tmp_path):
    check(model_type, torch.float32, tmp_path)


def test_a_tensor_that_a_family_keeps_in_float32_round_trips_in_bfloat16(tmp_path):
    check("deepseek_v3", torch.bfloat16, tmp_path)


@pytest.fixture
def little_text(monkeypatch, tmp_path):
    """What a model writes itself is kept here, in sequences no longer than the runs' own."""
    monkeypatch.setenv("EDKM_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr("edkm_cli.self_text.SEQUENCE_TOKENS", 32)


def check_seeing(model_type, folder):
    """The language model is compressed, what sees stays as it is, and the result reads images, packed and decoded."""
    model, ids, image = seeing_family(model_type)
    result = run_with_default_data(model, folder, assignments="free")
    inside = language_model(model)
    assert {row["role"] for row in result["swapped"]} - {"head"} == {"linear", "embedding"}
    assert all(row["role"] == "head" or row["name"].startswith(inside) for row in result["swapped"])
    assert (folder / "out" / "preprocessor_config.json").is_file()
    loaded = hf.load(folder / "out")
    assert type(loaded) is type(model)
    stored = loaded.state_dict()
    kept = {name: value for name, value in model.state_dict().items() if not name.startswith((inside, "lm_head"))}
    assert len(kept) > 20
    assert all(torch.equal(stored[name], value) for name, value in kept.items())
    with torch.no_grad():
        packed = loaded(input_ids=ids, **image).logits
        assert not image or (loaded(input_ids=ids).logits - packed).norm() > 0.1 * packed.norm()
        loaded.save_pretrained(folder / "again")
        assert torch.equal(hf.load(folder / "again")(input_ids=ids, **image).logits, packed)
        loaded.dequantize()
        assert (loaded(input_ids=ids, **image).logits - packed).norm() < 1e-5 * packed.norm()


@pytest.mark.parametrize("model_type", SEEN)
def test_a_model_that_reads_images_is_compressed_and_reads_them(model_type, tmp_path, little_text):
    check_seeing(model_type, tmp_path)


def check_default_data(model_type, folder):
    """A run as `edkm compress --model DIR`: on text that the model writes itself. Its result loads and writes."""
    assert run_with_default_data(family(model_type), folder)["perplexity"]["exported"] > 0


def run_with_default_data(model, folder, **changes):
    model.save_pretrained(folder / "model")
    byte_tokenizer().save_pretrained(folder / "model")
    (folder / "model" / "preprocessor_config.json").write_text("{}")
    config = CompressConfig(
        model=str(folder / "model"),
        output=str(folder / "out"),
        steps=1,
        sequence_length=32,
        context=32,
        eval_windows=1,
        calibration_tokens=64,
        start_tokens=128,
        save_every=0,
        **changes,
    )
    return compress(config)


@pytest.mark.parametrize("model_type", COMPRESSED)
def test_a_family_is_compressed_with_default_data(model_type, tmp_path, little_text):
    check_default_data(model_type, tmp_path)


@pytest.mark.slow
def test_families_are_compressed_with_default_data(tmp_path, little_text):
    failed = {}
    for model_type in sorted({*FAMILIES, *SEEING} - {*SEEN, *COMPRESSED})[::FIFTH]:
        try:
            (check_seeing if model_type in SEEING else check_default_data)(model_type, tmp_path / model_type)
        except Exception as error:
            failed[model_type] = f"{type(error).__name__}: {error}"
    assert not failed


@pytest.mark.slow
@pytest.mark.parametrize(("dtype", "every"), [(torch.float32, 1), (torch.bfloat16, HALF)])
def test_families_round_trip(dtype, every, tmp_path):
    failed = {}
    for model_type in sorted(FAMILIES.keys() - (FAST if dtype == torch.float32 else ()))[::every]:
        try:
            check(model_type, dtype, tmp_path / model_type)
        except Exception as error:
            failed[model_type] = f"{type(error).__name__}: {error}"
    assert not failed
    assert len(FAMILIES) >= 30


@pytest.mark.parametrize("model_type", ["llama", "gpt_neox", "falcon", "opt", "mixtral", "gemma3_text", "jamba"])
def test_the_base_model_of_a_checkpoint_loads_with_mixed_bits_and_skipped_modules(model_type, tmp_path):
    """Its modules have other names there: without the prefix of the base model."""
    model = family(model_type)
    linears = [swap.name for swap in plan_swaps(model, embedding_bits=8) if swap.clustered]
    model, spec = cluster(model, skip=(linears[1],), mixed={"module_bits": {linears[0]: 4}})
    assert spec.skipped
    directory = export(model, spec, tmp_path / "out")
    ids = torch.randint(0, 256, (2, 17), generator=torch.Generator().manual_seed(3))
    base, causal = AutoModel.from_pretrained(directory), AutoModelForCausalLM.from_pretrained(directory)
    with torch.no_grad():
        wanted = causal.base_model(ids).last_hidden_state
        assert torch.equal(base(ids).last_hidden_state, wanted)
        base.save_pretrained(tmp_path / "base")
        assert torch.equal(AutoModel.from_pretrained(tmp_path / "base")(ids).last_hidden_state, wanted)
        if is_tied(causal):  # else the output embedding lacks
            again = AutoModelForCausalLM.from_pretrained(tmp_path / "base")
            assert torch.equal(again(ids).logits, causal(ids).logits)
        else:
            with pytest.raises(UserError, match="is missing from the checkpoint"):
                AutoModelForCausalLM.from_pretrained(tmp_path / "base")


def test_scaled_embeddings_are_compressed_and_decoded_with_their_scale(tmp_path):
    model = family("gemma")
    assert not [swap for swap in plan_swaps(model, embedding_bits=8) if swap.reason]
    with torch.no_grad():
        wanted = model.get_input_embeddings()(torch.arange(5))
        cluster(model)
        found = model.get_input_embeddings()(torch.arange(5))
    assert wanted.abs().amax() > 2 * (model.get_input_embeddings().dequantize()[:5]).abs().amax()  # it does scale
    assert torch.allclose(found, wanted, atol=0.01 * wanted.abs().amax().item())


def test_an_embedding_that_does_more_than_scale_stays_dense_and_its_tied_head_with_it():
    class Normed(torch.nn.Embedding):
        def forward(self, ids):
            return torch.nn.functional.normalize(super().forward(ids), dim=-1)

    model = family("gemma")
    old = model.get_input_embeddings()
    new = Normed(*old.weight.shape)
    new.weight = old.weight
    model.set_input_embeddings(new)
    reasons = {swap.role: swap.reason for swap in plan_swaps(model, embedding_bits=8) if swap.reason}
    assert set(reasons) == {"embedding", "head"}
    assert "is a Normed" in reasons["embedding"]


def test_a_model_without_linears_is_refused_with_what_it_has_instead():
    from transformers import GPT2Config, GPT2LMHeadModel

    with torch.device("meta"):
        model = GPT2LMHeadModel(GPT2Config(n_embd=8, n_layer=1, n_head=1))
    with pytest.raises(UserError, match="has a weight of Conv1D, which is no Linear"):
        plan_swaps(model, embedding_bits=8)


EXPERTS = [name for name, sizes in FAMILIES.items() if any("expert" in key for key in sizes)]


@pytest.mark.parametrize("model_type", EXPERTS)
def test_all_experts_of_a_family_are_compressed_and_no_router(model_type):
    model = family(model_type)
    split_experts(model)
    assert any(isinstance(module, Experts) for module in model.modules())
    swaps = {swap.name: swap for swap in plan_swaps(model, embedding_bits=8)}
    kept = {name: swap for name, swap in swaps.items() if swap.reason and swap.role in ("linear", OTHER)}
    assert not [name for name in kept if is_expert(name) or "experts" in name]
    routers = [name for name, p in model.named_parameters() if "rout" in name or name.endswith(".gate.weight")]
    assert routers
    for name in routers:
        assert name in kept or name.removesuffix(".weight") in kept or model.get_parameter(name).dim() == 1, name


def test_a_time_step_that_is_not_called_stays_dense():
    kept = {swap.name: swap.reason for swap in plan_swaps(family("jamba"), embedding_bits=8) if swap.reason}
    assert "not called" in kept["model.layers.0.mamba.dt_proj"]
    assert "model.layers.0.mamba.x_proj" not in kept


def test_coefficients_that_training_clips_in_place_stay_dense():
    kept = {swap.name for swap in plan_swaps(family("gemma3n_text"), embedding_bits=8) if swap.reason}
    assert {f"model.layers.0.altup.{name}_coefs" for name in ("prediction", "correction")} <= kept


def test_where_a_target_leaves_nothing_the_line_names_what_it_left():
    swaps = plan_swaps(seeing_family("llava")[0], embedding_bits=8)
    with pytest.raises(UserError, match=r"language_model\..* rows of 32") as error:
        fall_back(swaps, "w4a16", "block:1x64", 0)
    assert "vision" not in str(error.value)


def test_a_packed_module_shows_its_weight_without_decoding_it():
    model = family("llama4_text")
    cluster(model)
    weight = model.get_input_embeddings().weight
    assert (weight.shape, weight.dtype, weight.device.type) == (torch.Size([257, 32]), torch.float32, "cpu")
    assert torch.equal(weight + 0, model.get_input_embeddings().dequantize())
