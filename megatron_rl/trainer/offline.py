"""What is done with a checkpoint outside a run: answer the evaluation set, or export it."""

from __future__ import annotations

from pathlib import Path

from megatron_rl.config.checkpoint_meta import is_checkpoint
from megatron_rl.config.derive import resolve
from megatron_rl.config.load import load_config
from megatron_rl.config.placement import role_layout
from megatron_rl.config.run_folder import folder_of_checkpoint
from megatron_rl.config.schema import RunConfig
from megatron_rl.config.sections.models import LayoutConfig, LoraConfig
from megatron_rl.config.stage_plan import present_model
from megatron_rl.data.prompts import load_prompts
from megatron_rl.data.tokenizing import load_tokenizer
from megatron_rl.errors import UserError
from megatron_rl.parallel import checkpoint, device, watch
from megatron_rl.parallel.checkpoint_megatron import checkpoint_arguments, save_megatron
from megatron_rl.parallel.hf.export import export, export_adapters
from megatron_rl.roles.build import add_lora, build_frozen_roles, build_policy
from megatron_rl.trainer.evaluation import evaluate
from megatron_rl.trainer.job import describe_rank, report_failure
from megatron_rl.trainer.loop import Phases


def evaluate_checkpoint(config: RunConfig, path: Path, *, trusted: bool = False) -> dict[str, float]:
    """Answer the evaluation set with a Hugging Face model or a run's checkpoint; return the metrics.

    Collective over the world.
    """
    phases = Phases()
    with report_failure(config, phases):
        tokenizer = load_tokenizer(config.model.path)
        with phases("data"):
            source = load_prompts(config, "data.eval", tokenizer)
        _join(config, phases)
        with phases("build"):
            training = is_checkpoint(path)
            frozen = None if training else str(path)
            roles = build_frozen_roles(config, tokenizer, path=frozen, templated=source.templated)
            if training:
                checkpoint.load_model(path, roles.actor.model, trusted=trusted)
        with phases("evaluate"):
            prompts = source.everything(config.evaluation.max_prompts, config.evaluation.temperature)
            values = evaluate(roles, prompts, config).metrics.values()
        roles.close()
        if device.rank() == 0:
            for name, value in values.items():
                print(f"{name:<24}{value:.4f}", flush=True)
        watch.leave()
    return values


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
