"""The command line: one module per command, imported when it is asked for."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from importlib import import_module

from megatron_rl.durable import file_error
from megatron_rl.errors import EXIT_BAD_INPUT, UserError
from megatron_rl.launcher import report_errors, without_proxy

COMMANDS = {
    "train": ("megatron_rl.cli.train", "train a configuration; under torchrun for more than one process"),
    "sft": ("megatron_rl.cli.train", "train the actor on given responses alone, as the section sft says"),
    "prefer": ("megatron_rl.cli.train", "train the actor on preferences alone, as preference says"),
    "reward-model": (
        "megatron_rl.cli.train",
        "train reward models on preferences alone, as reward.models.NAME.training says",
    ),
    "check": ("megatron_rl.cli.check", "check a configuration and show what follows from it, in seconds"),
    "plan": ("megatron_rl.cli.plan", "find layouts and placements for a model and a number of GPUs"),
    "plan-reshard": (
        "megatron_rl.cli.plan_reshard",
        "plan the weight transfer of a model between two layouts, up to 1,024 ranks and more",
    ),
    "eval": ("megatron_rl.cli.eval", "answer the evaluation sets with checkpoints, as a table"),
    "export": ("megatron_rl.cli.export", "write a checkpoint as a Hugging Face model, or for Megatron-LM"),
    "report": ("megatron_rl.cli.report", "make the table, the learning curve and report.html of a run"),
    "compare": ("megatron_rl.cli.compare", "put runs beside each other: settings, results, curves"),
    "doctor": ("megatron_rl.cli.doctor", "check the environment and say what to fix"),
}


def parse(words: Sequence[str]) -> argparse.Namespace:
    """Return the command and its arguments; words that are none end the process with 2, as argparse does."""
    parser = argparse.ArgumentParser(
        prog="megatron_rl",
        description="Reinforcement learning of language models on Megatron-Core and vLLM.",
        epilog="python -m megatron_rl COMMAND --help shows a command's arguments.",
    )
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    # Only the chosen command's module is imported: the others may need what is not installed here.
    chosen = next((word for word in words if not word.startswith("-")), None)
    for name, (module, words_about) in COMMANDS.items():
        command = commands.add_parser(
            name, help=words_about, description=words_about[0].upper() + words_about[1:] + "."
        )
        if name == chosen:
            import_module(module).add_arguments(command)
    known, rest = parser.parse_known_args(words)
    _take_overrides(parser, known, rest)
    return known


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code: 0, 2 for bad input, 1 for any other failure."""
    try:
        known = parse(list(sys.argv[1:] if arguments is None else arguments))
        # Trackers, judges and tools on this machine, of this process and of all that it starts.
        os.environ.update(without_proxy(os.environ))
        result = import_module(COMMANDS[known.command][0]).run(known)
        return 0 if result is None else int(result)
    except UserError as error:
        report_errors(error)
        return EXIT_BAD_INPUT
    except ModuleNotFoundError as error:
        absent = (error.name or "megatron_rl").partition(".")[0]
        if absent == "megatron_rl":
            raise
        report_errors(_not_installed(absent))
        return EXIT_BAD_INPUT
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:
        sys.stderr.close()  # the reader of our output went away, as in `check ... | head`
        return 1
    except OSError as error:
        told = file_error(error)
        if told is None:
            raise
        report_errors(told)
        return EXIT_BAD_INPUT


def _not_installed(package: str) -> UserError:
    return UserError(
        "a package that this command needs is not installed for this Python",
        where=sys.executable,
        expected=package,
        got="no such package",
        fix="call the Python that launch/setup.sh made (. .venv/bin/activate), or run launch/setup.sh; "
        "`python -m megatron_rl doctor` says what else is not there",
    )


def _take_overrides(parser: argparse.ArgumentParser, known: argparse.Namespace, rest: list[str]) -> None:
    """Let ``key=value`` stand before or after options, which argparse alone does not."""
    overrides = [word for word in rest if "=" in word and not word.startswith("-")]
    unknown = [word for word in rest if word not in overrides]
    if unknown or (overrides and not hasattr(known, "overrides")):
        parser.error(f"unrecognized arguments: {' '.join(unknown or overrides)}")
    if overrides:
        known.overrides = [*known.overrides, *overrides]
