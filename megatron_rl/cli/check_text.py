"""The result of a check for people: configuration, batch, roles, memory, weight sync, findings."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping
from importlib import import_module
from pathlib import Path

from megatron_rl.algorithms.lookup import scoring_reason
from megatron_rl.check.configuration import CheckReport
from megatron_rl.config.adapters import lora_apart
from megatron_rl.config.budget import PHASES, RankMemory, episodes_in_flight, saved_bytes
from megatron_rl.config.checkpoint_meta import SAME
from megatron_rl.config.derive import BatchPlan
from megatron_rl.config.engines import ENGINES
from megatron_rl.config.load import flatten, to_plain
from megatron_rl.config.roles import ACTOR, learner_sections, role_of
from megatron_rl.config.schema import RunConfig
from megatron_rl.config.sections.rollout import KEEP, OPEN
from megatron_rl.config.source import one_line
from megatron_rl.config.stage_plan import StagePlan, has_use, stage_plans
from megatron_rl.errors import numbered
from megatron_rl.planning.simulation.ranks import SIMULATED_LAYERS, Simulated, simulation_lines
from megatron_rl.shapes.layout import ParallelLayout
from megatron_rl.shapes.model import DTYPE_BYTES
from megatron_rl.shapes.traffic import byte_words, gathered_bytes

WIDTH = 110
_RANKS_IN_A_ROW = 8
_MAX_BLOCKS = 8


def report_text(report: CheckReport, name: str, simulated: list[Simulated] | None = None) -> str:
    """Return the whole check as text, with what was ``simulated``."""
    size = f"{report.world_size} process{'es' if report.world_size > 1 else ''}"
    blocks = [f"{name} on {size}", _configuration(report)]
    if report.layouts is not None:
        blocks.append(summary(report))
    if report.looked:
        note = "what was looked at; a run reads every record and leaves out or refuses longer ones"
        width = max(len(item.where) for item in report.looked)
        lines = [f"{item.where:<{width}}  {item.line()}" for item in report.looked]
        blocks.append(_section("DATA", note, lines))
    if report.memory:
        note = (
            "estimate; phases of one step" if report.batch is not None else "estimate, while the stage learns"
        )
        blocks.append(_section("MEMORY", note, _memory(report.memory, report.config.gpu_memory_gib)))
    if simulated is not None:
        blocks.append(_section("SIMULATION", SIMULATED_LAYERS, simulation_lines(simulated)))
    if report.sync is not None:
        blocks.append(_section("WEIGHT SYNC", "bytes each time the engine gets new weights", _sync(report)))
    if not report.config.rollout.capabilities.in_process and report.shape is not None:
        note = "one at each address of rollout.server.urls"
        blocks.append(_section("SERVERS", note, _servers(report.config)))
    if report.layouts is not None and report.shape is None:
        sync = "" if report.batch is None else ", no bytes per weight sync"
        blocks.append(f"The model's config.json is not on this machine: no memory{sync}.")
    if report.warnings:
        blocks.append("\n".join(numbered(report.warnings, "warning")))
    if report.errors:
        blocks.append("\n".join(numbered(report.errors, "error")))
    blocks.append(_verdict(report))
    return "\n\n".join(blocks)


def summary(report: CheckReport) -> str:
    """Return the batch arithmetic and the roles, for the start of a run."""
    if report.layouts is None:
        return ""
    note = "one training step, from prompts to micro-batches" if report.batch is not None else ""
    batch = _section("BATCH", note, batch_lines(report))
    return batch + "\n\n" + _section("ROLES", _legend(report.layouts), _roles(report))


def _verdict(report: CheckReport) -> str:
    warnings = f"{len(report.warnings)} warning{'' if len(report.warnings) == 1 else 's'}"
    if report.errors:
        count = len(report.errors)
        return f"NOT READY: {count} error{'' if count == 1 else 's'}, {warnings}"
    if report.untried:
        return f"NOT TRIED: no errors, {warnings}; whether Megatron takes its settings is not known"
    ready = "READY once the missing files are there" if report.files_missing else "READY"
    return f"{ready}: no errors, {warnings if report.warnings else 'no warnings'}"


def _section(title: str, note: str, lines: list[str]) -> str:
    return "\n".join([f"{title}  ({note})" if note else title, *(f"  {line}".rstrip() for line in lines)])


def _configuration(report: CheckReport) -> str:
    stated, derived, defaults = [], [], []
    for path, value in flatten(report.config).items():
        origin = report.origins[path]
        if not has_use(report.config.job, path):
            continue
        text = _value(to_plain(value, path.rpartition(".")[2]))
        if origin.kind == "default":
            defaults.append(f"{path}={text}")
        else:
            (derived if origin.kind == "derived" else stated).append((path, text, origin.detail))
    lines = ["stated:", *_columns(stated)]
    if derived:
        lines += ["derived:", *_columns(derived)]
    lines.append("defaults:")
    wrapped = textwrap.wrap("  ".join(defaults), WIDTH - 4, break_long_words=False, break_on_hyphens=False)
    lines += [f"  {line}" for line in wrapped]
    return _section("CONFIGURATION", "every value and where it comes from", lines)


def _columns(rows: list[tuple[str, str, str]]) -> list[str]:
    left = max((len(path) for path, _, _ in rows), default=0)
    middle = min(44, max((len(text) for _, text, _ in rows), default=0))
    return [f"  {path:<{left}}  {text:<{middle}}  {detail}".rstrip() for path, text, detail in rows]


def _value(value: object) -> str:
    text = one_line(value)
    return text if len(text) <= 60 else text[:57] + "..."


def batch_lines(report: CheckReport) -> list[str]:
    """Return the batch arithmetic in words."""
    rows = [_stage_line(plan) for plan in stage_plans(report.config)]
    if report.batch is not None:
        rows += _step_lines(report, report.batch)
    width = max(len(left) for left, _ in rows)
    return [f"{left:<{width}}  =  {right}" for left, right in rows]


def _step_lines(report: CheckReport, batch: BatchPlan) -> list[tuple[str, str]]:
    config = report.config
    minibatch = f"{_pair(batch.rows_per_minibatch)} rows"
    more = f" of {batch.prompts_in_flight:,} prompts in flight" if config.rollout.oversample else ""
    steps = f"{_count(batch.updates, 'optimizer step')} per training step"
    prompt, response = config.data.max_prompt_tokens, batch.longest_row - config.data.max_prompt_tokens
    return [
        (f"{batch.prompts:,} prompts x {batch.samples:,} samples", f"{batch.rows:,} rows per step"),
        (
            f"{batch.prompts_in_flight * batch.samples:,} rows{more} / "
            f"{_count(batch.replicas, 'rollout replica')}",
            f"{_pair(batch.rows_per_replica)} rows to generate per replica",
        ),
        (
            f"{batch.rows:,} rows / {_count(batch.optimizer_steps, 'mini-batch', 'es')}",
            f"{minibatch} per mini-batch; x {_count(batch.epochs, 'epoch')} = {steps}",
        ),
        (
            f"{minibatch} / {_count(batch.actor_data, 'data-parallel copy', plural='data-parallel copies')}",
            f"{_pair(batch.rows_per_actor_rank)} rows per copy of the actor, balanced by tokens",
        ),
        (
            f"prompt <= {prompt:,} + response <= {response:,}",
            f"a row has at most {batch.longest_row:,} tokens",
        ),
        (
            f"{batch.rows:,} rows x {batch.longest_row:,} tokens",
            f"at most {batch.tokens_per_step:,} tokens per step",
        ),
        (
            f"micro-batch <= {batch.tokens_per_microbatch:,} tokens",
            f"at least {_count(batch.rows_per_microbatch, 'row')} each, "
            f"at most {_count(batch.microbatches, 'micro-batch', 'es')} per mini-batch and copy",
        ),
        *_checkpoint_line(report),
        *_episode_lines(report, batch),
        *_scoring_line(report),
        (f"{config.rollout.order} order", _order_words(config)),
        (
            f"{_count(config.steps, 'step')} x {_count(batch.prompts, 'prompt')}",
            _passes(config.steps, batch, report.records),
        ),
    ]


def _checkpoint_line(report: CheckReport) -> list[tuple[str, str]]:
    """Return how optimizers are saved, and what that takes on the rank that holds the most."""
    config, layouts = report.config, report.layouts or {}
    settings, shards, whole = config.checkpoint, 0, 0
    for path, section in learner_sections(config).items():
        role = role_of(path)
        name = "optimizer" if role == ACTOR.name else f"{role} optimizer"
        held = [item.bytes for memory in report.memory for item in memory.items if item.name == name]
        if held:
            copies = layouts[role].data * layouts[role].context if section.optimizer.distributed else 1
            saved = saved_bytes(max(held), section.optimizer, DTYPE_BYTES[config.model.dtype])
            shards, whole = shards + saved, whole + saved * copies
    if not whole:
        return []
    words = f"optimizers gathered for any layout, {_bytes(whole)} on a rank"
    if settings.optimizer_layout == SAME:
        words = f"optimizers in shards, {_bytes(shards)} a rank; the last for any layout, {_bytes(whole)}"
    wait = "the copy to the host" if settings.asynchronous else "it"
    return [(f"checkpoint every {_count(settings.every, 'step')}", f"{words}; steps wait for {wait}")]


def _episode_lines(report: CheckReport, batch: BatchPlan) -> list[tuple[str, str]]:
    """Return what a run with an environment has at once: episodes, turns, and memory for them."""
    environment = report.config.rollout.environment
    if environment is None:
        return []
    rows, flight = batch.rows_per_replica[1], episodes_in_flight(report.config, batch)
    waiting = max(0, batch.prompts_in_flight - flight // batch.samples * batch.replicas)
    queue = f"{_count(waiting, 'group')} of the step wait in the queue" if waiting else "no group waits"
    bound = " (fewer where the engine takes fewer)" if flight == rows else ""
    turns, per_turn = _count(environment.max_turns, "turn"), f"{environment.turn_timeout:g} s"
    processes = _count(environment.workers, "process", "es")
    lines = [
        (f"{flight:,} of {rows:,} episodes in flight", f"a replica's, at most{bound}; {queue}"),
        (
            f"episode <= {turns}",
            f"each answered within {per_turn}; {processes} of environments per replica",
        ),
    ]
    caches = [item for rank in report.memory for item in rank.items if item.name == "key-value cache"]
    if caches:
        largest = max(caches, key=lambda item: item.bytes)
        lines.append((f"key-value cache {_bytes(largest.bytes)}", f"per rank, {largest.how}"))
    return lines


def _order_words(config: RunConfig) -> str:
    rollout, asynchrony = config.rollout, config.asynchrony
    words = "a step learns from exactly its prompts"
    if rollout.oversample:
        words = f"a step learns from the groups complete first, in rounds of {rollout.round_tokens:,} tokens"
    if rollout.order == OPEN:
        words = "a step learns from the groups complete first by the clock, not repeatable"
        words += f"; at an update prefixes are {'kept' if rollout.on_update == KEEP else 'computed again'}"
    if asynchrony.steps_ahead or rollout.partial:
        bound = asynchrony.max_staleness
        words += f"; no token is older than {_count(0 if bound is None else bound, 'update')}"
    return words


def _scoring_line(report: CheckReport) -> list[tuple[str, str]]:
    if report.algorithm is None:
        return []
    reason = scoring_reason(report.config, report.algorithm)
    words = "one optimizer step: those of its own pass, the actor scores nothing before"
    return [("old log-probs", words if reason is None else f"a scoring pass of the actor: {reason}")]


def _stage_line(plan: StagePlan) -> tuple[str, str]:
    settings = plan.settings
    size = _count(settings.per_step, settings.UNIT)
    if settings.steps is None:
        epochs = "1 epoch" if settings.epochs == 1 else f"{settings.epochs:g} epochs"
        return f"{plan.where}: {epochs}", f"steps of {size}"
    total = f"{_count(settings.steps * settings.per_step, settings.UNIT)} in all"
    return f"{plan.where}: {_count(settings.steps, 'step')} x {size}", total


def _passes(steps: int, batch: BatchPlan, records: int | None) -> str:
    total = f"{steps * batch.prompts:,} prompts in the run"
    if not records:
        return total
    return f"{total}, {steps * batch.prompts / records:.3g} passes over {records:,} records"


def _pair(values: tuple[int, int]) -> str:
    low, high = values
    return f"{low:,}" if low == high else f"{low:,}-{high:,}"


def _count(number: int, word: str, ending: str = "s", plural: str | None = None) -> str:
    return f"{number:,} {word if number == 1 else plural or word + ending}"


def _legend(layouts: Mapping[str, ParallelLayout]) -> str:
    names = ["t tensor"]
    if any(layout.context > 1 for layout in layouts.values()):
        names.append("c context")
    if any(layout.data > 1 for role, layout in layouts.items() if role != "rollout"):
        names.append("d data")
    if any(layout.pipeline > 1 for layout in layouts.values()):
        names.append("p pipeline")
    if "rollout" in layouts:
        names.append("r replica")
    return ", ".join(names)


def _roles(report: CheckReport) -> list[str]:
    layouts = report.layouts or {}
    world, node = report.world_size, min(report.config.gpus_per_node, _RANKS_IN_A_ROW)
    names = max(len(role) for role in layouts)
    lines = [f"{role:<{names}} {role_words(role, layout)}" for role, layout in layouts.items()]
    starts = list(range(0, world, node))
    shown = starts if len(starts) <= _MAX_BLOCKS else [*starts[:3], starts[-1]]
    cells = {
        role: {
            rank: cell_label(role, layout, rank)
            for start in shown
            for rank in range(start, min(start + node, world))
        }
        for role, layout in layouts.items()
    }
    labels = [label for row in cells.values() for label in row.values()]
    width = max(4, *(len(label) for label in labels)) + 1
    for position, start in enumerate(shown):
        ranks = range(start, min(start + node, world))
        if position and start != shown[position - 1] + node:
            lines += ["", f"... {(start - shown[position - 1]) // node - 1} more blocks of {node} ranks ..."]
        lines += ["", f"{'rank':<{names}} |" + "|".join(f"{rank:^{width}}" for rank in ranks) + "|"]
        lines.append("-" * (names + 1) + "+" + "+".join("-" * width for _ in ranks) + "+")
        for role in layouts:
            row = "|".join(f"{cells[role][rank]:^{width}}" for rank in ranks)
            lines.append(f"{role:<{names}} |{row}|")
    return lines


def role_words(role: str, layout: ParallelLayout) -> str:
    """Return the parallel sizes of a role in words."""
    notes = []
    if layout.virtual_pipeline > 1:
        notes.append(f"{layout.virtual_pipeline} virtual stages per rank")
    if layout.expert > 1:
        notes.append(f"expert {layout.expert}")
    if layout.sequence_parallel:
        notes.append("sequence parallel")
    copies = "replicas" if role == "rollout" else "data"
    return f"{layout.words(copies)} = {_count(len(layout.ranks), 'rank')}" + (
        f"  ({', '.join(notes)})" if notes else ""
    )


def cell_label(role: str, layout: ParallelLayout, rank: int) -> str:
    """Return a rank's coordinates in a role's layout, a dot where it has none."""
    if rank not in layout.ranks:
        return "."
    tensor, context, data, pipeline = layout.coordinates(rank)
    parts = [("t", tensor, layout.tensor), ("c", context, layout.context)]
    if role == "rollout":
        parts.insert(0, ("r", data, max(layout.data, 2)))
    else:
        parts += [("d", data, layout.data), ("p", pipeline, layout.pipeline)]
    label = " ".join(f"{name}{index}" for name, index, size in parts if size > 1)
    return label or "all"


def _memory(ranks: tuple[RankMemory, ...], gib: float | None) -> list[str]:
    worst = ranks[0]
    phases = [phase for phase in PHASES if worst.total(phase)]
    items = sorted(worst.items, key=lambda item: -item.bytes)
    name_width = max(len(item.name) for item in items) + 2
    header = "".join(f"{phase:>12}" for phase in phases)
    lines = [f"{f'rank {worst.rank}':<{name_width}}{header}    largest first"]
    for item in items:
        cells = "".join(f"{_bytes(item.bytes) if phase in item.phases else '':>12}" for phase in phases)
        host = "" if item.phases else f"{_bytes(item.bytes)} on the host: "
        lines.append(f"{item.name:<{name_width}}{cells}    {host}{item.how}")
    totals = "".join(f"{_bytes(worst.total(phase)):>12}" for phase in phases)
    lines += ["-" * (name_width + 12 * len(phases)), f"{'total':<{name_width}}{totals}"]
    if gib is not None:
        lines[-1] += f"    of {gib:g} GiB"
    if any(len(worst.turns(phase)) > 1 for phase in phases):
        lines.append(
            "roles on one rank work in turn: of what each has on the device meanwhile the largest counts"
        )
    if len(ranks) > 1:
        most = "".join(f"{_bytes(max(memory.total(phase) for memory in ranks)):>12}" for phase in phases)
        lines.append(f"{'most on any rank':<{name_width}}{most}")
        others = ", ".join(f"rank {memory.rank} {_bytes(memory.peak)}" for memory in ranks[1:6])
        lines.append(f"others at their peak: {others}" + (" ..." if len(ranks) > 6 else ""))
    return lines


def _servers(config: RunConfig) -> list[str]:
    if not (Path(config.model.path) / "config.json").is_file():
        return ["the command that starts one stands here once the model does in model.path"]
    command = ENGINES[config.rollout.engine].start_command
    if command is None:
        return ["start them as the engine's own documentation says"]
    module, _, function = command.partition(":")
    return getattr(import_module(module), function)(config)


def _sync(report: CheckReport) -> list[str]:
    sync, layouts = report.sync, report.layouts
    assert sync is not None and layouts is not None
    actor, rollout = layouts["actor"], layouts["rollout"]
    apart = lora_apart(report.config) is not None
    rows: list[tuple[str, float]] = [
        ("adapters" if apart else "model", sync.model_bytes),
        ("needed by a rollout rank, at most", max(sync.needed.values())),
        ("received by the busiest rank", sync.received_most),
        ("received by all ranks together", sum(sync.received.values())),
    ]
    colocated = bool(set(actor.ranks) & set(rollout.ranks))
    gathered = gathered_bytes(sync.model_bytes, actor, colocated)
    if gathered:
        rows.append(("by gathering whole tensors instead, per rank", gathered))
    width = max(len(name) for name, _ in rows)
    lines = [f"{name:<{width}}  {byte_words(value)}" for name, value in rows]
    if apart:
        lines.append("the weights beneath the adapters move once, at the first sync")
    return [*lines, "a rank receives what it lacks; what it holds as an actor rank is copied inside the rank"]


def _bytes(value: int) -> str:
    for unit, scale in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if value >= scale:
            return f"{value / scale:,.1f} {unit}"
    return f"{value} B"
