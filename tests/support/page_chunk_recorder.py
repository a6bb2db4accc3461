"""A worker extension that replays chunks of prompts from recorded queries, keys and values.

Its rules are those of docs/methods.md: it computes where chunks begin, which queries select, and
which pages are best, without the package's code.
"""

from collections import Counter, defaultdict
from dataclasses import dataclass

import torch

from tests.support.recorder import Oracle, RecordingWorker


@dataclass
class Chunk:
    """One chunk of a prompt in one layer; positions are those of the context.

    Attributes:
        method: The request's.
        layer: The layer's number among those that retrieve.
        begin, end: Its tokens.
        query: [tokens, kv_heads, group, d].
        output: The same of what the layer made of it.
        keys, values: [kv_heads, end, d].
        listed: Per KV head, the pages that it attends to.
        budget: Pages of sink, window before the chunk, and selection; zeros: everything.
    """

    method: str
    layer: int
    begin: int
    end: int
    query: torch.Tensor
    output: torch.Tensor
    keys: torch.Tensor
    values: torch.Tensor
    listed: list[list[int]]
    budget: tuple[int, int, int]


class PageChunkRecorder(RecordingWorker):
    """Mixed into the worker by vLLM (``worker_extension_cls``)."""

    def start_recording_chunks(self, layer_indices, chunk, queries, exact, sampling="spread"):
        """Record the prompts to come.

        Args:
            layer_indices: Counted among retrieval layers.
            chunk: Tokens of a chunk.
            queries: How many queries of a chunk select.
            exact: Tokens at the start of a prompt that attend to everything before them.
            sampling: Which queries of a chunk select.
        """
        self._chunks, self._rule, self._sampling = [], (chunk, queries, exact), sampling
        self.start_recording(layer_indices)

    def _record(self, name, impl):
        super()._record(name, impl)
        attend, tokens = impl._attend_to_prompts, self._written[name]
        number = [*self.retrieval_layers].index(name)

        def attend_to_prompts(layer, query, context, part, output):
            attend(layer, query, context, part, output)
            if part.chunks is not None:
                self._chunks += self._recorded(number, impl, query, part, output, tokens)

        impl._attend_to_prompts = attend_to_prompts

    def _rows(self, name, query, output, plan, chooser, tokens):
        """Rows that decode are not of interest, and their lists in front of a file void."""
        return []

    def _recorded(self, number, impl, query, part, output, tokens):
        late = impl.methods[part.chunks.method].chunks.late
        chunks, heads, size = (
            part.chunks.of_layer(late),
            impl.num_kv_heads,
            self.retrieval_config.page_size,
        )
        rows, starts = chunks.rows, (part.start + chunks.lists.starts).tolist()
        method = list(self.retrieval_config.methods)[chunks.method]
        for r, end in enumerate(rows.seq_lens.tolist()):
            of_step = slice(starts[r], starts[r + 1])
            begin = end - (of_step.stop - of_step.start)
            pages = rows.block_table[r, : -(-end // size)].tolist()
            slots = [pages[t // size] * size + t % size for t in range(end)]
            keys, values = tokens.at(torch.tensor(slots)).permute(1, 2, 0, 3).contiguous()
            laid_out = chunks.places
            places = pages if laid_out is None else laid_out[pages].tolist()
            position = {place: j for j, place in enumerate(places)}
            listed = []
            for head in range(heads):
                seen = int(part.by.seen[r * heads + head]) + of_step.stop - of_step.start - 1
                count = -(-seen // size)
                units = rows.lists[r * heads + head, :count].tolist()
                assert all(unit % heads == head for unit in units), "pages of another head"
                listed.append([position[unit // heads] for unit in units])
            own = len(pages) - begin // size  # the chunk's own pages
            sink, select = int(rows.sink[r]), int(rows.select[r])
            shape = (-1, heads, query.shape[1] // heads, query.shape[2])
            yield Chunk(
                method, number, begin, end, query[of_step].float().view(shape).clone(),
                output[of_step].float().view(shape).clone(), keys, values, listed,
                (sink, int(rows.window[r]) - own if sink else 0, select),
            )  # fmt: skip

    def check_chunks(self, methods, expected, shares):
        """Compare every recorded chunk with the rules.

        Args:
            methods: What the engine's methods are said to be, by name.
            expected: The method, the first token and the budget (sink, window, select, in pages)
                of each chunk that selects, in any order.
            shares: Of the KV heads in what is selected, by the number of the layer; 1 elsewhere.

        Returns:
            A summary: chunks that select, exact ones, chunks of another budget than expected, lists
            that are wrong, by method the lists that rounding decides and the pages selected, and
            the largest error of attention relative to the largest value.
        """
        impl = next(iter(self.retrieval_layers.values()))
        store = impl.choosers[0].store
        length, queries, exact = self._rule
        summary: defaultdict[str, float] = defaultdict(float)
        found = Counter((b.method, b.begin, b.budget) for b in self._chunks if b.begin >= exact)
        missing = Counter((method, begin, tuple(budget)) for method, begin, budget in expected)
        summary["of another budget"] = (found - missing).total() + (missing - found).total()
        for chunk in self._chunks:
            oracle = Oracle(methods[chunk.method], store.page_size, impl.scale, store.dtype)
            begin, end, size = chunk.begin, chunk.end, store.page_size
            selects = begin >= exact
            assert end <= (begin // length + 1) * length if selects else end <= exact
            assert selects or chunk.budget == (0, 0, 0)
            summary["sparse" if selects else "exact"] += 1
            sink, window, select = chunk.budget
            own = range(begin // size - window, -(-end // size))
            for head, pages in enumerate(chunk.listed):
                if selects:
                    share = shares[chunk.layer][head] if chunk.layer in shares else 1
                    between = begin // size - sink - window
                    middle = pages[sink : len(pages) - len(own)]
                    right = pages == [*range(sink), *middle, *own] and middle == sorted(middle)
                    query = self._sampled(chunk.query[:, head], length, queries).flatten(0, 1)
                    budget = (sink, len(own), min(round(share * select), between))
                    choice = oracle.choose(query, chunk.keys[head], budget)
                    selected = {page - sink for page in middle}
                    explained = choice.explains(selected)
                    summary["wrong"] += not (right and explained)
                    near = explained and selected != choice.best
                    summary[f"near ties of {chunk.method}"] += near
                    summary[f"selected by {chunk.method}"] += len(middle)
                else:
                    summary["wrong"] += pages != [*range(-(-end // size))]
                error = self._error(chunk, head, pages, size, impl.scale)
                summary["worst_error"] = max(summary["worst_error"], error)
        return dict(summary)

    def _sampled(self, query, chunk, queries):
        """The queries [queries, group, d] that select, of all queries of a chunk.

        A short chunk takes some again; they count once in the mean, and come after all others.
        """
        among = queries if self._sampling == "spread" else chunk
        places = [max((i + 1) * len(query) // among, 1) - 1 for i in range(among)]
        query = query[places]
        if among == queries:
            return query
        again = torch.tensor([i > 0 and places[i - 1] == place for i, place in enumerate(places)])
        heads = []
        for own in query.double().unbind(1):
            mean = own[~again].mean(0)
            cosines = (own @ mean) / own.norm(dim=1) / mean.norm()
            order = cosines.argsort(stable=True)
            heads.append(own[torch.cat([order[~again[order]], order[again[order]]])[:queries]])
        return torch.stack(heads, 1).float()

    def _error(self, chunk, head, pages, size, scale):
        """Of the attention to exactly these pages, up to each token itself."""
        places = torch.arange(chunk.end).split(size)
        tokens = torch.cat([places[page] for page in pages])
        keys, values = chunk.keys[head, tokens], chunk.values[head, tokens]
        scores = torch.einsum("ngd,td->ngt", chunk.query[:, head], keys) * scale
        later = tokens > torch.arange(chunk.begin, chunk.end)[:, None]
        scores.masked_fill_(later[:, None], float("-inf"))
        expected = torch.einsum("ngt,td->ngd", scores.softmax(-1), values)
        error = (chunk.output[:, head] - expected).abs().max()
        return float(error / chunk.values[head].abs().max())
