"""A worker extension that replays sparse prefill from recorded queries and keys.

Written from the paper's appendix D.10 and docs/methods.md alone, as `OmniKVRecorder` is.
"""

from collections import defaultdict
from itertools import pairwise

import torch

from tests.support.omnikv_recorder import ROUNDING, OmniKVRecorder


class TokenChunkRecorder(OmniKVRecorder):
    """Mixed into the worker by vLLM (``worker_extension_cls``)."""

    _replayed = ()

    def start_recording_chunks(self, filters, replayed, parts, chunk):
        """Replay the steps to come, as far as prompts are concerned.

        Args:
            filters: The layers that select.
            replayed: Those of the layers that follow that are replayed.
            parts: Tokens of sink, of the window before a chunk, and selected.
            chunk: Tokens of a chunk.
        """
        self._replayed, self._parts, self._chunk = replayed, parts, chunk
        self._asked: dict[int, torch.Tensor] = {}  # all queries of the step, by filter
        self.start_recording(filters, "last")

    def _record(self, number, impl):
        super()._record(number, impl)
        forward = impl.forward

        def recorded_forward(layer, query, key, value, kv_cache, metadata, output, **rest):
            result = forward(layer, query, key, value, kv_cache, metadata, output, **rest)
            if metadata is None:
                return result
            if number in self._filters:
                self._asked[number] = query.float().clone()
            elif number in self._replayed:
                self._check_prompts(number, impl, query.float(), output.float(), metadata)
            return result

        impl.forward = recorded_forward

    def _check_prompts(self, number, impl, query, output, metadata):
        """Hold every prompt of a step against the paper."""
        starts, size = metadata.query_start_loc.tolist(), self.retrieval_config.page_size
        picked = self._picked(impl, metadata)
        for r, length in enumerate(metadata.seq_lens.tolist()):
            first, last = starts[r : r + 2]
            if last - first < 2:
                continue
            request = self.requests.notes[self.requests.batch[r]]
            options = request.extra_args["kv_retrieval"]
            position = torch.arange(length)
            pages = metadata.block_table[r].long()
            slots = pages[position // size] * size + position % size
            whole = options.get("exact") or options.get("method", "omnikv") != "omnikv"
            for begin, end in self._divide(length - (last - first), length):
                tokens = slice(first + begin - (length - (last - first)), last - (length - end))
                sparse = not whole and begin // self._chunk * self._chunk > sum(self._parts)
                kept = torch.arange(begin)
                if sparse:
                    kept = self._check_choice(number, slots, begin, end, tokens, picked)
                expected = self._attend(number, impl, query[tokens], slots, kept, begin, end)
                error = float((output[tokens].view_as(expected) - expected).abs().max())
                self._summary["worst_error"] = max(self._summary["worst_error"], error)
                self._summary["sparse" if sparse else "exact"] += 1
        self._summary["left"] += len(picked)

    def _divide(self, begin, end):
        """Chunks of the tokens from ``begin`` to ``end``."""
        borders = [border for border in range(0, end, self._chunk) if border > begin]
        return pairwise([begin, *borders, end])

    def _picked(self, impl, metadata):
        """The slots that the implementation has listed, by the first and last slot of a chunk."""
        heads, size, found = impl.num_kv_heads, self.retrieval_config.page_size, {}
        for part in metadata.split.prefill if metadata.split is not None else []:
            if part.chunks is None:
                continue
            lists, new = part.chunks.lists, part.starts.diff().tolist()
            for row, count in enumerate(new):
                of_heads = lists.entries[row * heads : (row + 1) * heads].long()
                tokens = of_heads[:, : int(lists.lengths[row * heads])]
                slots = tokens // size // heads * size + tokens % size
                assert (tokens // size % heads == torch.arange(heads)[:, None]).all()
                assert (slots == slots[0]).all(), "a set for all heads"
                if bool(part.chunks.rows.select[row]):
                    found[int(slots[0, -count]), int(slots[0, -1])] = slots[0]
        return found

    def _check_choice(self, number, slots, begin, end, tokens, picked):
        """Positions before a chunk that it attends to, after comparing them with the best."""
        layer = max(f for f in self._filters if f < number)
        last = self._asked[layer][tokens][-16:]
        keys = self._written[layer][0, slots[:end]].transpose(0, 1).double()
        total = torch.zeros(end, dtype=torch.float64)
        for back, query in enumerate(last.flip(0)):
            context = end - back
            q = query.view(len(keys), -1, keys.shape[-1]).double()
            scores = torch.einsum("hgd,htd->hgt", q, keys[:, :context]) * keys.shape[-1] ** -0.5
            total[:context] += scores.softmax(-1).amax((0, 1))
        sink, window, select = self._parts
        until = begin - window
        best = set((total[sink:until].argsort(descending=True)[:select] + sink).tolist())
        place = {slot: j for j, slot in enumerate(slots[:end].tolist())}
        listed = [place[s] for s in picked.pop((int(slots[begin]), int(slots[end - 1]))).tolist()]
        chosen = set(listed[: -(end - begin)])
        fixed = {*range(sink), *range(until, begin)}
        least = total[list(best)].min() * (1 - ROUNDING)
        near = all(total[t] >= least for t in chosen - fixed - best)
        right = listed == sorted(listed) and fixed <= chosen and len(chosen) == sum(self._parts)
        self._summary["differ"] += not (near and right)
        self._summary["near_ties"] += len(chosen - fixed - best)
        self._summary["selected"] += select
        return torch.tensor(sorted(chosen))

    def _attend(self, number, impl, query, slots, kept, begin, end):
        """The output of a chunk's tokens, which attend to the tokens kept before it and to each
        other."""
        places = torch.cat([kept, torch.arange(begin, end)])
        keys, values = self._written[number][:, slots[places]].transpose(1, 2)
        q = query.view(end - begin, len(keys), -1, impl.head_size)
        scores = torch.einsum("nhgd,htd->nhgt", q, keys) * impl.head_size**-0.5
        later = places > torch.arange(begin, end)[:, None]
        scores.masked_fill_(later[:, None, None], float("-inf"))
        return torch.einsum("nhgt,htd->nhgd", scores.softmax(-1), values)

    def _check(self, step):
        """Check nothing: decode steps are not replayed here."""

    def recording_of_chunks(self):
        """A summary; the end of the replay."""
        self._replayed = ()
        return defaultdict(float, self._summary)
