"""k2v2: 2-bit keys, per channel of a page, and 2-bit values, per token."""

from vllm_kvretrieval.retrieval.codec.quantised import Quantised
from vllm_kvretrieval.retrieval.codec.rows import AroundZero, FromLowest


class K2V2(Quantised):
    """See :class:`Quantised`."""

    name = "k2v2"
    meaning = "2-bit keys, 2-bit values"
    keys = FromLowest(2)
    values = AroundZero(2)
