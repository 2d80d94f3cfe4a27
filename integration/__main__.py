"""The command `path-backend`, also `python -m path_backend.integration`."""

import importlib
import sys

COMMANDS = {
    "evaluate": "evaluate a checkpoint: errors on a task, perplexity over the length",
    "experiments": "train and evaluate a list of jobs on the GPUs of this machine",
    "report": "tables and pictures of the experiments' results",
}


def main() -> None:
    if len(sys.argv) < 2 or sys.argv[1] not in COMMANDS:
        usage = "\n".join(f"  {name:12} {text}" for name, text in COMMANDS.items())
        asked_for_help = sys.argv[1:2] in (["-h"], ["--help"])
        message = f"usage: path-backend COMMAND [arguments], COMMAND one of\n{usage}"
        if asked_for_help:
            print(message)
            return
        sys.exit(message)
    module = importlib.import_module(f"path_backend.integration.commands.{sys.argv[1]}")
    module.main(sys.argv[2:])


if __name__ == "__main__":
    main()
