"""The examples in the docstrings of small pure functions are true."""

import doctest
import importlib
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parent.parent / "edkm_cli"
MODULES = sorted(
    ".".join(path.relative_to(PACKAGE.parent).with_suffix("").parts)
    for path in PACKAGE.rglob("*.py")
    if " >>> " in path.read_text(encoding="utf-8")  # so no module without examples is imported for nothing
)


def test_the_examples_are_found():
    assert {"edkm_cli.packing", "edkm_cli.granularity", "edkm_cli.clustering.schedule"} <= set(MODULES)


@pytest.mark.parametrize("module", MODULES)
def test_docstring_examples_are_true(module):
    result = doctest.testmod(importlib.import_module(module))
    assert result.attempted > 0
    assert result.failed == 0, "the difference is printed above"
