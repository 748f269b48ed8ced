"""Evaluation and export of checkpoints outside a run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from megatron_rl.checkpoint import roles as checkpoint
from megatron_rl.checkpoint.folders import compute_on_first_rank, require_intact_models
from megatron_rl.checkpoint.megatron_lm import (
    checkpoint_arguments,
    save_megatron,
)
from megatron_rl.config.checkpoint_meta import (
    is_checkpoint,
    model_identity,
    require_same_model,
)
from megatron_rl.config.derive import resolve
from megatron_rl.config.load import load_config
from megatron_rl.config.placement import role_layout
from megatron_rl.config.run_folder import RunFolder, folder_of_checkpoint
from megatron_rl.config.schema import RunConfig
from megatron_rl.config.sections.evaluation import INTERVALS
from megatron_rl.config.sections.models import LayoutConfig, LoraConfig
from megatron_rl.config.stage_plan import current_model, existing_models
from megatron_rl.data.sources import PromptSource, load_prompts
from megatron_rl.data.token_files import TokenFiles
from megatron_rl.data.tokenizing import load_tokenizer
from megatron_rl.distributed import device, watch
from megatron_rl.errors import UserError, requirement_error
from megatron_rl.hf.export import export_adapters, export_model
from megatron_rl.hf.weights import load_weights
from megatron_rl.metrics import merge_metrics
from megatron_rl.roles.build import (
    Roles,
    build_frozen_policy,
    build_frozen_roles,
)
from megatron_rl.shapes.pretrained import read_pretrained
from megatron_rl.trainer.evaluation import (
    EvaluationSet,
    evaluate,
    failure_lines,
    make_evaluation_sets,
)
from megatron_rl.trainer.job import describe_rank, report_failure
from megatron_rl.trainer.loop import Phases

MEGATRON_HINT = ": pretrain_gpt.py --load it with --finetune, or --no-load-optim to count iterations on"
"""Console text on how Megatron-LM loads an exported checkpoint, which contains no optimizer state."""


def evaluate_checkpoints(
    config: RunConfig, paths: Sequence[Path], *, trusted: bool = False
) -> list[dict[str, float]]:
    """Evaluate Hugging Face models and checkpoints of runs; print and return the metrics of each path.

    The roles are built once and load one path after the other, so all paths must have the architecture of the
    configuration's model. ``trusted``: whether checkpoints may contain code. Collective over the world.
    """
    phases = Phases()
    with report_failure(config, phases):
        hf_models = [path for path in paths if not is_checkpoint(path)]
        _require_compatible_models(config, paths, hf_models)

        # Load the data first, so that its errors are raised before the ranks communicate.
        tokenizer = load_tokenizer(config.model.path, RunFolder(config.run_dir).read_first_start())
        with phases("data"):
            sources = {
                name: load_prompts(
                    config,
                    f"evaluation.sets.{name}.data",
                    settings.data,
                    tokenizer,
                    TokenFiles(None, print),
                )
                for name, settings in config.evaluation.sets.items()
            }
        _init_process_groups(config, phases)
        key_by_model = {str(path): "--checkpoint" for path in hf_models}
        require_intact_models(key_by_model | compute_on_first_rank(lambda: existing_models(config)))

        only_hf_models = len(hf_models) == len(paths)
        with phases("build"):
            sets = make_evaluation_sets(config, sources, tokenizer)
            roles = build_frozen_roles(
                config,
                tokenizer,
                path=str(hf_models[0]) if only_hf_models else None,
                templated=_is_templated(sources),
            )
        # Evaluate one model after the other in the same roles.
        metrics = [_evaluate_path(config, path, roles, sets, phases, trusted) for path in paths]

        # End reward processes and the engine before the job ends.
        for evaluation_set in sets:
            evaluation_set.close()
        roles.close()
        if device.rank() == 0:
            print(format_metrics_table([str(path) for path in paths], metrics), flush=True)
        watch.leave_job()
        # Raise only after the table is printed, so that metrics are shown even if too many rewards failed.
        _require_rewards(config, paths, metrics)
    return metrics


def _require_compatible_models(config: RunConfig, paths: Sequence[Path], hf_models: Sequence[Path]) -> None:
    """Raise UserError unless all checkpoints and models in ``paths`` can be loaded into the same roles.

    ``hf_models``: the Hugging Face models among ``paths``.
    """
    model = read_pretrained(Path(config.model.path) / "config.json")
    for path in hf_models:
        identity = model_identity(read_pretrained(path / "config.json"))
        require_same_model(
            path,
            identity,
            model,
            "evaluate it with a configuration that sets model.path to it",
        )

    # Checkpoints with adapters need roles with adapters, and complete models need roles without adapters.
    if config.actor.lora is not None and 0 < len(hf_models) < len(paths):
        raise UserError(
            "checkpoints with adapters and complete models cannot be evaluated by one command",
            where="--checkpoint",
            expected="only checkpoints of runs, or only Hugging Face folders",
            got=f"{len(paths) - len(hf_models)} checkpoints and {len(hf_models)} folders, with actor.lora",
            fix="run the command once for each kind",
        )


def _is_templated(sources: Mapping[str, PromptSource]) -> bool:
    """Return whether all prompts were rendered with the chat template.

    ``sources``: name of an evaluation set -> its prompts. All sources are rendered alike, so the function
    reads only the first one.
    """
    first_source = next(iter(sources.values()))
    return first_source.templated


def _evaluate_path(
    config: RunConfig,
    path: Path,
    roles: Roles,
    sets: Sequence[EvaluationSet],
    phases: Phases,
    trusted: bool,
) -> dict[str, float]:
    """Load one model and evaluate it; return its metrics. Collective over the world."""
    with phases("build"):
        if is_checkpoint(path):
            checkpoint.load_actor_weights(path, roles.actor.model, trusted=trusted)
        elif roles.actor.model is not None:
            load_weights(roles.actor.model, path)
        roles.hybrid_engine.mark_updated()

    with phases("evaluate"):
        results, _ = evaluate(roles, sets, config.seed)
    for line in failure_lines(results, 0):
        print(line, flush=True)
    return merge_metrics(result.metrics for result in results).values()


def _require_rewards(
    config: RunConfig,
    paths: Sequence[Path],
    metrics: Sequence[Mapping[str, float]],
) -> None:
    """Raise UserError if more rewards failed on a set than `reward.max_invalid_fraction` allows."""
    max_fraction = config.reward.max_invalid_fraction
    for path, values in zip(paths, metrics, strict=True):
        for name in config.evaluation.sets:
            invalid_fraction = values[f"eval/{name}/invalid"]
            if invalid_fraction > max_fraction:
                raise UserError(
                    f"rewards failed on {invalid_fraction:.0%} of the answers of {path}",
                    where=f"evaluation.sets.{name}",
                    expected=f"at most {max_fraction:.0%} (reward.max_invalid_fraction)",
                    got="the failures above; an answer whose reward failed counts as not correct",
                    fix="repair the reward function; reward.max_invalid_fraction=1 accepts any failures",
                )


def format_metrics_table(model_names: Sequence[str], metrics: Sequence[Mapping[str, float]]) -> str:
    """Format the metrics of models as text, with a line per metric and a column per model.

    A metric's interval is shown after its value. Several models are numbered: the numbers are the column
    headings, and a list above the table has the model of each number.
    """
    # The bounds of intervals are metrics, too, but are shown next to the metric to which they belong.
    interval_suffixes = tuple(f"_{bound}" for bound in INTERVALS)
    metric_names = list(dict.fromkeys(name for values in metrics for name in values))
    metric_names = [name for name in metric_names if not name.endswith(interval_suffixes)]

    lines: list[str] = []
    cell_rows: list[list[str]] = []
    if len(model_names) > 1:
        numbers = [f"[{number}]" for number in range(1, len(model_names) + 1)]
        lines = [f"{number} {name}" for number, name in zip(numbers, model_names, strict=True)]
        cell_rows = [["", *numbers]]
    for name in metric_names:
        cell_rows.append([name, *(_format_with_interval(name, values) for values in metrics)])

    # Pad each column to its longest cell.
    widths = [max(map(len, column)) for column in zip(*cell_rows, strict=True)]
    for row in cell_rows:
        cells = [cell.ljust(width) for cell, width in zip(row, widths, strict=True)]
        lines.append("  ".join(cells).rstrip())
    return "\n".join(lines)


def _format_with_interval(metric: str, values: Mapping[str, float]) -> str:
    """Format a metric's value and its interval, if there is one; return "-" if the model lacks the metric."""
    if metric not in values:
        return "-"
    text = f"{values[metric]:.4f}"
    bounds = [values[f"{metric}_{bound}"] for bound in INTERVALS if f"{metric}_{bound}" in values]
    if not bounds:
        return text
    low, high = bounds
    return f"{text} ({low:.3f}-{high:.3f})"


def export_checkpoint(
    path: Path,
    out: Path,
    *,
    checkpoint_format: str = "hf",
    trusted: bool = False,
) -> None:
    """Export a run's checkpoint to the folder ``out``.

    ``checkpoint_format``: ``hf`` for a Hugging Face model, ``megatron`` for a checkpoint that Megatron-LM can
        load, ``peft`` for the adapters only.
    ``trusted``: whether the checkpoint may contain code.

    If there are as many processes as in the run, the run's layout is used; otherwise each process is a
    pipeline stage. Collective over the world.
    """
    config, layout = _export_config(path)
    if checkpoint_format == "peft" and config.actor.lora is None:
        raise requirement_error(
            "--format",
            "peft",
            "a checkpoint of a run with actor.lora",
            got="a run that trained all weights",
            fix="remove --format, which writes the complete model",
        )

    if checkpoint_format == "peft" and read_pretrained(Path(config.model.path) / "config.json").is_multimodal:
        raise requirement_error(
            "--format",
            "peft",
            "a model that is only a language model",
            got=f"the multimodal {config.model.path}, whose vision tower PEFT would also adapt",
            fix="remove --format, which merges the adapters",
        )

    phases = Phases()
    with report_failure(config, phases), phases("export"):
        # Arguments that Megatron-LM reads from a checkpoint, and the iteration at the run's start.
        arguments = {}
        first_iteration = 0
        if checkpoint_format == "megatron":
            arguments, first_iteration = checkpoint_arguments(config.model.path)
        _init_process_groups(config, phases)
        require_intact_models(compute_on_first_rank(lambda: existing_models(config)))

        # Any layout can load a distributed checkpoint.
        model = build_frozen_policy(config, role_layout(layout, "layout"), None)
        meta = checkpoint.load_actor_weights(path, model, trusted=trusted)
        if checkpoint_format == "megatron":
            save_megatron(out, model, arguments, first_iteration + int(meta["step"]))
        elif model is not None and checkpoint_format == "peft":
            lora = config.actor.lora or LoraConfig()
            export_adapters(model, out, current_model(config), dropout=lora.dropout)
        elif model is not None:
            export_model(model, out, config.model.path)
        watch.leave_job()

    if device.rank() == 0:
        print(
            f"wrote {out}{MEGATRON_HINT if checkpoint_format == 'megatron' else ''}",
            flush=True,
        )


def _export_config(path: Path) -> tuple[RunConfig, LayoutConfig]:
    """Return the configuration of a checkpoint's run, and a layout for the number of available processes."""
    folder = folder_of_checkpoint(path)
    if folder is None:
        raise UserError(
            "the checkpoint's run has no config.yaml, which names its model and tokenizer",
            where=str(path),
            expected="the file config.yaml in a folder above the checkpoint",
            got="no such file",
            fix="name a checkpoint inside its run folder: RUN/checkpoints/step_N",
        )

    # With the run's number of ranks, use the run's layout.
    world_size = device.world_size()
    config = load_config(folder.config)
    if config.world_size == world_size:
        return config, resolve(config, world_size).config.actor.layout

    # Otherwise use pipeline parallelism only: layers can be distributed over any number of stages.
    config = load_config(folder.config, ["world_size=null", "rollout.ranks=null"])
    return config, LayoutConfig(ranks=tuple(range(world_size)), pipeline=world_size)


def _init_process_groups(config: RunConfig, phases: Phases) -> None:
    """Initialise the process groups and start the hang detector. Collective over the world."""
    watch.join_job(
        config.rank_timeout,
        lambda: f"{describe_rank(config, device.rank())} {phases.location}",
    )
