"""Measurements of a model: which layers can select for the layers after them (OmniKV, sections 3
and 5.3), and which KV heads look far back (RazorAttention, section 3)."""
