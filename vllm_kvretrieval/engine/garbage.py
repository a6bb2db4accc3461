"""Python's search for garbage, put off while it would find none."""

import contextlib
import gc
from collections.abc import Iterator


@contextlib.contextmanager
def without_collection() -> Iterator[None]:
    """Meanwhile Python looks for no garbage: many objects are made then, which all stay.

    They would have it look through all objects of the engine, which takes longer than making them.
    """
    was = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was:
            gc.enable()
