"""The command line: one module per command, imported when the command is called."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path

from megatron_rl.durable import file_error
from megatron_rl.errors import EXIT_BAD_INPUT, UserError
from megatron_rl.launcher import CONSOLE_SCRIPT, no_proxy_variables, report_errors

COMMANDS = {
    "train": ("megatron_rl.cli.train", "train a configuration; under torchrun for more than one process"),
    "sft": ("megatron_rl.cli.train", "run only the supervised training of the actor, the section sft"),
    "prefer": (
        "megatron_rl.cli.train",
        "run only the preference training of the actor, the section preference",
    ),
    "reward-model": (
        "megatron_rl.cli.train",
        "run only the training of reward models, the sections reward.models.NAME.training",
    ),
    "check": ("megatron_rl.cli.check", "check a configuration and show the plan of its run, in seconds"),
    "plan": ("megatron_rl.cli.plan", "find layouts and placements for a model and a number of GPUs"),
    "plan-reshard": (
        "megatron_rl.cli.plan_reshard",
        "plan the weight transfer of a model between two layouts, up to 1,024 ranks and more",
    ),
    "eval": ("megatron_rl.cli.eval", "evaluate checkpoints on the evaluation sets, as a table"),
    "export": ("megatron_rl.cli.export", "write a checkpoint as a Hugging Face model, or for Megatron-LM"),
    "serve": ("megatron_rl.cli.serve", "serve a run, a checkpoint or a model with vLLM's own server"),
    "bench-serve": ("megatron_rl.cli.bench_serve", "load-test a server with increasing numbers of users"),
    "report": ("megatron_rl.cli.report", "write the table, the learning curve and report.html of a run"),
    "compare": ("megatron_rl.cli.compare", "compare runs: settings, results, curves"),
    "doctor": ("megatron_rl.cli.doctor", "check the environment and list the fixes"),
}
"""Name of a command -> its module, and its one-line help."""

EXIT_INTERRUPTED = 130
"""Exit code of a process that Ctrl-C ends: 128 plus the number of the signal."""


def parse_command_line(command_line: Sequence[str]) -> argparse.Namespace:
    """Parse a command with its arguments and overrides; exit with status 2 for unknown ones."""
    parser = argparse.ArgumentParser(
        prog=CONSOLE_SCRIPT,
        description="Reinforcement learning of language models on Megatron-Core and vLLM.",
        epilog="megatron-rl COMMAND --help shows a command's arguments.",
    )
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)

    # Import only the module of the called command: others may need packages that are not installed.
    command_name = next((text for text in command_line if not text.startswith("-")), None)
    for name, (module, help_text) in COMMANDS.items():
        description = help_text[0].upper() + help_text[1:] + "."
        command = commands.add_parser(name, help=help_text, description=description)
        if name == command_name:
            import_module(module).add_arguments(command)

    arguments, unparsed = parser.parse_known_args(command_line)
    _add_overrides(parser, arguments, unparsed)
    return arguments


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code: 0, 2 for bad input, 1 for any other failure.

    ``arguments`` are those of the command line; None stands for this process's own.
    """
    if arguments is None:
        arguments = sys.argv[1:]
        # A console script has its own folder where `python -m` has the working directory, whose modules a
        # configuration may name.
        if Path(sys.argv[0]).name == CONSOLE_SCRIPT:
            sys.path[0] = os.getcwd()
    try:
        options = parse_command_line(list(arguments))

        # This process and its children connect to servers on this machine without a proxy.
        os.environ.update(no_proxy_variables(os.environ))
        module, _ = COMMANDS[options.command]
        return int(import_module(module).run(options))

    except UserError as error:
        report_errors(error)
        return EXIT_BAD_INPUT

    except ModuleNotFoundError as error:
        # A missing module of this package is a bug; any other one is a package to install.
        package = (error.name or "megatron_rl").partition(".")[0]
        if package == "megatron_rl":
            raise
        report_errors(_missing_package_error(package))
        return EXIT_BAD_INPUT

    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return EXIT_INTERRUPTED
    except BrokenPipeError:
        # The reader of a pipe has exited, as in `check ... | head`. Python would report this again at exit.
        sys.stderr.close()
        return 1

    except OSError as error:
        # Users can correct a file that cannot be read or written; other errors are bugs.
        user_error = file_error(error)
        if user_error is None:
            raise
        report_errors(user_error)
        return EXIT_BAD_INPUT


def _missing_package_error(package: str) -> UserError:
    """Return the error for a package that a command imports and this Python does not have."""
    return UserError(
        "a package that this command needs is not installed for this Python",
        where=sys.executable,
        expected=package,
        got="no such package",
        fix="call the Python that launch/setup.sh made (. .venv/bin/activate), or run launch/setup.sh; "
        "`megatron-rl doctor` lists the other packages that are missing",
    )


def _add_overrides(
    parser: argparse.ArgumentParser, arguments: argparse.Namespace, unparsed: list[str]
) -> None:
    """Add ``key=value`` arguments after an option, which argparse leaves unparsed, to the overrides."""
    overrides = [text for text in unparsed if "=" in text and not text.startswith("-")]
    unrecognized = [text for text in unparsed if text not in overrides]

    # Commands without a configuration have no overrides.
    if unrecognized or (overrides and not hasattr(arguments, "overrides")):
        parser.error(f"unrecognized arguments: {' '.join(unrecognized or overrides)}")
    if overrides:
        arguments.overrides = [*arguments.overrides, *overrides]
