"""The uncompressed model trained equally: the same batches and objective, its own rate, and nothing lost by a kill."""

import json
from dataclasses import replace

import pytest
import torch

from edkm_cli import compress as module
from edkm_cli import data, models
from edkm_cli.clustering.schedule import learning_rate_factor
from edkm_cli.compress import compress
from edkm_cli.data import Blocks
from edkm_cli.distributed import World
from edkm_cli.errors import UserError
from edkm_cli.evaluate.perplexity import perplexity
from edkm_cli.report.document import build_report
from edkm_cli.summaries import summary
from edkm_cli.train.loop import dense_directory, train_dense
from edkm_cli.train.losses import Beside, next_token_loss
from edkm_cli.train.optimizer import parameter_groups
from helpers import assert_same_run, cluster, settings, tiny_llama

TOKENS = torch.randint(0, 257, (2000,), generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("given", [3e-3, None])
def test_it_is_plain_training_of_linears_and_norms(tmp_path, given):
    """Against a loop written out: next-token loss, AdamW, the schedule; embeddings as they were."""
    config = settings("m", "t", tmp_path, distill=False, label_weight=1.0, dense_learning_rate=given, weight_decay=0.1)
    blocks = Blocks(TOKENS, config.sequence_length, seed=0)
    model, wanted = tiny_llama(), tiny_llama()
    train_dense(model, None, blocks, config, world=World(), staging=tmp_path)
    linears = [m.weight for name, m in wanted.named_modules() if name.endswith("proj")]
    every = torch.cat([weight.detach().flatten() for weight in [*linears, wanted.lm_head.weight]])
    rate = given or 1e-4 * min(1, float(every.square().mean().sqrt()) / 0.15)
    norms = [p for name, p in wanted.named_parameters() if "norm" in name]
    groups = [{"params": linears, "weight_decay": 0.1}, {"params": norms, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=rate, betas=(0.9, 0.95), eps=1e-8)
    wanted.get_input_embeddings().weight.requires_grad_(False)
    for step in range(config.steps):
        ids = blocks.batch(step, 1)
        for group in optimizer.param_groups:
            group["lr"] = rate * learning_rate_factor(step, config.steps, config.warmup)
        next_token_loss(wanted(ids).logits, ids).backward()
        torch.nn.utils.clip_grad_norm_([*linears, *norms], 1.0)
        optimizer.step()
        optimizer.zero_grad()
    for (name, found), expected in zip(model.named_parameters(), wanted.parameters(), strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5, msg=name)
    embedding = tiny_llama().get_input_embeddings().weight
    assert torch.equal(model.get_input_embeddings().weight, embedding)
    assert (tmp_path / "metrics_dense.jsonl").read_text().count("\n") == config.steps


def test_a_compressed_models_groups_are_as_before():
    model, _ = cluster(tiny_llama())
    groups = parameter_groups(model, settings("m", "t", "o", lut_learning_rate=1e-2))
    assert [group["lr"] for group in groups].count(1e-2) == 14
    assert len(groups) == 14 + 14 + 5  # weights, tables, norms


@pytest.fixture(scope="module")
def compared(model_directory, text_file, tmp_path_factory):
    """(report, directory, configuration) of a run with the comparison."""
    out = tmp_path_factory.mktemp("dense") / "out"
    config = settings(
        model_directory, text_file, out, compare_dense=True, dense_learning_rate=2e-3, start="kmeans", save_every=1
    )
    return compress(config), out, config


def test_both_perplexities_and_their_ratio_are_told_everywhere(compared, model_directory, text_file, tmp_path):
    report, out, config = compared
    (row,) = report["texts"]
    plain = compress(settings(model_directory, text_file, tmp_path / "plain", start="kmeans"))
    for stage in ("original", "start", "trained", "exported"):
        assert row[stage] == plain["texts"][0][stage]  # the comparison changes nothing
    assert "dense" not in plain["texts"][0]
    assert row["exported_over_dense"] == pytest.approx(row["exported"] / row["dense"])
    assert row["dense"] < row["original"]
    # As if it had been trained by itself.
    config = replace(config, **report["resolved"])
    source = models.resolve(str(model_directory))
    model, teacher = (models.load_dense(source, dtype="float32") for _ in range(2))
    tokenizer = models.load_tokenizer(source)
    blocks = data.open_training_data(data.parse_sources(config.data), tokenizer).blocks(config.sequence_length, seed=0)
    train_dense(model, Beside(teacher.requires_grad_(False)), blocks, config, world=World(), staging=tmp_path)
    text = data.tokenize(data.load_documents(data.parse_source(str(text_file)), "test"), tokenizer)
    assert row["dense"] == pytest.approx(perplexity(model, text, context=64, max_windows=2).perplexity, rel=1e-5)
    build_report(out, output=tmp_path / "page.html", weights=False)
    for page in (summary("compress", report), (out / "README.md").read_text(), (tmp_path / "page.html").read_text()):
        assert "uncompressed, trained equally" in page
        assert f"{row['exported_over_dense']:.2f}x" in page
    assert len((out / "metrics_dense.jsonl").read_text().splitlines()) == config.steps
    assert not (out / "checkpoints").exists()


def test_the_distance_before_training_stands_beside_that_after(compared):
    report, out, _ = compared
    figures = [report["texts"][0]["stages"][stage]["kl_per_token"] for stage in ("start", "exported")]
    for page in (summary("compress", report), (out / "README.md").read_text()):
        lines = [line for line in page.splitlines() if "KL per token" in line]
        for line, figure in zip(lines, figures, strict=True):
            assert f"{figure:.4f}" in line


def test_a_run_killed_in_the_dense_training_goes_on_there(compared, model_directory, text_file, tmp_path, monkeypatch):
    _, whole, config = compared
    cut = replace(config, output=str(tmp_path / "out"))

    class Stop(Exception):
        pass

    def stop(*arguments, **options):
        def show(text):
            if (dense_directory(options["staging"], cut) / "checkpoints" / "step-000002").exists():
                raise Stop

        return train_dense(*arguments, **{**options, "show": show})

    with monkeypatch.context() as patch:
        patch.setattr(module, "train_dense", stop)
        with pytest.raises(Stop):
            compress(cut)
    assert list((tmp_path / "out.partial" / "checkpoints").glob("step-*"))
    compress(cut, resume=True)
    assert_same_run(tmp_path / "out", whole)
    lines = [
        [json.loads(line)["loss"] for line in (path / "metrics_dense.jsonl").read_text().splitlines()]
        for path in (tmp_path / "out", whole)
    ]
    assert lines[0] == lines[1]


@pytest.mark.parametrize(
    ("changes", "message"),
    [({"steps": 0}, r"compare_dense trains .* steps is 0")],
)
def test_what_cannot_be_compared_is_refused(changes, message):
    with pytest.raises(UserError, match=message):
        settings("m", "t", "o", compare_dense=True, **changes)
