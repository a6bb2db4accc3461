"""Where the KV of a model's layers is: one file per kind of storage, all behind one protocol.

Attention asks a layer's storage for what it is about to read, and knows no more of it. A new
kind is a file here with a :class:`~vllm_kvretrieval.storage.base.Storage` and its
:class:`~vllm_kvretrieval.storage.base.LayerStorage`.
"""
