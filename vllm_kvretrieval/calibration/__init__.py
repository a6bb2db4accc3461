"""What is measured of a model: which layers can select for those after them (OmniKV, sections 3 and
5.3), and which KV heads look back for what they need (RazorAttention, section 3)."""
