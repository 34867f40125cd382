"""Differentiable k-means clustering of weights: the paper's mathematics, and its closed form that needs no memory."""

from edkm_cli.clustering.checks import relative_importance
from edkm_cli.clustering.dense import dense_dkm
from edkm_cli.clustering.fused import fused_dkm, iterate_centroids
from edkm_cli.clustering.grids import Grid
from edkm_cli.clustering.linear import clustered_linear
from edkm_cli.clustering.palette import kmeans_start, lookup, lut_scale, nearest_indices, round_lut, snap
from edkm_cli.clustering.schedule import SCHEDULES, temperature_at
