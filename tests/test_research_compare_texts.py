"""`edkm compare` on several texts: the KL of every row from the uncompressed model, and files of llama.cpp as rows."""

import shutil

import numpy as np
import pytest

from edkm_cli import data, models
from edkm_cli.errors import UserError
from edkm_cli.evaluate.perplexity import perplexity
from edkm_cli.research.baselines import rtn
from edkm_cli.research.compare import command as compare_module
from edkm_cli.research.compare import worker as compare_worker
from edkm_cli.research.compare.command import compare, settings_of
from edkm_cli.research.compare.config import CompareConfig, Entry, build_compare_config
from edkm_cli.research.compare.table import format_table
from edkm_cli.research.compare.worker import opened_model
from helpers import byte_tokenizer, logits_of, quantized, tiny_llama

gguf = pytest.importorskip("gguf")


def write_gguf(model, path):
    """A LLaMA's matrices at 8 bits, as llama.cpp's converter lays them out: rows of q and k reordered by halves."""
    config = model.config
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_vocab_size(config.vocab_size)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, config.num_hidden_layers)
    for name, tensor in model.state_dict().items():
        values = tensor.numpy()
        for part, heads in (("q_proj", config.num_attention_heads), ("k_proj", config.num_key_value_heads)):
            if part in name:
                halves = values.reshape(heads, 2, len(values) // heads // 2, -1)
                values = halves.swapaxes(1, 2).reshape(values.shape)
        kind = gguf.GGMLQuantizationType.Q8_0 if values.ndim == 2 else gguf.GGMLQuantizationType.F32
        packed = gguf.quants.quantize(np.ascontiguousarray(values), kind)
        writer.add_tensor(names.get_name(name, (".weight",)), packed, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


@pytest.fixture(scope="module")
def compared(tmp_path_factory, text_file):
    """(result, model, its directory, the measured texts) of a comparison on two texts."""
    folder = tmp_path_factory.mktemp("compare")
    model = tiny_llama(hidden=32, inner=64, tied=False)
    model.save_pretrained(folder / "model")
    byte_tokenizer().save_pretrained(folder / "model")
    write_gguf(model, folder / "tiny-Q8_0.gguf")
    other = folder / "other.txt"
    other.write_text("Another kind of text, with other words in it. " * 9)
    first = folder / "first.txt"
    first.write_text(text_file.read_text()[:700])
    config = CompareConfig(
        model=str(folder / "model"),
        methods=("fp16", "rtn", f"gguf:{folder / 'tiny-Q8_0.gguf'}"),
        output=str(folder / "out"),
        group_size=8,
        data=(str(text_file),),
        eval_data=(str(first), str(other)),
        context=64,
        eval_windows=2,
        calibration_samples=2,
        sequence_length=48,
        device="cpu",
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(compare_module, "_worker", lambda *arguments: compare_worker.main([*map(str, arguments)]))
        return compare(config), model, folder, (first, other)


def test_every_row_has_its_figures_on_every_text(compared):
    result, original, folder, texts = compared
    rows = {row["method"]: row for row in result["rows"]}
    assert [row["error"] for row in result["rows"]] == [None] * 3
    tokenizer = byte_tokenizer()
    changed = models.load_dense(models.resolve(str(folder / "model")), dtype="float32")
    quantized(rtn, changed, [], bits=3, group_size=8)
    for text, found, plain in zip(texts, rows["rtn"]["texts"], rows["fp16"]["texts"], strict=True):
        ids = data.tokenize(data.load_documents(data.parse_source(str(text)), "all"), tokenizer)
        direct = perplexity(changed, ids, context=64, max_windows=2, reference=logits_of(original))
        assert found["data"] == str(text)
        assert found["perplexity"] == pytest.approx(direct.perplexity)
        assert found["kl_per_token"] == pytest.approx(direct.kl_per_token, rel=1e-4)
        assert found["top1_agreement"] == pytest.approx(direct.top1_agreement)
        assert plain["kl_per_token"] == pytest.approx(0, abs=1e-6)
    assert rows["rtn"]["perplexity"] == rows["rtn"]["texts"][0]["perplexity"]
    assert rows["rtn"]["kl_per_token"] == rows["rtn"]["texts"][0]["kl_per_token"] > 0.01
    table = format_table(result)
    header = next(line.split() for line in table.splitlines() if line.startswith("method"))
    assert header[header.index("first.txt") :][:4] == ["first.txt", "KL", "other.txt", "KL"]
    assert f"{rows['rtn']['texts'][1]['kl_per_token']:.3f}" in table
    assert "perplexity of 2 windows" in table
    shorter = {**rows["rtn"], "texts": [rows["rtn"]["texts"][0], {**rows["rtn"]["texts"][1], "windows": 1}]}
    assert "perplexity of 1 or 2 windows" in format_table({**result, "rows": [shorter]})


def test_a_file_of_llama_cpp_is_a_row(compared):
    result, _, folder, _ = compared
    row = result["rows"][2]
    assert row["label"] == f"gguf:{folder / 'tiny-Q8_0.gguf'}"
    assert (row["bits"], row["granularity"], row["training"]) == (8, "Q8_0", "none")
    assert row["decoder_bits_per_weight"] == 8.5  # a float16 scale for 32 weights
    assert row["weights_bytes"] < (folder / "tiny-Q8_0.gguf").stat().st_size
    for text, plain in zip(row["texts"], result["rows"][0]["texts"], strict=True):
        assert text["perplexity"] == pytest.approx(plain["perplexity"], rel=0.05)
        assert 0 < text["kl_per_token"] < 0.02


def test_a_file_that_is_none_is_refused_before_the_work(tmp_path, model_directory):
    config = CompareConfig(model=str(model_directory))
    with pytest.raises(UserError, match=r"must name a \.gguf file, but .* is none"):
        settings_of(Entry.parse(f"gguf:{tmp_path / 'none.gguf'}"), config)
    broken = tmp_path / "broken.gguf"
    broken.write_bytes(b"GGUF" + bytes(100))
    with pytest.raises(UserError, match=r"cannot be read"):
        settings_of(Entry.parse(f"gguf:{broken}"), config)
    with pytest.raises(UserError, match="without options"):
        settings_of(Entry("gguf", (("bits", "3"), ("file", str(broken)))), config)


def test_a_file_of_another_model_is_a_failed_row(compared, model_directory):
    settings = {
        "file": str(compared[2] / "tiny-Q8_0.gguf"),
        "model": str(model_directory),
        "method": "gguf",
        "device": "cpu",
    }
    with pytest.raises(UserError, match="its hidden_size is 32, not 24"):
        opened_model(settings)


def test_the_text_of_a_method_with_a_file_comes_back():
    for text in ("gguf:/models/a-Q3_K_S.gguf", "gguf:file=/models/a-Q3_K_S.gguf"):
        entry = Entry.parse(text)
        assert entry.options == (("file", "/models/a-Q3_K_S.gguf"),)
        assert Entry.parse(entry.label) == entry
    assert build_compare_config(None, {"methods": "fp16,gguf:a.gguf"}).methods == ("fp16", "gguf:a.gguf")
    with pytest.raises(UserError, match="each text once"):
        CompareConfig(eval_data=("a", "a"))


def test_rows_of_ours_that_differ_in_their_seed_are_one_line_with_half_their_range(
    model_directory, text_file, tmp_path, monkeypatch
):
    monkeypatch.setattr(compare_module, "_worker", lambda *arguments: compare_worker.main([*map(str, arguments)]))
    config = CompareConfig(
        model=str(model_directory),
        methods=("rtn", "edkm:steps=0:data=builtin-prose"),
        output=str(tmp_path / "out"),
        group_size=8,
        data=(str(text_file),),
        context=64,
        eval_windows=2,
        sequence_length=48,
        device="cpu",
        seeds=2,
    )
    result = compare(config)
    labels = ["rtn", "edkm:data=builtin-prose:steps=0", "edkm:data=builtin-prose:seed=1:steps=0"]
    assert [row["label"] for row in result["rows"]] == labels
    first, second = (row["perplexity"] for row in result["rows"][1:])
    text = format_table(result)
    line = next(line for line in text.splitlines() if line.startswith("edkm"))
    assert f"{(first + second) / 2:,.3f} +-{abs(first - second) / 2:.3f}" in line
    assert sum(line.startswith("edkm data=builtin-prose") for line in text.splitlines()) == 1
    assert text.endswith("hours")


def test_a_rows_own_text_is_told_apart_and_not_measured(tmp_path, model_directory, text_file):
    shared = {"model": str(model_directory), "data": (str(text_file),), "device": "cpu"}
    own = shutil.copyfile(text_file, tmp_path / "own.txt")
    entry = Entry.parse(f"edkm:data={own}")
    first = settings_of(entry, CompareConfig(**shared))
    own.write_text(own.read_text() + "more")
    assert settings_of(entry, CompareConfig(**shared)) != first
    measured = CompareConfig(**shared, eval_data=(str(own),))
    with pytest.raises(UserError, match="--eval-data must not be trained on"):
        settings_of(entry, measured)
