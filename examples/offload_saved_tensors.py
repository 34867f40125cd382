"""Move what autograd saves to host memory in a training loop of your own, each storage once (docs/memory.md).

The loop below is ordinary PyTorch with one line added: `with marshal:` around forward and backward. It runs once
without that line and once with it; the losses are equal to the bit.

    python examples/offload_saved_tensors.py
"""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from edkm_cli.memory import MarshalSavedTensors


class Attention(nn.Module):
    """Causal self-attention. The three projections save the same input: `save_on_cpu` would copy it three times."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.q, self.k, self.v, self.out = (nn.Linear(width, width, bias=False) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:  # (batch, tokens, width) -> the same
        batch, tokens, width = x.shape
        q, k, v = (
            project(x).view(batch, tokens, self.heads, -1).transpose(1, 2) for project in (self.q, self.k, self.v)
        )
        mixed = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return x + self.out(mixed.transpose(1, 2).reshape(batch, tokens, width))


def train(marshal: MarshalSavedTensors | None, *, steps: int = 3, device: str = "cpu") -> list[float]:
    """The losses of a small model that learns to repeat its input."""
    torch.manual_seed(0)
    model = nn.Sequential(*(Attention(64, 4) for _ in range(2)), nn.Linear(64, 64)).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    losses = []
    for _ in range(steps):
        x = torch.randn(2, 128, 64, device=device)
        with marshal or nullcontext():
            loss = (model(x) - x).square().mean()
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def main() -> dict[str, Any]:
    """Train with and without offloading and return what was counted."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    # One object for the whole run: its buffers are reused. `force` copies even where there is no GPU, to show the counts.
    marshal = MarshalSavedTensors(device="cpu", force=device == "cpu")
    plain, offloaded = train(None, device=device), train(marshal, device=device)
    assert plain == offloaded, "offloading must not change a result"
    return marshal.statistics.as_dict()


if __name__ == "__main__":
    counted = main()
    print(f"saved by autograd  {counted['offered_tensors']:6,} tensors {counted['offered_bytes']:12,} bytes")
    print(f"moved to the host  {counted['moved_tensors']:6,} tensors {counted['moved_bytes']:12,} bytes")
    print(f"copies not needed  {counted['duplicates']:6,} tensors {counted['duplicate_bytes']:12,} bytes")
