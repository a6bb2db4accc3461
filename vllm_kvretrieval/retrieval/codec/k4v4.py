"""k4v4: 4-bit keys, per channel of a page, and 4-bit values, per token."""

from vllm_kvretrieval.retrieval.codec.quantised import Quantised
from vllm_kvretrieval.retrieval.codec.rows import AroundZero, FromLowest


class K4V4(Quantised):
    """See :class:`Quantised`."""

    name = "k4v4"
    meaning = "4-bit keys, 4-bit values"
    keys = FromLowest(4)
    values = AroundZero(4)
