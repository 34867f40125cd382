"""Options made from configurations: each field is a flag with help in a panel, and what it parses is what is built."""

import re
from dataclasses import fields

import pytest
import typer
from typer.testing import CliRunner

from edkm_cli import cli
from edkm_cli.cli.options import configured
from edkm_cli.config import CompressConfig, build_config
from edkm_cli.research.compare.config import CompareConfig
from edkm_cli.settings import PANELS, setting_of


def parse(*arguments):
    """The configuration that these flags of `edkm compress` give."""
    found = []

    @configured(CompressConfig, build_config)
    def command(settings: CompressConfig) -> None:
        """Keep the settings."""
        found.append(settings)

    app = typer.Typer()
    app.command()(command)
    app([str(argument) for argument in arguments], standalone_mode=False)
    return found[0]


def test_flags_become_the_configuration():
    settings = parse("--model", "m", "-o", "there", "--bits", 4, "--lr", "1e-3", "--data", "a", "--data", "b",
                     "--no-distill", "--gradient-checkpointing", "--warmup", 0.3)  # fmt: skip
    assert settings == CompressConfig(
        model="m", output="there", bits=4, learning_rate=1e-3, data=("a", "b"), distill=False,
        gradient_checkpointing=True, warmup=0.3)  # fmt: skip


def test_no_flags_are_the_defaults():
    assert parse() == CompressConfig()


def test_both_forms_of_a_switch_override_a_file(tmp_path):
    file = tmp_path / "c.yaml"
    file.write_text("distill: false\ngradient_checkpointing: true\ntrust_remote_code: true\nlog_with: [wandb]\n")
    assert parse("--config", file) == CompressConfig(
        distill=False, gradient_checkpointing=True, trust_remote_code=True, log_with=("wandb",)
    )
    settings = parse("--config", file, "--distill", "--no-gradient-checkpointing", "--no-trust-remote-code",
                     "--log-with", "tensorboard")  # fmt: skip
    assert settings == CompressConfig(gradient_checkpointing=False, log_with=("tensorboard",))


def shown_help(*arguments):
    """What `--help` prints on 100 columns, without colours."""
    done = CliRunner().invoke(cli.app, [*arguments, "--help"], env={"COLUMNS": "100"})
    assert done.exit_code == 0
    return re.sub(r"\x1b\[[0-9;]*m", "", done.output)


def flag(of):
    return next((one for one in setting_of(of).flags if one.startswith("--")), "--" + of.name.replace("_", "-"))


@pytest.mark.parametrize(("command", "kind"), [("compress", CompressConfig), ("compare", CompareConfig)])
def test_help_shows_every_field_in_its_panel_within_100_columns(command, kind):
    text = shown_help(command)
    assert max(map(len, text.splitlines())) <= 100
    panels = dict(zip(re.findall(r"^╭─ (\w+) ─", text, re.M), re.split(r"^╭─.*$", text, flags=re.M)[1:], strict=True))
    assert list(panels) == ["Options", *(name for name in PANELS if name in panels)]
    assert re.findall(r"^│ (--\S+)", panels["Options"], re.M) == ["--help"]
    for of in fields(kind):
        shown = panels[setting_of(of).panel]
        assert re.search(rf"^│ {flag(of)}[ ,]", shown, re.M), of.name
        words = " ".join(re.sub(r"[│╰─╯]", " ", shown).split())
        assert setting_of(of).help.split()[-1] in words
        assert "None" not in words
        for choice in setting_of(of).choices or ():
            assert str(choice) in words


def test_every_command_is_listed():
    text = shown_help()
    for name in ("compress", "eval", "generate", "inspect", "report", "compare", "ablate", "bench"):
        assert re.search(rf"^│ {name} ", text, re.M)


def test_a_command_shows_the_defaults_it_has_itself():
    text = " ".join(re.sub(r"[│╰─╯]", " ", shown_help("distill")).split())
    for default in ("tables", "self", "distilled"):
        assert f"(default: {default})" in text
