"""Train combinations of features; the other tests train each feature alone.

A case draws a model family, a number of ranks, some of `FEATURES`, and a layout for each role. If `check`
refuses it, the error has to be clear. If `check` says READY, the run trains, and then:

- interrupted in the middle, or stopped by a signal, and resumed, it equals the uninterrupted run bit for bit;
- the commands that read runs read it;
- its first stage gives the same result as a job of its own;
- it resumes from its middle on one rank, and on other ranks in another layout;
- its first step equals that of one rank, if the layout cannot change the result;
- other runs start from its outputs.
"""

from __future__ import annotations

import random
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from tests.campaign import runs
from tests.campaign.campaign import HELD, Case, Result, incomplete_errors
from tests.campaign.commands import (
    check,
    error_summary,
    errors_of,
    train,
    write,
)
from tests.campaign.features import BASE, FEATURES, STEPS
from tests.campaign.forked import preload
from tests.campaign.forms import TEMPLATE, in_form
from tests.campaign.journey import JOURNEY, Trial, on_all_ranks, samples_ahead
from tests.campaign.judges import ANYWHERE, reward_server
from tests.golden import record

# qwen2 appears twice: it is the cheapest family, and most features do not depend on the family.
FAMILIES = (
    "qwen2", "qwen2", "llama3", "qwen3-tied", "gemma3", "qwen3-moe", "mixtral", "deepseek-v3", "glm4-moe",
)  # fmt: skip
MIXTURES = ("qwen3-moe", "mixtral", "deepseek-v3", "glm4-moe")


def cases(seed: int, count: int) -> Iterator[Case]:
    """Yield ``count`` cases of a seed."""
    for index in range(count):
        # A generator per case: case 7 is the same whatever the number of cases.
        source = random.Random(f"{seed} {index}")
        family = source.choice(FAMILIES)
        ranks = source.choice((1, 2, 2, 4, 4))
        # Features keep the order of `FEATURES`, which decides which one overrides another.
        available = [name for name in FEATURES if name != "mixture" or family in MIXTURES]
        selected = {
            name: source.randrange(len(FEATURES[name]))
            for name in sorted(
                source.sample(available, source.randint(3, 8)),
                key=available.index,
            )
        }

        # Roles on separate ranks need two ranks, and each role then has half of them.
        separate = "apart" in selected and ranks > 1
        if not separate:
            selected.pop("apart", None)

        role_ranks = ranks // 2 if separate else ranks
        layout = _layout(source, family, role_ranks)
        critic = None
        if source.random() < 0.3:
            critic = _layout(source, family, role_ranks)

        # The run is continued on other ranks in a layout that is drawn independently.
        second_ranks = source.choice((1, 2, 2, 4))
        settings = {
            "family": family,
            "ranks": ranks,
            "features": selected,
            "layout": layout,
            "critic": critic,
            "onward": {
                "ranks": second_ranks,
                "layout": _layout(source, family, second_ranks),
            },
            "interrupted": source.choice(("end", "signal")),
        }
        yield Case(f"{index:04d} {family} x{ranks}", family, settings)


def _layout(source: random.Random, family: str, ranks: int) -> dict[str, int]:
    """Draw the layout of a model on at most ``ranks`` ranks."""
    layout = {}
    remaining = ranks
    names = [
        "tensor",
        "pipeline",
        "context",
        *(["expert"] * (family in MIXTURES)),
    ]
    for name in source.sample(names, 2):
        size = source.choice((1, 2))
        # The product of the sizes must not exceed the ranks.
        if size <= remaining:
            layout[name] = size
            remaining = remaining // size

    if layout.get("pipeline") == 2 and source.random() < 0.3:
        layout["virtual_pipeline"] = 2
    return {name: size for name, size in layout.items() if size > 1}


def configuration(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return the configuration of a case."""
    config = dict(BASE)
    # Later features override earlier ones.
    for name, index in settings["features"].items():
        config = runs.merged(config, FEATURES[name][index])

    config = runs.merged(config, {"actor": {"layout": settings["layout"]}})
    if "critic" in config and settings["critic"] is not None:
        config = runs.merged(config, {"critic": {"layout": settings["critic"]}})

    tensor = settings["layout"].get("tensor", 1)
    # vLLM's attention on CPUs does not support latent attention of this size.
    if settings["family"] == "deepseek-v3":
        config = runs.merged(config, {"rollout": {"engine": "torch"}})
    # The engine's degree is the actor's, unless a feature sets it.
    if config["rollout"]["engine"] == "vllm":
        config = runs.merged({"rollout": {"tensor": tensor}}, config)
    # A data feature names the prompts of another form; all other files have to be of that form too.
    if "/" in config["data"]["train"]:
        config = in_form(config, config["data"]["train"])
    # A run that samples ahead is continued from a copy, which needs its older checkpoints.
    if samples_ahead(config):
        config = runs.merged(config, {"checkpoint": {"keep": STEPS}})
    return config


def try_case(case: Case, work: Path) -> Result:
    """Check a case's configuration, train it, and run the steps of `JOURNEY` on the result."""
    preload()  # first, since ranks are forked and forks lose threads that later imports start
    if "servers" not in case.settings["features"]:
        return _try_with_server(case, work, "")
    with reward_server() as address:
        return _try_with_server(case, work, address)


def _try_with_server(case: Case, work: Path, address: str) -> Result:
    """Try a case whose reward servers are at ``address``."""
    settings = case.settings
    folder = work / case.name.split()[0]
    shutil.rmtree(folder, ignore_errors=True)
    config = configuration(settings)
    ranks = settings["ranks"]

    config["model"] = {
        **config["model"],
        "path": str(_model(settings["family"], work)),
    }
    # Servers have their address only now.
    for name in {"http", "judge"} & config["reward"].keys():
        server = config["reward"][name]
        config = runs.merged(
            config,
            {"reward": {name: {"url": server["url"].replace(ANYWHERE, address)}}},
        )

    # A refusal is as good a result as a run, if its errors are complete.
    whole_config = write(config, folder / "whole", work)
    code, output = check(whole_config, ranks)
    if code == 2:
        errors = errors_of(output)
        shutil.rmtree(folder)
        is_clear = errors and not incomplete_errors(errors)
        return Result(
            HELD if is_clear else "unclear",
            error_summary(output),
            {"refused": 1},
        )

    if code != 0:
        return Result("unclear", output[-3000:])

    # READY is a promise: the run has to train.
    problem = train(whole_config, ranks)
    if problem is not None:
        return problem

    onward = (
        settings["onward"]["ranks"],
        on_all_ranks(config, settings["onward"]["layout"]),
    )
    reference = runs.recording(whole_config.parent / "run")
    trial = Trial(
        folder,
        work,
        config,
        ranks,
        onward,
        reference,
        settings["interrupted"] == "signal",
    )

    # Each step either does not apply, passes, or ends the case with its problem.
    counts = {"trained": 1.0}
    for name, step in JOURNEY.items():
        outcome = step(trial)
        if isinstance(outcome, Result):
            return replace(outcome, counts=counts)
        counts[name] = float(outcome)

    shutil.rmtree(folder)
    return Result(HELD, counts=counts)


def _model(family: str, work: Path) -> Path:
    """Return a tiny model of a family with the quickstart's tokenizer; it is created once."""
    dense = runs.material(work) / "model"
    target = work / "models" / family
    if not target.exists():
        # vLLM's attention on CPUs does not support heads of 16 numbers.
        record.make_model(family, dense, target, hidden_size=128)
        (target / "chat_template.jinja").write_text(TEMPLATE)
    return target
