"""Seconds of collective communication, from group size, rank stride, and link rates.

Ring costs: all-gather and reduce-scatter of V bytes over n ranks move V (n-1)/n per rank (Thakur et
al. 2005). A ring that crosses nodes uses the network cards of all its members in a node, so a group
with g members per node gets min(NVLink, g x card).
"""

from __future__ import annotations

from megatron_rl.planner.constants import Cluster, Constants


def local_members(cluster: Cluster, size: int, stride: int) -> int:
    """Count the members of a rank group that share one NVLink domain (at least one)."""
    return max(1, min(size, cluster.domain // max(1, stride)))


def group_bandwidth(cluster: Cluster, constants: Constants, size: int, stride: int) -> float:
    """Return achieved bytes/s per rank of a ring over ``size`` ranks that are ``stride`` apart."""
    local = local_members(cluster, size, stride)
    inside = cluster.gpu.nvlink * constants.efficiency.nvlink
    if local >= size:
        return inside
    return min(inside, local * cluster.network * constants.efficiency.network)


def gather_seconds(
    cluster: Cluster, constants: Constants, size: int, stride: int, total_bytes: float
) -> float:
    """Return seconds to all-gather (or reduce-scatter) ``total_bytes`` over a group."""
    if size <= 1:
        return 0.0
    return total_bytes * (size - 1) / size / group_bandwidth(cluster, constants, size, stride)


def all_to_all_seconds(
    cluster: Cluster, constants: Constants, size: int, sent_bytes: float, copies: int
) -> float:
    """Return seconds of a token exchange over consecutive ranks, one direction.

    ``sent_bytes`` is what a rank sends in all (each token to each of its ``copies`` experts). Across
    nodes a token is sent once per node that needs it: min(copies, nodes) of its copies (DeepEP,
    arXiv 2412.19437 section 3.2.2).
    """
    if size <= 1:
        return 0.0
    local = local_members(cluster, size, 1)
    inside = sent_bytes * (size - 1) / size / (cluster.gpu.nvlink * constants.efficiency.nvlink)
    if local >= size:
        return inside
    nodes = size / local
    per_copy = sent_bytes / max(1, copies)
    # Distinct remote nodes that k uniform choices among the nodes hit.
    reached = nodes * (1.0 - (1.0 - 1.0 / nodes) ** copies) * (nodes - 1) / nodes
    return max(inside, per_copy * reached / (cluster.network * constants.efficiency.network))
