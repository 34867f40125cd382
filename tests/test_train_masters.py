"""Masters of 16-bit parameters: no update is lost, and float32 parameters get PyTorch's own steps."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from edkm_cli.train import optimizer
from edkm_cli.train.optimizer import MasterOptimizer, master_of, split_master


@settings(max_examples=200, deadline=None)
@given(st.floats(width=32, allow_nan=False, allow_infinity=False, min_value=-(2.0**100), max_value=2.0**100))
def test_a_master_is_split_without_loss_and_rounded_to_nearest(value):
    master = torch.tensor([value], dtype=torch.float32)
    rounded, remainder = split_master(master)
    assert torch.equal(master_of(rounded, remainder), master)
    nearest = master.to(torch.bfloat16)
    assert abs(rounded.double() - master.double()) <= abs(nearest.double() - master.double())


def trained(dtype, *, steps=60, lr=1e-4, decay=0.01):
    """The parameters, masters included, after some steps with gradients that do not depend on them."""
    torch.manual_seed(0)
    weight = nn.Parameter(torch.randn(37, 5).to(dtype))
    norm = nn.Parameter(torch.ones(11).to(dtype))
    groups = [{"params": [weight], "lr": lr, "weight_decay": decay}, {"params": [norm], "lr": lr, "weight_decay": 0.0}]
    optimizer = MasterOptimizer(groups, betas=(0.9, 0.95))
    for _ in range(steps):
        for parameter in (weight, norm):
            parameter.grad = (torch.randn(parameter.shape) + 0.5).to(dtype)
        optimizer.step()
    return weight, norm, optimizer


@pytest.mark.parametrize("chunk", [7, 2**22])
def test_float32_steps_are_those_of_pytorch(chunk, monkeypatch):
    monkeypatch.setattr(optimizer, "_CHUNK", chunk)
    weight, norm, _ = trained(torch.float32)
    torch.manual_seed(0)
    ours = [nn.Parameter(torch.randn(37, 5)), nn.Parameter(torch.ones(11))]
    groups = [{"params": ours[:1], "weight_decay": 0.01}, {"params": ours[1:], "weight_decay": 0.0}]
    reference = torch.optim.AdamW(groups, lr=1e-4, betas=(0.9, 0.95), eps=1e-8)
    for _ in range(60):
        for parameter in ours:
            parameter.grad = torch.randn(parameter.shape) + 0.5
        reference.step()
    torch.testing.assert_close(weight, ours[0], rtol=1e-6, atol=1e-7)
    torch.testing.assert_close(norm, ours[1], rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_small_updates_of_16_bit_parameters_add_up(dtype):
    """With PyTorch's AdamW and these rates no entry of the norm changes at all."""
    weight, norm, optimizer = trained(dtype, lr=1e-4)
    exact_weight, exact_norm, _ = trained(torch.float32, lr=1e-4)
    torch.manual_seed(0)
    begun = torch.randn(37, 5)
    for parameter, exact, start in ((norm, exact_norm, torch.ones(11)), (weight, exact_weight, begun)):
        state = optimizer.state[parameter]
        master = state["master"] if "master" in state else master_of(parameter.detach(), state["remainder"])
        rounded = (
            split_master(master)[0] if dtype == torch.bfloat16 else master.to(dtype)
        )  # there halves are rounded up
        assert torch.equal(rounded, parameter)
        moved, wanted = master - start.to(dtype).float(), exact.detach() - start
        assert float((moved - wanted).norm() / wanted.norm()) < 0.02
    plain = nn.Parameter(torch.ones(11, dtype=dtype))
    torch_own = torch.optim.AdamW([plain], lr=1e-4)
    for _ in range(60):
        plain.grad = torch.full_like(plain, 0.5)
        torch_own.step()
    assert dtype == torch.float16 or torch.equal(plain, torch.ones_like(plain))  # what used to happen
