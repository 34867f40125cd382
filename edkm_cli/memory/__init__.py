"""The systems part of eDKM (arXiv 2309.00964): saved tensors leave the device once, uniquified and sharded.

Knows tensors, autograd graphs and process groups, and nothing of clusters or models.
"""

from edkm_cli.memory.accounting import Statistics
from edkm_cli.memory.marshaling import MarshalSavedTensors
from edkm_cli.memory.shard import Shard
from edkm_cli.memory.uniquify import Uniquify

__all__ = ["MarshalSavedTensors", "Shard", "Statistics", "Uniquify"]
