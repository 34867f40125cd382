"""What children of the fork server do. The server imports this once, so that a child costs no imports."""

import ctypes
import gc
import json
import mmap
import os
import sys
import traceback
from pathlib import Path

if gc.isenabled():  # as in conftest.py
    gc.disable()
import accelerate  # noqa: F401 - imported here, so that no child has to
import numpy as np
import torch
import torch.distributed.fsdp
import transformers.models.llama.modeling_llama  # noqa: F401

from edkm_cli import precision
from edkm_cli.cli import main
from edkm_cli.compress import compress
from edkm_cli.environment import peak_memory_bytes
from edkm_cli.finetune.command import finetune
from edkm_cli.initialize.kept import KeptStart

gc.enable()
gc.freeze()


def compress_together(rank, size, port, log, configs, resume, environment=()):
    """Compress with each of the settings, or finetune (directory, settings), as process `rank` of `size`, which find one
    another as torchrun's do."""
    torch.set_num_threads(1)
    numbers = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": size, "LOCAL_WORLD_SIZE": size, "MASTER_PORT": port}
    os.environ.update({name: str(value) for name, value in numbers.items()}, MASTER_ADDR="127.0.0.1")
    os.environ.update(environment)
    if "FOLDERS" in os.environ:  # each works in one of its own
        os.chdir(os.environ["FOLDERS"] + str(rank))
    if os.environ.get("EXACT_PRODUCTS") == "1":  # as the fixture `exact_products` does in the test's own process
        precision.multiplies_bfloat16 = lambda device: False
    log_layers(f"{log}.{rank}.layers", stop=os.environ.get("STOP_AFTER_A_LAYER") == "1")
    with open(f"{log}.{rank}", "w", encoding="utf-8", buffering=1) as sys.stderr:
        try:
            for config in configs:
                if isinstance(config, tuple):
                    finetune(*config, resume=resume)
                else:
                    compress(config, resume=resume)
        except BaseException:
            traceback.print_exc(file=sys.stderr)
            raise


def log_layers(log, *, stop):
    """Write down which layers the start finishes; with `stop` the process ends after the first one."""
    add = KeptStart.add

    def logged(self, path, *arguments):
        add(self, path, *arguments)
        with open(log, "a", encoding="utf-8") as file:
            file.write(path + "\n")
        if stop:
            os._exit(9)

    KeptStart.add = logged


def edkm(arguments, peak_file):
    """A command in a process that has done nothing before; the process's peak of resident memory goes to a file."""
    torch.set_num_threads(1)
    map_files(os.getppid())
    try:
        main([str(argument) for argument in arguments])
    finally:  # a command ends by SystemExit
        Path(peak_file).write_text(json.dumps(peak_memory_bytes("cpu")))


def map_files(pid):
    """Read a byte of each page of a file that another process, of which this one is a copy, has in memory: they are part of
    resident memory, and a forked process begins without them. How many there are is the system's choice, which maps more
    around each one that is used where a library's file was written a short while ago."""
    if not os.path.exists("/proc/self/pagemap"):
        return
    with open(f"/proc/{pid}/maps", encoding="utf-8") as mappings, open(f"/proc/{pid}/pagemap", "rb") as pagemap:
        for mapping in mappings:
            span, access, _, _, inode = mapping.split()[:5]
            if inode == "0" or not access.startswith("r"):
                continue
            first, end = (int(address, 16) // mmap.PAGESIZE for address in span.split("-"))
            pagemap.seek(8 * first)
            present = np.frombuffer(pagemap.read(8 * (end - first)), np.uint64) >> 63
            for page in np.flatnonzero(present):
                ctypes.string_at((first + int(page)) * mmap.PAGESIZE, 1)
