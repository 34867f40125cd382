"""Measure how vLLM serves SmolLM2-135M compressed: does it write what transformers writes, how fast, in how much memory.

    python scripts/serving_figures.py all [DIRECTORY]            everything; compresses the model three times first
    python scripts/serving_figures.py agree DIRECTORY            a server, float32: 20 prompts of 48 tokens, and chats
    python scripts/serving_figures.py speed DIRECTORY...         bfloat16, 1, 16 and 64 sequences, directories taking turns

Runs where vLLM is installed; scripts/check_vllm.sh makes that environment. Each part is a process of its own. `all` makes
the models in DIRECTORY (default out/serving) where they are not there yet; servers write their logs beside them.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import socket
import statistics
import subprocess
import sys
import time
import urllib.error
import urllib.request
from contextlib import contextmanager
from pathlib import Path
from typing import Any

TOPICS = (
    "The capital of France is", "Once upon a time", "def fibonacci(n):", "Water boils at", "A language is",
    "In 1969, humans", "A recipe for bread:", "My favourite animal is", "The sun rises in", "Photosynthesis is",
    "To be or not to be", "import numpy as np\n", "The history of Rome begins", "Dear Sir or Madam,", "Two plus two is",
    "The largest planet", "She opened the door and", "A prime number is", "Breaking news:", "Q: What is a computer?\nA:",
)  # fmt: skip
CONVERSATIONS = (  # (what the system says, what the user says, turn by turn)
    (None, ("Name three colours.", "Which of them is the warmest?", "And the coldest?")),
    ("You answer in a few words.", ("What is two plus two?", "And three plus three?")),
    (None, ("Tell me a story about a cat.", "Thank you. Say goodbye.")),
)
QUICK = ("--start", "kmeans", "--importance", "activation")  # the format is what is measured here, not the quality
COMPRESSED = {"row:1": (), "tensor": QUICK, "block:8x64": QUICK}  # and options of `edkm compress`
TOKENS, PATIENCE_SECONDS, TIE = 48, 1800, 1e-3
SEQUENCES = (1, 16, 64)
BARS = {"decode_ratio_1": 1.5, "decode_ratio_16": 1.0, "decode_ratio_64": 0.8}
BARS |= {"resident_ratio": 0.30, "largest_logprob_difference": 1e-3}
KV_BYTES, SETTLE_SECONDS = 2**28, 1.2
DENSE_BYTES = 269_030_016  # SmolLM2's weights in bfloat16; vLLM repacks dense ones into memory that no tensor shows


def ask(url: str, **body: Any) -> Any:
    """The JSON answer of a server."""
    request = urllib.request.Request(url, json.dumps(body).encode(), {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=PATIENCE_SECONDS) as answer:
        return json.load(answer)


@contextmanager
def served(directory: str, *options: str):
    """Address of `vllm serve DIRECTORY`, which ends with the block."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    program = str(Path(sys.executable).parent / "vllm")
    command = [program, "serve", directory, "--port", str(port), "--kv-cache-memory-bytes", str(2 * KV_BYTES), *options]
    with open(f"{directory.rstrip('/')}-server.log", "w") as log:
        server = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT)
        try:
            end, base = time.monotonic() + PATIENCE_SECONDS, f"http://127.0.0.1:{port}"
            while True:
                try:
                    urllib.request.urlopen(f"{base}/health", timeout=10)
                    break
                except (urllib.error.URLError, OSError):
                    if server.poll() is not None or time.monotonic() > end:
                        sys.exit(f"vllm serve did not start; see {log.name}")
                    time.sleep(1)
            yield base
        finally:
            server.terminate()
            try:
                server.wait(60)
            except subprocess.TimeoutExpired:
                server.kill()


def agree(directory: str, *options: str) -> dict[str, Any]:
    """What a server writes beside what the packed model of transformers finds likeliest, token by token, in float32."""
    import torch
    from transformers import AutoTokenizer

    import edkm_cli
    from edkm_cli.generate import load_writer
    from edkm_cli.models import resolve

    tokenizer, answers = AutoTokenizer.from_pretrained(directory), []
    prompts = [tokenizer(text)["input_ids"] for text in TOPICS]
    with served(directory, "--dtype", "float32", *options) as base:
        for prompt in prompts:
            body = {"prompt": prompt, "max_tokens": TOKENS, "temperature": 0, "logprobs": 1, "ignore_eos": True}
            found = ask(f"{base}/v1/completions", model=directory, return_tokens_as_token_ids=True, **body)
            answers.append(found["choices"][0]["logprobs"])
        chats = [_served_chat(base, directory, *conversation) for conversation in CONVERSATIONS]
    writer = load_writer(resolve(directory), chat=True, dequantize=False, dtype="float32", device="cpu")
    own = [_own_chat(writer, *conversation) for conversation in CONVERSATIONS]
    model, ties, largest, tokens = edkm_cli.load(directory, dtype=torch.float32), [], 0.0, 0
    for prompt, answer in zip(prompts, answers, strict=True):
        written = [int(token.removeprefix("token_id:")) for token in answer["tokens"]]
        with torch.no_grad():
            log = model(torch.tensor([prompt + written])).logits[0, len(prompt) - 1 : -1].log_softmax(-1)
        for step, token in enumerate(written):
            here = log[step]
            largest = max(largest, abs(float(here[token]) - answer["token_logprobs"][step]))
            gap, tokens = float(here.max() - here[token]), tokens + 1
            if gap:
                ties.append({"prompt": prompt, "step": step, "behind_the_likeliest": gap})
    return {
        "prompts": len(prompts),
        "tokens": tokens,
        "other_tokens": sum(tie["behind_the_likeliest"] > TIE for tie in ties),
        "ties": ties,
        "largest_logprob_difference": largest,
        "chats": [chat["messages"] for chat in chats],
        "chat_finish_reasons": [chat.pop("finish_reasons") for chat in chats],
        "chat_equals_edkm_generate": chats == own,
    }


def _served_chat(base: str, directory: str, system: str | None, questions: tuple[str, ...]) -> dict[str, Any]:
    """A conversation with a server: its messages, the tokens it wrote, and why each answer ended."""
    messages = [] if system is None else [{"role": "system", "content": system}]
    tokens, reasons = 0, []
    for question in questions:
        messages.append({"role": "user", "content": question})
        body = {"messages": messages, "max_tokens": TOKENS, "temperature": 0}
        answer = ask(f"{base}/v1/chat/completions", model=directory, **body)
        messages.append({"role": "assistant", "content": answer["choices"][0]["message"]["content"]})
        tokens += answer["usage"]["completion_tokens"]
        reasons.append(answer["choices"][0]["finish_reason"])
    return {"messages": messages, "new_tokens": tokens, "finish_reasons": reasons}


def _own_chat(writer: Any, system: str | None, questions: tuple[str, ...]) -> dict[str, Any]:
    """The same with `edkm generate --chat`."""
    from edkm_cli.generate import Manner, converse

    left = iter(questions)
    result = converse(writer, Manner(TOKENS, system=system), ask=lambda: next(left, None))
    return {"messages": result["messages"], "new_tokens": result["new_tokens"]}


def _held(model: Any) -> int:
    """Bytes of all tensors of a model, each memory once."""
    tensors = [*model.parameters(), *model.buffers()]
    return sum({t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}.values())


def _process_bytes(worker: Any) -> int:
    import psutil

    return psutil.Process().memory_info().rss


def speed(directories: list[str], repeats: int, after: Path | None) -> list[dict[str, Any]]:
    """Tokens per second of decoding so many SEQUENCES, for each directory: medians of `repeats` that take turns.

    Rates are the tokens from the 9th on by the time that 72 tokens take longer than 8, so prompts do not count.
    """
    os.environ["VLLM_ALLOW_INSECURE_SERIALIZATION"] = "1"  # two functions of this file go to the worker
    import serving_figures as here  # by a name that the worker knows, too
    from vllm import LLM, SamplingParams

    options = {
        "dtype": "bfloat16",
        "max_model_len": 512,
        "kv_cache_memory_bytes": KV_BYTES,
        "enable_prefix_caching": False,
    }
    engines = [LLM(directory, **options) for directory in directories]
    while after is not None and not after.exists():
        time.sleep(0.1)

    def seconds(engine: Any, sequences: int, tokens: int) -> float:
        prompts = [{"prompt_token_ids": list(range(100 + i, 108 + i))} for i in range(sequences)]
        sampling, start = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True), time.perf_counter()
        engine.generate(prompts, sampling, use_tqdm=False)
        return time.perf_counter() - start

    rates: dict[tuple[int, int], list[float]] = {}
    for turn in range(-1, repeats):  # the first one does not count
        for sequences in SEQUENCES:
            for i, engine in enumerate(engines):
                time.sleep(SETTLE_SECONDS)  # the processes of an engine wait in a busy loop for a second
                extra = seconds(engine, sequences, 72 if turn >= 0 else 16) - seconds(engine, sequences, 8)
                if turn >= 0:
                    rates.setdefault((i, sequences), []).append(sequences * 64 / extra)
    return [
        {
            "weights_resident_bytes": engine.apply_model(here._held)[0],
            "worker_resident_bytes": engine.collective_rpc(here._process_bytes)[0],
            "rates": {str(sequences): rates[i, sequences] for sequences in SEQUENCES},
        }
        | {f"decode_tokens_per_second_{n}": statistics.median(rates[i, n]) for n in SEQUENCES}
        for i, engine in enumerate(engines)
    ]


def prepare(work: Path) -> tuple[str, list[str]]:
    """(the uncompressed model in bfloat16, the compressed ones): made where they are not there yet."""
    import torch

    from edkm_cli import models

    dense = work / "dense"
    if not dense.is_dir():
        source = models.resolve("smollm2-135m")
        model = models.load_dense(source, dtype="bfloat16", device="cpu")
        model.config.dtype = torch.bfloat16
        partial = work / "dense.partial"
        model.save_pretrained(partial)
        models.load_tokenizer(source).save_pretrained(partial)
        partial.rename(dense)
    compressed = []
    for granularity, options in COMPRESSED.items():
        output = work / granularity.replace(":", "")
        if not output.is_dir():
            print(f"serving_figures.py: compressing at {granularity}", file=sys.stderr, flush=True)
            command = [sys.executable, "-m", "edkm_cli", "compress", "--model", "smollm2-135m", "--steps", "0"]
            command += ["--eval-windows", "1", "--context", "128", "--granularity", granularity, *options]
            subprocess.run([*command, "--output", str(output)], check=True)
        compressed.append(str(output))
    return str(dense), compressed


def part(work: Path, name: str, *directories: str, **options: Any) -> Any:
    """The result of a part of this script, in a process of its own."""
    result = work / f"{name}-{Path(directories[-1]).name}.json"
    more = [word for key, value in options.items() for word in (f"--{key}", str(value))]
    command = [sys.executable, __file__, name, *directories, *more, "--json", str(result)]
    child = subprocess.Popen(command)
    try:
        status = child.wait()
    except BaseException:  # ended from outside: so must be the engines, which the part ends
        child.terminate()
        child.wait(60)
        raise
    if status:
        sys.exit(f"serving_figures.py: {' '.join(command[2:])} ended with status {status}, see above")
    return json.loads(result.read_text())


def everything(work: Path, repeats: int) -> dict[str, Any]:
    """Agreement and speed of each compressed model beside the uncompressed one."""
    from edkm_cli.environment import hardware, versions

    dense, compressed = prepare(work)
    agreed = [part(work, "agree", directory) for directory in compressed]
    plain, *packed = part(work, "speed", dense, *compressed, repeats=repeats)
    return {
        "command": "scripts/check_vllm.sh",
        "rows": [row(*of_one) for of_one in zip(compressed, agreed, packed, [plain] * len(packed), strict=True)],
        "versions": versions(),
        "hardware": hardware("cpu"),
    }


def row(directory: str, agreed: dict[str, Any], packed: dict[str, Any], dense: dict[str, Any]) -> dict[str, Any]:
    """All figures of one compressed model, and their ratios to the uncompressed one's: of rates, the median of the ratios
    within a turn, since the machine's speed changes from turn to turn."""
    shown = {key: value for key, value in dense.items() if key != "weights_resident_bytes"}
    figures = {"granularity": Path(directory).name, **agreed, "dense": shown, "packed": packed}
    for sequences in map(str, SEQUENCES):
        pairs = zip(packed["rates"][sequences], dense["rates"][sequences], strict=True)
        figures[f"decode_ratio_{sequences}"] = statistics.median(own / plain for own, plain in pairs)
    return figures | {"resident_ratio": packed["weights_resident_bytes"] / DENSE_BYTES}


def missed(result: dict[str, Any]) -> list[str]:
    """Figures that miss their bar."""
    found = []
    for row in result["rows"]:
        for key, bar in BARS.items():
            if (row[key] < bar) if key.startswith("decode") else (row[key] > bar):
                found.append(f"{row['granularity']}: {key} is {row[key]:.4g}, the bar is {bar}")
        if row["other_tokens"] or not row["chat_equals_edkm_generate"]:
            found.append(
                f"{row['granularity']}: {row['other_tokens']} tokens differ; chat: {row['chat_equals_edkm_generate']}"
            )
    return found


def main() -> int:
    """Parse, measure, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", choices=("all", "agree", "speed"))
    parser.add_argument("directory", nargs="*", help="models; for `all`: where they are made (default out/serving)")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--after", type=Path, help="for `speed`: load, and measure when this file is there")
    parser.add_argument("--eager", action="store_true", help="for `agree`: do not compile graphs")
    arguments = parser.parse_args()
    if arguments.json and not arguments.json.parent.is_dir():
        parser.error(f"--json must name a file in a directory that exists, got {arguments.json}")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that engines and servers are ended, too
    if arguments.part == "all":
        work = Path(*arguments.directory or ("out/serving",))
        work.mkdir(parents=True, exist_ok=True)
        result = everything(work, arguments.repeats)
    elif arguments.part == "agree":
        result = agree(arguments.directory[0], *(["--enforce-eager"] if arguments.eager else []))
    else:
        result = speed(arguments.directory, arguments.repeats, arguments.after)
    text = json.dumps(result, indent=2)
    print(text)
    if arguments.json:
        arguments.json.write_text(text + "\n", encoding="utf-8")
    faults = missed(result) if arguments.part == "all" else []
    print("\n".join(faults), file=sys.stderr, end="")
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
