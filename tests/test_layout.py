"""The house rules that no linter checks: names and sizes of files."""

import sys
from pathlib import Path

import pytest

import edkm_cli

PACKAGE = Path(edkm_cli.__file__).parent
SOURCES = sorted(PACKAGE.rglob("*.py"))
BACKENDS = ("torch", "c", "cuda", "triton", "meta")
NOT_KERNELS = (
    "__init__",
    "build",
    "closed_form",
    "levels",
)  # dispatch, compiler and its levels, the mathematics above, geometry


def test_no_module_shadows_the_standard_library():
    names = {path.stem for path in SOURCES if path.stem != "__init__"} | {path.parent.name for path in SOURCES}
    assert not names & (sys.stdlib_module_names - {"__main__"})


@pytest.mark.parametrize("folder", [PACKAGE, PACKAGE.parent / "tests", PACKAGE.parent / "scripts"])
def test_no_file_has_more_than_400_lines(folder):
    long = {path.name: lines for path in folder.rglob("*.py") if (lines := path.read_bytes().count(b"\n")) > 400}
    assert not long


def test_kernels_are_named_by_algorithm_and_backend():
    names = {path.stem for path in (PACKAGE / "kernels").glob("*.py")} - set(NOT_KERNELS)
    assert {name for name in names if name.rpartition("_")[2] not in BACKENDS} == set()
