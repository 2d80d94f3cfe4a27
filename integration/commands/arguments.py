"""Checks of command line arguments."""

import argparse
import sys
from pathlib import Path

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib


def positive_integer(text: str) -> int:
    try:
        value = int(text)
    except ValueError:
        value = 0
    if value < 1:
        raise argparse.ArgumentTypeError(f"must be an integer of at least 1, got {text!r}")
    return value


def check_job_file(name: str, path: Path) -> None:
    """Refuses a TOML file that is missing or malformed, for which torchtitan logs a traceback.

    Raises FileNotFoundError or ValueError, which name the argument and the path.
    """
    if not path.is_file():
        raise FileNotFoundError(f"{name} must be the TOML file of a job, found no file {path}")
    try:
        tomllib.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:  # TOMLDecodeError, UnicodeDecodeError
        raise ValueError(f"{name} must be a TOML file, got {path}: {error}") from error
