"""Tables and summaries from JSON."""

from edkm_cli.summaries import duration, fixed, megabytes, summary, table


def test_sizes_and_times_are_for_people():
    assert [fixed(value, 3) for value in (1234.5678, 3e200)] == ["1,234.568", "3e+200"]
    assert megabytes(70_950_144) == "71.0 MB"
    assert megabytes(13_476_831_232) == "13.48 GB"
    assert [duration(s) for s in (3.4, 75, 3700)] == ["3 s", "1 min 15 s", "1 h 1 min"]


def test_tables_align():
    assert table([["a", "1"], ["long", "100"]], header=["name", "n"]).splitlines() == [
        "name    n",
        "----  ---",
        "a       1",
        "long  100",
    ]


def test_the_summary_says_what_stayed_dense_and_why():
    report = {
        "model": "m",
        "output": "o",
        "perplexity": {"original": 10.0, "start": 20.0, "trained": None, "exported": 20.0},
        "evaluation": {"data": "d", "context": 8, "windows": 2, "tokens": 99},
        "weights_bytes": 10_000_000,
        "original_weights_bytes": 40_000_000,
        "decoder_bits_per_weight": 3.2,
        "model_bits_per_weight": 4.0,
        "swapped": [{}] * 3,
        "skipped": [{"name": "a", "reason": "matches --skip a"}, {"name": "b", "reason": "matches --skip a"}],
        "steps": 0,
        "training_tokens": 0,
        "seconds": {"load": 1.0},
        "peak_memory_bytes": 1_000_000,
    }
    text = summary("compress", report)
    assert "3 compressed, 2 left uncompressed (2: matches --skip a)" in text
    assert "after training" not in text
    assert "4.00x smaller" in text
