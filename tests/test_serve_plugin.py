"""The entry point by which vLLM finds edkm: it is where pyproject.toml says, and costs nothing where it is not called."""

import subprocess
import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).parent.parent


def test_the_entry_point_is_a_function_whose_module_imports_neither_torch_nor_vllm():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    module, name = project["entry-points"]["vllm.general_plugins"]["edkm"].split(":")
    heavy = "{'torch', 'vllm'} & set(sys.modules)"
    program = f"import sys, {module} as plugin; print(callable(plugin.{name}), sorted({heavy}))"
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout == "True []\n"
