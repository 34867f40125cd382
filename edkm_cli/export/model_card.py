"""README.md of what a run writes, with the metadata block that the hub reads."""

from __future__ import annotations

from typing import Any

from edkm_cli.summaries import megabytes, perplexity_rows, text_names, texts_of, windows_of

_USE = """```python
import edkm_cli

model = edkm_cli.load("PATH")  # PATH: this directory
```"""


def model_card(report: dict[str, Any], *, base_model: str | None) -> str:
    """Of a checkpoint that `edkm compress` wrote."""
    config, bits = report["config"], f"{report['decoder_bits_per_weight']:.2f}"
    names = text_names([text["data"] for text in texts_of(report)])
    header = ["", *(cell for name in names for cell in (f"perplexity, {name}", "relative"))]
    rows = "\n".join("| " + " | ".join(row) + " |" for row in [header, ["---"] * len(header), *perplexity_rows(report)])
    body = f"""`{report["model"]}` with its decoder's weights as {_tables(report)} \
(granularity `{config["granularity"]}`, {bits} bits per weight, tables included), made by `edkm compress` \
{report["versions"].get("edkm-cli", "")} with {report["steps"]} training steps.

## Use

{_USE}

or `import edkm_cli.hf` and then `AutoModelForCausalLM.from_pretrained` (`pip install edkm-cli`). Without that import \
transformers does not know the format and fills the model with random weights.

## Figures

Perplexity ({windows_of(report)}), its ratio to the uncompressed model's, and the KL divergence of the predictions from \
that model's:

{rows}

Weights: {megabytes(report["weights_bytes"])}, {report["model_bits_per_weight"]:.3f} bits per weight over the whole model. \
All settings and versions are in `report.json`."""
    base = [f"base_model: {base_model}", "base_model_relation: quantized"] if base_model else []
    return _page(f"{report['model']}, {config['bits']}-bit palettized", body, base, [f"- {config['bits']}-bit"])


def checkpoint_card(report: dict[str, Any], *, title: str, made: str, file: str) -> str:
    """Of a compressed model that was made of another one."""
    measured = report["texts"][0]
    stages = [f"{stage} {value:.3f}" for stage, value in report["perplexity"].items() if value is not None]
    body = f"""Made by edkm {report["versions"].get("edkm-cli", "")}: {made}.

{_USE}

Perplexity on {measured["data"]}, {measured["windows"]} windows of {measured["context"]} tokens: {", ".join(stages)}.
All settings and versions are in `{file}`."""
    return _page(title, body)


def _page(title: str, body: str, base: list[str] | None = None, tags: list[str] | None = None) -> str:
    head = ["library_name: transformers", "pipeline_tag: text-generation", *(base or [])]
    head += ["tags:", "- edkm", "- palettization", "- quantized", *(tags or [])]
    return "\n".join(["---", *head, "---", "", f"# {title}", "", body, ""])


def _tables(report: dict[str, Any]) -> str:
    """What the weights are stored as."""
    bits = report["config"]["bits"]
    if report.get("allocation") == "sensitivity":
        return f"lookup tables, more entries where errors matter more, as large as {bits:g} bits everywhere"
    return f"{2**bits}-entry lookup tables"
