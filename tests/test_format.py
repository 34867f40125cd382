"""The checkpoint's schema and files: specs refuse what they do not know, bytes are safetensors' own."""

import json
import os

import pytest
import torch
from safetensors.torch import save_file

from edkm_cli.errors import UserError
from edkm_cli.files import read_json, safetensors_writer, verify_checksums, write_checksums, written_whole
from edkm_cli.format import QuantizationSpec, read_spec

GOOD = {
    "quant_method": "edkm",
    "bits": 3,
    "granularity": "row:1",
    "lut_dtype": "float16",
    "embedding_bits": 8,
    "skipped": [],
    "format_version": 1,
}


def test_a_spec_survives_its_mapping():
    assert QuantizationSpec.from_mapping(GOOD).to_mapping() == GOOD
    mixed = {**GOOD, "format_version": 3, "embedding_group": 8, "module_bits": {"a": 4}}
    assert QuantizationSpec.from_mapping(mixed).to_mapping() == mixed


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"bits": 9}, "bits must be 1 to 8, got 9"),
        ({"bits": True}, "bits must be"),
        ({"bits": "3"}, "bits must be"),
        ({"granularity": "col:1"}, "granularity must be"),
        ({"lut_dtype": "int4"}, "lut_dtype must be one of"),
        ({"embedding_bits": 1}, "embedding_bits must be"),
        ({"embedding_bits": 16}, "embedding_bits must be 2 to 8 or null, got 16"),
        ({"format_version": 0}, "format_version must be 1, got None"),
        ({"format_version": 2}, "format_version must be 1"),
        ({"format_version": 3}, "format_version must be 1"),
        ({"embedding_group": 8}, "format_version must be 3"),
        ({"format_version": 6, "embedding_factors": True, "embedding_bits": 7}, "embedding_bits of at most 6, got 7"),
        (
            {"format_version": 6, "embedding_factors": True, "embedding_bits": None},
            "embedding_bits of at most 6, got None",
        ),
        ({"format_version": 3, "embedding_group": 0}, "embedding_group must be"),
        ({"embedding_rows": [[8, 4]]}, "format_version must be 7"),
        ({"format_version": 7, "embedding_rows": [[8, 4], [8, 5]]}, "embedding_rows must list at most 7 ascending"),
        ({"format_version": 7, "embedding_rows": [[0, 4]]}, "embedding_rows must list"),
        ({"format_version": 7, "embedding_rows": [[8, 9]]}, "2 to 8 bits"),
        (
            {"format_version": 7, "embedding_rows": [[8, 7]], "embedding_factors": True, "embedding_bits": 4},
            "2 to 6 bits",
        ),
        ({"format_version": 7, "embedding_rows": [[8, True]]}, "embedding_rows must list"),
        ({"format_version": 7, "embedding_rows": [[n, 4] for n in range(1, 9)]}, "embedding_rows must list at most 7"),
        ({"format_version": 7, "embedding_rows": 5}, "embedding_rows must list"),
        ({"format_version": 7, "embedding_rows": {"8": 4}}, "embedding_rows must list"),
        ({"format_version": 7, "embedding_rows": [[8, 4]], "embedding_bits": None}, "embedding_rows must list"),
        ({"format_version": 7, "embedding_rows": [[8, 4]], "embedding_group": 8}, "without embedding_group"),
        ({"format_version": 3, "embedding_group": True}, "embedding_group must be"),
        ({"format_version": 3, "module_bits": {"a": 9}}, "module_bits must map"),
        ({"format_version": 3, "module_bits": ["a"]}, "module_bits must map"),
        ({"extra": 1}, "unknown keys"),
        ({"lut_dtype": ["float16"]}, "lut_dtype must be one of"),
        ({"quant_method": "gptq"}, "quant_method"),
    ],
)
def test_a_broken_spec_is_refused_with_the_rule_and_the_value(change, message):
    with pytest.raises(UserError, match=message):
        QuantizationSpec.from_mapping({**GOOD, **change})


def test_all_faults_of_a_spec_are_reported_at_once():
    with pytest.raises(UserError, match=r"bits.*granularity"):
        QuantizationSpec.from_mapping({**GOOD, "bits": 0, "granularity": "row:0"})


def test_bits_that_all_have_leave_no_others():
    spec = QuantizationSpec(3, "row:1", "float16")
    assert spec.with_bits({"a": 4, "b": 3}).module_bits == {"a": 4}
    assert spec.with_bits({"a": 4}).with_bits({"a": 3}) == spec


def test_parts_of_an_embedding_end_before_its_last_row():
    spec = QuantizationSpec(3, "row:1", "float16", embedding_bits=4, embedding_rows=[[8, 5]])
    assert [part.end for part in spec.embedding_parts(9)] == [8, 9]
    with pytest.raises(UserError, match="must end before row 8"):
        spec.embedding_parts(8)


def test_a_directory_without_quantization_is_no_checkpoint_of_ours(tmp_path):
    assert read_spec(tmp_path) is None
    (tmp_path / "config.json").write_text("{}")
    assert read_spec(tmp_path) is None
    (tmp_path / "config.json").write_text("{broken")
    with pytest.raises(UserError, match="must be a JSON file"):
        read_spec(tmp_path)


def test_the_streaming_writer_gives_the_bytes_of_safetensors_in_any_order(tmp_path):
    tensors = {
        "b.indices": torch.arange(7, dtype=torch.uint8),
        "a.lut": torch.randn(3, 4).half(),
        "a.indices": torch.arange(5, dtype=torch.uint8)[None],
        "norm": torch.randn(9),
        "bf": torch.randn(3).bfloat16(),
        "f8": torch.randn(5).to(torch.float8_e4m3fn),
        "empty": torch.zeros(0),
        "scalar": torch.tensor(2.5),
    }
    save_file(tensors, tmp_path / "reference.safetensors", metadata={"format": "pt"})
    announced = {name: (tensor.dtype, tuple(tensor.shape)) for name, tensor in tensors.items()}
    with safetensors_writer(tmp_path / "streamed.safetensors", announced) as write:
        for name in reversed(list(tensors)):
            write(name, tensors[name])
    assert (tmp_path / "streamed.safetensors").read_bytes() == (tmp_path / "reference.safetensors").read_bytes()


def test_an_unfinished_file_never_appears(tmp_path):
    announced = {"a": (torch.float32, (2,)), "b": (torch.float32, (2,))}
    path = tmp_path / "model.safetensors"
    with pytest.raises(ValueError, match="never written"), safetensors_writer(path, announced) as write:
        write("a", torch.zeros(2))
    assert not path.exists()
    with pytest.raises(ZeroDivisionError), safetensors_writer(path, announced) as write:
        write("a", torch.zeros(2) / (1 // 0))
    assert not path.exists()
    assert {file.name for file in tmp_path.iterdir()} == set()
    with safetensors_writer(path, announced) as write:
        write("a", torch.zeros(2))
        write("b", torch.ones(2))
        assert not path.exists()  # until it is whole
    assert [file.name for file in tmp_path.iterdir()] == ["model.safetensors"]


def test_a_file_is_synced_before_it_takes_its_name(tmp_path, monkeypatch):
    done = []
    for name in ("fsync", "replace"):
        call = getattr(os, name)
        monkeypatch.setattr(os, name, lambda *args, name=name, call=call: (done.append(name), call(*args)))
    with written_whole(tmp_path / "a.json") as partial:
        partial.write_text("{}")
    assert done == ["fsync", "replace"]


def test_json_that_memory_should_not_hold_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr("edkm_cli.files._MAX_JSON_BYTES", 10)
    (tmp_path / "a.json").write_text('{"a": 12345}')
    with pytest.raises(UserError, match=r"12 bytes are more than the 10 that are read.*again"):
        read_json(tmp_path / "a.json", remedy="write it again")


def test_the_writer_refuses_what_was_not_announced(tmp_path):
    with (
        pytest.raises(ValueError, match="announced as"),
        safetensors_writer(tmp_path / "m", {"a": (torch.float32, (2,))}) as write,
    ):
        write("a", torch.zeros(3))


def test_checksums_catch_truncation_alteration_absence_and_escape(tmp_path):
    file = tmp_path / "model.safetensors"
    file.write_bytes(b"0123456789")
    write_checksums(tmp_path, ["model.safetensors"])
    verify_checksums(tmp_path)
    file.write_bytes(b"012345678")
    with pytest.raises(UserError, match=r"must have 10 bytes, got 9"):
        verify_checksums(tmp_path)
    file.write_bytes(b"0123456780")
    with pytest.raises(UserError, match="sha256"):
        verify_checksums(tmp_path)
    file.unlink()
    with pytest.raises(UserError, match="is missing"):
        verify_checksums(tmp_path)
    (tmp_path / "checksums.json").write_text(json.dumps({"../secret": {"bytes": 1, "sha256": "0"}}))
    with pytest.raises(UserError, match="own directory"):
        verify_checksums(tmp_path)
