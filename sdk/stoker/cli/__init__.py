"""The ``stoker`` command: start and look at clusters, submit jobs, and ask why something waits.

Commands live in one module each and are imported only when called for, as are rich and the HTTP
client, so that ``--help`` and shell completion answer at once. It speaks the public HTTP API alone;
what it can do, curl can do. Errors are one line on stderr with the fix: exit code 1, or 2 for usage;
with ``--json`` that line is an object with ``code``, ``message`` and ``exit_code``. On a terminal a
second line names the page of the code (``stoker docs``).
"""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING, Any, NoReturn

import click

from stoker_wire.errors import StokerError
from stoker_wire.suggestions import suggestion

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

__all__ = ("main", "root")

INTERRUPTED = 130

# name -> (module, attribute, the help's line). The line is here so that help imports no module.
_COMMANDS = {
    "start": ("local.cluster", "start", "Start a cluster on this machine, or join one."),
    "stop": ("local.cluster", "stop", "Stop what `stoker start` started on this machine."),
    "status": (
        "views.status",
        "status",
        "Show nodes, resources in use, jobs, and what waits and why.",
    ),
    "top": ("views.top", "top", "Show what runs and what is used, live, on the whole terminal."),
    "job": ("job", "job", "Submit, list, follow and stop jobs."),
    "launch": (
        "calls.launch",
        "launch",
        "Run a torchrun script on the cluster, with as many nodes as there are.",
    ),
    "call": ("calls.call", "call", "Call a registered function, or a method of an actor."),
    "cancel": ("calls.call", "cancel", "Cancel a call."),
    "kill": ("calls.call", "kill", "End an actor at once."),
    "object": ("calls.objects", "object_group", "Put, get and free values by reference."),
    "schedule": ("scheduling.schedules", "schedule", "Submit jobs at the times of a cron line."),
    "list": (
        "lists",
        "list_group",
        "List nodes, jobs, tasks, actors, groups, objects, leases, workers, events.",
    ),
    "get": ("lists", "get", "Show everything known of one node, job, task, actor or group."),
    "explain": (
        "scheduling.explain",
        "explain",
        "Say why a task, actor, job or placement group waits, and how a queue stands.",
    ),
    "story": (
        "history.story",
        "story",
        "Tell what happened to a task, actor, node or job, and why, in order.",
    ),
    "plan": (
        "scheduling.plan",
        "plan",
        "Say where work would go, and whom it would preempt, without starting it.",
    ),
    "logs": ("processes.logs", "logs", "Show the output of a job, task, actor or worker."),
    "stack": ("processes.profiles", "stack", "Show where running code is, now."),
    "profile": (
        "processes.profiles",
        "profile",
        "Record where time goes in a running process, its memory, or its torch operators.",
    ),
    "placement-group": (
        "scheduling.groups",
        "placement_group",
        "Reserve resources together, and give them back.",
    ),
    "queue": (
        "scheduling.queues",
        "queue",
        "Divide the cluster among tenants: weights, quotas, limits.",
    ),
    "node": ("scheduling.nodes", "node", "Put quarantined GPUs of a node back to use."),
    "simulate": (
        "scheduling.simulate",
        "simulate",
        "Run a trace of jobs on a cluster of your choice.",
    ),
    "summary": (
        "views.summary",
        "summary",
        "Add up tasks by function, actors by class, objects by node and job.",
    ),
    "memory": (
        "views.memory",
        "memory",
        "Show how full shared memory is, and who holds what there.",
    ),
    "train": ("views.training", "train", "Show how training goes, by what it reports."),
    "report": ("views.report", "report", "Write one HTML file about a job, to send on."),
    "dashboard": ("views.dashboard", "dashboard", "Print a link to the dashboard, and open it."),
    "timeline": ("history.timeline", "timeline", "Write what ran where and when, for Perfetto."),
    "backup": (
        "history.backup",
        "backup",
        "Write the gcs's database, of a live cluster, to a file.",
    ),
    "restore": ("history.backup", "restore", "Fill an empty database of the gcs from a backup."),
    "kernels": ("kernels", "kernels", "Tune the training kernels to the GPUs, compile them ahead."),
    "token": ("local.token", "token", "Give people tokens of their own, and take them back."),
    "certs": ("local.certs", "certs", "Make certificates for TLS: a CA, and those that it signs."),
    "port": (
        "local.port",
        "port",
        "Say what of programs written for Ray will not work with stoker.ray.",
    ),
    "config": ("local.about", "config", "Show every setting, its value and where that comes from."),
    "docs": ("local.docs", "docs", "Explain an error by its code: meaning, cause, fix, example."),
    "version": ("local.about", "version", "Show the version and the protocol."),
}

# How help groups them; what is in none of these comes last.
_GROUPS = {
    "Clusters": ("start", "stop", "node", "queue", "backup", "restore", "token", "certs"),
    "See what is": ("status", "top", "dashboard", "list", "get", "memory"),
    "See why": ("explain", "story", "stack", "profile", "plan", "simulate", "docs"),
    "See what was": ("summary", "train", "timeline", "report", "logs"),
    "Run": ("job", "launch", "schedule", "call", "cancel", "kill", "object", "placement-group"),
    "Tools": ("kernels", "port", "config", "version"),
}

# Commands of other systems -> the equivalent here.
_ELSEWHERE = {
    "up": "start a cluster with `stoker start --head`, add machines with `stoker start --address`",
    "down": "use `stoker stop`",
    "attach": "use `stoker.init(address=...)` in a program",
    "submit": "use `stoker job submit`",
    "exec": "use `stoker job submit`",
    "htop": "use `stoker top`",
    "ps": "see `stoker list jobs`, `stoker list actors` and `stoker list tasks`",
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
            instead = _ELSEWHERE.get(args[0])
            hint = f": {instead}" if instead else f"; {suggestion(args[0], _COMMANDS)}"
            raise click.UsageError(f"no command {args[0]!r}{hint}")
        return super().resolve_command(ctx, args)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        left = dict(_COMMANDS)
        for title, names in _GROUPS.items():
            with formatter.section(title):
                formatter.write_dl([(name, left.pop(name)[2]) for name in names])
        if left:
            with formatter.section("Others"):
                formatter.write_dl([(name, line) for name, (_, _, line) in left.items()])

    def main(
        self,
        args: Sequence[str] | None = None,
        prog_name: str | None = None,
        complete_var: str | None = None,
        standalone_mode: bool = True,
        **extra: Any,
    ) -> Any:
        """Run a command; with ``standalone_mode`` (a shell's call) an error is a line and an exit code."""
        if "_STOKER_COMPLETE" in os.environ:
            from stoker.cli.completion import register

            register()
        try:
            code = super().main(args, prog_name, complete_var, standalone_mode=False, **extra)
        except (click.ClickException, StokerError, click.Abort) as error:
            if not standalone_mode:
                raise
            _leave_with(error, as_json=_wants_json(sys.argv[1:] if args is None else args))
        if not standalone_mode:
            return code
        sys.exit(code if isinstance(code, int) else 0)


def _wants_json(args: Sequence[str]) -> bool:
    own = args[: args.index("--")] if "--" in args else args
    return "--json" in own


def _leave_with(error: Exception, *, as_json: bool) -> NoReturn:
    if isinstance(error, click.Abort):
        sys.exit(INTERRUPTED)
    if isinstance(error, StokerError):
        facts = {"field": error.field, "explain": error.explain, **error.extra}
        _fail(error.one_line or error.code, 1, error.code, facts, as_json)
    assert isinstance(error, click.ClickException)
    message = error.format_message()
    message = message.replace(". Did you mean", "; did you mean").rstrip(".")
    if isinstance(error, click.UsageError) and error.ctx is not None:
        link = " See:" if message.endswith("?") else "; see:"
        message = f"{message}{link} {error.ctx.command_path} --help"
    code = "usage" if isinstance(error, click.UsageError) else "failed"
    _fail(message, error.exit_code, code, {}, as_json)


def _fail(
    message: str, exit_code: int, code: str, facts: Mapping[str, Any], as_json: bool
) -> NoReturn:
    """Print the error on stderr, where it mixes with no data, and exit."""
    message = message[:1].lower() + message[1:] if message[1:2].islower() else message
    if as_json:
        import msgspec

        known = {name: fact for name, fact in facts.items() if fact is not None}
        problem = {**known, "code": code, "message": message, "exit_code": exit_code}
        click.echo(msgspec.json.encode(problem).decode(), err=True)
    else:
        from stoker.cli.output import echo

        echo(f"{click.style('error:', fg='red', bold=True)} {message}", err=True)
        if exit_code == 1 and code != "failed" and sys.stderr.isatty():
            echo(f"more: stoker docs {code}", err=True)
    sys.exit(exit_code)


def _print_version(ctx: click.Context) -> None:
    from stoker.cli.local.about import version

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
    callback=lambda ctx, _, asked: _print_version(ctx) if asked else None,
    help="Show the version and exit.",
)
def root() -> None:
    """Stoker keeps GPUs fed: a cluster scheduler for Python."""


def main() -> None:
    """Run the command line of this process."""
    root(prog_name="stoker")


if __name__ == "__main__":
    main()
