"""K-means after training against `edkm compress --steps 0`, and dense DKM against its closed form."""

import pytest
import torch

import edkm_cli
from edkm_cli import data, models
from edkm_cli.clustering import kmeans_start, snap
from edkm_cli.compress import compress
from edkm_cli.config import CompressConfig
from edkm_cli.errors import UserError
from edkm_cli.format import QuantizationSpec
from edkm_cli.nn.swap import decoder_bits_per_weight, plan_swaps
from edkm_cli.research.baselines import dkm, kmeans
from edkm_cli.research.baselines.outcome import decoder_linears
from edkm_cli.train.losses import next_token_loss
from helpers import byte_tokenizer, quantized, tiny_llama


def texts(count=3):
    generator = torch.Generator().manual_seed(4)
    return [torch.randint(0, 257, (1, 31), generator=generator) for _ in range(count)]


def weights(model):
    return {name: layer.weight.detach().clone() for name, layer in decoder_linears(model).items()}


@pytest.mark.parametrize("importance", ["gradient", "activation", "none"])
@pytest.mark.parametrize("granularity", ["row:1", "tensor"])
def test_it_is_what_compress_without_steps_exports(tmp_path, model_directory, text_file, granularity, importance):
    config = CompressConfig(
        model=str(model_directory),
        output=str(tmp_path / "out"),
        data=(str(text_file),),
        embedding_bits=16,
        steps=0,
        start="kmeans",
        granularity=granularity,
        importance=importance,
        calibration_tokens=256,
        context=64,
        eval_windows=1,
        device="cpu",
        dtype="float32",
    )
    report = compress(config)
    exported = edkm_cli.load(tmp_path / "out")
    exported.dequantize()
    model = models.load_dense(models.resolve(str(model_directory)), dtype="float32")
    text = data.open_training_data(data.parse_sources(list(config.data)), byte_tokenizer())
    outcome = quantized(
        kmeans,
        model,
        text.calibration_batches(512, limit=config.calibration_tokens, seed=config.seed),
        bits=3,
        granularity=granularity,
        importance=importance,
    )
    for name, weight in weights(model).items():
        assert torch.equal(weight, exported.get_submodule(name).weight), name
    assert outcome.bits_per_weight == pytest.approx(report["decoder_bits_per_weight"])
    assert outcome.calibration_tokens == (0 if importance == "none" else 256)


@pytest.mark.parametrize("method", [kmeans, dkm])
@pytest.mark.parametrize(
    ("granularity", "lut_dtype"), [("row:1", "float16"), ("tensor", "float32"), ("block:4x8", "float8_e4m3fn")]
)
def test_tables_are_counted_as_for_our_own_checkpoints(method, granularity, lut_dtype):
    model = tiny_llama()
    spec = QuantizationSpec(3, granularity, lut_dtype, 16)
    expected = decoder_bits_per_weight(plan_swaps(model, embedding_bits=16), spec)
    options = {"steps": 0} if method is dkm else {"importance": "none"}
    outcome = quantized(method, model, texts(1), bits=3, granularity=granularity, lut_dtype=lut_dtype, **options)
    assert outcome.bits_per_weight == pytest.approx(expected)
    total = sum(layer.weight.numel() for layer in decoder_linears(model).values())
    assert outcome.stored_bytes == pytest.approx(expected * total / 8)  # all widths are multiples of 8


def test_importance_changes_the_clusters_and_lowers_the_loss_it_stands_for():
    generator = torch.Generator().manual_seed(0)
    model = tiny_llama()
    x = torch.randn(200, 24, generator=generator)
    x[:, :6] *= 10  # columns of unequal importance
    layer = model.model.layers[0].self_attn.q_proj
    original = layer.weight.detach().clone()
    errors = {}
    for importance in ("activation", "none"):
        layer.weight.data.copy_(original)
        masses = x.square().mean(0) if importance == "activation" else None
        centroids = kmeans_start(layer.weight.detach(), 8, granularity="row:1", importance=masses)
        snapped = snap(layer.weight.detach(), centroids, granularity="row:1", lut_dtype="float16")
        errors[importance] = float(((snapped - original) ** 2 * x.square().mean(0)).sum())
    assert errors["activation"] < 0.9 * errors["none"]


def test_a_geometry_that_does_not_fit_names_the_layer():
    for method in (kmeans, dkm):
        with pytest.raises(UserError, match=r"model\.layers\.0\.self_attn\.q_proj"):
            quantized(method, tiny_llama(), texts(), bits=3, granularity="block:7x7")


@pytest.mark.parametrize("importance", ["none", "gradient"])
def test_dkm_without_steps_is_kmeans(importance):
    trained, clustered = tiny_llama(), tiny_llama()
    outcome = quantized(dkm, trained, texts(), bits=3, steps=0, importance=importance)
    quantized(kmeans, clustered, texts(), bits=3, importance=importance)
    for name, weight in weights(clustered).items():
        assert torch.equal(weight, weights(trained)[name])
    assert outcome.training_tokens == 0


def test_dkm_with_and_without_attention_maps_end_at_the_same_weights():
    dense, closed = tiny_llama(), tiny_llama()
    options = {"bits": 3, "steps": 4, "learning_rate": 1e-3, "temperature": 0.05}
    outcome = quantized(dkm, dense, texts(), **options)
    quantized(dkm, closed, texts(), closed_form=True, **options)
    assert outcome.training_tokens == 4 * 31
    same = total = 0
    for name, weight in weights(dense).items():
        same += int((weights(closed)[name] - weight).abs().lt(1e-4).sum())  # float16 entries may round apart
        total += weight.numel()
    assert same > 0.99 * total


@torch.no_grad()
def losses(model):
    return [float(next_token_loss(model(ids).logits, ids)) for ids in texts()]


def test_dkm_learns_the_text_and_leaves_an_ordinary_model():
    start, model = tiny_llama(), tiny_llama()
    model.model.layers[0].mlp.up_proj.weight.requires_grad_(False)
    quantized(dkm, start, texts(), bits=3, steps=0)
    quantized(dkm, model, texts(), bits=3, steps=12, learning_rate=5e-3, iterations=1, closed_form=True)
    assert sum(losses(model)) < 0.9 * sum(losses(start))
    for layer in decoder_linears(model).values():
        assert type(layer) is torch.nn.Linear
    assert [name for name, parameter in model.named_parameters() if not parameter.requires_grad] == [
        "model.layers.0.mlp.up_proj.weight"
    ]
    assert all(parameter.grad is None for parameter in model.parameters() if parameter.shape == (257, 24))
    assert not model.training
    assert not model.is_gradient_checkpointing


def test_dkm_refuses_values_out_of_range_and_a_loss_that_is_not_finite():
    with pytest.raises(UserError, match="learning_rate must be positive"):
        quantized(dkm, tiny_llama(), texts(), bits=3, learning_rate=0.0)
    with pytest.raises(UserError, match="got none"):
        quantized(dkm, tiny_llama(), [], bits=3)
    model = tiny_llama()
    with torch.no_grad():
        model.model.norm.weight[0] = float("inf")
    with pytest.raises(UserError, match="loss must stay finite"):
        quantized(dkm, model, texts(), bits=3, steps=1, closed_form=True)
