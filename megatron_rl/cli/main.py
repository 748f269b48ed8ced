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
    """Parse a command with its arguments and overrides; exit with status 2 for unknown arguments."""
    parser = argparse.ArgumentParser(
        prog=CONSOLE_SCRIPT,
        description="Reinforcement learning of language models on Megatron-Core and vLLM.",
        epilog="megatron-rl COMMAND --help shows a command's arguments.",
    )
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)

    # Import only the module of the called command: others may need packages that are not installed.
    positional_arguments = [argument for argument in command_line if not argument.startswith("-")]
    command_name = positional_arguments[0] if positional_arguments else None
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

    ``arguments`` is the command line without the program; None reads it from ``sys.argv``.
    """
    if arguments is None:
        arguments = sys.argv[1:]
        # A console script starts with its own folder as sys.path[0]. Use the working directory, as
        # `python -m` does: a configuration may name modules there.
        if Path(sys.argv[0]).name == CONSOLE_SCRIPT:
            sys.path[0] = os.getcwd()
    try:
        options = parse_command_line(list(arguments))

        # Let this process and its children connect to servers on this machine without a proxy.
        os.environ.update(no_proxy_variables(os.environ))
        module, _ = COMMANDS[options.command]
        return int(import_module(module).run(options))

    except UserError as error:
        report_errors(error)
        return EXIT_BAD_INPUT

    except ModuleNotFoundError as error:
        # A missing module of this package is a bug. Any other missing module is a package to install.
        package = (error.name or "megatron_rl").partition(".")[0]
        if package == "megatron_rl":
            raise
        report_errors(_missing_package_error(package))
        return EXIT_BAD_INPUT

    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return EXIT_INTERRUPTED
    except BrokenPipeError:
        # The reader of the pipe has exited, as in `check ... | head`. Close stderr, since Python would report
        # the error again at exit.
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
    """Return the error for a package that a command imports and that is not installed."""
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
    """Add the unparsed ``key=value`` arguments to the overrides; exit with status 2 for other arguments.

    argparse leaves positional arguments after an option unparsed.
    """
    overrides = [argument for argument in unparsed if "=" in argument and not argument.startswith("-")]
    unrecognized = [argument for argument in unparsed if argument not in overrides]

    # Commands without a configuration have no overrides.
    if unrecognized or (overrides and not hasattr(arguments, "overrides")):
        parser.error(f"unrecognized arguments: {' '.join(unrecognized or overrides)}")
    if overrides:
        arguments.overrides = [*arguments.overrides, *overrides]
