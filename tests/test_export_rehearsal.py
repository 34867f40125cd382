"""Export is tried before training: a model that could not be written is refused at once."""

from types import SimpleNamespace

import pytest

from edkm_cli.errors import UserError
from edkm_cli.export.checkpoint import rehearse_export
from edkm_cli.format import QuantizationSpec
from edkm_cli.granularity import Granularity
from edkm_cli.nn.clustered import Clustering
from edkm_cli.nn.swap import OTHER, plan_swaps
from families import family
from helpers import tiny_llama


def rehearse(model):
    model = model.to("meta")
    swaps = tuple(plan_swaps(model, embedding_bits=8))
    skipped = [swap.name for swap in swaps if swap.reason and swap.role != OTHER]
    spec = QuantizationSpec(3, "row:1", "float16", 8, skipped)
    clustering = Clustering(3, Granularity.parse("row:1"), "float16")
    config = SimpleNamespace(trust_remote_code=False, target=None)
    rehearse_export(SimpleNamespace(skeleton=model, swaps=swaps, spec=spec, clustering=clustering, config=config))


@pytest.mark.parametrize("model_type", ["gemma", "deepseek_v3", "mixtral"])
def test_families_pass(model_type):
    rehearse(family(model_type))


def test_a_model_that_its_configuration_does_not_describe_is_refused_before_training():
    model = tiny_llama()
    model.config.intermediate_size = 48  # read again, it is another model
    with pytest.raises(UserError, match="cannot be exported and loaded"):
        rehearse(model)
