"""`edkm inspect --verify`: what holds of any checkpoint is looked at, whatever was recorded of it."""

import json

import pytest
from safetensors.torch import load_file, save_file

from edkm_cli.errors import UserError
from edkm_cli.export.checkpoint import RECORD, tensor_record
from edkm_cli.export.source import Compressed
from edkm_cli.files import write_checksums, write_json
from edkm_cli.report.inspection import verify
from helpers import cluster, export, tiny_llama

DOWN, EMBEDDING = "model.layers.1.mlp.down_proj", "model.embed_tokens"


def recorded(directory, tensors, record):
    """A checkpoint with these tensors and this record, as if export had written both."""
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    write_json(directory / RECORD, record)
    write_checksums(directory, ["model.safetensors", RECORD])


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        (f"{DOWN}.lut", lambda lut: lut.copy_(lut.flip(1)), "must ascend"),
        (f"{DOWN}.indices", lambda indices: indices[:, -1].bitwise_or_(128), "last bits of the rows"),
        (f"{EMBEDDING}.indices", lambda indices: indices[3].zero_(), "holds index 0"),
    ],
)
def test_values_that_no_export_writes_are_found_although_they_were_recorded(tmp_path, name, change, message):
    directory = export(*cluster(tiny_llama(inner=42)), tmp_path / "one")
    tensors, record = load_file(directory / "model.safetensors"), json.loads((directory / RECORD).read_text())
    assert verify(Compressed(directory))["tensors"] == len(tensors)
    change(tensors[name])
    recorded(directory, tensors, record | {name: tensor_record(tensors[name])})
    with pytest.raises(UserError, match=message):
        verify(Compressed(directory))


def test_a_tensor_that_was_recorded_and_is_not_there_is_missed(tmp_path):
    directory = export(*cluster(tiny_llama()), tmp_path / "one")
    tensors, record = load_file(directory / "model.safetensors"), json.loads((directory / RECORD).read_text())
    recorded(directory, tensors, record | {"another": record[f"{DOWN}.lut"]})
    with pytest.raises(UserError, match=f"lists {len(tensors) + 1} tensors, files hold {len(tensors)}"):
        verify(Compressed(directory))


def test_a_report_of_other_sizes_is_not_verified(tmp_path):
    directory = export(*cluster(tiny_llama()), tmp_path / "one")
    (directory / "report.json").write_text('{"weights_bytes": 1}')
    with pytest.raises(UserError, match="says weights_bytes 1, but it is"):
        verify(Compressed(directory))
