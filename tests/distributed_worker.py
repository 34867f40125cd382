"""Run by torchrun in test_distributed.py: compresses with each of the settings in a JSON file, all in one launch."""

import json
import sys
from pathlib import Path

from edkm_cli.compress import compress
from edkm_cli.config import CompressConfig

for settings in json.loads(Path(sys.argv[1]).read_text()):
    compress(CompressConfig(**{**settings, "data": tuple(settings["data"])}))
