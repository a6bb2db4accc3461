"""vLLM's drafter of its V2 model runner, or in its place one whose drafts a test decides on."""

import torch
from vllm.v1.worker.gpu.spec_decode.ngram.speculator import NgramGPUSpeculator

from tests.support.drafter import Scripted


class DeviceDrafter(NgramGPUSpeculator):
    """It drafts as vLLM's, until it is told a text.

    Attributes:
        scripted: What drafts then, always as many tokens as there may be.
    """

    def __init__(self, vllm_config, device, req_states):
        super().__init__(vllm_config, device, req_states)
        self.scripted = Scripted(vllm_config)
        self.scripted.least = self.scripted.most

    def propose(self, input_batch, *args, dummy_run=False, **options):
        if dummy_run or not self.scripted.texts:
            return super().propose(input_batch, *args, dummy_run=dummy_run, **options)
        states, seats = self.req_states, input_batch.idx_mapping
        sampled = [[0] * int(count) for count in args[4]]
        lengths, contexts = (
            of[seats].numpy() for of in (states.total_len.gpu, states.all_token_ids.gpu)
        )
        drafts = self.scripted.propose(sampled, lengths, contexts)
        nothing = [0] * self.scripted.most
        return torch.tensor([row or nothing for row in drafts])


def init(vllm_config, device, req_states):
    """In place of vLLM's ``init_speculator``."""
    return DeviceDrafter(vllm_config, device, req_states)
