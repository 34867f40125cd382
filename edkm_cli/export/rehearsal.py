"""The end of a run tried before its beginning: swap, export and reload on the meta device, without a weight.

What a checkpoint needs is known from shapes alone: that each tensor it will hold is in the clustered model under the same
name, and that the configuration, written and read again, describes the same tensors. A family for which that does not
hold is refused here, not after training.
"""

from __future__ import annotations

import copy
import tempfile
from pathlib import Path
from typing import Any

from edkm_cli.errors import UserError
from edkm_cli.export.checkpoint import announced_tensors, copy_code, write_config
from edkm_cli.format import QuantizationSpec
from edkm_cli.initialize.build import Recipe, cluster_linears, no_tables
from edkm_cli.integrity import describe_tensors, expected_tensors
from edkm_cli.nn.clustered import Clustering
from edkm_cli.nn.swap import Swap, palettize_embeddings, palettize_skeleton


def rehearse_export(
    model: Any,
    swaps: tuple[Swap, ...],
    spec: QuantizationSpec,
    clustering: Clustering,
    *,
    trust_remote_code: bool = False,
) -> None:
    """Swap a copy of the dense `model` on the meta device, and try whether what it becomes can be written and read again.

    Raises UserError naming what does not fit.
    """
    model, target = copy.deepcopy(model), copy.deepcopy(model)
    cluster_linears(model, Recipe(swaps, spec, clustering), start=no_tables)
    palettize_embeddings(model, swaps, spec, rounded=None)
    try:
        palettize_skeleton(target, spec)
        _, announced = announced_tensors(model, spec, target=target)
        with tempfile.TemporaryDirectory(prefix="edkm-rehearsal-") as folder:
            write_config(target, spec, Path(folder))
            copy_code(model, Path(folder))
            expected = expected_tensors(Path(folder), spec, limit=len(announced), trust_remote_code=trust_remote_code)
    except UserError as error:
        raise _refused(model, str(error)) from error
    except (AttributeError, KeyError, RuntimeError, TypeError, ValueError, OSError) as error:
        raise _refused(model, f"{type(error).__name__}: {error}") from error
    written = describe_tensors(target, announced)
    different = sorted(name for name in written.keys() | expected.keys() if written.get(name) != expected.get(name))
    if different:
        name = different[0]
        raise _refused(
            model, f"{name} is {written.get(name, 'not there')}, and {expected.get(name, 'not there')} when read again"
        )


def _refused(model: Any, why: str) -> UserError:
    return UserError(
        f"a compressed {type(model).__name__} cannot be exported and loaded ({' '.join(why.split())[:300]}); nothing "
        "was trained; leave what it names dense with --skip, or report it with the model's name"
    )
