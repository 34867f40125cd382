"""`edkm bench runtime`: one row for each combination, each product checked, the same figures in table and JSON."""

import pytest

from edkm_cli.errors import UserError
from edkm_cli.research.bench import runtime
from edkm_cli.research.bench.config import RuntimeBench


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    monkeypatch.setattr(runtime, "_BUDGET_SECONDS", 0)
    monkeypatch.setattr(runtime, "_COPY_BYTES", 1 << 16)


def test_there_is_a_row_for_each_combination_with_its_times():
    lines = []
    settings = RuntimeBench(
        device="cpu", shape=("32x48", "16x64"), tokens=(1, 20), bits=(3, 5), granularity=("row:1", "tensor"),
        dtype=("bfloat16", "float32"),
    )  # fmt: skip
    result = runtime.run(settings, log=lines.append)
    assert len(result["rows"]) == len(lines) == 32
    for row in result["rows"]:
        for key in ("packed_seconds", "dense_bf16_seconds", "dense_fp32_seconds", "packed_bytes_per_second"):
            assert row[key] > 0
    assert result["copy_bytes_per_second"] > 0
    assert "32x48" in runtime.format_table(result)


def test_a_cold_sweep_reads_more_than_any_cache_holds(monkeypatch):
    seen = []
    product = runtime.Ready.product
    monkeypatch.setattr(
        runtime.Ready,
        "product",
        lambda self, *given: seen.append(given[1][0].indices.data_ptr()) or product(self, *given),
    )
    monkeypatch.setattr(runtime, "_COLD_BYTES", 1000)
    monkeypatch.setattr(runtime, "_cache_bytes", lambda device: 500)
    result = runtime.run(
        RuntimeBench(device="cpu", shape=("16x64",), tokens=(1,), bits=(3,), cold=True), log=lambda line: None
    )
    assert len(set(seen)) == result["rows"][0]["matrices"] == 6  # of 384 bytes each, at least 4 times 500
    assert result["rows"][0]["share_of_copy"] > 0
    assert "--cold" in result["command"]


def test_a_wrong_product_is_no_result(monkeypatch):
    monkeypatch.setattr(runtime.Ready, "product", lambda self, x, matrices, columns: [x.new_zeros(x.shape[0], 32)])
    with pytest.raises(RuntimeError, match="wrong by"):
        runtime.run(RuntimeBench(device="cpu", shape=("32x48",), tokens=(1,), bits=(3,)), log=lambda line: None)


@pytest.mark.parametrize(
    ("options", "rule"),
    [
        ({"shape": ("4096",)}, "OUTxIN"),
        ({"dtype": ("int8",)}, "dtype must be one of"),
        ({"granularity": ("block:5x5",)}, "does not divide"),
        ({"tokens": (0,)}, "tokens must be at least 1"),
        ({"bits": (9,)}, "bits must be at most 8"),
    ],
)
def test_values_that_are_none_are_refused(options, rule):
    with pytest.raises(UserError, match=rule):
        runtime.run(RuntimeBench(device="cpu", **options), log=lambda line: None)
