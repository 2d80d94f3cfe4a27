"""The command `path-backend`, also `python -m path_backend.integration`."""

import argparse
import difflib
import importlib
import importlib.metadata
import os
import sys
from collections.abc import Sequence
from typing import NoReturn

COMMANDS = {  # name: (module of integration/commands, what it does)
    "evaluate": ("evaluate", "evaluate a checkpoint: errors on a task, perplexity over the length"),
    "convert": ("convert", "make the starting checkpoint of a PaTH job from its base model's"),
    "experiments": ("experiments", "train and evaluate a list of jobs on the GPUs of this machine"),
    "report": ("report", "tables and pictures of the experiments' results"),
    "fla": ("fla_checkpoint", "export to and import from flash-linear-attention's checkpoints"),
}
TRACEBACK = "PATH_BACKEND_TRACEBACK"


def main(arguments: Sequence[str] | None = None) -> None:
    """Runs the command that the first argument names with the others.

    An error of the user (a value, a file, a module that is not installed) is one line and exit
    status 2, Ctrl-C one line and 130; the environment variable PATH_BACKEND_TRACEBACK=1 shows where
    an error was raised.
    """
    parser = argparse.ArgumentParser(
        prog="path-backend",
        usage="path-backend [-h] [--version] COMMAND [arguments]",
        description="\n".join(f"  {name:12} {text}" for name, (_, text) in COMMANDS.items()),
        epilog="path-backend COMMAND --help lists the arguments of a command.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=f"path-backend {_version()}")
    parser.add_argument("command", metavar="COMMAND", help="one of the above")
    given = list(sys.argv[1:] if arguments is None else arguments)
    if not given:
        parser.print_help(sys.stderr)
        sys.exit(2)
    options = parser.parse_args(given[:1])
    if options.command not in COMMANDS:
        near = difflib.get_close_matches(options.command, COMMANDS, n=1)
        hint = f" (did you mean {near[0]!r}?)" if near else ""
        _fail(f"COMMAND must be one of {', '.join(COMMANDS)}, got {options.command!r}{hint}")
    module, _ = COMMANDS[options.command]
    try:
        importlib.import_module(f"path_backend.integration.commands.{module}").main(given[1:])
    except (ValueError, OSError, ModuleNotFoundError) as error:
        if os.environ.get(TRACEBACK, "0") != "0":
            raise
        _fail(" ".join(str(error).split()) or type(error).__name__)
    except KeyboardInterrupt:
        print("path-backend: interrupted", file=sys.stderr)
        sys.exit(130)  # 128 + SIGINT, as a shell reports it


def _fail(message: str) -> NoReturn:
    print(f"path-backend: error: {message}", file=sys.stderr)
    sys.exit(2)


def _version() -> str:
    try:
        return importlib.metadata.version("path-backend")
    except importlib.metadata.PackageNotFoundError:  # a checkout on PYTHONPATH
        return "unknown (not installed)"


if __name__ == "__main__":
    main()
