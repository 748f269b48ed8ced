"""The picture of a check: nodes that are alike are drawn once, and groups across nodes are told apart."""

from __future__ import annotations

import json
import re
from itertools import pairwise
from pathlib import Path
from xml.etree import ElementTree

import pytest

from megatron_rl.cli.check_picture import NodeKind, node_kinds, nodes_per_group
from megatron_rl.cli.main import main
from megatron_rl.shapes.layout import ParallelLayout
from megatron_rl.shapes.traffic import byte_text

ROOT = Path(__file__).resolve().parents[2]
SVG = "{http://www.w3.org/2000/svg}"
INSIDE = "#2f7d4a"
ACROSS = "#b4551d"


@pytest.fixture(autouse=True)
def from_the_checkout(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)


def drawn(path: Path, config: str, *words: str) -> ElementTree.Element:
    """Return the picture of a configuration."""
    assert main(["check", config, *words, "--without-files", "--picture", str(path)]) == 0
    return ElementTree.fromstring(path.read_text(encoding="utf-8"))


def texts(picture: ElementTree.Element) -> list[str]:
    return [element.text or "" for element in picture.iter(f"{SVG}text")]


@pytest.mark.slow
@pytest.mark.usefixtures("forked_trials")
def test_a_job_of_any_size_is_drawn_with_its_replicas_collapsed(tmp_path: Path) -> None:
    picture = drawn(tmp_path / "large.svg", "configs/bench/deepseek-v3-1024gpu.yaml")
    shown = texts(picture)
    assert "nodes 0-127: 128 like this" in shown and "p0-15 d0-56:8" in shown
    # An engine's replica of 32 ranks lies on four nodes.
    assert "8 of 32 ranks: t0-31 r0-31" in shown
    assert int(picture.attrib["width"]) < 1280 and int(picture.attrib["height"]) < 700
    assert not any(text.startswith("rank ") for text in shown)


def test_nodes_that_differ_are_drawn_with_their_ranks(tmp_path: Path) -> None:
    words = ("world_size=20", "actor.layout={ranks: 0-9}", "rollout.ranks=10-19", "rollout.tensor=2")
    words += ("batch.prompts_per_step=130", "actor.recompute=full")
    shown = texts(drawn(tmp_path / "split.svg", "configs/qwen2.5-7b-8gpu.yaml", *words))
    assert [text for text in shown if text.startswith("node")] == ["node 0", "node 1", "node 2"]
    assert [text for text in shown if re.fullmatch(r"rank \d+", text)] == [f"rank {n}" for n in range(20)]
    assert [text for text in shown if re.fullmatch(r"d\d", text)] == [f"d{n}" for n in range(10)]
    assert "data 10 on 2 nodes" in shown and "t0-1 r4" in shown


def test_groups_inside_a_node_and_across_nodes_have_different_colours(tmp_path: Path) -> None:
    picture = drawn(tmp_path / "groups.svg", "configs/llama3.1-70b-64gpu.yaml")
    elements = list(picture)
    colour_of = {
        text.text: box.attrib["fill"]
        for box, text in pairwise(elements)
        if box.tag == f"{SVG}rect" and text.tag == f"{SVG}text"
    }
    assert colour_of["tensor 8"] == INSIDE == colour_of["inside a node"]
    assert colour_of["pipeline 4 on 4 nodes"] == ACROSS == colour_of["across nodes"]
    # Replicas of the engine do not communicate.
    assert "data 8 on 8 nodes" not in colour_of


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ("configs/llama3.1-70b-64gpu.yaml", ()),
        # Ranks 4-7 get from their node what they lack, and ranks 8-11 everything from another one.
        ("configs/qwen2.5-7b-8gpu.yaml", ("actor.layout={ranks: 0-7, tensor: 4}", "rollout.ranks=4-11")),
    ],
)
def test_bytes_of_a_sync_inside_nodes_and_across_nodes_are_those_of_check(
    config: str, words: tuple[str, ...], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    if words:
        words += ("world_size=12", "gpus_per_node=4", "rollout.tensor=1", "gpu_memory_gib=200")
    picture = drawn(tmp_path / "sync.svg", config, *words)
    capsys.readouterr()
    main(["check", config, *words, "--without-files", "--verbose"])
    text = capsys.readouterr().out
    (inside,) = re.findall(r"^ +inside nodes +(.+)$", text, re.MULTILINE)
    (across,) = re.findall(r"^ +across nodes +(.+)$", text, re.MULTILINE)
    assert f", {across} of it across nodes, " in text
    shown = {
        (label.text or "", box.attrib["fill"])
        for box, label in pairwise(picture)
        if (label.text or "").endswith(" to all ranks")
    }
    sizes = ((inside, INSIDE), (across, ACROSS))
    assert shown == {(f"{size} to all ranks", colour) for size, colour in sizes if size != "0 B"}

    # The columns of the ranks have the same numbers as the report.
    assert main(["check", config, *words, "--without-files", "--json"]) == 0
    sync = json.loads(capsys.readouterr().out)["weight_sync"]
    received = [size - sync["received_across_nodes"][rank] for rank, size in sync["received"].items()]
    assert sum(received) == sync["inside_nodes"]
    most = {byte_text(max(received)), byte_text(max(sync["received_across_nodes"].values()))}
    assert most <= {text.text for text in picture.iter(f"{SVG}text") if text.get("font-size") == "12"}


def test_kinds_of_nodes_and_the_nodes_of_groups() -> None:
    everywhere = ParallelLayout(tuple(range(64)), tensor=4, pipeline=2)
    assert node_kinds({"actor": everywhere}, 64, 8) == [NodeKind(tuple(range(8)), 8)]
    assert nodes_per_group(everywhere, 8) == {"tensor": 1, "pipeline": 2, "data": 4}
    # The last node has fewer ranks, and tensor groups of 3 do not fit into nodes of 8.
    odd = ParallelLayout(tuple(range(12)), tensor=3)
    assert [kind.size for kind in node_kinds({"actor": odd}, 12, 8)] == [8, 4]
    assert nodes_per_group(odd, 8) == {"tensor": 2, "data": 2}
    two_roles = {"actor": ParallelLayout(tuple(range(16))), "rollout": ParallelLayout(tuple(range(16, 32)))}
    assert [kind.nodes for kind in node_kinds(two_roles, 32, 8)] == [(0, 1), (2, 3)]
