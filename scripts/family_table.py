"""Try every family of models that the tests know, tiny and with random weights, and write the table of docs/models.md.

    python scripts/family_table.py docs/models.md

Each is saved, compressed, exported, loaded packed, asked for a padded batch and for text, saved again, and decoded; every
step is compared with the one before (tests/test_families.py). A step that fails is in the table with its error.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))

BEGIN, END = "<!-- table: scripts/family_table.py -->\n", "<!-- end of table -->\n"


def padded_batch_agrees(model: Any) -> bool:
    """Whether a text gives the same logits alone and beside a longer one, padded on the left."""
    ids = torch.randint(0, 256, (2, 12), generator=torch.Generator().manual_seed(5))
    mask = torch.ones_like(ids)
    mask[0, :4] = 0
    positions = (mask.cumsum(1) - 1).clamp_min(0)
    with torch.no_grad():
        both = model(input_ids=ids, attention_mask=mask, position_ids=positions).logits[0, 4:]
        alone = model(input_ids=ids[:1, 4:]).logits[0]
    return bool((both - alone).norm() <= 1e-3 * alone.norm())


def row(kind: str, folder: Path) -> list[str]:
    """The cells of a family: what is compressed, and what works of it."""
    from edkm_cli import hf
    from edkm_cli.initialize.sharded import open_layers
    from edkm_cli.models import resolve
    from edkm_cli.nn.swap import OTHER, plan_swaps
    from edkm_cli.runtime.experts import is_expert, split_experts
    from families import family
    from test_families import check

    def attempt(step: Any) -> str:
        try:
            return {True: "yes", False: "no"}[bool(step())]
        except Exception as error:
            return f"{type(error).__name__}: {str(error).splitlines()[0][:60] if str(error) else ''}"

    model = family(kind)
    split_experts(model)
    swaps = plan_swaps(model, embedding_bits=8)
    experts = sum(is_expert(swap.name) for swap in swaps)
    dense = [swap for swap in swaps if swap.reason]
    share = 1 - sum(torch.Size(swap.shape).numel() for swap in dense) / sum(p.numel() for p in model.parameters())
    whole = attempt(lambda: check(kind, torch.float32, folder) or True)
    return [
        kind,
        "each" if experts else "no experts",
        f"{100 * share:.0f}%",
        whole,
        attempt(lambda: padded_batch_agrees(hf.load(folder / "out", dtype=torch.float32))),
        attempt(lambda: open_layers(resolve(str(folder / "dense")), dtype=torch.float32, device="cpu") is not None),
        "some" if any(swap.role == OTHER for swap in dense) else "none",
    ]


def main() -> None:
    """Replace the table of a page, or print it."""
    from families import FAMILIES

    head = ["model type", "experts compressed", "weights", "round trip", "padded batch", "read by layer", "left dense"]
    lines = [head, ["---"] * len(head)]
    with tempfile.TemporaryDirectory() as folder:
        for kind in FAMILIES:
            lines.append(row(kind, Path(folder) / kind))
            print(" | ".join(lines[-1]), file=sys.stderr, flush=True)
    table = "".join(f"| {' | '.join(cells)} |\n" for cells in lines)
    if len(sys.argv) < 2:
        print(table)
        return
    page = Path(sys.argv[1])
    before, rest = page.read_text(encoding="utf-8").split(BEGIN)
    page.write_text(before + BEGIN + table + END + rest.split(END)[1], encoding="utf-8")


if __name__ == "__main__":
    main()
