"""Tables fitted to outputs: against least squares written out in float64; and the range of their number formats."""

import pytest
import torch

from edkm_cli.clustering import lookup
from edkm_cli.errors import UserError
from edkm_cli.granularity import Granularity
from edkm_cli.initialize import compensate as fitting
from edkm_cli.initialize.compensate import fits_tables, fitted_tables
from helpers import cluster, tiny_llama


def case(rows, columns, granularity, k=4, tokens=60):
    generator = torch.Generator().manual_seed(0)
    draw = lambda *shape: torch.randn(*shape, dtype=torch.float64, generator=generator)  # noqa: E731
    granularity = Granularity.parse(granularity)
    inputs = draw(tokens, columns) @ draw(columns, columns)
    indices = torch.randint(0, k, (rows, columns), generator=generator, dtype=torch.uint8)
    return draw(rows, columns), indices, inputs, draw(granularity.groups(rows, columns), k), granularity


def written_out(weight, indices, inputs, groups, k):
    """For each table the solution of one least squares problem: all outputs of its rows on all inputs."""
    found = []
    for rows in weight.reshape(groups, -1, weight.shape[1]).unbind(0):
        chosen = indices.reshape(groups, -1, weight.shape[1])[len(found)].long()
        features = torch.cat([inputs @ torch.nn.functional.one_hot(row, k).double() for row in chosen])
        found.append(torch.linalg.lstsq(features, (inputs @ rows.t()).t().reshape(-1, 1)).solution[:, 0])
    return torch.stack(found)


@pytest.mark.parametrize("granularity", ["row:1", "row:3", "tensor"])
def test_tables_are_the_least_squares_solution(granularity, monkeypatch):
    monkeypatch.setattr(fitting, "_COLUMNS", 16)
    weight, indices, inputs, tables, granularity = case(6, 40, granularity)
    hessian = inputs.t() @ inputs
    found = fitted_tables(weight @ hessian, indices, hessian, tables)
    torch.testing.assert_close(found, written_out(weight, indices, inputs, len(tables), 4), rtol=1e-4, atol=1e-4)


def test_the_output_error_falls_and_entries_nobody_chose_stay():
    weight, indices, inputs, tables, granularity = case(5, 30, "row:1")
    indices[indices == 3] = 0
    hessian = inputs.t() @ inputs
    found = fitted_tables(weight @ hessian, indices, hessian, tables)
    torch.testing.assert_close(found[:, 3], tables[:, 3])

    def error(tables):
        return ((weight - lookup(indices, tables, granularity=granularity)) @ inputs.t()).square().sum()

    assert error(found) < error(tables)
    assert torch.isfinite(found).all()


@pytest.mark.parametrize(
    ("granularity", "shape", "fits"),
    [
        ("row:1", (8, 2048), True),
        ("tensor", (8, 16), True),
        ("row:1", (8, 11008), True),
        ("block:8x64", (8, 128), False),
    ],
)
def test_tables_that_depend_on_one_another_are_left(granularity, shape, fits):
    assert fits_tables(Granularity.parse(granularity), shape) == fits


def test_weights_that_tables_do_not_reach_are_refused_with_a_number_format_that_does():
    model = tiny_llama()
    with torch.no_grad():
        model.model.layers[1].mlp.up_proj.weight.mul_(1e8)
    rule = r"float16 tables reach 65504, but model\.layers\.1\.mlp\.up_proj needs .*bfloat16"
    with pytest.raises(UserError, match=rule):
        cluster(model)


def test_weights_that_scaled_tables_do_not_reach_are_refused_with_a_scale():
    rule = (
        r"tables with --lut-scale 0\.000976562 reach 0\.4375, but model\.layers\.0\..* needs .*; use --lut-scale 0\.0"
    )
    with pytest.raises(UserError, match=rule):
        cluster(tiny_llama(), lut_dtype="float8_e4m3fn", lut_scale=2.0**-10)
