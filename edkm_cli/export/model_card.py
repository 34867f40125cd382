"""README.md of what a run writes, with the metadata block that the hub reads."""

from __future__ import annotations

from typing import Any

from edkm_cli.summaries import megabytes, perplexity_rows, text_names, texts_of, windows_of


def model_card(report: dict[str, Any], *, base_model: str | None) -> str:
    """Of a checkpoint that `edkm compress` wrote."""
    config = report["config"]
    bits = f"{report['decoder_bits_per_weight']:.2f}"
    metadata = ["---", "library_name: transformers", "pipeline_tag: text-generation"]
    if base_model:
        metadata += [f"base_model: {base_model}", "base_model_relation: quantized"]
    metadata += ["tags:", "- edkm", "- palettization", "- quantized", f"- {config['bits']}-bit", "---"]
    rows = ["| " + " | ".join(row) + " |" for row in perplexity_rows(report)]
    names = text_names([text["data"] for text in texts_of(report)])
    header = ["", *(cell for name in names for cell in (f"perplexity, {name}", "relative"))]
    return "\n".join(
        [
            *metadata,
            "",
            f"# {report['model']}, {config['bits']}-bit palettized",
            "",
            f"`{report['model']}` with its decoder's weights as {_tables(report)} "
            f"(granularity `{config['granularity']}`, {bits} bits per weight, tables included), made by "
            f"`edkm compress` {report['versions'].get('edkm-cli', '')} with {report['steps']} training steps.",
            "",
            "## Use",
            "",
            "```python",
            "import edkm_cli",
            "",
            'model = edkm_cli.load("PATH")  # PATH: this directory',
            "```",
            "",
            "or `import edkm_cli.hf` and then `AutoModelForCausalLM.from_pretrained` (`pip install edkm-cli`). Without "
            "that import transformers does not know the format and fills the model with random weights.",
            "",
            "## Figures",
            "",
            f"Perplexity ({windows_of(report)}), its ratio to the uncompressed model's, and the KL divergence of the "
            "predictions from that model's:",
            "",
            "| " + " | ".join(header) + " |",
            "| --- " * len(header) + "|",
            *rows,
            "",
            f"Weights: {megabytes(report['weights_bytes'])}, {report['model_bits_per_weight']:.3f} bits per weight over the "
            "whole model. All settings and versions are in `report.json`.",
            "",
        ]
    )


def _tables(report: dict[str, Any]) -> str:
    """What the weights are stored as."""
    bits = report["config"]["bits"]
    if report.get("allocation") == "sensitivity":
        return f"lookup tables, more entries where errors matter more, as large as {bits:g} bits everywhere"
    return f"{2**bits}-entry lookup tables"


def checkpoint_card(report: dict[str, Any], *, title: str, made: str, file: str) -> str:
    """Of a compressed model that was made of another one."""
    measured = report["texts"][0]
    stages = [f"{stage} {value:.3f}" for stage, value in report["perplexity"].items() if value is not None]
    return f"""---
library_name: transformers
pipeline_tag: text-generation
tags:
- edkm
- palettization
- quantized
---

# {title}

Made by edkm {report["versions"].get("edkm-cli", "")}: {made}.

```python
import edkm_cli

model = edkm_cli.load("PATH")  # PATH: this directory
```

Perplexity on {measured["data"]}, {measured["windows"]} windows of {measured["context"]} tokens: {", ".join(stages)}.
All settings and versions are in `{file}`.
"""
