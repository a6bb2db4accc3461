"""Which layers of a model can select for those after them (OmniKV, sections 3 and 5.3)."""
