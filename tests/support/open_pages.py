"""An encoded home of a layer, for tests of recall caches."""

import tempfile

import torch

from tests.support.recall_life import HEAD_SIZE, PAGE, UNITS
from vllm_kvretrieval.storage.encoded import EncodedHome


class OpenPages:
    """The places of the open pages of a layer with an encoded home, and the file of the other
    pages."""

    def __init__(self, codec):
        shape = (UNITS, 1, 2 * PAGE, HEAD_SIZE)
        encoded = codec.unit_bytes(PAGE, HEAD_SIZE, torch.float32)
        self.codec = codec
        self.home = EncodedHome(
            tempfile.gettempdir(), 2, 4 * torch.Size(shape).numel(), UNITS * encoded
        )
        self.units = self.home.memory.chunk(2)[1].view(torch.float32).view(shape)
        self.place = self.home.fd, self.home.begin(1)
