"""k8v4: 8-bit keys, per channel of a page, and 4-bit values, per token."""

from vllm_kvretrieval.retrieval.codec.quantised import Quantised
from vllm_kvretrieval.retrieval.codec.rows import AroundZero, Centred


class K8V4(Quantised):
    """See :class:`Quantised`."""

    name = "k8v4"
    meaning = "8-bit keys, 4-bit values"
    keys = Centred(8)
    values = AroundZero(4)
