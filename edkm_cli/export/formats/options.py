"""The settings of `edkm export`."""

from dataclasses import dataclass

from edkm_cli.settings import COMPRESSION, DATA, MODEL, REMOTE_CODE, faults, refuse, setting


@dataclass(frozen=True)
class Options:
    """What `edkm export` is given beside the checkpoint, the format and the place."""

    # fmt: off
    dtype: str = setting("auto", "Number format of what has no lookup tables, with dense of all; auto: the format's own.",
        COMPRESSION, choices=("auto", "float16", "bfloat16", "float32"))
    sequence_length: str = setting("1-1024", "coreml: tokens of a call, a number N or a range A-B.", COMPRESSION)
    cache: bool = setting(False, "coreml: keep keys and values of earlier tokens in the model's state.", COMPRESSION)
    base_gguf: str | None = setting(None,
        "gguf: a file of the same model whose metadata and tokenizer are taken over, tensors replaced.", COMPRESSION)
    verify: str = setting("weights", "perplexity: measure both models, beside comparing all weights.", DATA,
        choices=("weights", "perplexity"))
    data: str = setting("builtin", "Text for --verify perplexity: builtin, wikitext2, ... or a file.", DATA)
    context: int = setting(1024, "Tokens in a window on which perplexity is measured.", DATA, minimum=2)
    max_windows: int = setting(4, "Number of windows, from the first.", DATA, minimum=1)
    trust_remote_code: bool = setting(False, REMOTE_CODE, MODEL)
    # fmt: on

    def __post_init__(self) -> None:
        refuse(faults(self, {} if self.verify == "perplexity" else {DATA: "--verify perplexity"}))

    def dtype_name(self, auto: str = "float32") -> str:
        """The dtype's name, where `auto` stands for the one given."""
        return auto if self.dtype == "auto" else self.dtype
