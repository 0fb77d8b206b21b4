"""The ``stoker`` command: start and look at clusters, submit jobs, and ask why something waits.

Commands live in one module each and are imported only when called for, as are rich and the HTTP
client, so that ``--help`` and shell completion answer at once. It speaks the public HTTP API alone;
what it can do, curl can do. Errors are one line on stderr with the fix: exit code 1, or 2 for usage.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any, NoReturn

import click

from stoker_wire.errors import StokerError
from stoker_wire.nearest import suggestion

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ("main", "root")

INTERRUPTED = 130

# name -> (module, attribute, the help's line). The line is here so that help imports no module.
_COMMANDS = {
    "start": ("cluster", "start", "Start a cluster on this machine, or join one."),
    "stop": ("cluster", "stop", "Stop what `stoker start` started on this machine."),
    "status": ("status", "status", "Show nodes, resources in use, jobs, and what waits and why."),
    "job": ("job", "job", "Submit, list, follow and stop jobs."),
    "list": (
        "lists",
        "list_group",
        "List nodes, jobs, tasks, actors, objects, leases, workers, events.",
    ),
    "get": ("lists", "get", "Show everything known of one node, job, task or actor."),
    "explain": ("explain", "explain", "Say why a task, actor or job waits, or what became of it."),
    "logs": ("logs", "logs", "Show the output of a job, task, actor or worker."),
    "kernels": ("kernels", "kernels", "Tune the training kernels to the GPUs, compile them ahead."),
    "config": ("about", "config", "Show every setting, its value and where that comes from."),
    "version": ("about", "version", "Show the version and the protocol."),
}


class Lazy(click.Group):
    """A group whose commands are imported when called, with nearest names for unknown ones."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(_COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in _COMMANDS:
            return None
        import importlib

        module, attribute, _ = _COMMANDS[cmd_name]
        command = getattr(importlib.import_module(f"{__name__}.{module}"), attribute)
        assert isinstance(command, click.Command)
        return command

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        if args and args[0] not in _COMMANDS and not args[0].startswith("-"):
            raise click.UsageError(f"no command {args[0]!r}{suggestion(args[0], _COMMANDS)}")
        return super().resolve_command(ctx, args)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([(name, line) for name, (_, _, line) in _COMMANDS.items()])

    def main(
        self,
        args: Sequence[str] | None = None,
        prog_name: str | None = None,
        complete_var: str | None = None,
        standalone_mode: bool = True,
        **extra: Any,
    ) -> Any:
        """Run; with ``standalone_mode`` (a shell's call) errors become a line and an exit code."""
        try:
            code = super().main(args, prog_name, complete_var, standalone_mode=False, **extra)
        except (click.ClickException, StokerError, click.Abort) as error:
            if not standalone_mode:
                raise
            _leave_with(error)
        if not standalone_mode:
            return code
        sys.exit(code if isinstance(code, int) else 0)


def _leave_with(error: Exception) -> NoReturn:
    if isinstance(error, click.Abort):
        sys.exit(INTERRUPTED)
    if isinstance(error, StokerError):
        _fail(str(error) or error.code, 1)
    assert isinstance(error, click.ClickException)
    message = error.format_message()
    message = message.replace(". Did you mean", "; did you mean").rstrip(".")
    if isinstance(error, click.UsageError) and error.ctx is not None:
        link = " See:" if message.endswith("?") else "; see:"
        message = f"{message}{link} {error.ctx.command_path} --help"
    _fail(message, error.exit_code)


def _fail(message: str, code: int) -> NoReturn:
    message = message[:1].lower() + message[1:] if message[1:2].islower() else message
    click.echo(f"{click.style('error:', fg='red', bold=True)} {message}", err=True)
    sys.exit(code)


def _tell_version(ctx: click.Context) -> None:
    from stoker.cli.about import version

    ctx.invoke(version, as_json=False)
    ctx.exit()


@click.group(
    cls=Lazy,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
    epilog='Completion: eval "$(_STOKER_COMPLETE=bash_source stoker)"  (zsh_source, fish_source)',
)
@click.option(
    "--version",
    is_flag=True,
    is_eager=True,
    expose_value=False,
    callback=lambda ctx, _, asked: _tell_version(ctx) if asked else None,
    help="Show the version and exit.",
)
def root() -> None:
    """Stoker keeps GPUs fed: a cluster scheduler for Python."""


def main() -> None:
    """Run the command line of this process."""
    root(prog_name="stoker")


if __name__ == "__main__":
    main()
