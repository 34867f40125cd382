"""Rules of the suite itself."""

import ast
from pathlib import Path

import pytest

TESTS = Path(__file__).parent


def imported(path):
    """Top-level names of the modules that a file imports, wherever in the file."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield node.module or ""
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


@pytest.mark.parametrize("path", sorted(TESTS.glob("*.py")), ids=lambda path: path.name)
def test_no_file_imports_a_test_module(path):
    """What two test modules share lies in helpers.py, processes.py or a fixture of conftest.py."""
    modules = {name for whole in imported(path) for name in whole.split(".")}
    tests = {file.stem for file in TESTS.glob("test_*.py")} | {"conftest"}
    assert not modules & tests
