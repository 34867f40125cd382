"""Compiles the C kernels into a wheel, once for each level of processors; everything else is in pyproject.toml.

An editable checkout gets the level of its own processor. Without a C compiler the wheel is for any machine, and holds the
sources alone: what they do runs in plain PyTorch, or is compiled at first use.
"""

import os
import runpy
import shutil
import warnings
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from setuptools import Distribution, setup
from setuptools.command.build_py import build_py

_LEVELS = runpy.run_path(str(Path(__file__).parent / "edkm_cli" / "kernels" / "levels.py"))


class BuildKernels(build_py):
    """Python files, and the libraries of each wing in its folder `built`."""

    def run(self) -> None:
        super().run()
        wanted = _LEVELS["fitting"]()[:1] if self.editable_mode else _LEVELS["levels"]()
        root = Path() if self.editable_mode else Path(self.build_lib)
        jobs = [(root / "edkm_cli" / wing, level) for wing in _LEVELS["WINGS"] for level in wanted]
        jobs.append((root / "edkm_cli" / "runtime", _LEVELS["calls"]()))
        with ThreadPoolExecutor(os.cpu_count()) as pool:
            list(pool.map(self._compile, jobs))

    def _compile(self, job: tuple) -> None:
        wing, level = job
        directory = wing / _LEVELS["BUILT"]
        directory.mkdir(parents=True, exist_ok=True)
        if (directory / _LEVELS["file_name"](wing, level.name)).exists():
            return
        try:
            _LEVELS["compile_level"](wing, level, directory)
        except _LEVELS["Unavailable"] as error:
            warnings.warn(f"no kernels for the level {level.name} of processors: {error}", stacklevel=1)


class Compiled(Distribution):
    """What is built fits one platform and, for the sake of calls.c, one version of Python."""

    def has_ext_modules(self) -> bool:
        return any(shutil.which(name) for name in _LEVELS["COMPILERS"])


setup(cmdclass={"build_py": BuildKernels}, distclass=Compiled)
