"""A paper in 60 lines: a rule of one's own, served by vLLM and measured beside the published ones.

The claim. Pages that were chosen often are chosen again. So each page has a credit, which grows
when the page is chosen and fades with each step; it is added to the page's highest q.k. A page that
many queries needed is then kept over a few queries that look elsewhere.

    pip install -e examples/credit
    python -m benchmarks.quality ruler --variants credit credit_off quest --apart --table t.tex
    vllm-kvretrieval explain MODEL TEXT --method credit --html credit.html
    vllm serve MODEL --attention-backend credit --kv-retrieval.index '{"credit": {"worth": 0.5}}'
"""

from dataclasses import dataclass
from typing import ClassVar

import torch

from vllm_kvretrieval.extend import Preset, Rule, RuleState


@dataclass(frozen=True)
class Credit(Rule):
    """Pages by their highest q.k, and by how often they were chosen before.

    Attributes:
        worth: What a page's credit adds to its score, in units of q.k; 0: nothing.
        fades: The share of a credit that is left after a step.
    """

    worth: float = 0.5
    fades: float = 0.8
    name: ClassVar[str] = "credit"

    def select(
        self, query: torch.Tensor, record: dict[str, torch.Tensor], state: RuleState
    ) -> torch.Tensor:
        """See :meth:`Rule.select`."""
        scores = (record["keys"] @ query.T * state.scale).amax((1, 2))
        credit = torch.zeros(len(scores))
        if (before := state.memory.get("credit")) is not None:
            credit[: len(before)] = before * self.fades
        best = (scores + self.worth * credit)[state.first : state.last].topk(state.count).indices
        best += state.first
        credit[best] += 1
        state.memory["credit"] = credit
        return best


CREDIT = Preset("pages by their highest q.k, and by how often they were chosen", index="credit")
CREDIT_OFF = Preset("the same without credit: the ablation", index={"credit": {"worth": 0.0}})
