"""Generator of the documentation pages that are derived from the code.

``python -m megatron_rl.cli.reference all`` writes every page below docs/.
``python -m megatron_rl.cli.reference PAGE`` prints a single page.
"""

from __future__ import annotations

import argparse
import dataclasses
import inspect
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

from megatron_rl import PUBLIC
from megatron_rl.algorithms.algorithm import ALGORITHMS, KINDS, Algorithm, PieceKind
from megatron_rl.algorithms.piece import Piece
from megatron_rl.cli.main import COMMANDS
from megatron_rl.config.field_types import entry_class, field_hints, section_class, type_text, union_members
from megatron_rl.config.load import to_plain
from megatron_rl.config.other_names import FOREIGN_SECTIONS, NO_COUNTERPART, foreign_keys
from megatron_rl.config.schema import RunConfig
from megatron_rl.config.setting import Setting, is_setting, setting_of
from megatron_rl.config.source import one_line

_HEAD = """\
# Configuration reference

Every key of a run's configuration, a page for each subject. A key is written in YAML below its sections, or
on the command line with dots between: `actor.layout.tensor=2`.

Below each key are its type and its default. A default in *italics* describes the value that a run uses if the
key is not set. `check --verbose` prints every derived value of a run with its reason.

These pages are generated from the fields of the configuration: `python -m megatron_rl.cli.reference all`.
Other projects' names of the keys are on [a separate page](other_names.md).
"""
SUBJECTS: dict[str, tuple[str, tuple[str, ...]]] = {
    "model": ("Model", ("model",)),
    "data": ("Data and batches", ("data", "batch")),
    "algorithm": ("Algorithm", ("algorithm",)),
    "pieces": ("Pieces of an algorithm", ()),
    "roles": (
        "Actor, critic, reference, teacher",
        ("actor", "critic", "reference", "teacher", "teachers", "teacher_server"),
    ),
    "rollout": ("Rollout", ("rollout",)),
    "reward": ("Reward", ("reward",)),
    "stages": ("Stages before the first step", ("sft", "preference")),
    "weights": ("Weight sync and sampling ahead", ("hybrid_engine", "mismatch", "asynchrony")),
    "watch": ("Evaluation, checkpoints, health, trackers", ("evaluation", "checkpoint", "health", "logging")),
}
"""Page below docs/configuration -> (title, top-level sections on the page)."""
_GENERATED = "This page is generated from the code: `python -m megatron_rl.cli.reference {}`.\n"
_ALGORITHMS_HEAD = f"""\
# Algorithms

An algorithm is composed of pieces. `algorithm.name` chooses one of the algorithms below, and a key of
`algorithm` replaces a piece or changes its settings, see [configuration](configuration.md). A piece that is
not named is GRPO's. Each algorithm has a recipe in `configs/recipes/`.

| you want | choose |
|---|---|
| a first run on rewards that can be verified | `grpo` |
| long answers, many prompts that are all right or all wrong | `dapo` |
| a mixture of experts | `gspo`, or `grpo` with `actor.routing_replay` |
| no bias by length or by difficulty | `dr_grpo` |
| a value for each token, or rewards inside a response | `ppo`, `vapo` |
| no groups: one sample of each prompt | `reinforce_pp`, `remax` |
| the simplest baseline | `rloo`, `reinforce` |
| samples that are older than a step | `cispo`, `topr`, `vespo` |
| more exploration, less collapse of entropy | `clip_cov`, `kl_cov`, `grpo_pass_at_k` |
| several rewards of different scale | `gdpo` |
| a small model from a large one | `distillation` |

The table is a starting point, from the claims of their papers: this project has not compared them.

{_GENERATED.format("algorithms")}"""
_COMMANDS_HEAD = f"""\
# Commands

`megatron-rl COMMAND`; under `torchrun … -m megatron_rl COMMAND` for more than one process. Exit
codes: 0, 2 for bad input, 1 for any other failure.

{_GENERATED.format("commands")}"""
_PYTHON_GUIDE = Path(__file__).with_name("python_guide.md")
"""File with the first, hand-written part of the page about Python."""
_PYTHON_HEAD = f"""
# Reference

{_GENERATED.format("python")}"""
_NAMES_HEAD = f"""\
# Names of other projects

Names of our keys in other projects. The error for one of these names in a configuration gives our name and
the difference of the value, so a recipe is translated by running `check` until it reports no further name.

{_GENERATED.format("other_names")}"""
_COLUMNS = ("Key, type, default", "Meaning")


def configuration_page() -> str:
    """Return the first page of the configuration reference.

    The page lists the pages about single subjects, such as data, and documents the keys at the top level.
    """
    rows = []
    for name, (title, sections) in SUBJECTS.items():
        keys = ", ".join(f"`{section}`" for section in sections)
        rows.append(
            (f"[{title}](configuration/{name}.md)", keys or "`algorithm.advantage` and the other pieces")
        )
    pages = _table_lines(("Page", "Sections"), rows)
    return "\n".join([_HEAD, *pages, "", _section_table(RunConfig, [""])])


def subject_page(subject: str) -> str:
    """Return the configuration page about one subject, with a table for each class of sections."""
    title, _ = SUBJECTS[subject]
    tables = [_section_table(section_type, paths) for section_type, paths in _sections_by_subject()[subject]]
    if subject == "pieces":
        tables = [_piece_table(key, kind) for key, kind in KINDS.items()]

    introduction = f"A part of the [configuration reference](../configuration.md). {_GENERATED.format('all')}"
    return "\n".join([f"# {title}\n", introduction, *tables])


def _sections_by_subject() -> dict[str, list[tuple[type, list[str]]]]:
    """Map each subject of the configuration reference to the tables on the subject's page.

    A table documents the keys of a section class, such as `LayoutConfig`. It is given as the class with the
    paths of the sections of this class, such as ``actor.layout``.
    """
    # Sections of one class, such as the layouts of the roles, share a table.
    paths_by_class: dict[type, list[str]] = {}
    for path, section_type in _iter_sections(RunConfig, ""):
        if path:
            paths_by_class.setdefault(section_type, []).append(path)

    # A shared table is on the page of its first path. Sort the actor's path first.
    for paths in paths_by_class.values():
        paths.sort(key=lambda path: not path.startswith("actor."))
    subject_by_key: dict[str, str] = {}
    for subject, (_, keys) in SUBJECTS.items():
        subject_by_key |= dict.fromkeys(keys, subject)
    tables_by_subject: dict[str, list[tuple[type, list[str]]]] = {subject: [] for subject in SUBJECTS}
    for section_type, paths in paths_by_class.items():
        subject = subject_by_key[paths[0].partition(".")[0]]
        tables_by_subject[subject].append((section_type, paths))
    return tables_by_subject


def _iter_sections(section_type: type, path: str) -> Iterator[tuple[str, type]]:
    """Yield (path, class) of the section at ``path`` and of all sections below it.

    Named sections of a mapping are yielded once, with NAME in the path.
    """
    yield path, section_type
    for name, hint in field_hints(section_type).items():
        # The top level has an empty path, so remove the leading dot.
        field_path = f"{path}.{name}".removeprefix(".")
        inner_class = section_class(hint)
        named_class = entry_class(hint)
        if inner_class is not None:
            yield from _iter_sections(inner_class, field_path)
        if named_class is not None:
            yield from _iter_sections(named_class, f"{field_path}.NAME")


def _table_lines(header: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    """Format a header and rows as the lines of a Markdown table."""
    all_rows = [header, ["---"] * len(header), *rows]
    return [f"| {' | '.join(row)} |" for row in all_rows]


def _section_table(section_type: type, paths: list[str]) -> str:
    """Return the table of the keys of ``section_type``, whose sections have the given ``paths``."""
    title = "Top level"
    if paths[0]:
        title = ", ".join(f"`{path}`" for path in paths)
    hints = field_hints(section_type)
    rows = [_key_row(key_field, hints[key_field.name]) for key_field in dataclasses.fields(section_type)]
    meaning = inspect.cleandoc(section_type.__doc__ or "").replace("``", "`")
    paths_line: list[str] = []
    if len(paths) > 2:
        # A long list of paths does not fit into a heading.
        title = f"`{paths[0]}` and {len(paths) - 1} others"
        paths_line = [f"Sections with these keys: {', '.join(f'`{path}`' for path in paths)}.", ""]
    return "\n".join([f"## {title}", "", meaning, "", *paths_line, *_table_lines(_COLUMNS, rows), ""])


def _piece_table(key: str, kind: PieceKind) -> str:
    """Return the table of the values of the key ``algorithm.KEY``, such as each policy loss by name.

    A value is called a piece of the algorithm. Below its name, the table has the settings of the piece.
    """
    rows = []
    for name, piece in kind.named.items():
        summary = inspect.cleandoc(type(piece).__doc__ or "").partition("\n")[0].replace("``", "`")
        rows.append((f"`{name}`", _table_cell(summary)))
        rows += [
            _setting_row(piece, piece_field)
            for piece_field in dataclasses.fields(piece)
            if is_setting(piece_field)
        ]
    header = ("Name, or setting of it", "Meaning")
    return "\n".join([f"## Pieces: `algorithm.{key}`", "", *_table_lines(header, rows), ""])


def _setting_row(piece: Piece, setting_field: dataclasses.Field) -> tuple[str, str]:
    """Return the table cells of one setting: name and default, and meaning with bounds.

    ``piece`` is the component of the algorithm, such as a loss, that has the setting.
    """
    setting = setting_of(setting_field)
    value = getattr(piece, setting_field.name)

    # None means that a setting is off, or that its default is described in words.
    default = f"`{one_line(to_plain(value))}`"
    if value is None:
        default = f"*{setting.unset or 'none'}*"
    return _table_cell(f"… `{setting_field.name}`<br>{default}"), _table_cell(_meaning_text(setting))


def _key_row(key_field: dataclasses.Field, hint: Any) -> tuple[str, str]:
    """Return the table cells of a configuration key, in the order of `_COLUMNS`.

    ``key_field`` is the dataclass field of the key, ``hint`` its type.
    """
    setting = setting_of(key_field)
    type_and_unit = "section"
    if not section_class(hint):
        types = [option for option in union_members(hint) if option is not type(None)]
        names = [type_text(option).removeprefix("an ").removeprefix("a ") for option in types]
        type_and_unit = " or ".join(names)
        if setting.unit:
            type_and_unit += f", {setting.unit}"

    lines = [f"`{key_field.name}`", type_and_unit, _default_text(key_field, setting)]
    non_empty_lines = [line for line in lines if line]
    return _table_cell("<br>".join(non_empty_lines)), _table_cell(_meaning_text(setting))


def _meaning_text(setting: Setting) -> str:
    """Return the meaning of a setting with its choices or bounds, as text for a table cell."""
    allowed = _allowed_values_text(setting)
    if not allowed:
        return setting.meaning
    return f"{setting.meaning}<br>Allowed: {allowed}."


def _default_text(key_field: dataclasses.Field, setting: Setting) -> str:
    """Format the default of a configuration key as a table cell."""
    # The keys of a section have rows of their own: list only values that differ from the class's defaults.
    if key_field.default_factory is not dataclasses.MISSING:
        value = key_field.default_factory()
        if dataclasses.is_dataclass(value):
            return _changed_defaults_text(value)
        return f"`{one_line(to_plain(value))}`"

    if key_field.default is dataclasses.MISSING:
        return "required"
    if key_field.default is None:
        return f"*{setting.unset}*"
    return f"`{one_line(to_plain(key_field.default))}`"


def _changed_defaults_text(default_section: Any) -> str:
    """List the settings in a key's default section that differ from the defaults of the section's class."""
    values = [
        f"`{section_field.name}: {one_line(getattr(default_section, section_field.name))}`"
        for section_field in dataclasses.fields(default_section)
        if section_field.default is not dataclasses.MISSING
        and getattr(default_section, section_field.name) != section_field.default
    ]
    return ", ".join(values)


def _allowed_values_text(setting: Setting) -> str:
    """List the valid values of a setting: its choices or its bounds; empty if any value is valid."""
    if not setting.choices:
        return setting.bounds_text()
    choices = ", ".join(f"`{choice}`" for choice in setting.choices)
    if setting.allows_path:
        choices += ", or `file.py:Name`"
    return choices


# Formulas of the algorithms' page. Docstrings contain equations as plain text, readable in the code. The page
# contains the same equations in TeX, which GitHub and docs/mathml.py render.

RATIO_CLIP = r"\operatorname{clip}(r, 1 - \text{clip_low}, 1 + \text{clip_high})"
LOG_RATIO = r"\sum_t (\log p_t - \log p_t^{\text{rollout}})"

FORMULAS: dict[str, str] = {
    # Advantages.
    "A_i = (R_i - mean_g) / (std_g + epsilon)": r"A_i = \frac{R_i - \mu_g}{\sigma_g + \varepsilon}",
    "A = R / (1 + epsilon)": r"A = \frac{R}{1 + \varepsilon}",
    "A_i = sum_k w_k GRPO(r_k)_i": r"A_i = \sum_k w_k \operatorname{GRPO}(r_k)_i",
    "A_i = alpha (R_i - mean_g) / normalizer": r"A_i = \alpha \frac{R_i - \mu_g}{\text{normalizer}}",
    "alpha = B / max(#{R != 0}, 1)": r"\alpha = \frac{B}{\max(\operatorname{count}(R \neq 0), 1)}",
    "A = alpha R": r"A = \alpha R",
    "A_i = (R_i - mean_others) / (std_others + epsilon)": (
        r"A_i = \frac{R_i - \mu_{\text{others}}}{\sigma_{\text{others}} + \varepsilon}"
    ),
    "(R_max - R_second) / (std_g + epsilon)": (
        r"\frac{R_{\text{max}} - R_{\text{second}}}{\sigma_g + \varepsilon}"
    ),
    "A_i = R_i - sum_j l_j R_j / sum_j l_j": r"A_i = R_i - \frac{\sum_j l_j R_j}{\sum_j l_j}",
    "A = R": r"A = R",
    "A_t = G_t - b": r"A_t = G_t - b",
    "A = G": r"A = G",
    "A_t = G_t - B_t": r"A_t = G_t - B_t",
    "B_t = sum_i W_t^i G_t^i / sum_i W_t^i": r"B_t = \frac{\sum_i W_t^i G_t^i}{\sum_i W_t^i}",
    "W_t = sum_(j <= t) (1 - 2 p_j + sum_v p_j(v)^2)": (
        r"W_t = \sum_{j \le t} \left( 1 - 2 p_j + \sum_v p_j(v)^2 \right)"
    ),
    # Divergences of a teacher P and the policy Q.
    "sum P log(P / Q)": r"\sum P \log \frac{P}{Q}",
    "sum Q log(Q / P)": r"\sum Q \log \frac{Q}{P}",
    "beta sum P log(P / M) + (1 - beta) sum Q log(Q / M)": (
        r"\beta \sum P \log \frac{P}{M} + (1 - \beta) \sum Q \log \frac{Q}{M}"
    ),
    "M = beta P + (1 - beta) Q": r"M = \beta P + (1 - \beta) Q",
    "A_i = R_i - mean_(j != i) R_j = n / (n - 1) (R_i - mean_g)": (
        r"A_i = R_i - \frac{1}{n - 1} \sum_{j \neq i} R_j = \frac{n}{n - 1} (R_i - \mu_g)"
    ),
    # Policy losses; sg is the stopped gradient.
    "l = -sg[clip(r, 1 - clip_low, 1 + clip_high)] A log_prob": (
        rf"l = -\operatorname{{sg}}[{RATIO_CLIP}] \, A \log p"
    ),
    "l = -sg[min(r, ratio_cap)] A log_prob": (
        r"l = -\operatorname{sg}[\min(r, \text{ratio_cap})] \, A \log p"
    ),
    "|p - q|": r"\lvert p - q \rvert",
    "q log(q/p) + (1-q) log((1-q)/(1-p))": (r"q \log \frac{q}{p} + (1 - q) \log \frac{1 - q}{1 - p}"),
    "s = sign A": r"s = \operatorname{sign} A",
    "d_t = log_probs - old_log_probs": r"d_t = \log p_t - \log p_t^{\text{old}}",
    "d'_t = s min(s d_t, s clip(d_t, -clip_low, clip_high))": (
        r"d'_t = s \min(s \, d_t, s \operatorname{clip}(d_t, -\text{clip_low}, \text{clip_high}))"
    ),
    "l = -mean(A) exp(mean_t d'_t)": (r"l = -\operatorname{mean}(A) \exp(\operatorname{mean}_t d'_t)"),
    "s_i = exp(mean_t(log_probs - old_log_probs))": (
        r"s_i = \exp(\operatorname{mean}_t (\log p_t - \log p_t^{\text{old}}))"
    ),
    "sg[s_i] pi_t / sg[pi_t]": r"\operatorname{sg}[s_i] \frac{\pi_t}{\operatorname{sg}[\pi_t]}",
    "max(-A s_i, -A clip(s_i))": r"\max(-A s_i, -A \operatorname{clip}(s_i))",
    "coef |log_probs - old_log_probs|": r"\text{coef} \, \lvert \log p - \log p^{\text{old}} \rvert",
    "l = max(-A r, -A clip(r, 1 - clip_low, 1 + clip_high))": rf"l = \max(-A r, -A {RATIO_CLIP})",
    "l = min(l, -A c)": r"l = \min(l, -A c)",
    "l = -f(r) A": r"l = -f(r) A",
    "f(r) = sigmoid(tau (r - 1)) 4 / tau": (r"f(r) = \frac{4}{\tau} \operatorname{sigmoid}(\tau (r - 1))"),
    "l = -A log_prob": r"l = -A \log p",
    "l = -sg[min(R_i, 1)] A log_prob": r"l = -\operatorname{sg}[\min(R_i, 1)] \, A \log p",
    "R_i = exp(clamp(sum_t (log_probs - rollout_log_probs), +-20))": (
        rf"R_i = \exp(\operatorname{{clamp}}({LOG_RATIO}, \pm 20))"
    ),
    "l = -sg[phi(W)] A log_prob": r"l = -\operatorname{sg}[\varphi(W)] \, A \log p",
    "phi(W) = W^power exp(decay (1 - W))": (r"\varphi(W) = W^{\text{power}} \exp(\text{decay} \, (1 - W))"),
    "W = exp(clamp(sum_t (log_probs - rollout_log_probs), +-20))": (
        rf"W = \exp(\operatorname{{clamp}}({LOG_RATIO}, \pm 20))"
    ),
    "W = power / decay": r"W = \frac{\text{power}}{\text{decay}}",
    # Value losses and distillation.
    "coef max((v - G)^2, (clip(v, v_old - clip, v_old + clip) - G)^2)": (
        r"\text{coef} \, \max((v - G)^2, "
        r"(\operatorname{clip}(v, v_{\text{old}} - \text{clip}, v_{\text{old}} + \text{clip}) - G)^2)"
    ),
    "coef (log p_teacher - log p_actor)": (
        r"\text{coef} \, (\log p_{\text{teacher}} - \log p_{\text{actor}})"
    ),
}
"""Equation in a docstring, on one line -> its TeX."""

_CODE = re.compile(r"`([^`]+)`")


def replace_equations(text: str) -> str:
    """Replace the equations of `FORMULAS` in Markdown text by formulas in GitHub's notation.

    The notation is ``$`…`$``, in which GitHub does not interpret underscores as Markdown.

    Example:
        >>> replace_equations("`A = alpha R` with `alpha`")
        '$`A = \\\\alpha R`$ with `alpha`'
    """

    def to_formula(match: re.Match[str]) -> str:
        """Return the formula of an equation in backticks, or other text in backticks unchanged."""
        # A docstring may break an equation over two lines.
        equation = " ".join(match[1].split())
        tex = FORMULAS.get(equation)
        if tex is None:
            return match[0]
        return f"$`{tex}`$"

    return _CODE.sub(to_formula, text)


def algorithms_page() -> str:
    """Return the page with the pieces of each algorithm, and the equation and source of each piece.

    The pieces of an algorithm are its components, such as the advantage estimator and the policy loss.
    """
    blocks = [_ALGORITHMS_HEAD]
    defaults = Algorithm("").pieces()
    for name, algorithm in ALGORITHMS.items():
        # Omit pieces that are the same as GRPO's. Always list the advantage estimator and the policy loss.
        links: list[str] = []
        for key, piece in algorithm.pieces().items():
            if piece == defaults[key] and key not in ("advantage", "policy_loss"):
                continue
            class_name = type(piece).__name__
            link = f"`{key}`: [{class_name}](#{key}-{class_name.lower()})"
            links.append(link + _changed_settings_text(piece, type(piece)()))
        blocks.append(f"## `{name}`\n\n{algorithm.summary}\n\n{', '.join(links)}.\n")

    # Some classes are pieces of several kinds, such as `aggregation` and `value_aggregation`. Such a class is
    # described only under the first kind.
    first_kind_by_class: dict[type, str] = {}
    for key, kind in KINDS.items():
        for piece in kind.named.values():
            first_kind_by_class.setdefault(type(piece), key)

    for key, kind in KINDS.items():
        # Write a section about each piece, except pieces that are described under an earlier kind. For these
        # pieces write one line with the name of the earlier kind.
        blocks.append(f"## Pieces of `{key}`\n")
        describing_kinds = dict.fromkeys(first_kind_by_class[type(piece)] for piece in kind.named.values())
        blocks += [f"The pieces of `{kind_key}`.\n" for kind_key in describing_kinds if kind_key != key]
        for piece_class, first_kind in first_kind_by_class.items():
            if first_kind == key:
                text = replace_equations(_markdown_docstring(piece_class))
                blocks.append(f"### {key}: {piece_class.__name__}\n\n{text}\n")
    return "\n".join(blocks)


def _changed_settings_text(piece: Piece, default: Piece) -> str:
    """Format the settings in which ``piece`` differs from ``default``, in parentheses; empty if equal."""
    changes: list[str] = []
    for piece_field in dataclasses.fields(piece):
        value = getattr(piece, piece_field.name)
        if value != getattr(default, piece_field.name):
            changes.append(f"`{piece_field.name}: {one_line(to_plain(value))}`")
    if not changes:
        return ""
    return f" ({', '.join(changes)})"


def commands_page() -> str:
    """Return the page with the syntax and the arguments of every command."""
    blocks = [_COMMANDS_HEAD]
    for name, (module, help_text) in COMMANDS.items():
        parser = argparse.ArgumentParser()
        import_module(module).add_arguments(parser)
        # argparse has no public list of a parser's arguments.
        rows = [
            f"| `{_argument_syntax(action)}` | {_table_cell(_help_text(action))} |"
            for action in parser._actions
            if action.dest != "help"
        ]

        sentence = help_text[0].upper() + help_text[1:]
        blocks += [f"## {name}\n\n{sentence}.\n", "| Argument | Meaning |", "|---|---|", *rows, ""]
    return "\n".join(blocks)


def _argument_syntax(action: argparse.Action) -> str:
    """Format an argument in command-line syntax, such as ``--out FILE`` or ``[key=value ...]``."""
    name = action.metavar or action.dest.upper()
    if action.option_strings:
        option = action.option_strings[-1]
        # A flag has no value.
        if action.nargs == 0:
            return option
        return f"{option} {name}"
    if action.nargs == "*":
        return f"[{name} ...]"
    if action.nargs == "?":
        return f"[{name}]"
    return str(name)


def _help_text(action: argparse.Action) -> str:
    """Return the help of an argument with its default and choices filled in."""
    clauses: list[str] = []
    if action.help:
        clauses.append(action.help.replace("%(default)s", str(action.default)).replace("%%", "%"))
    if action.choices:
        choices = ", ".join(f"`{choice}`" for choice in action.choices)
        clauses.append(f"one of {choices}")
    return "; ".join(clauses)


def python_page() -> str:
    """Return the page about Python: the guide, then every public name with its signature and docstring."""
    blocks = [_PYTHON_GUIDE.read_text(encoding="utf-8") + _PYTHON_HEAD]
    for name, module in PUBLIC.items():
        value = getattr(import_module(module), name)
        if inspect.isclass(value):
            declaration = f"class {name}"
            members = vars(value).items()
        else:
            declaration = f"def {name}{_wrap_signature(_signature_text(value))}"
            members = ()

        # Write the signature as Python code, the docstring, and a table of the members.
        code = f"```python\n{declaration}: ...\n```"
        blocks.append(f"## {name}\n\n`{module}`\n\n{code}\n\n{_markdown_docstring(value)}\n")

        rows = []
        for member_name, member in members:
            is_method = inspect.isfunction(member) or isinstance(member, property | classmethod)
            if member_name.startswith("_") or not is_method:
                continue
            signature = _table_cell(_signature_text(member))
            summary = _markdown_docstring(member).partition("\n")[0]
            rows.append(f"| `{member_name}{signature}` | {_table_cell(summary)} |")
        if rows:
            blocks += ["| Member | Meaning |", "|---|---|", *rows, ""]
    return "\n".join(blocks)


def _signature_text(member: Any) -> str:
    """Format the signature of a function, or of a method without self; empty for a property."""
    if isinstance(member, property):
        return ""
    if isinstance(member, classmethod):
        member = member.__func__

    text = str(inspect.signature(member))
    # Abbreviate a default without a literal, such as a sentinel of dataclasses.
    text = re.sub(r"<[^>]*>", "...", text)
    # Remove the quotes that inspect prints around annotations, which are strings.
    text = re.sub(r"(: |-> )(['\"])(.*?)\2", r"\1\3", text)
    return re.sub(r"\((self|cls)(, )?", "(", text)


def _wrap_signature(signature: str) -> str:
    """Split a long signature into one line per parameter; return a short signature unchanged."""
    if len(signature) <= 80 or not signature.startswith("("):
        return signature
    parameters_text, _, result = signature[1:].rpartition(")")
    lines = "".join(f"    {parameter},\n" for parameter in _split_parameters(parameters_text))
    return f"(\n{lines}){result}"


def _split_parameters(text: str) -> Iterator[str]:
    """Yield the parameters of a signature; commas inside brackets do not separate them."""
    depth = 0
    begin = 0
    for position, character in enumerate(text):
        if character in "[(":
            depth += 1
        elif character in "])":
            depth -= 1
        elif character == "," and depth == 0:
            yield text[begin:position].strip()
            begin = position + 1
    yield text[begin:].strip()


def other_names_page() -> str:
    """Return the page of other projects' names for our keys, with a table per project."""
    rows_by_project: dict[str, list[str]] = {}
    # `foreign_keys` yields each of our keys with every name that the key has in another project.
    for path, other_name in foreign_keys():
        row = f"| `{other_name.name}` | `{path}` | {_table_cell(other_name.difference_text())} |"
        rows_by_project.setdefault(other_name.project, []).append(row)
    for section, other_name in FOREIGN_SECTIONS.items():
        row = f"| `{section}` | {_table_cell(other_name.name)} | a section |"
        rows_by_project[other_name.project].append(row)

    lines = [_NAMES_HEAD]
    for project in sorted(rows_by_project, key=str.lower):
        title = project
        if project == "common":
            title = "Short names"
        lines += [
            f"## {title}\n",
            "| There | Here | How the value differs |",
            "|---|---|---|",
            *rows_by_project[project],
            "",
        ]

    # Names with the same reason share a row.
    names_by_reason: dict[str, list[str]] = {}
    for name, reason in NO_COUNTERPART.items():
        names_by_reason.setdefault(reason, []).append(f"`{name}`")
    lines += ["## Without a counterpart\n", "| There | Why, or what there is instead |", "|---|---|"]
    lines += [f"| {', '.join(names)} | {_table_cell(reason)} |" for reason, names in names_by_reason.items()]
    return "\n".join([*lines, ""])


def _markdown_docstring(value: Any) -> str:
    """Return the docstring of ``value`` as Markdown with links to papers; empty without a docstring."""
    # Docstrings use double backticks, as in reStructuredText.
    text = re.sub(r"`{2}([^`]*)`{2}", r"`\1`", inspect.cleandoc(value.__doc__ or ""))
    text = re.sub(r"^(Example|Examples|Raises|Source):$", r"\1:\n", text, flags=re.MULTILINE)
    return re.sub(r"arXiv:(\d{4}\.\d{5})", r"[arXiv:\1](https://arxiv.org/abs/\1)", text)


def _table_cell(text: str) -> str:
    """Format a text as a cell of a Markdown table: on one line, with escaped vertical bars."""
    return " ".join(text.split()).replace("|", "\\|")


PAGES: dict[str, Callable[[], str]] = {
    "configuration": configuration_page,
    **{f"configuration/{subject}": partial(subject_page, subject) for subject in SUBJECTS},
    "algorithms": algorithms_page,
    "commands": commands_page,
    "python": python_page,
    "other_names": other_names_page,
}
"""Name of a page below docs/ -> function that returns its text."""
DOCS = Path(__file__).resolve().parents[2] / "docs"


def write_all_pages(folder: Path) -> None:
    """Write every generated page to its file below ``folder``."""
    for name, make_page in PAGES.items():
        path = folder / f"{name}.md"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(make_page(), encoding="utf-8")


if __name__ == "__main__":
    page = "configuration"
    if len(sys.argv) > 1:
        page = sys.argv[1]
    if page == "all":
        write_all_pages(DOCS)
    else:
        print(PAGES[page](), end="")
