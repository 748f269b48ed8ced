"""What is done with checkpoints outside a run: answer the evaluation sets, or export one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from megatron_rl.checkpoint import roles as checkpoint
from megatron_rl.checkpoint.folders import first, require_intact_models
from megatron_rl.checkpoint.megatron_lm import checkpoint_arguments, save_megatron
from megatron_rl.config.checkpoint_meta import check_same_model, is_checkpoint, model_identity
from megatron_rl.config.derive import resolve
from megatron_rl.config.load import load_config
from megatron_rl.config.placement import role_layout
from megatron_rl.config.run_folder import RunFolder, folder_of_checkpoint
from megatron_rl.config.schema import RunConfig
from megatron_rl.config.sections.evaluation import INTERVALS
from megatron_rl.config.sections.models import LayoutConfig, LoraConfig
from megatron_rl.config.stage_plan import models_read, present_model
from megatron_rl.data.prompts import load_prompts
from megatron_rl.data.token_files import TokenFiles
from megatron_rl.data.tokenizing import load_tokenizer
from megatron_rl.distributed import device, watch
from megatron_rl.errors import UserError
from megatron_rl.hf.export import export, export_adapters
from megatron_rl.hf.weights import load_weights
from megatron_rl.metrics import merge
from megatron_rl.roles.build import build_frozen_roles
from megatron_rl.roles.policy import add_lora, build_policy
from megatron_rl.shapes.pretrained import read_pretrained
from megatron_rl.trainer.evaluation import evaluate, evaluation_sets, failure_lines
from megatron_rl.trainer.job import describe_rank, report_failure
from megatron_rl.trainer.loop import Phases


def evaluate_checkpoints(
    config: RunConfig, paths: Sequence[Path], *, trusted: bool = False
) -> list[dict[str, float]]:
    """Answer the evaluation sets with Hugging Face models and runs' checkpoints; print and return metrics.

    All are of the configuration's model: it is built once, and takes the weights of one after another.
    Collective over the world.
    """
    phases = Phases()
    with report_failure(config, phases):
        model = read_pretrained(Path(config.model.path) / "config.json")
        models = [path for path in paths if not is_checkpoint(path)]
        for path in models:
            identity = model_identity(read_pretrained(path / "config.json"))
            check_same_model(path, identity, model, "evaluate it with a configuration whose model.path it is")
        if config.actor.lora is not None and 0 < len(models) < len(paths):
            raise UserError(
                "checkpoints with adapters and whole models are not evaluated by one command",
                where="--checkpoint",
                expected="checkpoints of runs alone, or Hugging Face folders alone",
                got=f"{len(paths) - len(models)} checkpoints and {len(models)} folders, with actor.lora",
                fix="call the command twice",
            )
        tokenizer = load_tokenizer(config.model.path, RunFolder(config.run_dir).read_first_start())
        with phases("data"):
            sources = {
                name: load_prompts(
                    config, f"evaluation.sets.{name}.data", described.data, tokenizer, TokenFiles(None, print)
                )
                for name, described in config.evaluation.sets.items()
            }
        _join(config, phases)
        named = {str(path): "--checkpoint" for path in models}
        require_intact_models(named | first(lambda: models_read(config)))
        measured: list[dict[str, float]] = []
        with phases("build"):
            sets = evaluation_sets(config, sources, tokenizer)
            templated = next(iter(sources.values())).templated
            whole = str(models[0]) if len(models) == len(paths) else None
            roles = build_frozen_roles(config, tokenizer, path=whole, templated=templated)
        for path in paths:
            with phases("build"):
                if is_checkpoint(path):
                    checkpoint.load_model(path, roles.actor.model, trusted=trusted)
                elif roles.actor.model is not None:
                    load_weights(roles.actor.model, path)
                roles.hybrid_engine.mark_updated()
            with phases("evaluate"):
                results, _ = evaluate(roles, sets, config.seed)
            measured.append(merge(result.metrics for result in results).values())
            for line in failure_lines(results, 0):
                print(line, flush=True)
        for one in sets:
            one.close()
        roles.close()
        if device.rank() == 0:
            print(table([str(path) for path in paths], measured), flush=True)
        watch.leave()
        _require_rewards(config, paths, measured)
    return measured


def _require_rewards(
    config: RunConfig, paths: Sequence[Path], measured: Sequence[Mapping[str, float]]
) -> None:
    """Raise a UserError where so many rewards failed that training would have stopped."""
    for path, values in zip(paths, measured, strict=True):
        for name in config.evaluation.sets:
            invalid, most = values[f"eval/{name}/invalid"], config.reward.max_invalid_fraction
            if invalid > most:
                raise UserError(
                    f"rewards failed on {invalid:.0%} of the answers of {path}",
                    where=f"evaluation.sets.{name}",
                    expected=f"at most {most:.0%} (reward.max_invalid_fraction)",
                    got="the failures above; an answer whose reward failed counts as not right",
                    fix="mend the reward function; reward.max_invalid_fraction=1 takes whatever fails",
                )


def table(names: Sequence[str], measured: Sequence[Mapping[str, float]]) -> str:
    """Return metrics of several models as text: a line each, with its interval, and a column for each model.

    Columns are numbered where there are several, and the models listed above.
    """
    metrics = list(dict.fromkeys(name for values in measured for name in values))
    metrics = [name for name in metrics if not name.endswith(tuple(f"_{end}" for end in INTERVALS))]
    heads = [f"[{place}]" for place in range(1, len(names) + 1)]
    lines = [f"{head} {name}" for head, name in zip(heads, names, strict=True)] if len(names) > 1 else []
    rows = [["", *heads]] if len(names) > 1 else []
    for name in metrics:
        rows.append([name, *(_with_interval(name, values) for values in measured)])
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        cells = [cell.ljust(width) for cell, width in zip(row, widths, strict=True)]
        lines.append("  ".join(cells).rstrip())
    return "\n".join(lines)


def _with_interval(name: str, values: Mapping[str, float]) -> str:
    if name not in values:
        return "-"
    low, high = (values.get(f"{name}_{end}") for end in INTERVALS)
    return f"{values[name]:.4f}" + ("" if low is None else f" ({low:.3f}-{high:.3f})")


def export_checkpoint(path: Path, out: Path, *, form: str = "hf", trusted: bool = False) -> None:
    """Write a run's checkpoint for others, with the processes that the launcher gives.

    ``form`` is ``hf`` for a Hugging Face model, ``megatron`` for a checkpoint that Megatron-LM loads,
    ``peft`` for the adapters alone.

    Under torchrun with as many processes as the run had the run's own layout is used; else the layers are
    cut over the processes. Collective over the world.
    """
    folder = folder_of_checkpoint(path)
    if folder is None:
        raise UserError(
            "the checkpoint's run has no config.yaml, which names its model and tokenizer",
            where=str(path),
            expected="the file config.yaml in a folder above the checkpoint",
            got="nothing there",
            fix="name a checkpoint inside its run folder: RUN/checkpoints/step_N",
        )
    world = device.world_size()
    config = load_config(folder.config)
    if config.world_size != world:
        config = load_config(folder.config, ["world_size=null", "rollout.ranks=null"])
        layout = LayoutConfig(ranks=tuple(range(world)), pipeline=world)
    else:
        layout = resolve(config, world).config.actor.layout
    lora = config.actor.lora or LoraConfig()
    if form == "peft" and config.actor.lora is None:
        raise UserError(
            "the run trained weights, not adapters",
            where="--format",
            expected="a checkpoint of a run with actor.lora",
            got="peft",
            fix="leave --format out: the whole model is written",
        )
    phases = Phases()
    with report_failure(config, phases), phases("export"):
        arguments, begun = checkpoint_arguments(config.model.path) if form == "megatron" else ({}, 0)
        _join(config, phases)
        require_intact_models(first(lambda: models_read(config)))
        model = build_policy(
            config, role_layout(layout, "layout"), path=present_model(config), trainable=False
        )
        add_lora(config, model, trainable=False)
        meta = checkpoint.load_model(path, model, trusted=trusted)
        if form == "megatron":
            save_megatron(out, model, arguments, begun + int(meta["step"]))
        elif model is not None and form == "peft":
            export_adapters(model, out, present_model(config), dropout=lora.dropout)
        elif model is not None:
            export(model, out, config.model.path)
        watch.leave()
    if device.rank() == 0:
        more = ": pretrain_gpt.py --load it with --finetune, or --no-load-optim to count iterations on"
        print(f"wrote {out}{more if form == 'megatron' else ''}", flush=True)


def _join(config: RunConfig, phases: Phases) -> None:
    """Join a job that has nothing to save when it is stopped. Collective over the world."""
    watch.join(config.rank_timeout, lambda: f"{describe_rank(config, device.rank())} {phases.place}")
