"""A text whose tokenizer needs no file."""

from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from benchmarks.quality.tasks.base import novel_text
from vllm_kvretrieval.calibration.samples import TokenText


def byte_text() -> TokenText:
    """The novel in a tokenizer that needs no file: one token per byte."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    raw = Tokenizer(models.BPE(vocab={letter: i for i, letter in enumerate(letters)}, merges=[]))
    raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    raw.decoder = decoders.ByteLevel()
    return novel_text(PreTrainedTokenizerFast(tokenizer_object=raw))
