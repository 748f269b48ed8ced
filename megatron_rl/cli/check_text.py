"""Text of a checked configuration: five summary lines, errors and warnings, and on request every section.

The summary lines contain the verdict, the size of the run, the memory of the fullest rank, the bytes of a
weight sync, and the predicted seconds of a step.
"""

from __future__ import annotations

import math
import textwrap
from collections.abc import Mapping
from importlib import import_module
from pathlib import Path

from megatron_rl.algorithms.algorithm import KINDS, Algorithm
from megatron_rl.algorithms.lookup import piece_text, scoring_pass_reason
from megatron_rl.check.configuration import CheckReport
from megatron_rl.check.model.accelerator import AppliedDefault
from megatron_rl.config.adapters import separate_lora
from megatron_rl.config.budget import (
    CHECKPOINT_BANDWIDTH,
    PHASES,
    RankMemory,
    checkpoint_memory,
    episodes_in_flight,
)
from megatron_rl.config.checkpoint_meta import ANY, SAME
from megatron_rl.config.derive import BatchPlan, versions_between_syncs
from megatron_rl.config.engines import ENGINES
from megatron_rl.config.health import VALUE, health_rules
from megatron_rl.config.hub import model_source
from megatron_rl.config.load import flatten, to_plain
from megatron_rl.config.placement import process_group_counts
from megatron_rl.config.roles import ACTOR, ROLLOUT
from megatron_rl.config.schema import TRAIN, RunConfig
from megatron_rl.config.sections.health import STOP, WARN
from megatron_rl.config.sections.response_limits import AUTO, table_rows
from megatron_rl.config.sections.rollout import KEEP, OPEN, RolloutConfig
from megatron_rl.config.source import one_line
from megatron_rl.config.stage_plan import StagePlan, job_reads, stage_plans
from megatron_rl.errors import numbered_lines
from megatron_rl.planning.predict.step import predict_checked_step
from megatron_rl.planning.simulation.ranks import SIMULATED_LAYERS, RankSimulation, simulation_lines
from megatron_rl.shapes.layout import ParallelLayout
from megatron_rl.shapes.model import ModelShape
from megatron_rl.shapes.pretrained import read_pretrained
from megatron_rl.shapes.traffic import byte_text, gathered_bytes

WIDTH = 110
"""Width in columns at which lines are wrapped."""
_MAX_VALUE_WIDTH = 60
"""Length in characters to which a configuration value is truncated."""
_MAX_VALUE_COLUMN = 44
"""Largest width of the column of configuration values."""
_RANKS_IN_A_ROW = 8
"""Largest number of ranks in one block of the table of ranks."""
_MAX_BLOCKS = 8
"""Largest number of blocks of ranks that are printed completely."""
_MEMORY_COLUMN = 12
"""Width of a phase's column in the memory table."""
_MAX_OTHER_RANKS = 5
"""Number of ranks after the fullest whose peak memory is printed."""
_LABEL_COLUMN = 14
"""Width of the column of labels in the section HEALTH."""
_BatchRow = tuple[str, str]
"""Row of the section BATCH: a quantity, and its computed value."""
_SECTION_NAMES = (
    "every value and its origin, the algorithm, batch arithmetic, ranks, memory by item, "
    "weight sync and health rules"
)


# ---------------------------------------------------------------- the report


def report_text(
    report: CheckReport, name: str, simulated: list[RankSimulation] | None = None, *, verbose: bool = False
) -> str:
    """Format the report of a check: summary lines, simulated ranks, warnings and errors.

    ``name`` is the configuration's name. ``simulated`` contains the simulated ranks, or None without a
    simulation. ``verbose`` adds the sections: configuration, algorithm, batch, roles, data, accelerator,
    memory by item, weight sync, health rules.
    """
    blocks = ["\n".join(summary_lines(report, name))]
    if verbose:
        blocks += _verbose_sections(report)
    if simulated is not None:
        blocks.append(_format_section("SIMULATION", SIMULATED_LAYERS, simulation_lines(simulated)))

    # Always show the command that starts the servers, since the user has to run it.
    if not report.config.rollout.capabilities.in_process and report.shape is not None:
        note = "one at each address of rollout.server.urls"
        blocks.append(_format_section("SERVERS", note, _server_lines(report.config)))

    # Print the findings last, since a terminal shows the end of a long text.
    if report.warnings:
        blocks.append("\n".join(numbered_lines(report.warnings, "warning")))
    if report.errors:
        blocks.append("\n".join(numbered_lines(report.errors, "error")))
    # The sections scroll the verdict off the screen, so repeat it at the end.
    if verbose:
        blocks.append(_verdict_line(report))
    elif not report.errors:
        blocks.append(f"--verbose shows {_SECTION_NAMES}")
    return "\n\n".join(blocks)


def _verbose_sections(report: CheckReport) -> list[str]:
    """Return the sections of a verbose report, except sections that could not be computed after errors."""
    blocks = [_configuration_section(report)]

    # Explicit input comes first, then the derived memory and traffic.
    if report.layouts is not None:
        blocks.append(_plan_sections(report))
    if report.data_stats:
        blocks.append(_data_section(report))
    if report.accelerator:
        note = "defaults of this run because it is on GPUs; a value of yours wins"
        blocks.append(_format_section("ACCELERATOR", note, _accelerator_lines(report.accelerator)))
    if report.memory:
        note = "estimate; phases of one step"
        if report.batch is None:
            note = "estimate, while the stage trains"
        lines = _memory_lines(report.memory, report.config.gpu_memory_gib)
        blocks.append(_format_section("MEMORY", note, lines))
    if report.sync is not None:
        note = "bytes each time the engine gets new weights"
        blocks.append(_format_section("WEIGHT SYNC", note, _weight_sync_lines(report)))
    if report.batch is not None and not report.errors:
        blocks.append(
            _format_section("HEALTH", "rules that watch the metrics of the run", _health_lines(report.config))
        )

    # Give the reason for missing sections on memory and weight sync.
    if report.layouts is not None and report.shape is None:
        unavailable = "memory"
        if report.batch is not None:
            unavailable = "memory and the bytes per weight sync"
        blocks.append(f"Without the model's config.json, {unavailable} cannot be estimated.")

    return blocks


def summary_lines(report: CheckReport, name: str) -> list[str]:
    """Return the five summary lines: verdict, run, memory, weight sync and predicted seconds of a step."""
    rows = [
        ("run", _run_line(report)),
        ("memory", _memory_line(report)),
        ("weight sync", _weight_sync_line(report)),
        ("step", _step_line(report)),
    ]
    width = max(len(subject) for subject, _ in rows)
    lines = [f"{subject:<{width}}  {text}" for subject, text in rows]
    return [f"{_verdict_line(report)} ({name} on {_count_text(report.world_size, 'process', 'es')})", *lines]


def _run_line(report: CheckReport) -> str:
    """Describe the model and the job (stages, algorithm, steps, prompts and samples) in one line."""
    config = report.config
    model = Path(model_source(config.model.path)).name
    if report.shape is not None:
        model += f", {_parameter_text(report.shape)}"

    # In a configuration with errors, the values below may be out of range or missing.
    if report.layouts is None:
        return f"{model}; not computed: {_missing_reason(report)}"
    job_texts = [_stage_row(plan)[0] for plan in stage_plans(config)]
    if config.job == TRAIN:
        steps = _count_text(config.steps, "step")
        prompts = _count_text(config.batch.prompts_per_step, "prompt")
        samples = _count_text(config.batch.samples_per_prompt, "sample")
        job_texts.append(f"{config.algorithm.name} for {steps} of {prompts} x {samples}")
    return f"{model}; {', then '.join(job_texts)}"


def _parameter_text(shape: ModelShape) -> str:
    """Format a model's number of parameters, and the number of active parameters if it has experts."""
    text = f"{_short_number(shape.parameters)} parameters"
    if shape.active_parameters != shape.parameters:
        text += f" ({_short_number(shape.active_parameters)} active)"
    return text


def _short_number(number: float) -> str:
    """Format a number with the suffix T, B or M, such as 7.62B for 7,615,616,512."""
    for suffix, scale in (("T", 1e12), ("B", 1e9), ("M", 1e6)):
        if number >= scale:
            return f"{number / scale:.3g}{suffix}"
    return f"{number:,.0f}"


def _memory_line(report: CheckReport) -> str:
    """Describe the peak memory of the fullest rank, as a fraction of its GPU's memory, in one line."""
    if not report.memory:
        return f"not computed: {_missing_reason(report)}"
    fullest = report.memory[0]
    phase = max(PHASES, key=fullest.phase_peak)
    text = f"{_bytes_text(fullest.peak)} on the fullest rank (rank {fullest.rank}, {phase})"

    gpu_gib = report.config.gpu_memory_gib
    if gpu_gib is None:
        return f"{text}; not compared, since no GPU is named (--on GPU)"
    return f"{text}, {fullest.peak / 2**30 / gpu_gib:.0%} of {gpu_gib:g} GiB"


def _weight_sync_line(report: CheckReport) -> str:
    """Return a one-line description of the bytes that one weight sync transfers."""
    if report.sync is None:
        if report.config.job != TRAIN:
            return "none: the job has no rollout"
        # The command line of a server sets how it shards the model. The run cannot read this command line.
        if not report.config.rollout.capabilities.in_process:
            return "not computed: the servers choose their own layout"
        return f"not computed: {_missing_reason(report)}"

    content = "weights"
    if separate_lora(report.config) is not None:
        content = "adapters"
    received = byte_text(sum(report.sync.received.values()))
    received_most = byte_text(report.sync.received_most)
    model_bytes = byte_text(report.sync.model_bytes)

    text = f"{received} to all ranks together, "
    if report.world_size > report.config.gpus_per_node:
        text += f"{byte_text(report.sync.across_nodes)} of it across nodes, "
    text += f"{received_most} to the busiest; {model_bytes} of {content}"
    interval = report.config.hybrid_engine.every
    if interval == 1:
        return text
    return f"{text}; {_interval_text(interval)}"


def _step_line(report: CheckReport) -> str:
    """Describe the predicted seconds of a step, in total and by phase, in one line."""
    prediction = predict_checked_step(report)
    if prediction.step is None:
        return f"not predicted: {prediction.reason}"

    gpu = str(prediction.gpu)
    if prediction.is_gpu_assumed:
        gpu += " (assumed)"
    seconds = prediction.step.seconds
    phases = ", ".join(f"{phase} {seconds[phase]:.3g}" for phase in seconds if seconds[phase])
    tokens = f"responses of {prediction.response_tokens:,.0f} tokens"
    text = f"{prediction.step.total:.3g} s predicted on {gpu}: {phases}; {tokens}"

    # The predicted step syncs weights and samples each prompt once. Mention settings that change this.
    if report.config.hybrid_engine.every != 1:
        text += "; with a weight sync"
    if report.config.rollout.filters.refill:
        text += "; without refills"
    return text


def _missing_reason(report: CheckReport) -> str:
    """Return the reason why the report has no estimate of memory and weight sync."""
    if report.errors:
        return "the configuration has errors"
    return "the model's config.json is not on this machine"


def _plan_sections(report: CheckReport) -> str:
    """Return the sections ALGORITHM, BATCH and ROLES, or empty text for a report without layouts."""
    if report.layouts is None:
        return ""
    # A job that runs one training stage alone, such as `sft`, has no step of reinforcement learning.
    note = ""
    if report.batch is not None:
        note = "one training step, from prompts to micro-batches"
    blocks = [_format_section("BATCH", note, batch_lines(report))]
    if report.config.job == TRAIN and report.algorithm is not None:
        note = report.algorithm.summary.rstrip(".")
        blocks.insert(0, _format_section("ALGORITHM", note, _algorithm_lines(report)))
    blocks.append(_format_section("ROLES", coordinate_legend(report.layouts), _role_lines(report)))
    return "\n\n".join(blocks)


def _algorithm_lines(report: CheckReport) -> list[str]:
    """Return a line for each component of the algorithm: key, name with settings, and origin.

    The configuration calls a component, such as the policy loss, a piece. `KINDS` has the key of each piece.
    """
    section = report.config.algorithm
    rows = [("algorithm.name", section.name, _origin_text(report, "algorithm.name"))]
    for key in KINDS:
        value = getattr(section, key)
        path = f"algorithm.{key}"
        text = piece_text(value)
        # An algorithm without a critic has no loss and no aggregation of the value function.
        if value is None and key.startswith("value_"):
            text = "not used without a critic"
        rows.append((path, text, _origin_text(report, path)))

    key_width = max(len(path) for path, _, _ in rows)
    indent = " " * (key_width + 2)
    lines: list[str] = []
    for path, text, origin in rows:
        if origin:
            text += f"  ({origin})"
        first, *continuation = textwrap.wrap(text, WIDTH - 2 - len(indent))
        lines.append(f"{path:<{key_width}}  {first}")
        lines += [indent + line for line in continuation]
    return lines


def _origin_text(report: CheckReport, path: str) -> str:
    """Return the file and line, or the override, of an explicit value; empty for other values."""
    origin = report.origins[path]
    if origin.kind in ("file", "override"):
        return origin.detail
    return ""


def _verdict_line(report: CheckReport) -> str:
    """Return the verdict (READY, NOT READY or NOT TRIED) with the number of errors and warnings."""
    warnings = _count_text(len(report.warnings), "warning")
    if report.errors:
        return f"NOT READY: {_count_text(len(report.errors), 'error')}, {warnings}"
    if report.untried:
        return f"NOT TRIED: no errors, {warnings}; Megatron has not validated its settings"
    if not report.warnings:
        warnings = "no warnings"
    if report.files_missing:
        return f"READY once the missing files exist: no errors, {warnings}"
    return f"READY: no errors, {warnings}"


def _format_section(title: str, note: str, lines: list[str]) -> str:
    """Format a section: its title with a note in parentheses, and its lines indented."""
    if note:
        title = f"{title}  ({note})"
    return "\n".join([title, *(f"  {line}".rstrip() for line in lines)])


def _range_text(values: tuple[int, int]) -> str:
    """Format a (minimum, maximum) pair such as ``3-4``, or one number if both are equal."""
    minimum, maximum = values
    if minimum == maximum:
        return f"{minimum:,}"
    return f"{minimum:,}-{maximum:,}"


def _count_text(number: int, noun: str, ending: str = "s", plural: str | None = None) -> str:
    """Format a number with its noun, in the plural unless the number is 1.

    The plural is ``plural`` if given, else ``noun`` followed by ``ending``.
    """
    if number == 1:
        return f"{number:,} {noun}"
    return f"{number:,} {plural or noun + ending}"


def _bytes_text(value: int) -> str:
    """Format a number of bytes in GiB, MiB, KiB or B."""
    for unit, scale in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if value >= scale:
            return f"{value / scale:,.1f} {unit}"
    return f"{value} B"


# ---------------------------------------------------------------- configuration and data


def _configuration_section(report: CheckReport) -> str:
    """Return the section CONFIGURATION: explicit values, derived values, and defaults."""
    explicit: list[tuple[str, str, str]] = []
    derived: list[tuple[str, str, str]] = []
    defaults: list[str] = []
    for path, value in flatten(report.config).items():
        # A job that runs one training stage alone, such as `sft`, does not read the keys of other jobs.
        if not job_reads(report.config.job, path):
            continue
        # The components of the algorithm, such as its loss, are printed in the section ALGORITHM.
        if path.partition("algorithm.")[2] in KINDS and report.algorithm is not None:
            continue
        origin = report.origins[path]
        text = _value_text(to_plain(value, path.rpartition(".")[2]))
        if origin.kind == "default":
            defaults.append(f"{path}={text}")
        elif origin.kind == "derived":
            derived.append((path, text, origin.detail))
        else:
            explicit.append((path, text, origin.detail))

    # There are many defaults, which are rarely read: print them as wrapped text without their origins.
    lines = ["explicit:", *_column_lines(explicit)]
    if derived:
        lines += ["derived:", *_column_lines(derived)]
    lines.append("defaults:")
    wrapped = textwrap.wrap("  ".join(defaults), WIDTH - 4, break_long_words=False, break_on_hyphens=False)
    lines += [f"  {line}" for line in wrapped]
    return _format_section("CONFIGURATION", "every value and its origin", lines)


def _column_lines(rows: list[tuple[str, str, str]]) -> list[str]:
    """Format rows of a key, a value and its origin in aligned columns."""
    key_width = max((len(path) for path, _, _ in rows), default=0)
    # Limit the column width: one long value would move all origins off the screen.
    value_width = min(_MAX_VALUE_COLUMN, max((len(text) for _, text, _ in rows), default=0))
    return [f"  {path:<{key_width}}  {text:<{value_width}}  {detail}".rstrip() for path, text, detail in rows]


def _value_text(value: object) -> str:
    """Format a configuration value on one line of at most `_MAX_VALUE_WIDTH` characters."""
    text = one_line(value)
    if len(text) <= _MAX_VALUE_WIDTH:
        return text
    return text[: _MAX_VALUE_WIDTH - 3] + "..."


def _health_lines(config: RunConfig) -> list[str]:
    """Return the health rules by effect (warn, end the run, off), and the bands that the user set."""
    rules = health_rules(config)
    lines: list[str] = []
    for label, act in (("warn", WARN), ("end the run", STOP)):
        names = ", ".join(rule.name for rule in rules if rule.act == act)
        lines += _labelled_lines(label, names)
    disabled_names = [name for name, settings in config.health.rules.items() if not settings.on]
    lines += _labelled_lines("off", ", ".join(disabled_names))

    # Print only the bands that the user changed; docs/health.md lists the default bands.
    for rule in rules:
        if rule.name in config.health.rules:
            metrics = ", ".join(rule.metrics)
            if rule.measure != VALUE:
                metrics += f" ({rule.measure})"
            count_text = _count_text(rule.steps, "measurement")
            lines += _labelled_lines(
                rule.name, f"{metrics}: healthy {rule.band_text()}; fires after {count_text} outside"
            )
    return lines


def _labelled_lines(label: str, text: str) -> list[str]:
    """Return a label with its wrapped text as lines, or no lines for an empty text."""
    # Do not break lines at hyphens: a split name cannot be searched for.
    indent = " " * (_LABEL_COLUMN + 2)
    wrapped = textwrap.wrap(text, WIDTH - 2 - len(indent), break_on_hyphens=False)
    if not wrapped:
        return []
    first, *continuation = wrapped
    return [f"{label:<{_LABEL_COLUMN}}  {first}", *(indent + line for line in continuation)]


def _data_section(report: CheckReport) -> str:
    """Return the section DATA, with a line of statistics for each data set."""
    note = "of the records that were read; a run reads all, and skips or rejects records that are too long"
    width = max(len(stats.where) for stats in report.data_stats)
    lines = [f"{stats.where:<{width}}  {stats.describe()}" for stats in report.data_stats]
    return _format_section("DATA", note, lines)


# ---------------------------------------------------------------- batch


def batch_lines(report: CheckReport) -> list[str]:
    """Return the lines of the section BATCH, in the form ``quantity = computed value``."""
    rows = [_stage_row(plan) for plan in stage_plans(report.config)]
    if report.batch is not None:
        rows += _step_rows(report, report.batch)
    width = max(len(quantity) for quantity, _ in rows)
    return [f"{quantity:<{width}}  =  {result}" for quantity, result in rows]


def _step_rows(report: CheckReport, batch: BatchPlan) -> list[_BatchRow]:
    """Return the rows about a training step, from its prompts to its passes over the data."""
    config = report.config
    # If rows do not divide evenly, their numbers are ranges.
    minibatch_text = f"{_range_text(batch.rows_per_minibatch)} rows"
    updates_text = f"{_count_text(batch.updates, 'optimizer step')} per training step"
    prompt_tokens = config.data.max_prompt_tokens
    response_tokens = batch.longest_row - prompt_tokens

    # With over-sampling, more rows are in flight than the step trains on.
    in_flight_text = f"{batch.prompts_in_flight * batch.samples:,} rows"
    if config.rollout.oversample:
        in_flight_text += f" of {batch.prompts_in_flight:,} prompts in flight"
    replicas_text = _count_text(batch.replicas, "rollout replica")
    minibatches_text = _count_text(batch.optimizer_steps, "mini-batch", "es")
    copies_text = _count_text(batch.actor_data, "data-parallel copy", plural="data-parallel copies")
    return [
        (f"{batch.prompts:,} prompts x {batch.samples:,} samples", f"{batch.rows:,} rows per step"),
        (
            f"{in_flight_text} / {replicas_text}",
            f"{_range_text(batch.rows_per_replica)} rows to generate per replica",
        ),
        (
            f"{batch.rows:,} rows / {minibatches_text}",
            f"{minibatch_text} per mini-batch; x {_count_text(batch.epochs, 'epoch')} = {updates_text}",
        ),
        (
            f"{minibatch_text} / {copies_text}",
            f"{_range_text(batch.rows_per_actor_rank)} rows per copy of the actor, balanced by tokens",
        ),
        (
            f"prompt <= {prompt_tokens:,} + response <= {response_tokens:,}",
            f"a row has at most {batch.longest_row:,} tokens",
        ),
        *_limit_rows(config.rollout),
        (
            f"{batch.rows:,} rows x {batch.longest_row:,} tokens",
            f"at most {batch.tokens_per_step:,} tokens per step",
        ),
        (
            f"micro-batch <= {batch.tokens_per_microbatch:,} tokens",
            f"at least {_count_text(batch.rows_per_microbatch, 'row')} each, "
            f"at most {_count_text(batch.microbatches, 'micro-batch', 'es')} per mini-batch and copy",
        ),
        *_checkpoint_rows(report),
        *_episode_rows(report, batch),
        *_scoring_rows(report),
        (f"{config.rollout.order} order", _order_text(config)),
        *_sync_interval_rows(report),
        (
            f"{_count_text(config.steps, 'step')} x {_count_text(batch.prompts, 'prompt')}",
            _data_passes_text(config.steps, batch, report.records),
        ),
    ]


def _checkpoint_rows(report: CheckReport) -> list[_BatchRow]:
    """Return the rows about checkpoints: optimizer layout, host memory and seconds of a write.

    The list is empty if no role has an optimizer.
    """
    config = report.config
    memory = checkpoint_memory(config, report.layouts or {}, report.memory)
    if memory is None:
        return []

    settings = config.checkpoint
    # With `SAME`, each rank writes its own optimizer shards; with `ANY`, complete optimizer states are
    # gathered.
    saved_layout = settings.optimizer_layout or ANY
    if saved_layout == SAME:
        optimizer_text = f"optimizers in shards, {_bytes_text(memory.shards)} a rank"
        other_layout = ANY
    else:
        optimizer_text = f"complete optimizers, {_bytes_text(memory.gathered)} gathered on a rank"
        other_layout = SAME
    # An asynchronous checkpoint is written from a host copy while the next steps run.
    blocking_work = "the copy to the host" if settings.asynchronous else "the write"
    host_memory_text = f"{_bytes_text(memory.host_bytes(saved_layout))} of host memory a node"
    host_memory_text += f" ({_bytes_text(memory.host_bytes(other_layout))} with {other_layout})"

    write_seconds = memory.write_seconds
    stop_seconds = settings.stop_seconds or 0
    rate_text = f"{CHECKPOINT_BANDWIDTH / 1e9:g} GB/s a node"
    rate_text += f"; a stopped job has {stop_seconds:g} s for the write"
    if write_seconds > stop_seconds:
        rate_text += ", which is too short: raise checkpoint.stop_seconds and torchrun's --shutdown-timeout"
    return [
        (
            f"checkpoint every {_count_text(settings.every, 'step')}",
            f"{optimizer_text}; steps wait for {blocking_work}",
        ),
        ("memory of a checkpoint", host_memory_text),
        (f"checkpoint written in {write_seconds:,.0f} s", f"at {rate_text}"),
    ]


def _episode_rows(report: CheckReport, batch: BatchPlan) -> list[_BatchRow]:
    """Return the rows about concurrent episodes; an empty list without an environment."""
    environment = report.config.rollout.environment
    if environment is None:
        return []
    # Count the episodes of the replica with the most rows.
    _, most_rows = batch.rows_per_replica
    in_flight = episodes_in_flight(report.config, batch)
    running_groups = in_flight // batch.samples * batch.replicas
    queued_groups = max(0, batch.prompts_in_flight - running_groups)
    queue_text = "no group waits"
    if queued_groups:
        queue_text = f"{_count_text(queued_groups, 'group')} of the step wait in the queue"

    # If the configuration sets no limit, the default limit of the engine may apply.
    engine_limit = ""
    if in_flight == most_rows:
        engine_limit = " (fewer if the engine's own limit is lower)"
    processes = _count_text(environment.workers, "process", "es")
    rows = [
        (
            f"{in_flight:,} of {most_rows:,} episodes in flight",
            f"at most, per replica{engine_limit}; {queue_text}",
        ),
        (
            f"episode <= {_count_text(environment.max_turns, 'turn')}",
            f"each answered within {environment.turn_timeout:g} s; {processes} of environments per replica",
        ),
    ]

    # Ranks may have caches of different sizes: print the largest.
    all_items = [item for rank in report.memory for item in rank.items]
    caches = [item for item in all_items if item.name == "key-value cache"]
    if caches:
        largest_cache = max(caches, key=lambda item: item.bytes)
        size = _bytes_text(largest_cache.bytes)
        rows.append((f"key-value cache {size}", f"per rank, {largest_cache.how}"))
    return rows


def _order_text(config: RunConfig) -> str:
    """Describe which rows a step trains on, depending on `rollout.order` and over-sampling."""
    rollout = config.rollout
    # By default (`rollout.order: closed`, no over-sampling) a step trains on all responses that were sampled
    # for it. With `open`, a step trains on the prompts whose responses are complete first, which depends on
    # timing.
    text = "a step trains on all responses that were sampled for it"
    if rollout.oversample:
        text = f"a step trains on the first complete groups, in rounds of {rollout.round_tokens:,} tokens"
    if rollout.order == OPEN:
        cache_treatment = "kept" if rollout.on_update == KEEP else "recomputed"
        text = "a step trains on the groups that finish first, which differ from run to run"
        text += f"; at a weight update the KV cache of unfinished responses is {cache_treatment}"
    if config.asynchrony.steps_ahead or rollout.partial or config.hybrid_engine.every != 1:
        text += f"; no token is older than {_count_text(config.asynchrony.max_staleness or 0, 'update')}"
    return text


def _limit_rows(rollout: RolloutConfig) -> list[_BatchRow]:
    """Return a row for each response limit that is automatic or depends on the prompt length."""
    auto = rollout.auto_limit
    rows: list[_BatchRow] = []
    for path, value in rollout.limit_settings.items():
        task = path.removeprefix("rollout.sampling_profiles.").rpartition(".")[0]
        name = "limit of responses" if task == "rollout" else f"limit of {task}"

        # A limit that is a plain number is printed with the lengths of prompt and response.
        if value == AUTO:
            text = (
                f"{auto.margin:g} x the {auto.quantile:.0%} quantile of the last {auto.window} response "
                f"lengths for the same task and prompt length, {auto.at_least} to {auto.at_most} tokens; "
                f"{auto.at_most} for the first {auto.responses} responses and in evaluations"
            )
            rows.append((name, text))
        elif isinstance(value, dict):
            row_texts = [f"{limit:,} for {_prompts_text(tokens)}" for tokens, limit in table_rows(value)]
            rows.append((name, f"tokens: {', '.join(row_texts)}"))
    return rows


def _prompts_text(max_tokens: int | None) -> str:
    """Describe prompts of up to ``max_tokens`` tokens; None stands for all longer prompts.

    A table of response limits has one row for each such range of prompt lengths.
    """
    if max_tokens is None:
        return "longer prompts"
    return f"prompts up to {max_tokens:,}"


def _sync_interval_rows(report: CheckReport) -> list[_BatchRow]:
    """Return a row about `hybrid_engine.every`; an empty list if every version is synced."""
    config = report.config
    interval = config.hybrid_engine.every
    if interval == 1:
        return []

    # Describe the age of the samples, how the loss corrects for it, and the memory for older weights.
    age = _count_text(versions_between_syncs(config), "version")
    text = f"responses are sampled from weights up to {age} older than the actor's"
    if report.algorithm is not None:
        text += f", {_correction_text(report.algorithm)}"
    text += "; evaluations have the newest weights; the actor's ranks keep a copy of the older weights in "
    text += "host memory; a checkpoint between two syncs contains this copy"
    return [(f"weights {_interval_text(interval)}", text)]


def _interval_text(interval: int) -> str:
    """Describe the interval of weight syncs: 2 or more versions, or 0 for no sync after the start."""
    if interval:
        return f"synced every {interval} versions"
    return "never synced again"


def _correction_text(algorithm: Algorithm) -> str:
    """Describe how the loss corrects for responses that were sampled from older weights.

    The text continues the sentence "responses are sampled from weights up to 3 versions older than the
    actor's, ...".
    """
    correction = algorithm.correction
    if correction.bypass or algorithm.policy_loss.follows_rollout:
        return "and the log-probs of the older weights are the denominator of the loss's ratio"
    if correction.level != "none":
        return (
            f"weighted by the ratio of each {correction.level}, at most {correction.threshold or math.inf:g}"
        )
    if correction.is_active:
        return (
            "rejected where the log-probs under the older and the newest weights differ too much, and "
            "otherwise not corrected"
        )
    return "and the loss does not correct for the older weights"


def _scoring_rows(report: CheckReport) -> list[_BatchRow]:
    """Return a row about the source of old log-probs; an empty list without an algorithm."""
    if report.algorithm is None:
        return []
    reason = scoring_pass_reason(report.config, report.algorithm)
    if reason is None:
        text = "from the forward pass of the only optimizer step, without a separate scoring pass"
    else:
        text = f"a scoring pass of the actor: {reason}"
    return [("old log-probs", text)]


def _stage_row(plan: StagePlan) -> _BatchRow:
    """Return the line about the length of a stage: its records per step, and its steps or epochs.

    A stage is a training phase before reinforcement learning, such as supervised fine-tuning.
    """
    settings = plan.settings
    # `UNIT` is the word for one record: a pair for preference data, otherwise a row.
    records_text = _count_text(settings.records_per_step, settings.UNIT)
    if settings.steps is None:
        # Epochs can be a fraction.
        epochs = "1 epoch" if settings.epochs == 1 else f"{settings.epochs:g} epochs"
        return f"{plan.where}: {epochs}", f"steps of {records_text}"
    total = f"{_count_text(settings.steps * settings.records_per_step, settings.UNIT)} in all"
    return f"{plan.where}: {_count_text(settings.steps, 'step')} x {records_text}", total


def _data_passes_text(steps: int, batch: BatchPlan, record_count: int | None) -> str:
    """Describe the number of prompts in a run, and its passes over the data.

    ``record_count`` is the number of records of the data, None if unknown.
    """
    prompts = steps * batch.prompts
    text = f"{prompts:,} prompts in the run"
    if not record_count:
        return text
    return f"{text}, {prompts / record_count:.3g} passes over {record_count:,} records"


# ---------------------------------------------------------------- roles and ranks


def coordinate_legend(layouts: Mapping[str, ParallelLayout]) -> str:
    """Return the legend of the coordinate letters in the table of ranks and in the picture."""
    names = ["t tensor"]
    # List only the letters that occur in these layouts.
    if any(layout.context > 1 for layout in layouts.values()):
        names.append("c context")
    if any(layout.data > 1 for role, layout in layouts.items() if role != ROLLOUT.name):
        names.append("d data")
    if any(layout.pipeline > 1 for layout in layouts.values()):
        names.append("p pipeline")
    if ROLLOUT.name in layouts:
        names.append("r replica")
    return ", ".join(names)


def _role_lines(report: CheckReport) -> list[str]:
    """Return lines with the parallel sizes of each role, and a table of each rank's coordinates per role."""
    layouts = report.layouts or {}
    world_size = report.world_size
    block_size = min(report.config.gpus_per_node, _RANKS_IN_A_ROW)
    role_width = max(len(role) for role in layouts)
    lines = [f"{role:<{role_width}} {layout_text(role, layout)}" for role, layout in layouts.items()]
    lines += _unusual_checkpoint_lines(report)
    group_counts = process_group_counts(layouts, world_size)
    if group_counts.total:
        lines.append(
            f"{_count_text(group_counts.total, 'process group')}, at most {group_counts.per_rank} on a rank"
        )

    # For a large job, draw the first blocks and the last one.
    block_starts = list(range(0, world_size, block_size))
    if len(block_starts) > _MAX_BLOCKS:
        block_starts = [*block_starts[:3], block_starts[-1]]
    blocks = [range(block_start, min(block_start + block_size, world_size)) for block_start in block_starts]
    drawn_ranks = [rank for ranks in blocks for rank in ranks]
    labels_by_role = {
        role: {rank: cell_label(role, layout, rank) for rank in drawn_ranks}
        for role, layout in layouts.items()
    }
    # A column must fit the rank, which may have several digits, and its coordinates.
    width = max(4, *(len(label) for row in labels_by_role.values() for label in row.values())) + 1

    next_block_start = 0
    for ranks in blocks:
        if ranks.start != next_block_start:
            num_omitted = (ranks.start - next_block_start) // block_size
            lines += ["", f"... {num_omitted} more blocks of {block_size} ranks ..."]
        next_block_start = ranks.start + block_size
        lines += ["", f"{'rank':<{role_width}} |" + "|".join(f"{rank:^{width}}" for rank in ranks) + "|"]
        lines.append("-" * (role_width + 1) + "+" + "+".join("-" * width for _ in ranks) + "+")
        for role in layouts:
            row = "|".join(f"{labels_by_role[role][rank]:^{width}}" for rank in ranks)
            lines.append(f"{role:<{role_width}} |{row}|")
    return lines


def layout_text(role: str, layout: ParallelLayout) -> str:
    """Format the parallel sizes of a role, with notes on pipeline, expert and sequence parallelism."""
    notes = []
    if layout.virtual_pipeline > 1:
        notes.append(f"{layout.virtual_pipeline} virtual stages per rank")
    if layout.expert > 1:
        notes.append(f"expert {layout.expert}")
    if layout.sequence_parallel:
        notes.append("sequence parallel")

    # The data-parallel size of the engine is its number of replicas.
    data_label = "replicas" if role == ROLLOUT.name else "data"
    text = f"{layout.text(data_label)} = {_count_text(len(layout.ranks), 'rank')}"
    if notes:
        text += f"  ({', '.join(notes)})"
    return text


def cell_label(role: str, layout: ParallelLayout, rank: int) -> str:
    """Format a rank's coordinates in a role's layout, or a dot for a rank without the role."""
    if rank not in layout.ranks:
        return "."
    tensor, context, data, pipeline = layout.coordinates(rank)

    # Letter, index of the rank, and size of each dimension. Dimensions of size 1 are omitted.
    coordinates = [("t", tensor, layout.tensor), ("c", context, layout.context)]
    if role == ROLLOUT.name:
        # Show the index of a single replica, too: its label would otherwise be empty.
        coordinates.insert(0, ("r", data, max(layout.data, 2)))
    else:
        coordinates += [("d", data, layout.data), ("p", pipeline, layout.pipeline)]
    label = " ".join(f"{letter}{index}" for letter, index, size in coordinates if size > 1)
    return label or "all"


# ---------------------------------------------------------------- accelerator, memory, servers, weight sync


def _accelerator_lines(applied: tuple[AppliedDefault, ...]) -> list[str]:
    """Return a line for each applied accelerator default: key and value, its roles, and the reason."""
    all_roles: set[str] = set()
    for default in applied:
        all_roles.update(default.roles)
    rows: list[tuple[str, str]] = []
    for default in applied:
        value = default.row.value
        if isinstance(value, bool):
            value = str(value).lower()
        # Do not print the roles if the default applies to all of them, or to the job (environment variables).
        role_prefix = ""
        if default.roles and set(default.roles) != all_roles:
            role_prefix = f"{', '.join(default.roles)}: "
        rows.append((f"{default.row.key}={value}", role_prefix + default.row.reason))

    width = max(len(name) for name, _ in rows)
    return [f"{name:<{width}}  {text}" for name, text in rows]


def _memory_lines(ranks: tuple[RankMemory, ...], gpu_gib: float | None) -> list[str]:
    """Return a table of the fullest rank's memory by item and phase, and the peaks of other ranks.

    ``ranks`` are sorted, the fullest first. ``gpu_gib`` is the memory of a GPU, None if unknown.
    """
    fullest = ranks[0]
    # Leave out a phase without memory: supervised fine-tuning, for example, generates no responses.
    phases = [phase for phase in PHASES if fullest.phase_peak(phase)]
    items = sorted(fullest.items, key=lambda item: -item.bytes)
    name_width = max(len(item.name) for item in items) + 2

    header = "".join(f"{phase:>{_MEMORY_COLUMN}}" for phase in phases)
    lines = [f"{f'rank {fullest.rank}':<{name_width}}{header}    largest first"]
    for item in items:
        cells = [_bytes_text(item.bytes) if phase in item.phases else "" for phase in phases]
        row = "".join(f"{cell:>{_MEMORY_COLUMN}}" for cell in cells)
        # `item.how` explains how the bytes were computed. An item without a phase is in host memory.
        detail = item.how
        if not item.phases:
            detail = f"{_bytes_text(item.bytes)} on the host: {item.how}"
        lines.append(f"{item.name:<{name_width}}{row}    {detail}")

    totals = "".join(f"{_bytes_text(fullest.phase_peak(phase)):>{_MEMORY_COLUMN}}" for phase in phases)
    lines += ["-" * (name_width + _MEMORY_COLUMN * len(phases)), f"{'total':<{name_width}}{totals}"]
    if gpu_gib is not None:
        lines[-1] += f"    of {gpu_gib:g} GiB"
    if any(len(fullest.active_roles(phase)) > 1 for phase in phases):
        lines.append(
            "roles on one rank work one after another: only the largest of their memory peaks counts"
        )

    if len(ranks) > 1:
        # The fullest rank may differ between phases.
        peaks = [max(memory.phase_peak(phase) for memory in ranks) for phase in phases]
        row = "".join(f"{_bytes_text(peak):>{_MEMORY_COLUMN}}" for peak in peaks)
        lines.append(f"{'most on any rank':<{name_width}}{row}")
        other_ranks = ranks[1 : 1 + _MAX_OTHER_RANKS]
        text = ", ".join(f"rank {memory.rank} {_bytes_text(memory.peak)}" for memory in other_ranks)
        if len(ranks) > 1 + _MAX_OTHER_RANKS:
            text += " ..."
        lines.append(f"others at their peak: {text}")
    return lines


def _unusual_checkpoint_lines(report: CheckReport) -> list[str]:
    """Return a line for each multimodal checkpoint and each quantised checkpoint."""
    # Use a dict as an ordered set: roles with the same checkpoint share its line.
    lines: dict[str, None] = {}
    for file in report.models.values():
        model = read_pretrained(file)
        if model.is_multimodal:
            text = "the language model of a multimodal checkpoint; exports carry the other parts unchanged"
            lines[f"{file.parent}: {text}"] = None
        if model.quantization is not None:
            dtype = report.config.model.dtype
            text = f"{model.quantization.text}, read as {dtype}; exports are {dtype} too"
            lines[f"{file.parent}: {text}"] = None
    return list(lines)


def _server_lines(config: RunConfig) -> list[str]:
    """Return the lines of the command that starts an inference server for the run."""
    # The command depends on the model's architecture, which is in its config.json.
    if not (Path(config.model.path) / "config.json").is_file():
        return ["once the model is in model.path, the command that starts a server is printed here"]
    command = ENGINES[config.rollout.engine].start_command
    if command is None:
        return ["start the servers as described in the engine's documentation"]
    # Import the function by its path, since an engine's module may import packages that are missing here.
    module, _, function = command.partition(":")
    return getattr(import_module(module), function)(config)


def _weight_sync_lines(report: CheckReport) -> list[str]:
    """Return lines with the bytes of a weight sync, and the bytes that gathering whole tensors would need."""
    sync = report.sync
    layouts = report.layouts
    assert sync is not None and layouts is not None
    actor = layouts[ACTOR.name]
    sends_only_adapters = separate_lora(report.config) is not None
    rows: list[tuple[str, float]] = [
        ("adapters" if sends_only_adapters else "model", sync.model_bytes),
        ("needed by a rollout rank, at most", max(sync.needed.values())),
        ("received by the busiest rank", sync.received_most),
        ("received by all ranks together", sum(sync.received.values())),
    ]
    if report.world_size > report.config.gpus_per_node:
        rows += [
            ("  inside nodes", sync.inside_nodes),
            ("  across nodes", sync.across_nodes),
        ]
    # For comparison: systems that gather complete tensors in the same layouts.
    is_colocated = bool(set(actor.ranks) & set(layouts[ROLLOUT.name].ranks))
    gathered = gathered_bytes(sync.model_bytes, actor, is_colocated)
    if gathered:
        rows.append(("by gathering whole tensors instead, per rank", gathered))

    width = max(len(name) for name, _ in rows)
    lines = [f"{name:<{width}}  {byte_text(value)}" for name, value in rows]
    if sends_only_adapters:
        lines.append("the base weights of the adapters move once, at the first sync")
    return [
        *lines,
        "a rank receives the bytes that it lacks, and copies the bytes that it has as an actor rank",
    ]
