"""Kernels in an engine of support/device_engine.py, held against their specification at every step.

Its records of keys need not be the specification's, so neither need answers be those of the CPU's
kernels. What is selected by these records has to be, and they have to be as good.
"""

from copy import deepcopy
from typing import Any

import torch

from tests.spec import device as reference
from vllm_kvretrieval.kernels import triton as kernels
from vllm_kvretrieval.retrieval.index import pack, unpack

_checked: Any = None


class Checked:
    """The ops.

    Attributes:
        selections: How many there have been, of rows of all layers.
        lists: How many rows' lists of kept tokens there have been, likewise.
        dropped: How many KV heads have kept a new token, and perhaps dropped others.
        errors: Mean squares of those of scores, by records of the kernels and of the specification.
    """

    def __init__(self):
        self.selections, self.lists, self.dropped, self.errors = 0, 0, 0, []

    def __getattr__(self, name):
        return getattr(kernels, name)

    def plan_decode(self, query, rows, requests, choosers, plan):
        expected_requests, expected, expected_plan = deepcopy((requests, choosers, plan))
        kernels.plan_decode(query, rows, requests, choosers, plan)
        reference.plan_decode(query, rows, expected_requests, expected, expected_plan)
        heads, page = choosers[0].store.kv_heads, choosers[0].store.page_size
        lengths = plan.lengths[: len(rows) * heads]
        assert torch.equal(lengths, expected_plan.lengths[: len(lengths)])
        for pair, length in enumerate(lengths.tolist()):
            listed = -(-max(length, 0) // page)
            assert torch.equal(plan.lists[pair, :listed], expected_plan.lists[pair, :listed])
        for row, chooser in enumerate(rows.choosers.tolist()):
            if chooser >= 0:
                seat = int(rows.seats[row])
                chosen = (c[chooser].selection.chosen[seat] for c in (choosers, expected))
                assert torch.equal(*chosen)
                self.selections += 1
        assert torch.equal(requests.corrected, expected_requests.corrected)

    def list_kept(self, rows, requests, numbers, others, selection, page_size, plan, **options):
        given, expected = (rows, requests, numbers, others, selection, page_size), deepcopy(plan)
        kernels.list_kept(*given, plan, **options)
        reference.list_kept(*given, expected, **options)
        lengths = plan.lengths[: len(rows) * selection.chosen.shape[1]]
        assert torch.equal(lengths, expected.lengths[: len(lengths)])
        for pair, length in enumerate(lengths.tolist()):
            listed = max(length, 0)
            assert torch.equal(plan.lists[pair, :listed], expected.lists[pair, :listed])
        self.lists += int((lengths >= 0).sum())

    def drop_tokens(self, scores, lse, rows, number, kept, rule, received=None):
        expected = deepcopy(kept)
        kernels.drop_tokens(scores, lse, rows, number, kept, rule, received=received)
        reference.drop_tokens(scores, lse, rows, number, expected, rule, received=received)
        assert torch.equal(kept.counts, expected.counts)
        for seat in rows.seats[rows.choosers == number].tolist():
            for head, count in enumerate(kept.counts[seat].tolist()):
                here = seat, head, slice(count)
                assert torch.equal(kept.chosen[here], expected.chosen[here])
                torch.testing.assert_close(kept.ratings[here], expected.ratings[here])
                self.dropped += 1

    def select_ahead(self, rows, requests, number, chooser, room):
        expected = deepcopy(chooser)
        kernels.select_ahead(rows, requests, number, chooser, room)
        reference.select_ahead(rows, requests, number, expected, room)
        assert torch.equal(chooser.selection.chosen, expected.selection.chosen)

    def write_kv(self, key, value, slot_mapping, cache, indexes, *, drafted=False):
        kernels.write_kv(key, value, slot_mapping, cache, indexes, drafted=drafted)
        written = slot_mapping[slot_mapping >= 0]
        for store in indexes:
            size = store.entry_tokens
            entries = written[written % size == size - 1] // size
            if not store.index.grows and len(entries):
                self._compare(entries, cache, store)

    def _compare(self, entries, cache, store):
        """How well records of whole pages score."""
        assert store.parts == 1
        layout = store.index.fields(store.head_size, store.entry_tokens)
        keys = cache[entries, ..., : store.head_size].float().flatten(0, 1)
        ours = store.records[entries].flatten(0, 1)
        theirs = pack(layout, store.index.build(keys), store.dtype, store.alignment)
        query, scale = keys[:4, 0], store.head_size**-0.5
        exact = (torch.einsum("gd,ntd->gnt", query, keys) * scale).logsumexp(-1)
        self.errors.append(
            [
                float((store.index.score(query, record, scale) - exact).square().mean())
                for record in (
                    unpack(layout, r, store.dtype, store.alignment) for r in (ours, theirs)
                )
            ]
        )


def install():
    """Install it in the engine that this process will open."""
    from tests.support import device_worker

    global _checked
    device_worker.DeviceRunner.ops = _checked = Checked()


def selections():
    """How many were checked."""
    return _checked.selections


def lists():
    """How many lists of kept tokens were checked."""
    return _checked.lists


def dropped():
    """How many KV heads' steps of methods that drop tokens were checked."""
    return _checked.dropped


def seen():
    """How many selections were checked, and errors of scores: the kernels', the specification's."""
    ours, theirs = torch.tensor(_checked.errors).mean(0).tolist()
    return _checked.selections, ours, theirs
