"""Data sets of the Hugging Face hub, and local copies of them, by `datasets`: streamed, or as its memory-mapped tables."""

import os
import re
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from edkm_cli.data.sources import Source
from edkm_cli.errors import UserError, brief

# What a set's own text for measuring is called, the best first.
_HELD_OUT_SPLITS = ("test", "validation", "valid", "dev")
_PATIENCE_SECONDS = 5.0


def held_out_split(source: Source) -> str | None:
    """The split of a set that is for measuring; None where it has none, or where the source names a split itself.

    Raises UserError where the set cannot be had.
    """
    if source.split is not None:
        return None
    import datasets

    try:
        with _without_retries(source):
            names = datasets.get_dataset_split_names(source.repository, source.config)
    except Exception as error:
        raise _explained(source, error) from error
    return next((name for name in _HELD_OUT_SPLITS if name in names), None)


def rows(source: Source, split: str, *, streaming: bool) -> Iterator[dict[str, Any]]:
    """The records of a split. Raises UserError that says what there is instead, or why it is out of reach."""
    import datasets

    try:
        with _without_retries(source):
            loaded = datasets.load_dataset(source.repository, source.config, split=split, streaming=streaming)
        yield from loaded
    except Exception as error:
        raise _explained(source, error) from error


@contextmanager
def _without_retries(source: Source) -> Iterator[None]:
    """Where the hub does not answer, `datasets` looks into its own cache at once, not after half a minute of retries."""
    if os.path.isdir(source.repository) or _answers():
        yield
        return
    import datasets
    import huggingface_hub

    modules: list[Any] = [datasets.config, huggingface_hub.constants]
    with ExitStack() as restored:
        for module in modules:
            restored.callback(setattr, module, "HF_HUB_OFFLINE", module.HF_HUB_OFFLINE)
            module.HF_HUB_OFFLINE = True
        yield


def _answers() -> bool:
    """Whether the hub answers at all."""
    from huggingface_hub import constants, get_session

    try:
        get_session().head(constants.ENDPOINT, timeout=_PATIENCE_SECONDS)
    except Exception:  # whatever a proxy, a name server or offline mode raises
        return False
    return True


def _explained(source: Source, error: Exception) -> UserError:
    """The one line for what `datasets` raised."""
    text = " ".join(str(error).split())
    where = "from the Hugging Face hub" if not os.path.isdir(source.repository) else f"from {source.repository}"
    choices = re.search(r"\[('.*?')\]", text)
    there = choices[1].replace("'", "") if choices else ""
    if "OfflineModeIsEnabled" in text:
        return UserError(
            f"{source} could not be loaded: the Hugging Face hub does not answer, and the cache of `datasets` "
            "has no copy of it; check the network and HF_HUB_OFFLINE, or give a local file or 'builtin'"
        )
    if "Config" in text and there:
        return UserError(
            f"{source} needs one of its configurations, which are {there}, but "
            f"{source.config or 'none'} is given; write it as {re.split('[:@]', source.name)[0]}:{there.split(',')[0]}"
        )
    if "split" in text.lower() and there:
        if "[" in (source.split or ""):
            return UserError(f"{source} is a part of a split: it must be of {there}, not streamed; add --no-streaming")
        return UserError(
            f"{source} has the splits {there}, but not {source.split or 'train'}; write one as "
            f"{source.name.partition('@')[0]}@{there.split(',')[0]}"
        )
    if "gated" in text.lower():
        return UserError(f"{source} is a gated data set; ask for access on its page, then `hf auth login`")
    if type(error).__name__ == "DatasetNotFoundError":
        return UserError(f"{source} is not on the hub, or is private; check the name, or `hf auth login`")
    return UserError(
        f"{source} could not be loaded {where} ({type(error).__name__}: {brief(error)}); check the network, "
        "or give a local file or 'builtin'"
    )
