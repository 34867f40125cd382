"""What is not finite is never saved, and what does not train is not restored; random numbers are."""

import pytest
import torch
from torch import nn

from edkm_cli.errors import UserError
from edkm_cli.train.state import Checkpoints


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_broken_state_is_refused_and_the_last_good_one_stays(value, tmp_path):
    model = nn.Linear(3, 2)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    checkpoints = Checkpoints(tmp_path, keep=1)
    checkpoints.save(1, model, optimizer)
    with torch.no_grad():
        model.weight[1, 2] = value
    with pytest.raises(UserError, match=r"parameter\.weight is not.*step-000001 is kept"):
        checkpoints.save(2, model, optimizer)
    fresh = nn.Linear(3, 2)
    assert checkpoints.load_newest(fresh, torch.optim.AdamW(fresh.parameters())) == 1
    assert bool(fresh.weight.isfinite().all())


@pytest.mark.parametrize("saved", [True, False])
def test_a_checkpoint_of_other_parameters_is_refused(saved, tmp_path):
    model = nn.Linear(3, 2)
    model.weight.requires_grad_(saved)
    optimizer = torch.optim.AdamW([model.bias, *([model.weight] if saved else [])])
    Checkpoints(tmp_path, keep=1).save(1, model, optimizer)
    model.weight.requires_grad_(not saved)
    with pytest.raises(UserError, match="the parameters that train now, but in one of both is no weight; go on with"):
        Checkpoints(tmp_path, keep=1).load_newest(model, optimizer)


def test_a_checkpoint_outlives_a_damaged_one_of_a_later_step(tmp_path):
    model = nn.Linear(3, 2)
    optimizer = torch.optim.AdamW(model.parameters())
    checkpoints = Checkpoints(tmp_path, keep=1)
    checkpoints.save(100, model, optimizer)
    (checkpoints.directory / "step-000100" / "state.json").write_text("damaged")
    assert checkpoints.load_newest(model, optimizer) == 0
    checkpoints.save(60, model, optimizer)
    assert checkpoints.load_newest(model, optimizer) == 60


def test_random_numbers_go_on_where_the_checkpoint_was_written(tmp_path):
    model = nn.Linear(3, 2)
    optimizer = torch.optim.AdamW(model.parameters())
    Checkpoints(tmp_path, keep=1).save(1, model, optimizer)
    wanted = torch.rand(4)
    Checkpoints(tmp_path, keep=1).load_newest(model, optimizer)
    assert torch.equal(torch.rand(4), wanted)
