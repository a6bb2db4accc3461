"""The instruction sets that the kernels are compiled for, and which of them a run has tested."""

from collections.abc import Iterator

ISAS = ("avx512_amx", "avx512_bf16", "avx512", "avx2", "portable")
tested: set[str] = set()
absent: set[str] = set()  # compiled in, but this machine does not run it
missing: set[str] = set()  # not compiled in

_only: str | None = None
_visited: str | None = None


def use(name: str) -> str | None:
    """Use and note an instruction set; where that cannot be, the reason."""
    from vllm_kvretrieval.kernels import cpu

    if name not in cpu.isas():
        missing.add(name)
        return f"{name} is not compiled in"
    try:
        cpu.use_isa(name)
    except ValueError:
        absent.add(name)
        return f"this machine does not run {name}"
    tested.add(name)
    return None


def only(name: str | None) -> None:
    """Let :func:`visited` give this set alone from now on; None: all again."""
    global _only
    _only = name


def visited() -> Iterator[str]:
    """The instruction sets that run here, the best one last, each in use meanwhile.

    In a test that runs once per set (the fixture ``isa``), just that one.
    """
    global _visited
    from vllm_kvretrieval.kernels import cpu

    if _only is not None:
        yield _only
        return
    best = cpu.isa()
    try:
        for name in reversed(ISAS):
            if use(name) is None:
                _visited = name
                yield name
        _visited = None
    finally:
        cpu.use_isa(best)


def failed_in() -> str | None:
    """The set that the last test was visiting when it ended, if it did not finish."""
    global _visited
    name, _visited = _visited, None
    return name
