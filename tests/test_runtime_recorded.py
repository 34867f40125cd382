"""Products where PyTorch records or follows what is done, or makes new tensors elsewhere."""

import pytest
import torch
from torch.autograd import forward_ad

import edkm_cli
from edkm_cli import kernels
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
