"""The settings of `edkm eval`."""

from dataclasses import dataclass

from edkm_cli.settings import DATA, DEVICE, DTYPES, MODEL, REMOTE_CODE, SCALE, TASKS, VERDICT, faults, refuse, setting


@dataclass(frozen=True)
class EvalConfig:
    """What `edkm eval` measures, and what it asks of a model that is compared with `reference`; a limit of 0 asks nothing.

    The limits of KL and agreement allow twice the KL that 3 bits cost SmolLM2-135M. A matrix whose outputs are wrong by
    more than themselves does more harm than none.
    """

    # fmt: off
    data: tuple[str, ...] = setting((),
        "Text to measure on, as in edkm compress. Default: wikitext2; with --tasks none (beside --reference builtin-prose).",
        DATA, "--data", "--eval-data")
    context: int = setting(2048, "Tokens in a window on which perplexity is measured.", DATA, minimum=2)
    max_windows: int | None = setting(None, "Number of windows, from the first; default: all.", DATA, minimum=1)
    reference: str | None = setting(None,
        "Uncompressed model: compare predictions, layers, texts and answers with it, and say pass or fail.", VERDICT)
    max_kl: float = setting(0.2, "Most KL divergence per token from --reference; 0: no limit.", VERDICT, minimum=0)
    min_agreement: float = setting(0.75, "Least share of predictions with the likeliest token of --reference.", VERDICT,
        minimum=0, maximum=1)
    max_matrix_error: float = setting(1.0, "Most relative error of a matrix's outputs, from --reference; 0: no limit.",
        VERDICT, minimum=0)
    max_perplexity_ratio: float = setting(0.0, "Most perplexity, as a multiple of that of --reference; 0: no limit.",
        VERDICT, minimum=0)
    positions: int | None = setting(None,
        "Window measured by position, with --reference; default: the full context, at most 8192.", VERDICT, minimum=2)
    prompts: int = setting(64, "Prompts that both models write after, with --reference.", VERDICT, minimum=0,
        maximum=64)
    tasks: str | None = setting(None, "Tasks of lm-evaluation-harness, with commas, such as piqa,hellaswag.", TASKS)
    task_path: str | None = setting(None,
        "Directory with your own task files (*.yaml). They may run code, so trust them first.", TASKS)
    limit: int | None = setting(None, "Number of documents of each task, from the first; default: all.", TASKS,
        minimum=1)
    num_fewshot: int | None = setting(None, "Number of examples in the prompt of a task; default: the task's own.",
        TASKS, minimum=0)
    batch_size: int = setting(1, "Sequences in a forward pass, for tasks.", TASKS, minimum=1)
    speed: bool = setting(False, "Measure tokens per second as well.", SCALE)
    dtype: str = setting("float32", "Number format of the weights.", SCALE, choices=DTYPES)
    device: str = setting("auto", DEVICE, SCALE)
    trust_remote_code: bool = setting(False, REMOTE_CODE, MODEL)
    # fmt: on

    def __post_init__(self) -> None:
        nothing = "--tasks must name at least one task, for example piqa,hellaswag; got nothing"
        missing = {VERDICT: "--reference"} if self.reference is None else {}
        missing |= {TASKS: "--tasks"} if self.tasks is None else {}
        refuse(faults(self, missing) + [nothing] * (self.tasks is not None and not self.benchmarks))

    @property
    def benchmarks(self) -> list[str]:
        return [name.strip() for name in (self.tasks or "").split(",") if name.strip()]

    @property
    def texts(self) -> tuple[str, ...]:
        """The names of the texts that are measured: `data`, or what stands for it."""
        if self.data or (self.benchmarks and self.reference is None):
            return self.data
        return ("builtin-prose",) if self.benchmarks else ("wikitext2",)
