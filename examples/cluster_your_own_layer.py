"""Train a layer of your own on clustered weights, then store it as indices and a lookup table (docs/clustering.md).

`clustered_linear` is a function, so it fits any module: give it the weight and the table as parameters. In the mode
`straight-through` the forward pass multiplies with the nearest table entries, which is what will be stored, so nothing
is lost when training ends.

    python examples/cluster_your_own_layer.py
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from edkm_cli.clustering import clustered_linear, kmeans_start, lookup, nearest_indices, round_lut
from edkm_cli.packing import pack, unpack

BITS, GRANULARITY, LUT_DTYPE = 3, "row:1", "float16"  # one table of 2**3 float16 entries for each output row


class ClusteredMLP(nn.Module):
    """Two linear layers; the first one, (inner, width), is trained as the 3-bit layer it will become."""

    def __init__(self, width: int, inner: int) -> None:
        super().__init__()
        up = nn.Linear(width, inner)
        self.weight, self.bias = up.weight, up.bias
        # The table starts at the k-means of the weight; `importance` would say which weights matter most.
        self.table = nn.Parameter(kmeans_start(up.weight.detach(), 2**BITS, granularity=GRANULARITY))  # (groups, 8)
        self.down = nn.Linear(inner, width)

    def forward(self, x: Tensor) -> Tensor:
        hidden = clustered_linear(
            x,
            self.weight,
            self.table,
            self.bias,
            granularity=GRANULARITY,
            mode="straight-through",
            lut_dtype=LUT_DTYPE,
        )
        return self.down(nn.functional.silu(hidden))

    def stored(self) -> tuple[Tensor, Tensor]:
        """What a file needs of the clustered layer: packed indices (inner, bytes) uint8 and the table (groups, 8)."""
        table = round_lut(self.table.detach(), LUT_DTYPE)
        indices = nearest_indices(self.weight.detach(), table, granularity=GRANULARITY)
        return pack(indices, BITS), table.to(torch.float16)


def decoded(packed: Tensor, table: Tensor, width: int) -> Tensor:
    """The weight (inner, width) that the stored form stands for."""
    return lookup(unpack(packed, BITS, width), table, granularity=GRANULARITY).float()


def main(steps: int = 50) -> dict[str, float]:
    """Fit a random function and check that the stored layer gives the trained layer's output."""
    torch.manual_seed(0)
    width, inner = 128, 64
    x = torch.randn(256, width)
    y = torch.sin(2 * x) @ torch.randn(width, width) / width**0.5
    model = ClusteredMLP(width, inner)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    for _ in range(steps):
        loss = (model(x) - y).square().mean()
        optimizer.zero_grad()
        loss.backward()  # gradients reach the weight, the table, the bias and x
        optimizer.step()
        losses.append(loss.item())
    packed, table = model.stored()
    hidden = nn.functional.linear(x, decoded(packed, table, width), model.bias)
    stored_loss = (model.down(nn.functional.silu(hidden)) - y).square().mean().item()
    stored_bits = 8 * (packed.numel() + table.numel() * table.element_size())
    return {
        "first_loss": losses[0],
        "trained_loss": (model(x) - y).square().mean().item(),
        "stored_loss": stored_loss,
        "bits_per_weight": stored_bits / model.weight.numel(),
    }


if __name__ == "__main__":
    for name, value in main().items():
        print(f"{name:16} {value:.4f}")
