"""What other packages build on: indexes, rules and presets of their own.

``docs/extending.md`` shows a package. Names that this module does not have may change without
notice.
"""

from vllm_kvretrieval.retrieval.index.base import Field, Index
from vllm_kvretrieval.retrieval.index.rule import Rule, RuleState
from vllm_kvretrieval.retrieval.keeping import Keeping
from vllm_kvretrieval.retrieval.presets import Preset

__all__ = ["Field", "Index", "Keeping", "Preset", "Rule", "RuleState"]
