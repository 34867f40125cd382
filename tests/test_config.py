"""Configuration: defaults < file < flags, and every fault of it at once."""

from dataclasses import fields

import pytest
import torch

from edkm_cli.config import CompressConfig, build_config
from edkm_cli.data import parse_source
from edkm_cli.errors import UserError
from edkm_cli.format import QuantizationSpec
from edkm_cli.granularity import Granularity
from edkm_cli.preflight import choose_device
from edkm_cli.runtime.dispatch import forced_path
from edkm_cli.settings import configs_directory, read_yaml, setting_of


def test_flags_override_the_file_which_overrides_the_defaults(tmp_path):
    file = tmp_path / "c.yaml"
    file.write_text("bits: 4\nsteps: 7\ndata: text.txt\nlearning_rate: 3e-5\n")
    config = build_config(file, {"steps": 9, "bits": None})
    assert (config.bits, config.steps, config.data, config.learning_rate) == (4, 9, ("text.txt",), 3e-5)
    assert config.granularity == CompressConfig().granularity


@pytest.mark.parametrize("given", ["5", 5, "auto", "4+"])
def test_a_number_or_a_word_may_be_given_as_a_flag_gives_it(given):
    assert str(build_config(None, {"model": "m", "embedding_bits": given}).embedding_bits) == str(given)
    with pytest.raises(UserError, match="embedding_bits must be one of"):
        build_config(None, {"model": "m", "embedding_bits": "9"})
    with pytest.raises(UserError, match=r"embedding_bits 4\+ is for palette free without embedding_group"):
        build_config(None, {"model": "m", "embedding_bits": "4+", "embedding_group": 64})


def test_all_faults_come_at_once_with_a_suggestion(tmp_path):
    file = tmp_path / "c.yaml"
    file.write_text("bitz: 3\nbits: 9\ngranularity: row:x\nsteps: many\ndistill: 3\nmethod: best\n")
    with pytest.raises(UserError) as caught:
        build_config(file, {})
    message = str(caught.value)
    for part in ("'bitz' (did you mean 'bits'?)", "bits must be", "granularity", "steps must be a whole number",
                 "distill must be true or false", "method must be one of"):  # fmt: skip
        assert part in message
    assert "\n" not in message


@pytest.mark.parametrize(
    ("text", "message"),
    [("- a\n- b\n", "must hold a mapping"), ("a: [", "must be YAML"), ("\xff", "")],
)
def test_a_file_that_is_no_mapping_is_refused(tmp_path, text, message):
    file = tmp_path / "c.yaml"
    file.write_bytes(text.encode("latin-1"))
    with pytest.raises(UserError, match=message):
        read_yaml(file)


def test_ready_configurations_are_found_from_any_directory(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    wanted = build_config(configs_directory() / "smollm2_chat.yaml", {})
    assert build_config("configs/smollm2_chat.yaml", {}) == build_config("smollm2_chat.yaml", {}) == wanted
    assert parse_source(wanted.data[0]).files == (configs_directory() / "example_chat.jsonl",)
    (tmp_path / "smollm2_chat.yaml").write_text("bits: 5")
    assert build_config("smollm2_chat.yaml", {}).bits == 5  # one's own comes first


def test_a_missing_file_is_refused(tmp_path):
    with pytest.raises(UserError, match="does not exist"):
        build_config(tmp_path / "none.yaml", {})


@pytest.mark.parametrize("name", [path.name for path in sorted(configs_directory().glob("*.yaml"))])
def test_every_shipped_configuration_is_valid(name):
    if name == "models.yaml" or name.startswith("compare"):
        return
    build_config(configs_directory() / name, {})


@pytest.mark.parametrize("text", ["tensor", "row:1", "row:32", "block:8x64"])
def test_granularities_survive_their_text(text):
    assert str(Granularity.parse(text)) == text


@pytest.mark.parametrize("text", ["row:0", "row:-1", "row:", "block:8", "block:0x4", "Tensor", "", "row:1x2"])
def test_other_granularities_are_refused(text):
    with pytest.raises(UserError, match="granularity must be"):
        Granularity.parse(text)


def test_groups_bits_and_the_nearest_geometry():
    assert Granularity.parse("row:2").groups(8, 5) == 4
    assert Granularity.parse("block:4x5").groups(8, 15) == 6
    assert Granularity.parse("tensor").groups(8, 5) == 1
    rows, blocks = QuantizationSpec(3, "row:1", "float16"), QuantizationSpec(3, "block:8x64", "float8_e4m3fn")
    assert rows.linear_bits(1, 576, 3) == pytest.approx(3 * 576 + 128)
    assert blocks.linear_bits(64, 64, 3) == 3.125 * 64**2
    with pytest.raises(UserError, match=r"q_proj.*\(8, 5\).*nearest that fits is row:2"):
        Granularity.parse("row:3").groups(8, 5, layer="q_proj")


def test_the_choices_are_those_of_the_code_that_reads_them():
    from edkm_cli.clustering.linear import MODES
    from edkm_cli.clustering.schedule import SCHEDULES
    from edkm_cli.granularity import LUT_DTYPES
    from edkm_cli.initialize.importance import IMPORTANCES

    declared = {of.name: set(setting_of(of).choices or ()) for of in fields(CompressConfig)}
    assert declared["mode"] == set(MODES)
    assert declared["temperature_schedule"] == set(SCHEDULES)
    assert declared["lut_dtype"] == {"auto", *LUT_DTYPES}
    assert declared["importance"] == set(IMPORTANCES)


@pytest.mark.parametrize(
    ("target", "wanted"),
    [
        ("squeezellm", (3, "row:1", "float16", None)),
        ("coreml", (3, "row:1", "float16", None)),
        ("lut-b", (3, "block:8x64", "float8_e4m3fn", 0.0625)),
    ],
)
def test_a_target_sets_what_its_format_holds(target, wanted):
    config = build_config(None, {"target": target})
    assert (config.bits, config.granularity, config.lut_dtype, config.lut_scale) == wanted
    assert build_config(None, {"target": "any-precision", "bits": 5}).bits == 5


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"target": "coreml", "bits": 5}, "coreml holds 1, 2, 3, 4, 6 and 8 bits, got 5; use --bits 4"),
        ({"target": "coreml", "lut_dtype": "bfloat16"}, "got bfloat16; use --lut-dtype float16"),
        ({"target": "lut-b", "granularity": "row:1"}, "got row:1; use --granularity block:8x64"),
        ({"lut_scale": 0.1, "lut_dtype": "float8_e4m3fn"}, "lut_scale must be a power of two, such as 0.0625, got 0.1"),
        ({"lut_scale": 0.5}, "lut_scale is for lut_dtype float8_e4m3fn, got auto"),
        ({"target": "gguf"}, "target must be one of squeezellm"),
    ],
)
def test_what_contradicts_a_target_is_refused_with_what_would_fit(settings, message):
    with pytest.raises(UserError) as caught:
        build_config(None, settings)
    assert message in str(caught.value)


def test_a_file_gives_each_key_once_and_no_list_for_a_name(tmp_path):
    file = tmp_path / "c.yaml"
    file.write_text("model: a\nbits: 2\nbits: 4\n")
    with pytest.raises(UserError, match="bits is given twice"):
        build_config(file, {})
    file.write_text("base: &base {bits: 2, steps: 3}\n")
    with pytest.raises(UserError, match="base"):  # an unknown key
        build_config(file, {})
    file.write_text("model: a\ntarget: [coreml]\n")
    with pytest.raises(UserError, match="target must be a text"):
        build_config(file, {})
    with pytest.raises(UserError, match=r"learning_rate must be at most 1e\+30"):
        build_config(None, {"learning_rate": 1e300})
    assert choose_device("cpu:0") == "cpu"
    with pytest.raises(UserError, match="lut_dtype float8_e4m3fn has no scale for offsets; use lut_dtype float16"):
        build_config(
            None, {"model": "m", "palette": "affine", "granularity": "block:1x32", "lut_dtype": "float8_e4m3fn"}
        )


def test_a_gpu_that_is_not_there_is_refused_and_so_is_a_path_that_is_none(monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    with pytest.raises(UserError, match="this machine has, but 'cuda:9' is not available"):
        choose_device("cuda:9")
    with pytest.raises(UserError, match="--device must be auto, cpu, cuda or cuda:N"):
        choose_device("cuda:-1")
    with pytest.raises(UserError, match="--device must be auto, cpu, cuda or cuda:N, got 'gpu'"):
        choose_device("gpu")
    monkeypatch.setenv("EDKM_LUT_LINEAR", "fast")
    forced_path.cache_clear()
    with pytest.raises(UserError, match="EDKM_LUT_LINEAR must be one of"):
        choose_device("cpu")
    monkeypatch.undo()
    forced_path.cache_clear()


def test_a_size_and_bits_are_not_both_given(tmp_path):
    with pytest.raises(UserError, match="leave bits or target_size out"):
        build_config(None, {"model": "m", "bits": 4, "target_size": "64MB"})
    file = tmp_path / "c.yaml"
    file.write_text("model: m\ntarget_size: 64MB\n")
    with pytest.raises(UserError, match="leave bits or target_size out"):
        build_config(file, {"bits": 4})
    file.write_text("model: m\ntarget_size: 64MB\nbits: 4\n")
    with pytest.raises(UserError, match="leave bits or target_size out"):
        build_config(file, {})
    with pytest.raises(UserError, match="a size must be like 24GiB"):
        build_config(None, {"model": "m", "target_size": "9" * 400})
    file.write_text("model: m\nbits: 4\n")
    assert build_config(file, {"target_size": "64MB"}).target_size == "64MB"  # a flag stands above a file


def test_no_is_a_word_where_yaml_makes_a_truth_value_of_it(tmp_path):
    (tmp_path / "c.yaml").write_text("model: m\nmixed_precision: no\n")
    assert build_config(tmp_path / "c.yaml", {}).mixed_precision == "no"
