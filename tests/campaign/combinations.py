"""Train features together that the other tests try apart.

A case draws a model family, ranks, and some of `FEATURES`, with a layout for each role. What `check` refuses
has to be a clear error. What it calls READY trains; ended in the middle, or stopped by a signal, and started
again it equals the run that was not, to the last bit; the commands that read a run read it; its first stage
does the same as a job of its own; it goes on from its middle on one rank, and on other ranks in another
layout; where the layout cannot matter its first step is that of one rank; and other runs begin with what it
left.
"""

from __future__ import annotations

import random
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from tests.campaign import runs
from tests.campaign.campaign import HELD, Case, Result, vague
from tests.campaign.commands import checked, errors_of, told, train, write
from tests.campaign.features import BASE, FEATURES, STEPS
from tests.campaign.forked import preload
from tests.campaign.forms import TEMPLATE, laid
from tests.campaign.journey import JOURNEY, Trial, ahead, on_all_ranks
from tests.campaign.judges import ANYWHERE, served
from tests.golden import record

FAMILIES = (
    "qwen2", "qwen2", "llama3", "qwen3-tied", "gemma3", "qwen3-moe", "mixtral", "deepseek-v3", "glm4-moe",
)  # fmt: skip
MIXTURES = ("qwen3-moe", "mixtral", "deepseek-v3", "glm4-moe")


def cases(seed: int, count: int) -> Iterator[Case]:
    """Yield ``count`` cases of a seed."""
    for number in range(count):
        source = random.Random(f"{seed} {number}")
        family = source.choice(FAMILIES)
        ranks = source.choice((1, 2, 2, 4, 4))
        several = [name for name in FEATURES if name != "mixture" or family in MIXTURES]
        chosen = {
            name: source.randrange(len(FEATURES[name]))
            for name in sorted(source.sample(several, source.randint(3, 8)), key=several.index)
        }

        apart = "apart" in chosen and ranks > 1
        if not apart:
            chosen.pop("apart", None)

        layout = _layout(source, family, ranks // 2 if apart else ranks)
        critic = _layout(source, family, ranks // 2 if apart else ranks) if source.random() < 0.3 else None
        onward = source.choice((1, 2, 2, 4))
        settings = {
            "family": family,
            "ranks": ranks,
            "features": chosen,
            "layout": layout,
            "critic": critic,
            "onward": {"ranks": onward, "layout": _layout(source, family, onward)},
            "interrupted": source.choice(("end", "signal")),
        }
        yield Case(f"{number:04d} {family} x{ranks}", family, settings)


def _layout(source: random.Random, family: str, ranks: int) -> dict[str, int]:
    """Draw how a model is cut over at most so many ranks."""
    layout = {}
    left = ranks
    names = ["tensor", "pipeline", "context", *(["expert"] * (family in MIXTURES))]
    for name in source.sample(names, 2):
        size = source.choice((1, 2))
        if size <= left:
            layout[name] = size
            left = left // size

    if layout.get("pipeline") == 2 and source.random() < 0.3:
        layout["virtual_pipeline"] = 2
    return {name: size for name, size in layout.items() if size > 1}


def configuration(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return the configuration of a case."""
    config = dict(BASE)
    for name, index in settings["features"].items():
        config = runs.merged(config, FEATURES[name][index])

    config = runs.merged(config, {"actor": {"layout": settings["layout"]}})
    if "critic" in config and settings["critic"] is not None:
        config = runs.merged(config, {"critic": {"layout": settings["critic"]}})

    tensor = settings["layout"].get("tensor", 1)
    if settings["family"] == "deepseek-v3":  # vLLM has no latent attention of this size on hosts
        config = runs.merged(config, {"rollout": {"engine": "torch"}})
    if config["rollout"]["engine"] == "vllm":
        config = runs.merged({"rollout": {"tensor": tensor}}, config)
    if "/" in config["data"]["train"]:
        config = laid(config, config["data"]["train"])
    if ahead(config):
        config = runs.merged(config, {"checkpoint": {"keep": STEPS}})
    return config


def try_case(case: Case, work: Path) -> Result:
    """Check a case's configuration, train it whole, interrupted, and a step on one rank."""
    preload()  # before anything that would leave a thread: ranks are forked
    if "servers" not in case.settings["features"]:
        return _tried(case, work, "")
    with served() as address:
        return _tried(case, work, address)


def _tried(case: Case, work: Path, address: str) -> Result:
    """Try a case, whose server is at ``address``."""
    settings = case.settings
    folder = work / case.name.split()[0]
    shutil.rmtree(folder, ignore_errors=True)
    config = configuration(settings)
    ranks = settings["ranks"]

    config["model"] = {**config["model"], "path": str(_model(settings["family"], work))}
    for name in {"http", "judge"} & config["reward"].keys():
        server = config["reward"][name]
        config = runs.merged(config, {"reward": {name: {"url": server["url"].replace(ANYWHERE, address)}}})

    whole = write(config, folder / "whole", work)
    code, shown = checked(whole, ranks)
    if code == 2:
        errors = errors_of(shown)
        shutil.rmtree(folder)
        return Result(HELD if errors and not vague(errors) else "unclear", told(shown), {"refused": 1})

    if code != 0:
        return Result("unclear", shown[-3000:])

    problem = train(whole, ranks)
    if problem is not None:
        return problem

    onward = settings["onward"]["ranks"], on_all_ranks(config, settings["onward"]["layout"])
    left = runs.recording(whole.parent / "run")
    trial = Trial(folder, work, config, ranks, onward, left, settings["interrupted"] == "signal")

    counts = {"trained": 1.0}
    for name, step in JOURNEY.items():
        ended = step(trial)
        if isinstance(ended, Result):
            return replace(ended, counts=counts)
        counts[name] = float(ended)

    shutil.rmtree(folder)
    return Result(HELD, counts=counts)


def _model(family: str, work: Path) -> Path:
    """Return a tiny model of a family with the quickstart's tokenizer, made once."""
    dense = runs.material(work) / "model"
    target = work / "models" / family
    if not target.exists():
        # vLLM has no attention of 16 numbers a head on hosts.
        record.make_model(family, dense, target, hidden_size=128)
        (target / "chat_template.jinja").write_text(TEMPLATE)
    return target
