"""The ``plan`` command: search for placements of a model or a configuration, or calibrate the constants."""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path

from megatron_rl.check.model.tokenizer import has_chat_template
from megatron_rl.cli.common import require_counts
from megatron_rl.config.hub import PREFIX
from megatron_rl.config.roles import MODEL_ROLES, NUMBER, REFERENCE, REWARD_MODELS
from megatron_rl.config.sections.bounds import MAX_WORLD
from megatron_rl.errors import UserError, range_error
from megatron_rl.planning.predict.batch import StepBatch, response_lengths
from megatron_rl.planning.predict.calibrate import calibrate_constants
from megatron_rl.planning.predict.configured import (
    configured_plan_record,
    configured_plans_text,
    plan_configuration,
)
from megatron_rl.planning.predict.placement import (
    ONE_STEP_OFF,
    OPEN_ORDER,
    ROLES,
    SYNCHRONOUS,
    PlacementProblem,
    search_simplest_placements,
)
from megatron_rl.planning.predict.plan_file import (
    Paths,
    config_text,
    make_planned_run,
    plan_record,
    plans_text,
)
from megatron_rl.planning.predict.step import TYPICAL_SHARE
from megatron_rl.shapes.hardware import Machine, load_constants
from megatron_rl.shapes.lora import Lora
from megatron_rl.shapes.published import is_base_model, load_shape, published_repo

_MODEL_OPTIONS = {
    "algorithm": "grpo",
    "critic": None,
    "lora_rank": None,
    "no_reference": False,
    "no_reward_model": False,
    "prompts": 256,
    "samples": 8,
    "optimizer_steps": 1,
    "prompt_tokens": 1024,
    "response_tokens": 8192,
    "response_tokens_mean": None,
    "precision": "bf16",
    "split": SYNCHRONOUS,
    "gpus_per_node": None,
    "network_gigabits_per_gpu": None,
    "network_gigabits_per_node": None,
    "out": None,
    "model_path": None,
    "data": None,
    "reward": None,
    "reward_model_path": None,
}
"""Option -> default, for the options that describe the job of a plain MODEL.

A configuration sets these values itself, so `plan CONFIG` refuses them.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command-line arguments of ``plan`` to its parser."""
    parser.add_argument(
        "model",
        nargs="?",
        metavar="MODEL",
        help="preset name, Hugging Face directory or config.json; or CONFIG, the YAML file of a run",
    )
    parser.add_argument(
        "overrides", metavar="KEY=VALUE", nargs="*", default=[], help="values that replace CONFIG's"
    )

    machine = parser.add_argument_group("machines")
    machine.add_argument("--gpus", type=int, help="number of GPUs")
    machine.add_argument("--gpu", help="GPU name, as h100, h200, a100, h20, b200, gb200 (default h100)")
    machine.add_argument(
        "--gpus-per-node", type=int, help="GPUs of a node (default: those of the GPU's usual machine)"
    )
    machine.add_argument("--network-gigabits-per-gpu", type=float, help="network bandwidth of a GPU, Gbit/s")
    machine.add_argument(
        "--network-gigabits-per-node", type=float, help="network bandwidth of a node, Gbit/s"
    )

    job = parser.add_argument_group("job")
    job.add_argument("--algorithm", choices=sorted(ROLES), default="grpo")
    job.add_argument("--critic", help="critic and reward model of ppo (default: MODEL)")
    job.add_argument("--lora-rank", type=int, help="train adapters of this rank (default: the weights)")
    job.add_argument("--no-reference", action="store_true", help="no reference policy (no KL term)")
    job.add_argument(
        "--no-reward-model", action="store_true", help="ppo with a reward function and no reward model"
    )
    job.add_argument("--prompts", type=int, default=256, help="prompts per step (default 256)")
    job.add_argument("--samples", type=int, default=8, help="samples per prompt (default 8)")
    job.add_argument("--optimizer-steps", type=int, default=1, help="optimizer steps per step (default 1)")
    job.add_argument("--prompt-tokens", type=int, default=1024, help="tokens of a prompt (default 1024)")
    job.add_argument("--response-tokens", type=int, default=8192, help="longest response (default 8192)")
    job.add_argument(
        "--response-tokens-mean", type=float, help="mean response (default: a third of the longest)"
    )
    job.add_argument(
        "--precision",
        choices=("bf16", "fp16", "fp8"),
        default="bf16",
        help="type of the predicted weights; --out requires bf16 (default), the only one that runs support",
    )

    # --one-step-off and --open-order set the same option, since flags are easier to read than its values.
    sampling = job.add_mutually_exclusive_group()
    sampling.add_argument(
        "--one-step-off",
        dest="split",
        action="store_const",
        const=ONE_STEP_OFF,
        default=SYNCHRONOUS,
        help="let split placements sample a step while the previous one trains",
    )
    sampling.add_argument(
        "--open-order",
        dest="split",
        action="store_const",
        const=OPEN_ORDER,
        help="let split placements train on the groups that are complete first (rollout.order: open)",
    )

    result = parser.add_argument_group("result")
    result.add_argument("--best", type=int, default=3, help="plans to print (default 3)")
    result.add_argument("--out", metavar="FILE", help="write the best plan as a configuration")
    result.add_argument(
        "--model-path",
        help="model.path in that configuration (default: MODEL; a preset on the Hub)",
    )
    result.add_argument("--data", help="data.train in that configuration")
    result.add_argument("--reward", help="reward.function in that configuration")
    result.add_argument("--reward-model-path", help="path of the reward model in that configuration")
    result.add_argument("--json", metavar="FILE", help="write plans, or calibrated phases, as JSON")

    calibration = parser.add_argument_group("instead of a search")
    calibration.add_argument(
        "--calibrate", metavar="RUN_DIR", help="fit efficiency factors to a run folder (--out FILE)"
    )
    parser.add_argument("--constants", metavar="FILE", help="JSON file that overrides packaged constants")


def run(args: argparse.Namespace) -> int:
    """Calibrate constants, plan a configuration, or search for placements, depending on the arguments.

    Returns the exit code; raises UserError for invalid arguments.
    """
    if args.calibrate:
        return _calibrate_constants(args)
    if args.model and args.model.endswith((".yaml", ".yml")):
        return _plan_configuration(args)

    # argparse does not require these two arguments, since --calibrate works without them.
    if not args.model or not args.gpus:
        raise UserError(
            "plan needs a model and a number of GPUs",
            where="command line",
            expected="plan MODEL --gpus N [--gpu h100], plan CONFIG, or plan --calibrate RUN_DIR",
            got=f"MODEL {args.model}, --gpus {args.gpus}",
        )

    # A model without a configuration has no keys to override.
    if args.overrides:
        raise UserError(
            "overrides apply to a configuration, and a model is named",
            where="command line",
            expected="plan CONFIG KEY=VALUE, with the YAML file of a run",
            got=f"plan {args.model} {' '.join(args.overrides)}",
            fix="name the configuration, or use the options that plan --help lists",
        )
    return _search_placements(args)


def _calibrate_constants(args: argparse.Namespace) -> int:
    """Fit constants to a run, print predicted and measured seconds by phase, and print or write the fit."""
    override, phases = calibrate_constants(
        args.calibrate, args.gpu, load_constants(args.constants), args.model
    )
    print(f"{'phase':12} {'predicted s':>12} {'measured s':>12} {'factor':>8}")
    record = {}
    for name, (predicted_seconds, measured_seconds) in phases.items():
        factor = predicted_seconds / measured_seconds
        print(f"{name:12} {predicted_seconds:12.4g} {measured_seconds:12.4g} {factor:8.3f}")
        record[name] = {"predicted": predicted_seconds, "measured": measured_seconds}

    if args.json:
        Path(args.json).write_text(json.dumps(record, indent=1) + "\n")
    # Without --out, print the override so that it can be redirected to a file.
    text = json.dumps(override, indent=1) + "\n"
    if args.out:
        Path(args.out).write_text(text)
        print(f"wrote {args.out}; use it with plan --constants {args.out}")
    else:
        print(text, end="")
    return 0


def _check_numbers(args: argparse.Namespace) -> None:
    """Raise UserError for counts and lengths that are out of range."""
    require_counts(args, "gpus", at_most=MAX_WORLD)
    require_counts(
        args, "prompts", "samples", "optimizer_steps", "prompt_tokens", "response_tokens", "lora_rank"
    )

    # An optimizer step needs the samples of at least one prompt.
    if args.optimizer_steps > args.prompts:
        raise UserError(
            "more optimizer steps than prompts",
            where="--optimizer-steps",
            expected=f"at most --prompts {args.prompts}",
            got=str(args.optimizer_steps),
        )
    mean = args.response_tokens_mean
    if mean is not None and not 0 < mean <= args.response_tokens:
        raise range_error("--response-tokens-mean", mean, f"more than 0, at most {args.response_tokens}")


def _check_precision(args: argparse.Namespace) -> None:
    """Raise UserError if ``--out`` is combined with a precision that no run supports."""
    if args.out and args.precision != "bf16":
        raise UserError(
            f"a run has no {args.precision} weights, so a plan of them cannot be written as a configuration",
            where="--precision",
            expected="bf16 with --out; other precisions are only predictions",
            got=f"{args.precision} with --out {args.out}",
            fix="leave out --precision to write a plan, or leave out --out to see only the prediction",
        )


def make_problem(args: argparse.Namespace) -> PlacementProblem:
    """Build the placement problem from the command-line options; raise UserError for invalid options."""
    _check_numbers(args)
    _check_precision(args)
    constants = load_constants(args.constants)
    cluster = constants.cluster(
        args.gpu or "h100",
        args.gpus,
        args.gpus_per_node,
        args.network_gigabits_per_gpu,
        args.network_gigabits_per_node,
    )

    # Without a measured mean, assume the planner's default fraction of the limit.
    mean_length = args.response_tokens_mean or args.response_tokens * TYPICAL_SHARE
    batch = StepBatch(
        prompts=args.prompts,
        samples=args.samples,
        optimizer_steps=args.optimizer_steps,
        prompt_length=float(args.prompt_tokens),
        lengths=response_lengths(mean_length, float(args.response_tokens), "variable"),
        row_limit=float(args.prompt_tokens + args.response_tokens),
    )

    # The critic and the reward model, which have a scalar head, use the model of --critic.
    actor = load_shape(args.model)
    critic = actor
    if args.critic:
        critic = load_shape(args.critic)
    shapes = {spec.name: critic if spec.head == NUMBER else actor for spec in MODEL_ROLES}
    # The problem contains only the roles of the algorithm.
    models = {role: shapes[role] for role in ROLES[args.algorithm]}
    if args.no_reference:
        models.pop(REFERENCE.name)
    if args.no_reward_model:
        models.pop(REWARD_MODELS.name, None)
    lora = None
    if args.lora_rank:
        lora = Lora.for_model(actor, args.lora_rank)
    return PlacementProblem(
        models, args.algorithm, batch, Machine(cluster, constants, args.precision), lora=lora
    )


def _search_placements(args: argparse.Namespace) -> int:
    """Search for placements of the MODEL argument, print the best, and write the requested files."""
    problem = make_problem(args)
    started = time.monotonic()
    result = search_simplest_placements(problem, args.split)
    # Sort by the predictions of the written configurations, which have one token budget for all roles.
    runs = [make_planned_run(problem, plan, _config_paths(args)) for plan in result.plans]
    runs.sort(key=lambda planned_run: planned_run.prediction.total)
    runs = runs[: max(1, args.best)]

    print(plans_text(problem, runs, result.layouts, result.evaluated))
    print(f"\nsearched {time.monotonic() - started:.1f} s")
    if args.json:
        records = [plan_record(planned_run) for planned_run in runs]
        Path(args.json).write_text(json.dumps(records, indent=1) + "\n")
    if args.out:
        Path(args.out).write_text(config_text(problem, runs[0]))
        print(f"wrote {args.out}: {runs[0].plan.name}")
    return 0


def _plan_configuration(args: argparse.Namespace) -> int:
    """Predict a step with the layout of a configuration, search for faster layouts, and print both.

    Options that describe the job, such as ``--prompts``, are refused. They are for a plain model: a MODEL
    argument that is a model's folder or preset instead of a configuration.
    """
    # An option with its default value cannot be distinguished from an omitted option, and changes nothing.
    explicit_options = [name for name, default in _MODEL_OPTIONS.items() if getattr(args, name) != default]
    if explicit_options:
        option = "--" + explicit_options[0].replace("_", "-")
        raise UserError(
            f"{option} describes the job of a plain model; the configuration {args.model} already sets "
            "this value",
            where=option,
            expected="plan CONFIG [KEY=VALUE …] with --gpus, --gpu, --best, --json or --constants",
            got=f"{option} with {args.model}",
            fix="write the value into the configuration, or as KEY=VALUE after it",
        )
    require_counts(args, "gpus", at_most=MAX_WORLD)

    overrides = list(args.overrides)
    if args.gpus is not None:
        overrides.append(f"world_size={args.gpus}")
    constants = load_constants(args.constants)
    plans = plan_configuration(Path(args.model), overrides, None, args.gpu, constants)
    best_plans = plans.found[: max(1, args.best)]
    print(configured_plans_text(args.model, plans, best_plans))
    if args.json:
        records = [configured_plan_record(plan) for plan in (plans.given, *best_plans)]
        Path(args.json).write_text(json.dumps(records, indent=1) + "\n")
    return 0


def _model_path(model: str) -> str:
    """Convert the MODEL argument, a folder or the name of a preset, to a value of ``model.path``.

    A folder is returned unchanged, even if the folder does not exist on this machine. The path of a
    config.json becomes its folder. A preset becomes the
    name of its repository on the Hub. If a preset is not on the Hub, it becomes ``models/PRESET``, the folder
    into which the user has to put the model.
    """
    if not Path(model).exists():
        looks_like_folder = model.startswith(("/", ".", "~", "models/")) or model.count("/") > 1
        if looks_like_folder:
            return model
        repo = published_repo(model)
        return f"{PREFIX}{repo}" if repo else f"models/{model}"
    if model.endswith("config.json"):
        return str(Path(model).parent)
    return model


def _may_have_chat_template(model: str) -> bool:
    """Return whether a model has a chat template; return True if this machine cannot find out.

    ``model`` is a value of ``model.path``: a folder, or `PREFIX` with the name of a repository on the Hub.
    """
    folder = Path(model)
    if (folder / "tokenizer_config.json").is_file():
        return has_chat_template(folder)
    if model.startswith(PREFIX):
        return not is_base_model(model)
    return True


def _config_paths(args: argparse.Namespace) -> Paths:
    """Return the paths of models, data and rewards for the configuration of a plan."""
    model = args.model_path or _model_path(args.model)
    return Paths(
        model=model,
        data=args.data,
        reward=args.reward,
        reward_model=args.reward_model_path,
        critic=_model_path(args.critic) if args.critic else None,
        chat_template=_may_have_chat_template(model),
    )
