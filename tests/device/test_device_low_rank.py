"""``kvretrieval`` in a GPU's engine, emulated: its own index, whose records take the interpreter
long, so its requests are few; see ``support/device_engine.py`` and ``device_specification.py``."""

import pytest

from tests.device.test_device_engine import EMULATED, PAGE, TOLERANCE, Served, prompt
from tests.support import device_engine, device_specification
from tests.support.engine import Request, difference, random_llama

pytestmark = pytest.mark.engine

BUDGET = 80


@pytest.mark.parametrize("home", ["device", pytest.param("host", marks=pytest.mark.slow)])
def test_selections_are_by_records_of_keys(tmp_path, home):
    """Every step selects by records, also replays of graphs, and the records are as good as the
    best."""
    options = {"page_size": PAGE, "sink": PAGE, "window": 2 * PAGE, "budget": BUDGET, "home": home}
    with device_engine.start() as pool:
        pool.submit(device_specification.install).result()
        served = Served(pool)
        served.open_engine(
            random_llama(tmp_path / "model", layers=2, kv_heads=2),
            {
                **EMULATED,
                "attention_backend": "kvretrieval",
                "additional_config": {"kv_retrieval": options},
                "num_gpu_blocks_override": 18,
            },
        )
        sparse, exact = (Request(prompt(140, 3), 6, o) for o in ({}, {"exact": True}))
        answer, other = served.drive([sparse])[0], served.drive([exact])[0]
        assert difference(answer, other) > 10 * TOLERANCE
        assert served.replays() > 8
        selections, ours, theirs = pool.submit(device_specification.seen).result()
        assert selections == sparse.tokens - 1
        assert ours < 1.5 * theirs, "keys of random weights have no few directions"
