"""Run by torchrun in test_distributed.py: compresses with each of the settings in a JSON file, all in one launch."""

import json
import sys
from pathlib import Path

from edkm_cli.compress import compress
from edkm_cli.config import build_config

for settings in json.loads(Path(sys.argv[1]).read_text()):
    compress(build_config(None, settings))  # JSON has lists for tuples
