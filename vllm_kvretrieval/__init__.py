"""Long-context serving by KV-cache retrieval: a plug-in for vLLM.

Importing this package imports nothing else: vLLM loads its plug-ins in every process.
"""

__version__ = "0.1.0"
