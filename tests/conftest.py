"""Which instruction sets of the kernels a run has tested: the fixture, and a line at its end."""

import pytest

ISAS = ("avx512_bf16", "avx512", "avx2", "portable")
tested: set[str] = set()
absent: set[str] = set()  # compiled in, but this machine does not run it
missing: set[str] = set()  # not compiled in


@pytest.fixture(params=ISAS)
def isa(request):
    """Runs a test once per instruction set of the kernels, with this one in use."""
    from vllm_kvretrieval.kernels import cpu

    name, best = request.param, cpu.isa()
    if name not in cpu.isas():
        missing.add(name)
        pytest.skip(f"{name} is not compiled in")
    try:
        cpu.use_isa(name)
    except ValueError:
        absent.add(name)
        pytest.skip(f"this machine does not run {name}")
    tested.add(name)
    yield name
    cpu.use_isa(best)


def pytest_terminal_summary(terminalreporter):
    """A green run has proved no more than what it says here."""
    others = set(ISAS) - tested - absent - missing
    parts = [f"kernels tested: {_listed(tested)}", f"not on this machine: {_listed(absent)}"]
    parts += [f"not compiled in: {_listed(missing)}"] if missing else []
    parts += [f"not in this run: {_listed(others)}"] if others else []
    terminalreporter.write_line("; ".join(parts))


def _listed(names):
    return ", ".join(name for name in ISAS if name in names) or "none"
