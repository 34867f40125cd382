"""How a run shows itself: seconds by phase, progress bars on standard error, in a log file a line every half minute."""

import sys
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from tqdm import tqdm

from edkm_cli.allocator import return_free_blocks

_LOG_INTERVAL_SECONDS = 30.0

Track = Callable[[Iterable[Any], str, int], Iterable[Any]]


def no_progress(items: Iterable[Any], description: str, total: int) -> Iterable[Any]:
    """The default of `track` arguments: iterate, show nothing."""
    return items


@dataclass
class Observer:
    """How a run shows itself: `track` wraps long loops, `show` adds a short text to the current one, `say` prints."""

    track: Track = no_progress
    show: Callable[[str], None] = lambda text: None
    say: Callable[[str], None] = lambda text: None


class Clock:
    """Seconds by phase. At the end of one, memory that is free goes back to the system."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        start = time.perf_counter()
        try:
            yield
        finally:
            return_free_blocks()
            self.seconds[name] = round(self.seconds.get(name, 0.0) + time.perf_counter() - start, 3)


class Progress(Observer):
    """`track` wraps an iterable in a bar, `show` sets the text beside it, `say` prints a line above it."""

    def __init__(self) -> None:
        super().__init__(self._track, self._show, lambda text: tqdm.write(text, file=sys.stderr))
        self._bar: Any = None

    def _track(self, items: Iterable[Any], description: str, total: int) -> Iterable[Any]:
        live = sys.stderr.isatty()
        interval = 0.1 if live else _LOG_INTERVAL_SECONDS
        pace: dict[str, Any] = {"mininterval": interval, "maxinterval": interval, "dynamic_ncols": live}
        with tqdm(items, desc=description, total=total, **pace) as self._bar:
            yield from self._bar
        self._bar = None

    def _show(self, text: str) -> None:
        if self._bar is not None:
            self._bar.set_postfix_str(text, refresh=False)


@contextmanager
def no_warnings() -> Iterator[None]:
    """transformers' own warnings are not shown for a while."""
    from transformers.utils import logging

    kept = logging.get_verbosity()
    logging.set_verbosity_error()
    try:
        yield
    finally:
        logging.set_verbosity(kept)


@contextmanager
def quiet_bars(quiet: bool = True) -> Iterator[None]:
    """transformers' own progress bars are off for a while, if `quiet`."""
    from transformers.utils import logging

    turned_off = quiet and logging.is_progress_bar_enabled()
    if turned_off:
        logging.disable_progress_bar()
    try:
        yield
    finally:
        if turned_off:
            logging.enable_progress_bar()
