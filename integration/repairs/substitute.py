"""Another function under a name that code of torchtitan looks up, for the time of a call."""

import contextlib
from collections.abc import Iterator
from typing import Any


@contextlib.contextmanager
def substituted(namespace: dict[str, Any], name: str, ours: Any) -> Iterator[None]:
    """Context in which `name` of a module's namespace is `ours`."""
    theirs = namespace[name]
    namespace[name] = ours
    try:
        yield
    finally:
        namespace[name] = theirs
