"""Rules of the suite itself."""

import ast
from pathlib import Path

TESTS = Path(__file__).parent


def imported(path):
    """Top-level names of the modules that a file imports, wherever in the file."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield node.module or ""
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def test_no_file_imports_a_test_module():
    """What two test modules share lies in helpers.py, processes.py or a fixture of conftest.py."""
    tests = {file.stem for file in TESTS.glob("test_*.py")} | {"conftest"}
    for path in TESTS.glob("*.py"):
        modules = {name for whole in imported(path) for name in whole.split(".")}
        assert not modules & tests, path.name
