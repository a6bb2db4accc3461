"""Methods that keep tokens in a GPU's engine with two workers, emulated: what tokens get of the
attention is added up over both, in prompts and, with ``tova``, in steps.

Requests and expected answers are those of ``tests/device/test_device_dropping.py``.
"""

import pytest

from tests.device.test_device_dropping import OURS, REQUESTS, expected, model  # noqa: F401
from tests.device.test_device_engine import EMULATED, TOLERANCE, Served
from tests.support import device_engine
from tests.support.engine import assert_same

pytestmark = [pytest.mark.engine, pytest.mark.cores, pytest.mark.slow]


@pytest.fixture(scope="module")
def served(model):  # noqa: F811
    with device_engine.start() as pool:
        served = Served(pool)
        size = {"tensor_parallel_size": 2, "kv_cache_memory_bytes": 1 << 21}
        served.open_engine(model, EMULATED | OURS | size)
        yield served
        served.close_engine()


ROUNDING = 2 * TOLERANCE
"""Each worker rounds its part of a layer's result to float16."""


@pytest.mark.parametrize("name", ["tova", "entropies", "h2o"])
def test_answers_are_those_of_one_worker(served, expected, name):  # noqa: F811
    assert_same(served.drive([REQUESTS[name]])[0], expected[name][0], ROUNDING)


def test_a_crowd(served, expected):  # noqa: F811
    """Rows of other methods are beside those whose attention is added up."""
    names = ["tova", "h2o", "exact"]
    for answer, name in zip(served.drive([REQUESTS[n] for n in names]), names, strict=True):
        assert_same(answer, expected[name][0], ROUNDING)
