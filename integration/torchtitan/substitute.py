"""`substituted` puts another function under a name that torchtitan looks up, during a call."""

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
