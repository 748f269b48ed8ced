"""Picture of a checked run: nodes, the roles on their ranks, and the traffic between ranks.

Most nodes of a large job look the same. Nodes with the same roles, replicas and pipeline stages are drawn
once, so the picture of a job of any size is readable.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby, pairwise
from xml.sax.saxutils import escape

from megatron_rl.check.configuration import CheckReport
from megatron_rl.cli.check_text import coordinate_legend
from megatron_rl.config.roles import ROLLOUT
from megatron_rl.shapes.layout import ParallelLayout
from megatron_rl.shapes.traffic import WeightTraffic, byte_text

_MAX_KINDS = 12
"""Largest number of kinds of nodes that are drawn."""
_WIDE_NODE = 8
"""Largest number of ranks of a node for which each rank has a wide column."""

# Sizes in pixels: width of a column and of a narrow column, height of a row, width of the names at the left,
# and heights of the title, of the header of a kind of nodes, and of a line of groups.
_COLUMN = 112
_NARROW_COLUMN = 64
_ROW = 40
_LEFT = 290
_TITLE = 44
_HEADER = 36
_GROUP_ROW = 26
_CHARACTER = 7.5
"""Maximum width of a character in a label, in pixels."""

_ROLE_COLOURS = ("#2563a8", "#8a5bb5", "#b5485d", "#5aa7b8", "#6b7280", "#7c6f1d")
_ROLLOUT_COLOUR = "#1f2937"
_TEXT_COLOUR = "#1f2937"
_NOTE_COLOUR = "#6b7280"
_EMPTY_COLOUR = "#f3f4f6"
_INSIDE_COLOUR = "#2f7d4a"
"""Colour of groups whose ranks are on one node."""
_ACROSS_COLOUR = "#b4551d"
"""Colour of groups with ranks on several nodes."""
_INSIDE = "inside a node"
_ACROSS = "across nodes"

_DIMENSIONS = ("tensor", "context", "expert", "pipeline", "data")
"""Dimensions of a layout in which its ranks communicate, from the most to the least frequently used."""


@dataclass(frozen=True)
class NodeKind:
    """Nodes that look the same in the picture: same roles, replicas and pipeline stages on their ranks.

    Example: 64 colocated ranks on 8 nodes, with a tensor-parallel size of 2, are one kind: ``NodeKind((0, …,
    7), 8)``.
    """

    nodes: tuple[int, ...]
    """Indices of the nodes."""
    size: int
    """Ranks of each node; the last node of a job can have fewer than the others."""


def node_kinds(layouts: dict[str, ParallelLayout], world_size: int, gpus_per_node: int) -> list[NodeKind]:
    """Group the nodes of a job into kinds, in the order of the first node of each kind.

    Two nodes are of the same kind if their ranks have the same roles, and if each role groups these ranks
    into replicas and pipeline stages in the same way.
    """
    # (number of ranks, [(role, local rank, index of its replica and stage on the node)]) -> nodes.
    nodes_by_kind: dict[tuple[int, tuple[tuple[str, int, int], ...]], list[int]] = {}
    for node, ranks in enumerate(_node_ranks(world_size, gpus_per_node)):
        shards: list[tuple[str, int, int]] = []
        for role, layout in layouts.items():
            # Number replicas and stages in the order in which they occur on the node.
            index_on_node: dict[tuple[int, int] | None, int] = {}
            for local_rank, rank in enumerate(ranks):
                if rank not in layout.ranks:
                    continue
                index = index_on_node.setdefault(_replica_stage(layout, rank), len(index_on_node))
                shards.append((role, local_rank, index))
        nodes_by_kind.setdefault((len(ranks), tuple(shards)), []).append(node)

    return [NodeKind(tuple(nodes), size) for (size, _), nodes in nodes_by_kind.items()]


def _node_ranks(world_size: int, gpus_per_node: int) -> list[range]:
    """Return the ranks of each node, in the order of nodes; the last node may have fewer."""
    starts = range(0, world_size, gpus_per_node)
    return [range(start, min(start + gpus_per_node, world_size)) for start in starts]


def draw_svg(report: CheckReport, name: str) -> str:
    """Return an SVG of a checked run: a box per kind of node, and the communication groups of each role.

    Nodes are of one kind if their ranks have the same roles, replicas and pipeline stages (`node_kinds`). At
    most `_MAX_KINDS` kinds are drawn. The report must have layouts. ``name`` is the configuration's name, for
    the title.
    """
    assert report.layouts is not None
    layouts = dict(report.layouts)
    ranks_per_node = min(report.config.gpus_per_node, report.world_size)
    all_kinds = node_kinds(layouts, report.world_size, ranks_per_node)
    drawn_kinds = all_kinds[:_MAX_KINDS]

    # Add two rows for the bytes that a rank needs and receives in a weight sync.
    rows = len(layouts)
    if report.sync is not None:
        rows += 2

    # Sizes in pixels.
    column_width = _COLUMN
    if ranks_per_node > _WIDE_NODE:
        column_width = _NARROW_COLUMN
    width = max(_LEFT + column_width * ranks_per_node + 16, _LEFT + 5 * _COLUMN)
    kind_height = _HEADER + _ROW * rows + 14
    groups_top = _TITLE + kind_height * len(drawn_kinds)
    group_lines = len(layouts)
    if report.sync is not None:
        group_lines += 1
    height = groups_top + _HEADER + _GROUP_ROW * (group_lines + 1) + 10

    elements = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" '
        f'height="{height}" font-family="system-ui, sans-serif" font-size="13">',
        f"<title>{escape(name)}: nodes, roles and weights</title>",
        f'<rect width="{width}" height="{height}" fill="#ffffff"/>',
        _text_element(16, 26, f"{name} on {report.world_size} ranks", weight="bold"),
    ]
    if len(all_kinds) > len(drawn_kinds):
        note = f"{len(drawn_kinds)} of {len(all_kinds)} kinds of nodes are shown"
        elements.append(_text_element(width - 16, 26, note, _NOTE_COLOUR, anchor="end"))

    for index, kind in enumerate(drawn_kinds):
        elements += _draw_kind(report, kind, ranks_per_node, column_width, _TITLE + kind_height * index)
    elements += _draw_groups(layouts, report.sync, ranks_per_node, groups_top)
    elements.append(_text_element(16, height - 16, coordinate_legend(layouts), _NOTE_COLOUR))
    return "\n".join([*elements, "</svg>"]) + "\n"


def _draw_kind(
    report: CheckReport, kind: NodeKind, ranks_per_node: int, column_width: int, top: int
) -> list[str]:
    """Draw the box of one kind of nodes: its ranks, a row for each role, and the bytes of a weight sync.

    Returns SVG elements. ``column_width`` is the width of a rank's column, and ``top`` the vertical position
    of the box, both in pixels.
    """
    assert report.layouts is not None
    first_rank = kind.nodes[0] * ranks_per_node
    elements: list[str] = []

    # Label the columns of a single node with ranks, and the columns of several nodes with GPU indices.
    if len(kind.nodes) == 1:
        title = f"node {kind.nodes[0]}"
        labels = [f"rank {first_rank + local_rank}" for local_rank in range(kind.size)]
    else:
        title = f"nodes {_index_text(kind.nodes)}: {len(kind.nodes)} like this"
        labels = [f"GPU {local_rank}" for local_rank in range(kind.size)]
    elements.append(_text_element(16, top + 20, title, weight="bold"))
    for local_rank, label in enumerate(labels):
        centre = _column_centre(local_rank, column_width)
        elements.append(_text_element(centre, top + 20, label, _NOTE_COLOUR, anchor="middle"))

    frame_top = top + _HEADER
    frame_width = column_width * kind.size
    rows = len(report.layouts)
    if report.sync is not None:
        rows += 2
    elements.append(
        f'<rect x="{_LEFT}" y="{frame_top - 4}" width="{frame_width}" height="{_ROW * rows + 8}" rx="7" '
        f'fill="none" stroke="#d1d5db"/>'
    )
    for index, (role, layout) in enumerate(report.layouts.items()):
        elements += _draw_role_row(
            role, layout, index, kind, ranks_per_node, column_width, frame_top + _ROW * index
        )
    if report.sync is not None:
        sync_top = frame_top + _ROW * len(report.layouts)
        elements += _draw_sync_rows(report.sync, kind, ranks_per_node, column_width, sync_top)
    return elements


def _draw_role_row(
    role: str,
    layout: ParallelLayout,
    index: int,
    kind: NodeKind,
    ranks_per_node: int,
    column_width: int,
    top: int,
) -> list[str]:
    """Draw the row of one role: its name, its sizes, and a bar for each replica or stage on the node.

    Returns SVG elements. ``index`` is the position of the role, which chooses its colour. ``column_width`` is
    the width of a rank's column, and ``top`` the vertical position of the row, both in pixels.
    """
    # Draw the rollout in the same dark colour as the arrows to it.
    colour = _ROLE_COLOURS[index % len(_ROLE_COLOURS)]
    if role == ROLLOUT.name:
        colour = _ROLLOUT_COLOUR
    elements = [
        _text_element(16, top + 17, role, weight="bold"),
        _text_element(16, top + 32, _layout_text(role, layout), _NOTE_COLOUR, size=11),
    ]

    first_rank = kind.nodes[0] * ranks_per_node
    local_ranks = range(kind.size)

    # Consecutive ranks of one replica and stage share a bar.
    bars = groupby(local_ranks, key=lambda local_rank: _replica_stage(layout, first_rank + local_rank))
    for replica_stage, ranks_of_bar in bars:
        bar_local_ranks = list(ranks_of_bar)
        x = _LEFT + column_width * bar_local_ranks[0] + 4
        width = column_width * len(bar_local_ranks) - 8
        fill = colour
        if replica_stage is None:
            fill = _EMPTY_COLOUR
        box = f'<rect x="{x}" y="{top + 4}" width="{width}" height="{_ROW - 8}" rx="5" fill="{fill}"/>'
        elements.append(box)
        if replica_stage is None:
            continue
        label = _bar_label(role, layout, kind, ranks_per_node, bar_local_ranks)

        # Truncate a label that is too long for its bar; the tooltip shows the complete label.
        visible_label = label
        if len(label) * _CHARACTER > width:
            visible_label = label[: max(1, int(width / _CHARACTER) - 1)] + "…"
        text = _text_element(x + width // 2, top + 25, visible_label, "#ffffff", anchor="middle", size=12)
        elements.append(f"<g><title>{escape(role)}: {escape(label)}</title>{text}</g>")
    return elements


def _layout_text(role: str, layout: ParallelLayout) -> str:
    """Format the parallel sizes of a role, such as ``TP8 PP4 DP2, 64 ranks``."""
    sizes = layout.short_text()
    if role == ROLLOUT.name:
        sizes = f"TP{layout.tensor} x {layout.data} replicas"
    ranks = "1 rank"
    if layout.size > 1:
        ranks = f"{layout.size:,} ranks"
    return f"{sizes}, {ranks}"


def _replica_stage(layout: ParallelLayout, rank: int) -> tuple[int, int] | None:
    """Return the indices of a rank's replica and pipeline stage, or None for a rank without the role."""
    if rank not in layout.ranks:
        return None
    coordinates = layout.coordinates(rank)
    return coordinates.data, coordinates.pipeline


def _bar_label(
    role: str, layout: ParallelLayout, kind: NodeKind, ranks_per_node: int, local_ranks: Sequence[int]
) -> str:
    """Return the label of a bar with the coordinates of its ranks, such as ``t0-1 p0-3 d0,4,8``.

    ``local_ranks`` are the indices of the bar's ranks within a node. The label contains the coordinates of
    these ranks on all nodes of ``kind``. The letters are t (tensor), c (context), p (pipeline), d (data), and
    r (replica, for the rollout); see `coordinate_legend`.
    """
    coordinates = []
    for node in kind.nodes:
        coordinates += [layout.coordinates(node * ranks_per_node + local_rank) for local_rank in local_ranks]
    data_letter = "d"
    if role == ROLLOUT.name:
        data_letter = "r"

    # Letter, size of the dimension and coordinates. Dimensions of size 1 are omitted.
    dimensions = [
        ("t", layout.tensor, [item.tensor for item in coordinates]),
        ("c", layout.context, [item.context for item in coordinates]),
        ("p", layout.pipeline, [item.pipeline for item in coordinates]),
        (data_letter, layout.data, [item.data for item in coordinates]),
    ]
    terms = [f"{letter}{_index_text(indices)}" for letter, size, indices in dimensions if size > 1]

    # A pipeline stage of a replica can have more ranks than the node.
    stage_ranks = layout.tensor * layout.context
    if len(local_ranks) < stage_ranks:
        terms.insert(0, f"{len(local_ranks)} of {stage_ranks} ranks:")
    return " ".join(terms) or "all"


def _index_text(indices: Sequence[int]) -> str:
    """Format indices as a range ``0-7``, a range with a stride ``0-14:2``, or first and last with the count.

    Example:
        >>> _index_text([0, 1, 2]), _index_text([0, 2, 4]), _index_text([0, 1, 5]), _index_text([3, 3])
        ('0-2', '0-4:2', '0…5 (3)', '3')
    """
    ordered = sorted(set(indices))
    first = ordered[0]
    last = ordered[-1]
    if first == last:
        return str(first)

    strides = {later - earlier for earlier, later in pairwise(ordered)}
    if strides == {1}:
        return f"{first}-{last}"
    if len(ordered) == 2:
        return f"{first},{last}"
    if len(strides) == 1:
        return f"{first}-{last}:{strides.pop()}"
    return f"{first}…{last} ({len(ordered)})"


def _draw_sync_rows(
    sync: WeightTraffic, kind: NodeKind, ranks_per_node: int, column_width: int, top: int
) -> list[str]:
    """Draw the rows of a weight sync: the bytes of weights that each rank needs, and the bytes it receives.

    Returns SVG elements. ``column_width`` is the width of a rank's column, and ``top`` the vertical position
    of the rows, both in pixels.
    """
    elements = [
        _text_element(16, top + 20, "weights of a sync", weight="bold"),
        _text_element(16, top + 36, "the rank's share of the engine's model", _NOTE_COLOUR, size=11),
        _text_element(16, top + 52, "received inside its node, at most", _INSIDE_COLOUR, size=11),
        _text_element(16, top + 68, "received across nodes, at most", _ACROSS_COLOUR, size=11),
    ]
    for local_rank in range(kind.size):
        ranks = [node * ranks_per_node + local_rank for node in kind.nodes]
        if ranks[0] not in sync.needed:
            continue

        # Draw an arrow to the rollout's row above, then three numbers, each the maximum over the nodes.
        centre = _column_centre(local_rank, column_width)
        across_nodes = sync.received_across_nodes
        sizes = [
            (_TEXT_COLOUR, max(sync.needed[rank] for rank in ranks)),
            (_INSIDE_COLOUR, max(sync.received[rank] - across_nodes[rank] for rank in ranks)),
            (_ACROSS_COLOUR, max(across_nodes[rank] for rank in ranks)),
        ]
        arrow = f"M{centre} {top + 22}v-16m-5 7l5 -7l5 7"
        elements.append(f'<path d="{arrow}" fill="none" stroke="{_ROLLOUT_COLOUR}"/>')
        for line_index, (colour, size) in enumerate(sizes):
            baseline = top + 36 + 16 * line_index
            text = byte_text(size)
            elements.append(_text_element(centre, baseline, text, colour, anchor="middle", size=12))
    return elements


def _draw_groups(
    layouts: dict[str, ParallelLayout], sync: WeightTraffic | None, ranks_per_node: int, top: int
) -> list[str]:
    """Draw the communication groups of each role and the traffic of a weight sync.

    Traffic inside a node and traffic across nodes have different colours.

    Returns SVG elements. ``top`` is the vertical position in pixels.
    """
    elements = [_text_element(16, top + 22, "groups that communicate", weight="bold")]
    x = _LEFT
    for text, colour in ((_INSIDE, _INSIDE_COLOUR), (_ACROSS, _ACROSS_COLOUR)):
        elements.append(f'<rect x="{x}" y="{top + 11}" width="13" height="13" rx="3" fill="{colour}"/>')
        elements.append(_text_element(x + 20, top + 22, text, _NOTE_COLOUR))
        x += 130

    lines_top = top + _HEADER
    for index, (role, layout) in enumerate(layouts.items()):
        nodes_by_dimension = nodes_per_group(layout, ranks_per_node)
        # Replicas of the engine do not communicate with each other.
        if role == ROLLOUT.name:
            nodes_by_dimension.pop("data", None)
        labels: list[tuple[str, str]] = []
        for dimension, node_count in nodes_by_dimension.items():
            text = f"{dimension} {getattr(layout, dimension)}"
            if node_count > 1:
                labels.append((f"{text} on {node_count} nodes", _ACROSS_COLOUR))
            else:
                labels.append((text, _INSIDE_COLOUR))
        elements += _draw_labels(role, labels, lines_top + _GROUP_ROW * index)

    if sync is not None:
        sizes = ((sync.inside_nodes, _INSIDE_COLOUR), (sync.across_nodes, _ACROSS_COLOUR))
        labels = [(f"{byte_text(size)} to all ranks", colour) for size, colour in sizes if size]
        elements += _draw_labels("weight sync", labels, lines_top + _GROUP_ROW * len(layouts))
    return elements


def _draw_labels(name: str, labels: Sequence[tuple[str, str]], top: int) -> list[str]:
    """Draw a line with a name and coloured labels; ``labels`` are (text, colour) pairs.

    Returns SVG elements; ``top`` is the vertical position in pixels.
    """
    elements = [_text_element(16, top + 16, name, weight="bold")]
    x = _LEFT
    for text, colour in labels:
        width = round(len(text) * _CHARACTER) + 16
        elements.append(f'<rect x="{x}" y="{top}" width="{width}" height="22" rx="5" fill="{colour}"/>')
        elements.append(_text_element(x + width // 2, top + 15, text, "#ffffff", anchor="middle", size=12))
        x += width + 8
    if not labels:
        elements.append(_text_element(x, top + 16, "none", _NOTE_COLOUR))
    return elements


def nodes_per_group(layout: ParallelLayout, gpus_per_node: int) -> dict[str, int]:
    """Map each dimension with a size above 1 to the largest number of nodes that one of its groups spans.

    Example:
        >>> nodes_per_group(ParallelLayout(tuple(range(16)), tensor=2), gpus_per_node=8)
        {'tensor': 1, 'data': 2}
    """
    node_counts: dict[str, int] = {}
    for dimension in _DIMENSIONS:
        if getattr(layout, dimension) > 1:
            nodes_of_groups = [
                {rank // gpus_per_node for rank in group} for group in layout.groups(dimension)
            ]
            node_counts[dimension] = max(len(nodes) for nodes in nodes_of_groups)
    return node_counts


def _column_centre(local_rank: int, column_width: int) -> int:
    """Return the horizontal centre of a rank's column in pixels; ``local_rank`` is its index in the node."""
    return _LEFT + column_width * local_rank + column_width // 2


def _text_element(
    x: int,
    baseline: int,
    text: str,
    colour: str = _TEXT_COLOUR,
    *,
    weight: str = "normal",
    size: int = 13,
    anchor: str = "start",
) -> str:
    """Return an SVG text element; ``x`` and ``baseline`` are in pixels, ``anchor`` is SVG's text-anchor."""
    return (
        f'<text x="{x}" y="{baseline}" fill="{colour}" font-size="{size}" font-weight="{weight}" '
        f'text-anchor="{anchor}">{escape(text)}</text>'
    )
