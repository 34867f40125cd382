"""The memory techniques of eDKM (arXiv 2309.00964): saved tensors move to host memory once, uniquified and sharded.

Works on tensors, autograd graphs and process groups; knows nothing of clustering or models.
"""

from edkm_cli.memory.marshaling import MarshalSavedTensors
from edkm_cli.memory.mover import Statistics
from edkm_cli.memory.shard import Shard
from edkm_cli.memory.uniquify import Uniquify
