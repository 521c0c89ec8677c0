"""The subcommands: one file each, with a function whose parameters are the options."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Any

import typer

from ..errors import ToolError
from ..version import version
from . import bandwidth, plan, profile, simulate, topo, train

COMMANDS: dict[str, Callable[..., int]] = {
    "bandwidth": bandwidth.command,
    "plan": plan.command,
    "profile": profile.command,
    "simulate": simulate.command,
    "topo": topo.command,
    "train": train.command,
}


def invoke(arguments: list[str]) -> int:
    """Run the subcommand that `arguments` name.

    Returns
    -------
    int
        The exit status.

    Raises
    ------
    ToolError
        The arguments are not understood.
    """
    root = typer.main.get_command(_application())
    # The exceptions of the command-line parser, wherever this version of typer has them from.
    usage_error: Any = next(base for base in typer.BadParameter.__mro__ if base.__name__ == "ClickException")
    try:
        with root.make_context("memferry", arguments) as context:
            return int(root.invoke(context) or 0)
    except typer.Exit as finished:
        return finished.exit_code
    except usage_error as error:
        named = f"memferry {arguments[0]}" if arguments and arguments[0] in COMMANDS else "memferry"
        where = getattr(getattr(error, "ctx", None), "command_path", named)
        raise ToolError(f"{error.format_message().rstrip('.')}; see {where} --help") from None


def _application() -> typer.Typer:
    application = typer.Typer(add_completion=False, context_settings={"help_option_names": ["-h", "--help"]})
    application.callback(invoke_without_command=True)(_memferry)
    for name, command in COMMANDS.items():
        application.command(name)(command)
    return application


def _show_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"memferry {version()}")
        raise typer.Exit


def _memferry(
    context: typer.Context,
    show_version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Show the version and exit.")
    ] = False,
) -> None:
    """Train models that do not fit in accelerator memory."""
    if context.invoked_subcommand is None:
        typer.echo(context.get_help())
        raise typer.Exit
