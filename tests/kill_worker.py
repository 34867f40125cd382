"""What test_resume.py kills. A fork server imports it once, so that an attempt costs no imports.

A child may be told to end itself by SIGKILL just before one of its changes of the file system: between two of them lies
every state that a kill can leave on disk (but for a file that is half written under a temporary name).
"""

import os
import signal
import sys

import accelerate  # noqa: F401 - imported here, so that no child has to
import torch
import transformers.models.llama.modeling_llama
import transformers.quantizers.auto  # noqa: F401

from edkm_cli.compress import compress
from edkm_cli.export.directory import OutputDirectory
from edkm_cli.files import write_json
from edkm_cli.train.state import Checkpoints

# The last one is how a commit gets at the system's way to swap two directories.
_CHANGES = ("os.rename", "os.remove", "os.rmdir", "os.mkdir", "os.truncate", "ctypes.dlopen")


class Changes:
    """This process's changes of files and directories from now on, by name.

    With `number`, the process ends (or does `action`) before the `number`-th one, counted from the first whose name
    contains `after`.
    """

    def __init__(self, *, after="", number=0, action=None):
        self.names = []
        self._after, self._number, self._action = after, number, action or end_this_process
        sys.addaudithook(self._hook)

    def _hook(self, event, arguments):
        name = changed(event, arguments)
        if name and (self.names or self._after in name):
            self.names.append(name)
            if len(self.names) == self._number:
                self._action()


def changed(event, arguments):
    """The name of what an audit event changes in the file system; None for any other event."""
    writes = event == "open" and isinstance(arguments[2], int) and arguments[2] & (os.O_WRONLY | os.O_RDWR)
    if not (event in _CHANGES or writes):
        return None
    name = str(arguments[0])
    return None if name.isdigit() or name.startswith("/dev") else name  # a file that is open already, or none


def end_this_process():
    os.kill(os.getpid(), signal.SIGKILL)


def run(config, *, after="", number=0, record=None, environment=()):
    """Go on with a run, if there is one; write the names of its changes to `record`."""
    torch.set_num_threads(1)
    os.environ.update(environment)
    changes = Changes(after=after, number=number)
    compress(config, resume=True)
    if record is not None:
        write_json(record, changes.names)


def commit(path, number):
    """Put `DIR.partial` in its place."""
    output = OutputDirectory(path, overwrite=True)
    Changes(number=number)
    output.commit()


def train_three_steps(folder, number):
    """Train a linear layer for three steps with a checkpoint after each, keeping two; returns the three states.

    A kill counts from the beginning of the third checkpoint.
    """
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = torch.nn.Linear(3, 2)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    checkpoints, states = Checkpoints(folder, keep=2), {}
    if number:
        Changes(after="step-000003", number=number)
    for step in (1, 2, 3):
        optimizer.zero_grad()
        model(torch.ones(1, 3)).sum().backward()
        optimizer.step()
        checkpoints.save(step, model, optimizer)
        states[step] = {name: value.clone() for name, value in model.state_dict().items()}
    return states
