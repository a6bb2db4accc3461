"""A worker extension that records what the layers saw and checks it against an oracle.

The oracle is written from the papers alone: raw keys and values as the model produced them, no page
index, no state tensors, requests told apart by their ids. It shares no code with the package.
"""

import math
from collections import defaultdict
from dataclasses import dataclass, field
from typing import Any

import torch

from tests.support.growing import Growing
from tests.support.recorder_scores import (
    INDEXES,
    NORMS,
    POOLINGS,
    ROUNDING,
    Method,
    by_page,
    one_bit_tokens,
)
from vllm_kvretrieval.kernels import Mode

FIRST = 1e6
"""Above all scores that pages may have."""


@dataclass
class Step:
    """One sparse decode step of one request in one layer."""

    request: str
    layer: str
    method: str
    length: int
    pages: list[int]  # page ids of the context, in order
    query: torch.Tensor  # [kv_heads, group, d]
    attended: list[list[int]]  # per KV head, positions in the context of the pages or tokens
    output: torch.Tensor  # [kv_heads, group, d]
    tau: float
    budget: tuple[int, int, int]  # sink, window, select on average; in pages or tokens
    number: int  # of the layer, among retrieval layers
    keys: torch.Tensor  # [kv_heads, length, d]
    values: torch.Tensor


@dataclass
class Choice:
    """What one KV head may select at a step, among the pages between sink and window.

    A page that is certainly a candidate, and certainly better than one that was selected, has to be
    selected. Scores are certain up to ``off``, both ways.
    """

    best: set[int]
    scores: torch.Tensor
    off: torch.Tensor
    possible: torch.Tensor  # bool; may be a candidate
    certain: torch.Tensor  # bool; must be one

    def explains(self, selected: set[int]) -> bool:
        """Whether exactly these are selected up to rounding."""
        inside = torch.zeros(len(self.scores), dtype=torch.bool)
        inside[list(selected)] = True
        others = self.certain & ~inside
        if len(selected) != len(self.best) or not self.possible[inside].all():
            return False
        if not selected:
            return True
        least = (self.scores + self.off)[inside].min()
        return not others.any() or bool((self.scores - self.off)[others].max() <= least)


@dataclass
class Oracle:
    """An independent implementation of FreeKV, with any index and pooling, request by request."""

    method: Method
    page_size: int
    scale: float
    dtype: torch.dtype  # of the KV cache
    previous: dict[tuple[str, str], tuple[Step, list[Choice]]] = field(default_factory=dict)

    def choose(self, query: torch.Tensor, keys: torch.Tensor, budget: tuple[int, int, int]):
        """The :class:`Choice` for queries [group, d] and the keys of a context, [length, d]."""
        (sink, window, select), method = budget, self.method
        query, size = query * self.scale, method.entry_tokens
        if method.per_token:
            return self._choose_tokens(query, keys, sink, len(keys) - window, select)
        end = -(-len(keys) // self.page_size) - window
        # Of unfinished entries, which lie in the window, there are bounds alone.
        scores, off = self._entries(method.index, query, keys, method.index == "min_max")
        norms = NORMS[method.pooling](scores)
        norms_off = (off * torch.softmax(scores, -1)).sum(-1).max()
        parts = max(1, self.page_size // size)
        pooled, off = self._pool(scores - norms, off, parts, norms_off)
        pooled, off = pooled[sink:end], off[sink:end]
        self._put_first(pooled, off, keys[sink * self.page_size : end * self.page_size], select)
        everything = torch.ones(len(pooled), dtype=torch.bool)
        count = select * method.rerank
        if not method.rerank or count >= len(pooled):
            possible = certain = everything
        else:
            edges = pooled.sort(descending=True).values[count - 1 : count + 1]
            possible = pooled + off >= (edges[0] - off.max())
            certain = pooled - off > (edges[1] + off.max())
        if method.rerank:
            scores, off = self._entries("exact", query, keys[: end * self.page_size], False)
            first = pooled
            pooled, off = self._pool(scores - norms, off, parts, norms_off)
            pooled, off = pooled[sink:end], off[sink:end]
            order = first.argsort(descending=True)[:count]
            best = order[pooled[order].argsort(descending=True)[:select]]
        else:
            best = pooled.argsort(descending=True)[:select]
        return Choice(set(best.tolist()), pooled, off, possible, certain)

    def _put_first(self, pooled, off, keys, select):
        """ShadowKV, section 4.1: chunks whose keys are least like their mean are attended to.

        They get the highest scores, which are uncertain if rounding may have decided.
        """
        if not self.method.outliers or select < 2:
            return
        count = max(1, int(self.method.outliers * select))
        entries = keys.double().unflatten(0, (-1, self.method.entry_tokens))
        cosines = torch.cosine_similarity(entries, entries.mean(1, keepdim=True), dim=-1).amin(1)
        least = cosines.view(len(pooled), -1).amin(1)
        edges = least.sort().values[count - 1 : count + 1]
        pooled[least <= edges[0]] = FIRST
        off[(least - edges.mean()).abs() < ROUNDING] = 2 * FIRST

    def _choose_tokens(self, query, keys, sink, end, select):
        """FIER, with the mean of softmax over the query heads of a KV head."""
        size = self.method.entry_tokens
        groups = keys[: len(keys) // size * size].unflatten(0, (-1, size))
        scores, off = one_bit_tokens(query, groups, self.method, self.dtype)
        off = (0 * scores + off).flatten(1).double() + ROUNDING
        scores = scores.flatten(1).double()
        pooled = torch.log_softmax(scores, -1).logsumexp(0)[sink:end]
        off = off.amax(0)[sink:end] + (off * torch.softmax(scores, -1)).sum(-1).max()
        best = pooled.argsort(descending=True)[:select]
        everything = torch.ones(len(pooled), dtype=torch.bool)
        return Choice(set(best.tolist()), pooled, off, everything, everything)

    def _entries(self, index, query, keys, unfinished):
        """float64 [group, entries] of scores, and how far they may be off."""
        size, score = self.method.entry_tokens, INDEXES[index]
        whole = len(keys) // size * size
        parts = [keys[:whole].unflatten(0, (-1, size))]
        parts += [keys[None, whole:]] if unfinished and whole < len(keys) else []
        scored = [score(query, part, self.method, self.dtype) for part in parts]
        scores = torch.cat([scores.double() for scores, _ in scored], 1)
        off = torch.cat([(0 * scores + off).double() for scores, off in scored], 1)
        return scores, off + ROUNDING

    def _pool(self, scores, off, parts, norms_off):
        """[pages]; a pooled score is off by no more than the entries that it is of.

        And, where each head's part of its own total counts, by what that is off.
        """
        pooled = POOLINGS[self.method.pooling](scores, parts)
        if self.method.pooling == "sum":
            return pooled, by_page(off.sum(0), parts, lambda page: page.amax(-1))
        most = by_page(off.amax(0), parts, lambda page: page.amax(-1))
        if self.method.pooling == "max":
            return pooled, most
        return pooled, most + norms_off

    def counts(self, step: Step) -> list[int]:
        """Pages or tokens that each KV head selects; a share may be rounded up or down."""
        sink, window, select = step.budget
        shares = self.method.shares
        exact = [select * s for s in (shares[step.number] if shares else [1] * len(step.query))]
        counts = [len(attended) - sink - window for attended in step.attended]
        assert all(abs(n - x) < 1 for n, x in zip(counts, exact, strict=True)), (counts, exact)
        return counts

    def expect(self, step: Step) -> tuple[list[Choice], list[bool]]:
        """Per KV head: what it attends to between sink and window, and whether it is corrected."""
        key = (step.request, step.layer)
        before, kept = self.previous.get(key, (None, []))
        continues = before is not None and before.length == step.length - 1
        choices = [
            self.choose(query, keys, (*step.budget[:2], select))
            for query, keys, select in zip(step.query, step.keys, self.counts(step), strict=True)
        ]
        expected, corrected = [], []
        for head, query in enumerate(step.query):
            turned = not continues
            if before is not None and continues:
                old = before.query[head]
                cosine = (query * old).sum(-1) / (query.norm(dim=-1) * old.norm(dim=-1))
                turned = bool(cosine.mean() < step.tau) or step.tau >= 1
            corrected.append(turned)
            expected.append(choices[head] if turned else kept[head])
        self.previous[key] = step, choices
        return expected, corrected

    def attention(self, step: Step, head: int) -> torch.Tensor:
        """[group, d]; softmax attention over exactly the tokens attended to, and the remainder."""
        size = 1 if self.method.per_token else self.page_size
        places = torch.arange(step.length).split(size)
        tokens = torch.cat([places[j] for j in step.attended[head]])
        logits = step.query[head] @ step.keys[head].T * self.scale
        values = step.values[head]
        masses, means = logits[:, tokens], values[tokens]
        if self.method.remainder:
            size = self.method.entry_tokens
            whole = step.length // size * size
            entries = logits[:, :whole].unflatten(1, (-1, size)).logsumexp(-1)
            share = torch.softmax(entries, -1).mean(0)
            listed = torch.zeros(len(share), dtype=torch.bool)
            listed[torch.unique(tokens[tokens < whole] // size)] = True
            left = (share <= self.method.remainder) & ~listed
            most = entries[:, listed].logsumexp(-1) + math.log(0.4)
            over = (entries[:, left].logsumexp(-1) - most).clamp(min=0)
            masses = torch.cat([masses, entries[:, left] - over[:, None]], 1)
            means = torch.cat([means, values[:whole].unflatten(0, (-1, size)).mean(1)[left]])
        return torch.softmax(masses, -1) @ means


class RecordingWorker:
    """Mixed into the worker by vLLM (``worker_extension_cls``)."""

    retrieval_layers: dict[str, Any]
    retrieval_config: Any
    requests: Any
    model_runner: Any
    _steps: list[Step]
    _written: defaultdict[str, Growing]  # by layer: keys and values by slot

    def start_recording(self, layer_indices):
        """Record the given retrieval layers (counted among retrieval layers) afresh."""
        self._steps = []
        if hasattr(self, "_written"):  # installed already; what was written before stays cached
            return
        self._written = defaultdict(lambda: Growing(torch.float32))
        names = list(self.retrieval_layers)
        for i in layer_indices:
            self._record(names[i], self.retrieval_layers[names[i]])

    def _record(self, name, impl):
        write, attend = impl.do_kv_cache_update, impl._attend_to_plan
        tokens = self._written[name]

        def do_kv_cache_update(layer, key, value, kv_cache, slot_mapping):
            tokens.put(slot_mapping, torch.stack((key, value), 1)[: len(slot_mapping)])
            return write(layer, key, value, kv_cache, slot_mapping)

        def attend_to_plan(query, output, plan, method):
            attend(query, output, plan, method)
            self._steps += self._rows(name, query, output, plan, method.chooser, tokens)

        alone = impl._attend_alone

        def attend_alone(query, key, value, slot_mapping, output, plan, layer):
            tokens.put(slot_mapping, torch.stack((key, value), 1)[: len(slot_mapping)])
            alone(query, key, value, slot_mapping, output, plan, layer)
            chooser = impl.methods[plan.method].chooser
            self._steps += self._rows(name, query, output, plan, chooser, tokens)

        impl.do_kv_cache_update, impl._attend_to_plan = do_kv_cache_update, attend_to_plan
        impl._attend_alone = attend_alone

    def _rows(self, name, query, output, plan, chooser, tokens):
        rows, heads, size = plan.rows, chooser.store.kv_heads, chooser.store.page_size
        places = range(len(rows)) if plan.index is None else plan.index.tolist()
        method = list(self.retrieval_config.methods)[plan.method]
        for r, place in enumerate(places):
            if rows.mode[r] == Mode.WHOLE:
                continue
            length = int(rows.seq_lens[r])
            pages = rows.block_table[r, : -(-length // size)].tolist()
            slots = [pages[t // size] * size + t % size for t in range(length)]
            keys, values = tokens.at(torch.tensor(slots)).permute(1, 2, 0, 3).contiguous()
            budget = (
                int(rows.sink[r]),
                int(rows.window[r]),
                int(rows.select[r]),
            )
            position = {page: j for j, page in enumerate(pages)}
            attended = []
            for head in range(heads):
                count = int(rows.lengths[r * heads + head])
                count = count if rows.per_token else -(-count // size)
                entries = rows.lists[r * heads + head, :count].tolist()
                unit = size if rows.per_token else 1  # tokens, or the unit itself
                assert all(e // unit % heads == head for e in entries), "pages of another head"
                attended.append([position[e // unit // heads] * unit + e % unit for e in entries])
            shape = (heads, chooser.group, chooser.store.head_size)
            yield Step(
                self.requests.batch[place], name, method, length, pages,
                query[place].float().reshape(shape).clone(), attended,
                output[place].float().reshape(shape).clone(),
                float(rows.numbers["threshold"][r]), budget,
                [*self.retrieval_layers].index(name), keys, values,
            )  # fmt: skip

    def check_recording(self, methods):
        """Compare every recorded step with the oracle of its method.

        Args:
            methods: What the engine's methods are said to be, by name.

        Returns:
            By the name of the method, a summary: steps, heads compared, heads corrected, selections
            that differ although rounding does not explain it, those that it explains, pages
            selected, those of them that the oracle selects, requests that began a page, and the
            largest error of attention relative to the largest value.
        """
        impl = next(iter(self.retrieval_layers.values()))
        store = impl.choosers[0].store
        oracles = {
            name: Oracle(method, store.page_size, impl.scale, store.dtype)
            for name, method in methods.items()
        }
        summaries: dict[str, dict[str, Any]] = {}
        lengths = defaultdict(set)
        for step in self._steps:
            summary = summaries.setdefault(step.method, defaultdict(int))
            oracle = oracles[step.method]
            expected, corrected = oracle.expect(step)
            summary["steps"] += 1
            lengths[step.method, step.request].add(step.length)
            sink, window, _ = step.budget
            count = step.length if oracle.method.per_token else len(step.pages)
            fixed = [*range(sink), *range(count - window, count)]
            summary["most"] = max(summary["most"], *oracle.counts(step))
            for head, choice in enumerate(expected):
                attended = step.attended[head]
                middle = attended[sink : len(attended) - window]
                selected = {page - sink for page in middle}
                same = selected == choice.best
                explained = attended == sorted(fixed + middle) and choice.explains(selected)
                summary["heads"] += 1
                summary["corrected"] += corrected[head]
                summary["near_ties"] += explained and not same
                summary["differ"] += not explained
                summary["pages"] += len(middle)
                summary["agree"] += len(selected & choice.best)
                error = (oracle.attention(step, head) - step.output[head]).abs().max()
                error = float(error / step.values[head].abs().max())
                summary["worst_error"] = max(summary["worst_error"], error)
        for (method, _), seen in lengths.items():
            moved = any(length % store.page_size == 1 for length in seen)
            summaries[method]["page_moves"] += moved
        return {name: dict(summary) for name, summary in summaries.items()}
