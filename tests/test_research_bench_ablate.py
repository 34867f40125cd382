"""The ablation: the paper's ratios from real processes, with the same gradient under every technique."""

import json

import pytest
import torch

from edkm_cli.errors import UserError
from edkm_cli.research.bench import ablate
from edkm_cli.research.bench.config import Ablation
from helpers import refused

pytestmark = pytest.mark.usefixtures("fork_server")


def test_table_1_is_the_papers():
    assert ablate.measure_table1() == {
        "device_bytes": 4 << 20,
        "cpu_bytes_plain": 8 << 20,
        "cpu_bytes_marshaled": 4 << 20,
    }


def test_the_dense_layer_computes_dkm():
    weight = torch.randn(16, 24, dtype=torch.float64) * 0.02
    centroids = torch.linspace(-0.04, 0.04, 8, dtype=torch.float64)
    tau = ablate.TEMPERATURE * float(weight.float().var())
    w, c = weight.view(-1, 1), centroids
    for _ in range(3):
        attention = torch.softmax(-((w - c) ** 2) / tau, 1)
        c = (attention * w).sum(0) / attention.sum(0)
    found = ablate.dense_attention_weight(weight, centroids, iterations=3)
    torch.testing.assert_close(found, (attention @ c).view(16, 24))


def test_the_dense_layer_saves_six_maps_in_two_storages():
    layer = ablate._Layer(
        {"width": 64, "bits": 3, "iterations": 1, "dtype": "bfloat16", "device": "cpu"}, torch.device("cpu")
    )
    saved = layer.account()
    maps = [entry for entry in saved if entry["bytes"] == 64 * 64 * 8 * 2]
    assert len(maps) == 6
    assert len({entry["storage"] for entry in maps}) == 2
    assert [entry["operation"] for entry in saved if entry["bytes"] == 64 * 64 * 2] == ["MmBackward0"]


@pytest.fixture(scope="module")
def result():
    lines = []
    found = ablate.run(Ablation(width=192, learners=2, device="cpu"), log=lines.append)
    assert lines
    return found


def test_every_technique_gives_the_same_gradient_and_the_expected_bytes(result):
    assert result["gradients_identical"]
    assert all(row["gradient"] is not None for row in result["rows"])
    rows = {row["technique"]: row for row in result["rows"]}
    assert tuple(rows) == ablate.TECHNIQUES
    weights = 192 * 192
    small = 64
    assert rows["none"]["bytes"] - (6 * 16 + 2) * weights in range(small)
    assert rows["M"]["bytes"] - (2 * 16 + 2) * weights in range(small)
    assert rows["M+S"]["bytes"] - rows["M"]["bytes"] // 2 in range(small)
    assert rows["M+U"]["bytes"] - 2 * weights - rows["M+U"]["uniquify"]["table_bytes"] in range(small)
    assert rows["M+U+S"]["bytes"] - rows["M+U"]["bytes"] // 2 in range(small)
    assert rows["closed-form"]["reduction"] >= 10_000


def test_the_result_is_json_and_a_table(result, tmp_path):
    assert json.loads(json.dumps(result))["setting"]["learners"] == 2
    text = ablate.format_table(result)
    assert all(technique in text for technique in ablate.TECHNIQUES)


def test_the_plot_is_a_picture_with_a_bar_for_each_technique(result, tmp_path):
    ablate.plot(result, tmp_path / "ablation.svg")
    picture = (tmp_path / "ablation.svg").read_text()
    assert picture.startswith("<svg xmlns=")
    assert picture.count("<rect") == len(ablate.TECHNIQUES)
    assert "--plot must name a .svg file" in refused("ablate", "--plot", tmp_path / "ablation.png")


def test_a_plot_that_is_the_result_file_is_refused(tmp_path):
    file = tmp_path / "a.svg"
    assert "--plot must be apart" in refused("ablate", "--width", 8, "--learners", 1, "--plot", file, "--json", file)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"width": 0}, "width must be at least 1"),
        ({"bits": 9}, "bits must be at most 8, got 9"),
        ({"learners": 0}, "learners"),
        ({"iterations": 0}, "iterations"),
        ({"dtype": "float32"}, "dtype must be one of bfloat16, float16"),
    ],
)
def test_arguments_out_of_range_are_refused(options, message):
    with pytest.raises(UserError, match=message):
        Ablation(**options)


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a GPU")
def test_a_gpu_that_is_not_there_is_a_user_error():
    assert "'cuda' is not available" in refused("ablate", "--device", "cuda")


def test_learners_that_do_not_finish_are_ended(monkeypatch):
    monkeypatch.setattr(ablate, "TIMEOUT_SECONDS", 0.0)
    before = set(torch.multiprocessing.active_children())
    with pytest.raises(UserError, match="did not finish in"):
        ablate.run(
            Ablation(width=2048, learners=2, device="cpu"), log=lambda line: None
        )  # more than the second between two looks
    assert set(torch.multiprocessing.active_children()) <= before


@pytest.mark.slow
@pytest.mark.usefixtures("alone")
def test_the_papers_reductions_at_width_1024_with_8_learners():
    found = ablate.run(Ablation(width=1024, learners=8, device="cpu"), log=lambda line: None)
    reduction = {row["technique"]: row["reduction"] for row in found["rows"]}
    assert reduction["M"] >= 2.5
    assert reduction["M+U"] >= 15
    assert reduction["M+S"] >= 20
    assert reduction["M+U+S"] >= 120
    assert reduction["closed-form"] >= 10_000
    assert found["gradients_identical"]
