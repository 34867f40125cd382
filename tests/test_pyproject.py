"""What pyproject.toml says about the package is true: an installed copy holds every module that the checkout holds."""

import tomllib
from pathlib import Path

ROOT = Path(__file__).parent.parent
SETUPTOOLS = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]


def test_every_folder_of_the_package_is_installed():
    folders = {path.parent.relative_to(ROOT) for path in (ROOT / "edkm_cli").rglob("__init__.py")}
    assert set(SETUPTOOLS["packages"]) == {".".join(folder.parts) for folder in folders} | {"edkm_cli.configs"}


def test_every_file_that_is_not_python_is_installed():
    patterns = SETUPTOOLS["package-data"]
    for path in (ROOT / "edkm_cli").rglob("*"):
        if path.is_dir() or "__pycache__" in path.parts or path.suffix == ".py":
            continue
        if path.parent.name == "built":  # setup.py compiled it here, as it does into a wheel
            continue
        package = ".".join(path.parent.relative_to(ROOT).parts)
        assert any(path.match(pattern) for pattern in patterns.get(package, [])), f"{path} is not in package-data"
