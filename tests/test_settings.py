"""Declared settings: what a field says about itself is what is checked, read and shown."""

import math
from dataclasses import dataclass, fields

import pytest

from edkm_cli.config import CompressConfig
from edkm_cli.errors import UserError
from edkm_cli.finetune.config import FinetuneConfig, MergeConfig
from edkm_cli.research.compare.config import CompareConfig
from edkm_cli.settings import COMPRESSION, PANELS, faults, from_mapping, refuse, setting, setting_of


def no_spaces(text):
    if " " in text:
        raise UserError(f"name must have no spaces, got {text!r}")


@dataclass(frozen=True)
class Example:
    name: str = setting("a", "A name.", COMPRESSION, check=no_spaces)
    count: int = setting(1, "A count.", COMPRESSION, minimum=1)
    share: float = setting(0.5, "A share.", COMPRESSION, minimum=0, maximum=1)
    rate: float | None = setting(None, "A rate.", COMPRESSION, positive=True, finite=False)
    kinds: tuple[str, ...] = setting((), "Kinds.", COMPRESSION, choices={"x": "this", "y": ""})

    def __post_init__(self):
        refuse([*faults(self), *(["share needs count 2"] if self.share == 1 and self.count < 2 else [])])


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"count": 0}, "count must be at least 1, got 0"),
        ({"count": True}, "count must be a whole number, got True"),
        ({"share": 1.5}, "share must be at most 1, got 1.5"),
        ({"share": math.nan}, "share must be a finite number, got nan"),
        ({"share": -math.inf}, "share must be a finite number, got -inf"),
        ({"rate": math.nan}, "rate must be a number, got nan"),
        ({"rate": 0}, "rate must be positive, got 0.0"),
        ({"kinds": ["x", "z"]}, "kinds must be one of x, y, got 'z'"),
        ({"name": "a b"}, "name must have no spaces, got 'a b'"),
        ({"cuont": 2}, "unknown key 'cuont' (did you mean 'count'?)"),
        ({"share": 1.0}, "share needs count 2"),
    ],
)
def test_a_forbidden_value_is_refused_with_its_rule(values, message):
    with pytest.raises(UserError) as caught:
        from_mapping(Example, values)
    assert str(caught.value) == f"configuration: {message}"


def test_all_faults_come_at_once_and_contradictions_with_them():
    with pytest.raises(UserError) as caught:
        from_mapping(Example, {"rate": "fast", "kinds": ["z"], "share": 1, "nmae": "b"})
    message = str(caught.value)
    for part in ("rate must be a number", "kinds must be one of", "share needs count 2", "did you mean 'name'"):
        assert part in message


def test_what_contradicts_the_default_only_is_accepted_in_any_order():
    for values in ({"share": 1, "count": 2}, {"count": 2, "share": 1}):
        assert from_mapping(Example, values) == Example(share=1, count=2)


def test_infinity_is_accepted_where_it_is_declared():
    assert from_mapping(Example, {"rate": "inf"}).rate == math.inf


@pytest.mark.parametrize("kind", [CompressConfig, CompareConfig, FinetuneConfig, MergeConfig])
def test_every_field_declares_its_help_and_panel(kind):
    for of in fields(kind):
        assert setting_of(of).panel in PANELS
        assert setting_of(of).help.strip().endswith((".", "a file", ")")), of.name


@pytest.mark.parametrize("name", ["label_weight", "weight_decay"])
@pytest.mark.parametrize("value", [-1.0, math.nan, math.inf])
def test_weights_of_losses_are_finite_and_not_negative(name, value):
    with pytest.raises(UserError, match=f"{name} must be"):
        CompressConfig(**{name: value})


@pytest.mark.parametrize("name", ["learning_rate", "lut_learning_rate", "temperature", "temperature_end"])
@pytest.mark.parametrize("value", [0.0, math.nan, math.inf])
def test_rates_and_temperatures_are_finite_and_above_zero(name, value):
    with pytest.raises(UserError, match=f"{name} must be"):
        CompressConfig(**{name: value})


def test_texts_are_without_nul():
    with pytest.raises(UserError, match="output must be without NUL"):
        from_mapping(CompressConfig, {"output": "a\0b"})
