"""The documentation builds, and its names, outputs and commands are correct."""

from __future__ import annotations

import doctest
import logging
import re
import runpy
import shlex
import textwrap
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import NamedTuple

import pytest
import yaml

from megatron_rl.check.configuration import check_config
from megatron_rl.cli import reference
from megatron_rl.cli.main import main, parse_command_line
from megatron_rl.config.load import load
from megatron_rl.config.schema import RunConfig

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = ROOT / "launch/examples"
OUTSIDE = [
    *(ROOT / name for name in ("README.md", "benchmarks/README.md")),
    *EXAMPLES.rglob("README.md"),
]
"""Pages that are read where they lie."""
PAGES = sorted([*OUTSIDE, *(ROOT / "docs").rglob("*.md")])
NAMES = [str(page.relative_to(ROOT)) for page in PAGES]
CHECKED = sorted([*EXAMPLES.glob("*/*.yaml"), *(ROOT / "configs/translated").glob("*.yaml")])

# `megatron_rl/distributed/device.py`, `configs/quickstart.yaml`, `launch/test.sh` …
PATH = re.compile(r"(?<![\w/.-])(?:megatron_rl|configs|launch|tests|benchmarks|docs)/[\w./-]*\w/?")
# `trainer/loop.py`, `roles/{rollout,reward}.py` …: of the package
SOURCES = "|".join(folder.name for folder in (ROOT / "megatron_rl").iterdir() if folder.is_dir())
SOURCE = re.compile(rf"(?<![\w/.-])(?:{SOURCES})/[\w./{{}},-]*\.py\b")
# `megatron_rl.distributed.device` …
MODULE = re.compile(r"(?<![\w/.])megatron_rl(?:\.[a-z_]\w*)+")
# `actor.layout.tensor`, `rollout.oversample: 0.5`, `actor.layout.tensor=2`
KEY = re.compile(rf"((?:{'|'.join(RunConfig.__dataclass_fields__)})(?:\.[A-Za-z_]\w*)+)(?:[:=] ?.*)?")
FENCE = re.compile(r'^```(\w+)(?: title="([^"]+)")?\n(.*?)^```$', re.MULTILINE | re.DOTALL)
CODE = re.compile(r"(?<!`)`([^`\n]+)`(?!`)")
COMMAND = re.compile(
    r"megatron-rl [a-z]|(?:python|torchrun) .*(?:-m megatron_rl [a-z]|\S/)|launch/\S+\.(?:sh|sbatch)\b"
)
LINK = re.compile(r"\]\(([^)\s]+)\)")
FILES = (".py", ".yaml", ".jsonl", ".safetensors")
"""Endings of file names, which are no keys."""
ELSEWHERE = {"hf", "sbatch", "kubectl", "tensorboard"}
"""Programs of a cluster and of the Hub."""


class Block(NamedTuple):
    """Fenced block: its language, title and text."""

    language: str
    title: str
    text: str


def blocks(name: str, *languages: str) -> list[Block]:
    found = [Block(*match) for match in FENCE.findall((ROOT / name).read_text(encoding="utf-8"))]
    return [block for block in found if block.language in languages]


def prose(name: str) -> str:
    return FENCE.sub("", (ROOT / name).read_text(encoding="utf-8"))


def lines_of(name: str) -> Iterator[str]:
    """Yield a page's commands: of shell blocks, of indented lines, and in the text."""
    for block in blocks(name, "sh"):
        # A backslash continues a command on the next line.
        lines = block.text.replace("\\\n", " ").splitlines()
        commands = (line.partition(" #")[0].strip() for line in lines)
        yield from (command for command in commands if command and not command.startswith("#"))
    text = prose(name)
    yield from re.findall(r"^    (launch/\S+.*|python .*|torchrun .*)$", text, re.MULTILINE)
    yield from (code for code in CODE.findall(text) if COMMAND.match(code))


@pytest.mark.slow
def test_the_documentation_builds_strictly(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from mkdocs.commands.build import build
    from mkdocs.config import load_config

    monkeypatch.chdir(ROOT)
    logging.getLogger("mkdocs").setLevel(logging.WARNING)
    build(load_config(".mkdocs.yml", site_dir=str(tmp_path / "site"), strict=True))
    page = (tmp_path / "site/concepts/index.html").read_text(encoding="utf-8")
    assert "One world" in page and "--8&lt;--" not in page
    assert "tokens/s" in (tmp_path / "site/benchmarks/index.html").read_text(encoding="utf-8")


@cache
def anchors(page: Path) -> set[str]:
    headings = re.findall(r"^#+ (.+)$", FENCE.sub("", page.read_text(encoding="utf-8")), re.MULTILINE)
    return {re.sub(r"[^\w\s-]", "", heading.lower()).strip().replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", OUTSIDE, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_of_pages_outside_lead_somewhere(page: Path) -> None:
    dead = []
    for link in LINK.findall(page.read_text(encoding="utf-8")):
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        if not link.startswith("https://"):
            there = target.is_file() and (not anchor or anchor in anchors(target))
            dead += [] if there else [link]
    assert not dead


@cache
def is_module_or_member(dotted: str) -> bool:
    """Return whether a dotted name is a module of the package, or a name that such a module defines."""
    parts = dotted.split(".")
    for length in range(len(parts), 0, -1):
        base = ROOT.joinpath(*parts[:length])
        if base.is_dir() or base.with_suffix(".py").is_file():
            rest = parts[length:]
            source = base.with_suffix(".py") if base.with_suffix(".py").is_file() else base / "__init__.py"
            return not rest or re.search(rf"\b{rest[0]}\b", source.read_text(encoding="utf-8")) is not None
    return False


def spelled_out(path: str) -> list[str]:
    """Return the paths that braces stand for, as in a shell."""
    before, brace, rest = path.partition("{")
    if not brace:
        return [path]
    names, _, after = rest.partition("}")
    return [whole for name in names.split(",") for whole in spelled_out(f"{before}{name}{after}")]


@pytest.mark.parametrize("name", NAMES)
def test_a_page_names_what_exists(name: str) -> None:
    text = re.sub(r"https?://\S+", "", (ROOT / name).read_text(encoding="utf-8"))
    missing = {path for path in PATH.findall(text) if not (ROOT / path).exists()}
    # A user's own files are called my_….
    sources = [path for found in SOURCE.findall(text) for path in spelled_out(found) if "/my_" not in path]
    missing |= {path for path in sources if not (ROOT / "megatron_rl" / path).is_file()}
    missing |= {module for module in MODULE.findall(text) if not is_module_or_member(module)}
    assert not missing


@pytest.mark.parametrize("name", NAMES)
def test_excerpts_are_what_stands_in_the_files(name: str) -> None:
    for block in blocks(name, "python", "yaml"):
        if "/" in block.title:
            source = (ROOT / block.title).read_text(encoding="utf-8")
            indented = (textwrap.indent(block.text, " " * spaces) for spaces in (0, 4, 8))
            assert any(text in source for text in indented), f"{block.title} has no such lines:\n{block.text}"
        elif block.language == "python" and not block.text.startswith(">>>"):
            compile(block.text, name, "exec")


def test_the_examples_of_the_python_guide_hold(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    results = doctest.testfile("megatron_rl/cli/python_guide.md", module_relative=False, verbose=False)
    assert results.attempted > 10
    assert not results.failed


TUTORIALS = sorted(str(page.relative_to(ROOT)) for page in (ROOT / "docs/tutorials").glob("*.md"))
SECTIONS = ("What you should see", "What to change next", "What goes wrong")


@pytest.mark.parametrize("name", TUTORIALS)
def test_a_tutorial_has_the_parts_of_the_template(name: str) -> None:
    text = (ROOT / name).read_text(encoding="utf-8")
    missing = [row for row in ("Goal", "Before", "Time", "Files") if f"| {row} |" not in text]
    missing += [section for section in SECTIONS if f"\n## {section}\n" not in text]
    assert not missing
    assert blocks(name, "sh"), "no command"
    assert re.search(r"^!\[[^]]+\]\(\.\./images/", text, re.MULTILINE), "no picture"


@pytest.mark.parametrize("name", TUTORIALS)
def test_what_a_tutorial_imports_is_public(name: str) -> None:
    text = (ROOT / name).read_text(encoding="utf-8")
    private = re.findall(r"^\s*(?:from|import) megatron_rl\..*", text, re.MULTILINE)
    assert not private


CONCEPTS = sorted(str(page.relative_to(ROOT)) for page in (ROOT / "docs/concepts").glob("*.md"))


@pytest.mark.parametrize("name", CONCEPTS)
def test_a_concept_has_a_page_with_a_diagram(name: str) -> None:
    assert re.search(r"^!\[[^]]+\]\(\.\./images/\w+\.svg\)$", (ROOT / name).read_text(), re.MULTILINE)
    assert f"({name.removeprefix('docs/')})" in (ROOT / "docs/concepts.md").read_text()


def test_the_concepts_show_the_training_step() -> None:
    block, sampling = blocks("docs/concepts/step.md", "python")[:2]
    source = (ROOT / "megatron_rl/trainer/loop.py").read_text(encoding="utf-8")
    step = source.split("def train_step(", 1)[1].split('"""', 2)[2].split("\n\n\n", 1)[0]
    assert block.text.strip() == textwrap.dedent(step).strip()
    batch = source.split("class SameStepBatches", 1)[1].split("def produce_batch(", 1)[1].split('"""', 2)[2]
    assert sampling.text.strip() == textwrap.dedent(batch.split("\n\n\n", 1)[0].strip("\n")).strip()


@pytest.mark.parametrize("name", NAMES)
def test_configurations_of_a_page_have_known_keys(name: str, tmp_path: Path) -> None:
    for block in blocks(name, "yaml"):
        if "/" not in block.title:
            path = tmp_path / "page.yaml"
            path.write_text(f"base: {ROOT / 'configs/minimal.yaml'}\n{block.text}")
            loaded = load(path)
            assert not loaded.errors, loaded.errors[0]


NO_NAME = re.compile(r"not a known name|is called `")


@cache
def key_error(key: str, config: str = "configs/minimal.yaml") -> str:
    """Return the problem with the name of a key in a configuration, or None."""
    loaded = load(ROOT / config, [f"{key}=1"])
    errors = loaded.errors
    if key.startswith("algorithm."):  # the names below a piece are known once it is made
        errors = check_config(loaded, 1, without_files=True, patience=0).errors
    named = [error for error in errors if error.where and error.where.split()[0] == key]
    return next((str(error) for error in named if NO_NAME.search(error.message)), "")


THEIR_NAMES = ("docs/configuration", "docs/other_names")


# These name the keys of other projects, and are compared with the code themselves.
@pytest.mark.parametrize("name", [name for name in NAMES if not name.startswith(THEIR_NAMES)])
def test_keys_in_the_text_are_known(name: str) -> None:
    keys = {match[1] for code in CODE.findall(prose(name)) if (match := KEY.fullmatch(code))}
    wrong = {key: key_error(key) for key in keys if not key.endswith(FILES)}
    assert not any(wrong.values())


def test_an_unknown_key_is_found() -> None:
    assert key_error("rollout.tenser") and key_error("algorithm.policy_loss.clipp")
    assert not key_error("reward.models.NAME.training.steps") and not key_error("actor.megatron.any")


@pytest.mark.parametrize("name", NAMES)
def test_commands_parse(name: str) -> None:
    for line in lines_of(name):
        words = [word for word in shlex.split(line) if not re.fullmatch(r"[A-Z]+=\S+|\[.*|.*\]", word)]
        program = next((word for word in words if word in ("megatron-rl", "megatron_rl")), None)
        if words[0] in ("git", "cd"):
            continue
        if program is not None:
            parse_command_line([re.sub(r"^(N|…)$", "1", word) for word in words[words.index(program) + 1 :]])
        elif words[0] not in ELSEWHERE and "-m" not in words:
            script = next(word for word in words if "/" in word)
            assert list(ROOT.glob(script)), line
        files = [word.replace("run.sh", "run.yaml") for word in words]
        config = next((file for file in files if file.endswith("yaml") and (ROOT / file).is_file()), None)
        for key in (word.partition("=")[0] for word in words if KEY.fullmatch(word) and "=" in word):
            assert not key_error(key, config or "configs/minimal.yaml"), line


@pytest.mark.parametrize("name", [name for name in NAMES if "```console" in (ROOT / name).read_text()])
def test_commands_answer_what_a_page_shows(
    name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(ROOT)
    for block in blocks(name, "console"):
        command, *answer = block.text.strip().splitlines()
        main(shlex.split(command)[2:])
        shown = capsys.readouterr()
        missing = [line for line in answer if line not in (shown.out + shown.err).splitlines()]
        assert not missing, command


@pytest.mark.parametrize("path", CHECKED, ids=lambda path: f"{path.parent.name}/{path.stem}")
def test_examples_and_translated_recipes_pass_check(
    path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(ROOT)
    code = main(["check", str(path.relative_to(ROOT)), "--without-files"])
    shown = "".join(capsys.readouterr())
    if path.parent.name == "verifiers_environment" and code:  # its packages are no part of the lock file
        assert "No module named 'verifiers'" in shown and "NOT READY: 1 error," in shown
    else:
        assert code == 0, shown


@pytest.mark.parametrize(
    ("name", "config"),
    [
        ("ppo_reward_model", "launch/examples/ppo_reward_model/run.yaml"),
        ("llama_64gpu", "configs/llama3.1-70b-64gpu.yaml"),
    ],
)
def test_the_picture_is_what_check_draws(
    name: str,
    config: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(ROOT)
    command = ["check", config, "--without-files", "--picture"]
    assert main([*command, str(tmp_path / "roles.svg")]) == 0
    drawn = (tmp_path / "roles.svg").read_text(encoding="utf-8")
    assert drawn == (ROOT / f"docs/images/{name}.svg").read_text(encoding="utf-8")
    assert main([*command, str(tmp_path / "no/roles.svg")]) == 2
    assert "--picture" in capsys.readouterr().err


def drawings() -> dict[str, str]:
    """Return the pictures that docs/images/draw.py draws, by name."""
    namespace = runpy.run_path(str(ROOT / "docs/images/draw.py"))
    return {name: draw() for name, draw in namespace["PICTURES"].items()}


def test_the_diagrams_are_what_their_script_draws() -> None:
    """Write them with ``python docs/images/draw.py``."""
    for name, text in drawings().items():
        assert (ROOT / f"docs/images/{name}.svg").read_text(encoding="utf-8") == text, name


def test_every_equation_of_an_algorithm_is_a_formula() -> None:
    page = reference.algorithms_page()
    assert [plain for plain, tex in reference.FORMULAS.items() if f"$`{tex}`$" not in page] == []
    # Code outside of examples that is no formula: conditions on settings.
    text = re.sub(r"(?m)^    .*$|\$`[^`]+`\$", "", page)
    code = {" ".join(match.split()) for match in re.findall(r"`([^`]+)`", text)}
    equations = {item for item in code if re.search(r" [=+/^<>-] |sum_|\|", item)}
    assert equations == {
        "clip_high > clip_low",
        "c = dual_clip > 1",
        "covariance_low < covariance < covariance_high",
    }


def test_every_page_is_in_the_navigation() -> None:
    pages = {str(page.relative_to(ROOT / "docs")) for page in (ROOT / "docs").rglob("*.md")}
    navigation = (ROOT / ".mkdocs.yml").read_text(encoding="utf-8").partition("\nnav:")[2]
    assert pages == set(re.findall(r": (\S+\.md)$", navigation, re.MULTILINE))


LONGEST = 75
"""Words of a paragraph. Pages that are made from docstrings are as long as those."""
GENERATED = tuple(f"docs/{name}.md" for name in reference.PAGES)


def long_paragraphs(name: str) -> list[str]:
    """Return the beginnings of paragraphs and list items that are too long, tables aside."""
    found = []
    for block in re.split(r"\n\s*\n", prose(name)):
        if not block.lstrip().startswith("|"):
            items = re.split(r"\n(?=\s*(?:[-*]|\d+\.) )", block)
            found += [item[:60] for item in items if len(item.split()) > LONGEST]
    return found


@pytest.mark.parametrize("name", sorted({*NAMES} - {*GENERATED}))
def test_paragraphs_are_short(name: str) -> None:
    assert not long_paragraphs(name)


def test_every_example_has_a_readme_and_one_command() -> None:
    folders = sorted(path.name for path in EXAMPLES.iterdir() if path.is_dir() and path.name != "__pycache__")
    listed = re.findall(r"^\| \[(\w+)\]", (EXAMPLES / "README.md").read_text(), re.MULTILINE)
    assert sorted(listed) == folders
    for folder in folders:
        text = (EXAMPLES / folder / "README.md").read_text()
        assert f"    launch/examples/{folder}/run.sh" in text and len(text.splitlines()) <= 20, folder
        assert (EXAMPLES / folder / "run.sh").stat().st_mode & 0o111, folder


def test_the_public_workflow_runs_what_ci_runs() -> None:
    workflow = yaml.safe_load((ROOT / ".github/workflows/ci.yml").read_text())
    assert ".ci/run" in [step.get("run") for step in workflow["jobs"]["test"]["steps"]]
