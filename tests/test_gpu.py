"""On a GPU layers, starts and checkpoints give what float64 on the CPU gives, and no layer makes the host wait.

Without a GPU the same tests compare the CPU's kernels; `scripts/gpu_check.sh` runs them where there is one.
"""

import pytest
import torch

from edkm_cli.clustering import clustered_linear, kmeans_start
from edkm_cli.config import CompressConfig
from edkm_cli.distributed import World
from edkm_cli.errors import UserError
from edkm_cli.nn.clustered import hold
from edkm_cli.train.optimizer import build_optimizer
from edkm_cli.train.state import Checkpoints
from helpers import cluster, tiny_llama

GPU = torch.cuda.is_available()
DEVICE = "cuda" if GPU else "cpu"
SHAPE, TOKENS = (16, 128), 12
GRANULARITIES = ("tensor", "row:1", "row:4", "block:8x64")


def layer(dtype, *, granularity, bits=3):
    """(x, weight, centroids) on the CPU, random; the numbers of `dtype` exactly, whatever dtype they have later."""
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(SHAPE, generator=generator).mul_(0.02).to(dtype)
    x = torch.randn(TOKENS, SHAPE[1], generator=generator).to(dtype)
    centroids = kmeans_start(weight, 2**bits, granularity=granularity)
    return x, weight, centroids


def results(tensors, dtypes, device, **options):
    """(output, gradients of all tensors) of the layer in these dtypes on the device."""
    x, weight, centroids = wanted = tuple(
        tensor.to(device, dtype).requires_grad_() for tensor, dtype in zip(tensors, dtypes, strict=True)
    )
    output = clustered_linear(x, weight, centroids, temperature=0.05, iterations=2, **options)
    upstream = torch.linspace(-1, 1, output.numel()).view_as(output.cpu()).to(output)
    return [output.detach(), *torch.autograd.grad(output, wanted, upstream)]


@pytest.mark.parametrize("bits", [3, 5])
@pytest.mark.parametrize("granularity", GRANULARITIES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("mode", ["straight-through", "hard", "soft"])
def test_a_layer_and_its_gradients_are_those_of_float64(mode, dtype, granularity, bits):
    """Within what the layer's dtype resolves, at the scale of the largest entry; one in a hundred may be off."""
    tensors = layer(dtype, granularity=granularity, bits=bits)
    options = {"granularity": granularity, "mode": mode, "lut_dtype": "float16"}
    real = [dtype, dtype, torch.float32]
    ours, exact = results(tensors, real, DEVICE, **options), results(tensors, [torch.float64] * 3, "cpu", **options)
    tolerance = 2e-2 if dtype == torch.bfloat16 else 2e-3 if mode == "soft" else 1e-4
    for what, found, wanted in zip(("y", "dx", "dw", "dc"), ours, exact, strict=False):
        error = (found.double().cpu() - wanted).abs() / wanted.abs().max()
        assert found.device.type == DEVICE
        assert error.quantile(0.99) <= tolerance, f"{what}: {error.quantile(0.99)}"


@pytest.mark.parametrize("granularity", GRANULARITIES)
def test_the_start_is_where_the_weight_is_and_what_the_cpu_finds(granularity):
    weight, importance = torch.randn(SHAPE).bfloat16(), torch.rand(SHAPE)
    found = kmeans_start(weight.to(DEVICE), 8, granularity=granularity, importance=importance)
    assert found.device.type == DEVICE
    assert torch.equal(found.cpu(), kmeans_start(weight, 8, granularity=granularity, importance=importance))


@pytest.mark.skipif(not GPU, reason="needs a GPU")
@pytest.mark.parametrize("granularity", GRANULARITIES)
def test_no_layer_makes_the_host_wait(granularity):
    tensors = layer(torch.bfloat16, granularity=granularity)
    real = [torch.bfloat16, torch.bfloat16, torch.float32]
    on_gpu = [tensor.to(DEVICE, dtype) for tensor, dtype in zip(tensors, real, strict=True)]
    x, weight, centroids = (tensor.requires_grad_() for tensor in on_gpu)

    def step():
        mode = {"granularity": granularity, "mode": "straight-through", "lut_dtype": "float16"}
        clustered_linear(x, weight, centroids, **mode).sum().backward()

    step()  # compiles the kernels
    torch.cuda.set_sync_debug_mode("error")
    try:
        step()
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("mode", ["straight-through", "hard", "soft"])
@pytest.mark.parametrize("granularity", GRANULARITIES)
def test_a_weight_that_is_not_finite_is_never_hidden(granularity, mode):
    """On a GPU the output shows it, where the trainer sees it in the loss; on the CPU it is an error at once."""
    x, weight, centroids = (tensor.to(DEVICE) for tensor in layer(torch.float32, granularity=granularity))
    weight[3, 5] = float("nan")
    options = {"granularity": granularity, "mode": mode}
    if GPU:
        assert clustered_linear(x, weight, centroids, **options)[:, 3].isnan().all()
    else:
        with pytest.raises(UserError, match="finite"):
            clustered_linear(x, weight, centroids, **options)


@pytest.mark.parametrize("held", [False, True])
def test_an_optimizer_goes_on_from_a_checkpoint_as_if_it_had_not_stopped(tmp_path, held, ids):
    config = CompressConfig(model="none", learning_rate=1e-3, lut_learning_rate=1e-3)

    def fresh():
        model, _ = cluster(tiny_llama().bfloat16().to(DEVICE))
        if held:
            hold(model)
        return model.train(), build_optimizer(model, config, World(device=DEVICE))

    def step(model, optimizer):
        model(input_ids=ids.to(DEVICE)).logits.float().square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    going, optimizer = fresh()
    for _ in range(2):
        step(going, optimizer)
    Checkpoints(tmp_path, keep=1).save(2, going, optimizer)
    resumed, again = fresh()
    assert Checkpoints(tmp_path, keep=1).load_newest(resumed, again) == 2
    for trained in ((going, optimizer), (resumed, again)):
        step(*trained)
    for (name, found), wanted in zip(resumed.named_parameters(), going.parameters(), strict=True):
        if GPU:  # sums by atomics have no order
            torch.testing.assert_close(found, wanted, rtol=2e-2, atol=2e-3, msg=name)
        else:
            assert torch.equal(found, wanted), name
