"""Packed layers where PyTorch records or follows what is done, makes new tensors elsewhere, or is told to write."""

import copy

import pytest
import torch
from torch.autograd import forward_ad

import edkm_cli
from edkm_cli import kernels
from edkm_cli.errors import UserError
from edkm_cli.packing import pack
from edkm_cli.runtime.lut_linear import lut_linear, row_scaled_embedding
from helpers import cluster, export, tiny_llama


def matrix(rows=24, columns=64, bits=3):
    codes = torch.randint(0, 2**bits, (rows, columns), dtype=torch.uint8)
    return pack(codes, bits), torch.randn(rows, 2**bits), {"bits": bits, "tile": (1, columns)}


class Block(torch.nn.Module):
    def __init__(self, embedding, mlp):
        super().__init__()
        self.embedding, self.mlp = embedding, mlp

    def forward(self, ids):
        x = self.embedding(ids)
        return x + self.mlp(x)  # without the sum a trace of constants is refused by itself


def test_a_trace_holds_products_not_their_results(ids, tmp_path):
    model = edkm_cli.load(export(*cluster(tiny_llama()), tmp_path / "packed"), dtype=torch.float32)
    block = Block(model.model.embed_tokens, model.model.layers[0].mlp).requires_grad_(False)
    some, other = ids[:, :4] % 257, ids[:, 4:8] % 257
    traced = torch.jit.trace(block, some, check_trace=False)
    assert torch.equal(traced(other), block(other))


def test_a_derivative_that_is_not_there_is_not_left_out():
    indices, lut, about = matrix()
    with forward_ad.dual_level(), pytest.raises(NotImplementedError, match="no forward-mode derivatives"):
        lut_linear(forward_ad.make_dual(torch.rand(2, 64), torch.rand(2, 64)), indices, lut, None, **about)


def test_kernels_write_to_host_memory_whatever_the_default_device_is():
    indices, scale = pack(torch.randint(1, 16, (32, 64), dtype=torch.uint8), 4), torch.rand(32, 1)
    ids, weight = torch.tensor([1, 2]), torch.randn(32, 64)
    about = {"columns": 64, "bits": 4, "dtype": torch.float32}
    wanted = row_scaled_embedding(ids, indices, scale, **about)
    centroids = kernels.kmeans(weight, None, [8])[0]
    chosen = kernels.nearest(weight, centroids, (1, 64))
    with torch.device("meta"):
        assert torch.equal(row_scaled_embedding(ids, indices, scale, **about), wanted)
        assert torch.equal(kernels.kmeans(weight, None, [8])[0], centroids)
        assert torch.equal(kernels.nearest(weight, centroids, (1, 64)), chosen)


def loaded(directory, **options):
    return edkm_cli.load(export(*cluster(tiny_llama(), **options), directory), dtype=torch.float32)


def test_a_packed_weight_that_is_written_to_says_so(tmp_path):
    model = loaded(tmp_path / "packed")
    for module in (model.model.embed_tokens, model.model.layers[0].mlp.up_proj):
        before = module.weight[0].clone()
        with pytest.raises(UserError, match="cannot be changed in place"):
            module.weight.data[-1] = 0.0
        with pytest.raises(UserError, match="cannot be changed in place"):
            torch._foreach_mul_([module.weight], 0.0)
        assert torch.equal(module.weight[0], before)


def test_gradients_are_given_or_refused_also_after_a_pass_without(ids, tmp_path):
    model = loaded(tmp_path / "packed", lut_dtype="float8_e4m3fn")
    with torch.no_grad():
        model(ids)
    scale = model.model.layers[0].mlp.up_proj.lut_scale.requires_grad_(True)
    for _ in range(2):  # as gradients are accumulated
        model(ids).logits.sum().backward()
    assert scale.grad.abs().sum() > 0
    model.model.embed_tokens.scale.requires_grad_(True)
    with pytest.raises(ValueError, match="scales of an embedding do not train"):
        model(ids)


def test_tables_that_were_made_in_inference_mode_are_read(ids, tmp_path):
    model = loaded(tmp_path / "packed", lut_dtype="float8_e4m3fn")
    with torch.inference_mode():
        wanted = model(ids).logits
        other = copy.deepcopy(model)
        assert torch.equal(other(ids).logits, wanted)
