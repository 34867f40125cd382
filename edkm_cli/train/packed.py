"""Several documents in one sequence, each attending to itself only: what a model has to be able to do for `--packing`.

transformers sees from positions that restart where documents end, and keeps attention within them: by a block-diagonal
mask, or by variable-length kernels. A model with a state that runs on (convolutions, recurrences), or with code of its own,
may not. So each model is asked.
"""

from typing import Any

import torch
from torch import Tensor

from edkm_cli.errors import UserError
from edkm_cli.nn.hooks import evaluating

_DOCUMENTS = (3, 11)  # documents, tokens of each


@torch.no_grad()
def require_attention_within_documents(model: Any) -> None:
    """Compares a packed sequence of short documents with each document alone.

    Raises UserError where they differ by more than a tenth of what attention across the borders would change.
    """
    device, vocabulary = next(model.parameters()).device, model.config.get_text_config().vocab_size
    documents = torch.randint(0, vocabulary, _DOCUMENTS, generator=torch.Generator().manual_seed(0)).to(device)
    positions = torch.arange(_DOCUMENTS[1], device=device).repeat(1, _DOCUMENTS[0])
    ids = documents.view(1, -1)
    with evaluating(model):
        alone = _logits(model, documents).flatten(0, 1)
        packed, running = _logits(model, ids, position_ids=positions), _logits(model, ids)
    leak, whole = float((packed - alone).abs().max()), float((running - alone).abs().max())
    if not leak <= 0.1 * whole:
        rule = "--packing needs a model whose attention stays within documents"
        found = f"{type(model).__name__} gives a packed document other predictions than one alone"
        by = f"(by {leak:.2g}, where mixed documents give {whole:.2g})"
        raise UserError(f"{rule}, but {found} {by}; leave --packing out", everywhere=True)


def _logits(model: Any, ids: Tensor, **positions: Tensor) -> Tensor:
    return model(input_ids=ids, use_cache=False, **positions).logits.float()
