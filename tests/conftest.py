"""Fixtures: a tiny model with its tokenizer, a text, token ids, and children to kill; nothing is downloaded."""

from __future__ import annotations

import os
import sys
from pathlib import Path

os.environ.setdefault("HF_HUB_OFFLINE", "1")  # a test that needs the hub is wrong

import pytest
import torch

from helpers import byte_tokenizer, tiny_llama
from processes import SERVER


@pytest.fixture
def ids() -> torch.Tensor:
    return torch.randint(0, 257, (2, 17), generator=torch.Generator().manual_seed(3))


@pytest.fixture(scope="session")
def model_directory(tmp_path_factory) -> Path:
    """A dense tiny LLaMA with its tokenizer, as a local Hugging Face directory."""
    directory = tmp_path_factory.mktemp("models") / "tiny"
    tiny_llama().save_pretrained(directory)
    byte_tokenizer().save_pretrained(directory)
    return directory


@pytest.fixture(scope="session")
def text_file(tmp_path_factory) -> Path:
    """About 20,000 characters of varied text."""
    path = tmp_path_factory.mktemp("texts") / "text.txt"
    lines = [f"Line {i}: the {['quick', 'slow', 'odd'][i % 3]} fox counted {i * 7919 % 1000} hens." for i in range(400)]
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path


@pytest.fixture
def start(monkeypatch):
    """Starts a function of kill_worker in a child of the fork server; ends what is left of it after the test."""
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(sys.path))  # the server looks there for what it imports
    children = []

    def begin(function, *arguments, **options):
        children.append(SERVER.Process(target=function, args=arguments, kwargs=options))
        children[-1].start()
        return children[-1]

    yield begin
    for child in children:
        child.kill()
        child.join()
