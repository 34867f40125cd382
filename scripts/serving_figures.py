"""Measure how vLLM serves SmolLM2-135M compressed: does it write what transformers writes, how fast, in how much memory.

    python scripts/serving_figures.py all --json FILE            everything; compresses the model three times first
    python scripts/serving_figures.py agree DIRECTORY            a server, float32: 20 prompts of 48 tokens, and a chat
    python scripts/serving_figures.py speed DIRECTORY...         bfloat16, 1 and 16 sequences, each directory in turn

Runs where vLLM is installed; scripts/check_vllm.sh makes that environment. Each part is a process of its own.
"""

from __future__ import annotations

import argparse
import json
import os
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
COMPRESSED = ("row:1", "tensor", "block:8x64")
TOKENS, PATIENCE_SECONDS, TIE = 48, 1800, 1e-3
BARS = {"decode_ratio_1": 1.5, "decode_ratio_16": 1.0, "resident_ratio": 0.30, "largest_logprob_difference": 1e-3}
KV_BYTES = 2**29


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
    command = [program, "serve", directory, "--port", str(port), "--kv-cache-memory-bytes", str(KV_BYTES), *options]
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
            server.wait(60)


def agree(directory: str) -> dict[str, Any]:
    """What a server writes beside what the packed model of transformers finds likeliest, token by token, in float32."""
    import torch
    from transformers import AutoTokenizer

    import edkm_cli
    from edkm_cli.generate import generate_text, load_writer

    tokenizer, answers = AutoTokenizer.from_pretrained(directory), []
    prompts = [tokenizer(text)["input_ids"] for text in TOPICS]
    with served(directory, "--dtype", "float32") as base:
        for prompt in prompts:
            body = {"prompt": prompt, "max_tokens": TOKENS, "temperature": 0, "logprobs": 1, "ignore_eos": True}
            found = ask(f"{base}/v1/completions", model=directory, return_tokens_as_token_ids=True, **body)
            answers.append(found["choices"][0]["logprobs"])
        messages = [{"role": "user", "content": "Name three colours."}]
        chat = ask(f"{base}/v1/chat/completions", model=directory, messages=messages, max_tokens=TOKENS, temperature=0)
    writer = load_writer(directory, chat=True, dequantize=False, dtype="float32", device="cpu")
    own = generate_text(writer, messages[0]["content"], chat=True, max_new_tokens=TOKENS)
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
    answer = chat["choices"][0]
    return {
        "prompts": len(prompts),
        "tokens": tokens,
        "other_tokens": sum(tie["behind_the_likeliest"] > TIE for tie in ties),
        "ties": ties,
        "largest_logprob_difference": largest,
        "chat": answer["message"]["content"],
        "chat_equals_edkm_generate": answer["message"]["content"].strip() == own["text"].strip(),
        "chat_finish_reason": answer["finish_reason"],
    }


def _held(model: Any) -> int:
    """Bytes of all tensors of a model, each memory once."""
    tensors = [*model.parameters(), *model.buffers()]
    return sum({t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}.values())


def _process_bytes(worker: Any) -> int:
    import psutil

    return psutil.Process().memory_info().rss


def speed(directory: str, repeats: int) -> dict[str, Any]:
    """Tokens per second of decoding one and 16 sequences, median of `repeats`, after one that does not count."""
    os.environ["VLLM_ALLOW_INSECURE_SERIALIZATION"] = "1"  # two functions of this file go to the worker
    import serving_figures as here  # by a name that the worker knows, too
    from vllm import LLM, SamplingParams

    llm = LLM(
        directory, dtype="bfloat16", max_model_len=512, kv_cache_memory_bytes=KV_BYTES, enable_prefix_caching=False
    )
    row: dict[str, Any] = {"weights_resident_bytes": llm.apply_model(here._held)[0]}
    for sequences in (1, 16):
        prompts = [{"prompt_token_ids": list(range(100 + i, 108 + i))} for i in range(sequences)]

        def seconds(tokens: int, prompts: Any = prompts) -> float:
            start = time.perf_counter()
            llm.generate(prompts, SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True), use_tqdm=False)
            return time.perf_counter() - start

        seconds(8)
        rates = [sequences * 64 / (seconds(72) - seconds(8)) for _ in range(repeats)]
        row[f"decode_tokens_per_second_{sequences}"] = statistics.median(rates)
        row[f"rates_{sequences}"] = rates
    row["worker_resident_bytes"] = llm.collective_rpc(here._process_bytes)[0]
    return row


def prepare(work: Path) -> tuple[str, list[str]]:
    """(the uncompressed model in bfloat16, the compressed ones): made where they are not there yet."""
    import torch

    from edkm_cli import models

    dense = work / "dense"
    if not dense.is_dir():
        source = models.resolve("smollm2-135m")
        model = models.load_dense(source, dtype="bfloat16", device="cpu")
        model.config.dtype = torch.bfloat16
        model.save_pretrained(dense)
        models.load_tokenizer(source).save_pretrained(dense)
    compressed = []
    for granularity in COMPRESSED:
        output = work / granularity.replace(":", "")
        if not output.is_dir():
            command = [
                sys.executable,
                "-m",
                "edkm_cli",
                "compress",
                "--model",
                "smollm2-135m",
                "--steps",
                "0",
                "--data",
                "builtin",
            ]
            command += ["--start", "kmeans", "--importance", "none", "--eval-windows", "1", "--context", "128"]
            subprocess.run([*command, "--granularity", granularity, "--output", str(output)], check=True)
        compressed.append(str(output))
    return str(dense), compressed


def part(*arguments: str) -> Any:
    """The result of this script in a process of its own."""
    result = Path(f"{arguments[1].rstrip('/')}-{arguments[0]}.json")
    subprocess.run([sys.executable, __file__, *arguments, "--json", str(result)], check=True)
    return json.loads(result.read_text())


def everything(work: Path, repeats: int) -> dict[str, Any]:
    """Agreement and speed of each compressed model beside the uncompressed one."""
    from edkm_cli.environment import hardware, versions

    dense, compressed = prepare(work)
    rows = []
    for directory in compressed:
        row = {"granularity": Path(directory).name, **part("agree", directory)}
        # In one process each, one right after the other, so that both meet the same machine.
        plain, packed = (
            part("speed", dense, "--repeats", str(repeats)),
            part("speed", directory, "--repeats", str(repeats)),
        )
        row |= {"dense": plain, "packed": packed}
        for sequences in (1, 16):
            key = f"decode_tokens_per_second_{sequences}"
            row[f"decode_ratio_{sequences}"] = packed[key] / plain[key]
        row["resident_ratio"] = (
            packed["weights_resident_bytes"] / 269_030_016
        )  # of the uncompressed model's bfloat16 weights
        rows.append(row)
    return {"command": "scripts/check_vllm.sh", "rows": rows, "versions": versions(), "hardware": hardware("cpu")}


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
    parser.add_argument("directory", nargs="?", help="a model; for `all`: where models are made (default out/serving)")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--repeats", type=int, default=3)
    arguments = parser.parse_args()
    if arguments.part == "all":
        work = Path(arguments.directory or "out/serving")
        work.mkdir(parents=True, exist_ok=True)
        result = everything(work, arguments.repeats)
    elif arguments.part == "agree":
        result = agree(arguments.directory)
    else:
        result = speed(arguments.directory, arguments.repeats)
    text = json.dumps(result, indent=2)
    print(text)
    if arguments.json:
        arguments.json.write_text(text + "\n", encoding="utf-8")
    faults = missed(result) if arguments.part == "all" else []
    print("\n".join(faults), file=sys.stderr, end="")
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
