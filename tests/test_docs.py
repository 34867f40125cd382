"""What the documentation points to exists, and its map of the code is the code's."""

import json
import re
import tomllib
from pathlib import Path

import pytest

from edkm_cli.compress import compress
from edkm_cli.config import CompressConfig
from edkm_cli.dryrun.plan import dry_run

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", ROOT / "CHANGELOG.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_to_files_that_exist(page):
    targets = re.findall(r"\]\(([^)#\s]+)", page.read_text(encoding="utf-8"))
    local = [target for target in targets if "://" not in target]
    assert [target for target in local if not (page.parent / target).exists()] == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_recorded_results_that_a_page_names_exist_and_are_json(page):
    for name in re.findall(r"docs/results/([\w.-]+\.json)\b", page.read_text(encoding="utf-8")):
        if not re.search(r"MACHINE|DATE", name):  # a pattern to fill in
            json.loads((ROOT / "docs" / "results" / name).read_text(encoding="utf-8"))


def test_every_page_and_example_is_in_the_index():
    index = (ROOT / "docs" / "README.md").read_text(encoding="utf-8")
    found = [*(ROOT / "docs").glob("*.md"), *(ROOT / "examples").glob("*.py")]
    assert [path.name for path in found if path.name != "README.md" and path.name not in index] == []


def test_the_rows_of_the_architecture_page_are_the_import_contract():
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
    layers = [set(re.findall(r"\w+", layer)) for layer in contracts[0]["layers"]]
    page = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    table = page.split("## Which way imports run")[1].split("| --- | --- |\n")[1].split("\n\n")[0]
    assert [set(re.findall(r"`(\w+)`", row.split("|")[1])) for row in table.splitlines()] == layers


def test_paths_of_code_that_pages_name_exist():
    for page in PAGES:
        for path in re.findall(
            r"`((?:edkm_cli|scripts|configs|tests|examples)/[\w/.-]*\w/?)`", page.read_text("utf-8")
        ):
            if not any(word.isupper() and len(word) > 3 for word in re.split(r"[/._]", path)):  # a pattern to fill in
                assert (ROOT / path).exists(), f"{page.name} names {path}"


def test_tests_that_pages_and_scripts_name_exist():
    for file in (*PAGES, *(ROOT / "scripts").iterdir(), ROOT / "Makefile"):
        for path in re.findall(r"\btests/test_\w+\.py", file.read_text("utf-8") if file.is_file() else ""):
            assert (ROOT / path).exists(), f"{file.name} names {path}"


def explained():
    """The keys that docs/results.md names."""
    return set(re.findall(r"`(\w+)`", (ROOT / "docs" / "results.md").read_text(encoding="utf-8")))


def test_every_key_of_a_report_is_explained(model_directory, text_file, tmp_path):
    settings = {
        "data": (str(text_file),),
        "importance": "none",
        "context": 64,
        "eval_windows": 1,
        "sequence_length": 32,
    }
    config = CompressConfig(model=str(model_directory), output=str(tmp_path / "out"), steps=1, **settings)
    report = compress(config)
    metrics = json.loads((tmp_path / "out" / "metrics.jsonl").read_text().splitlines()[0])
    assert (report.keys() | metrics.keys()) - explained() == set()


def test_every_key_of_a_plan_is_explained(model_directory):
    assert dry_run(CompressConfig(model=str(model_directory), sequence_length=32)).keys() - explained() == set()


def test_every_key_of_a_recorded_result_is_explained():
    """Its own keys and those of its rows; what deeper maps hold is explained with the key that holds them."""
    known = explained()
    missing = set()
    for path in (ROOT / "docs" / "results").glob("*.json"):
        result = json.loads(path.read_text(encoding="utf-8"))
        for keys in (result, *result.get("rows", ())):
            missing |= {f"{key} ({path.name})" for key in keys if key not in known}
    assert not missing
