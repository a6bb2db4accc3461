"""A worker extension that records what the layers saw and checks it against an oracle.

The oracle is written from the papers alone: raw keys and values as the model produced them, no page
index, no state tensors, requests told apart by their ids. It shares no code with the package.
"""

from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from vllm_kvretrieval.kernels import Mode

ROUNDING = 1e-5
"""How far scores may be off that are computed in float32, in units of ``q.k * scale``."""
SIGMAS = 3
"""Standard deviations of the sum of many roundings that are taken for its bound."""


@dataclass(frozen=True)
class Method:
    """The method of a request, as the test states it."""

    index: str = "min_max"
    pooling: str = "mean_softmax"
    entry_tokens: int = 32
    rerank: int = 0
    rank: int = 11
    per_token: bool = False
    # Of what is selected, per retrieval layer and KV head, 1 on average; None: all the same.
    shares: tuple[tuple[float, ...], ...] | None = None


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


# ------------------------------------------------------------------------------------- scores
# Each gives, of queries [group, d] (times the softmax scale) and the keys of n entries,
# [n, tokens, d], the scores [group, n]; and how far a served score may be off, besides ROUNDING,
# for what the record of an entry is kept in: elements of `dtype`, unless the index has its own.


def bounds(query, keys, method, dtype):
    """FreeKV, section 3.2, and Quest: relu(q) @ kmax.T + min(q, 0) @ kmin.T."""
    return query.clamp(min=0) @ keys.amax(1).T + query.clamp(max=0) @ keys.amin(1).T, 0.0


def mean(query, keys, method, dtype):
    return query @ keys.mean(1).T, rounded(query, keys.mean(1), dtype)


def spread(query, keys, method, dtype):
    """The mean, and one standard deviation in each channel's favour."""
    centre, width = keys.mean(1), keys.std(1, correction=0)
    off = rounded(query, centre, dtype) + rounded(query, width, dtype)
    return query @ centre.T + query.abs() @ width.T, off


def sphere(query, keys, method, dtype):
    """ArkVale: the best key that the smallest sphere around the mean may hold."""
    centre = keys.mean(1, keepdim=True)
    radius = (keys - centre).norm(dim=-1).amax(-1)
    scores = query @ centre[:, 0].T + query.norm(dim=-1, keepdim=True) * radius
    return scores, rounded(query, centre[:, 0], dtype)


def farthest(query, keys, method, dtype):
    """InfLLM: the mean score of four representative keys, here those farthest from the mean."""
    order = (keys - keys.mean(1, keepdim=True)).norm(dim=-1).argsort(-1, descending=True)
    chosen = torch.stack([k[o[:4]] for k, o in zip(keys, order, strict=True)])
    scores = (query @ chosen.transpose(1, 2)).mean(-1).T
    return scores, rounded(query, chosen.mean(1), dtype)


def one_bit(query, keys, method, dtype):
    """FIER, section 3.2: keys rounded to the minimum or the maximum of their channel."""
    low, high = keys.amin(1, keepdim=True), keys.amax(1, keepdim=True)
    _, off = one_bit_tokens(query, keys, method, dtype)
    return mass(query, torch.where(keys - low > high - keys, high, low), method, dtype)[0], off[
        ..., 0
    ]


def one_bit_tokens(query, keys, method, dtype):
    """FIER, sections 3.2 and 3.3: of each token, q.k with its key rounded; [group, n, tokens].

    Served are products with whole numbers of a 32000th of what all channels may add.
    """
    low, high = keys.amin(1, keepdim=True), keys.amax(1, keepdim=True)
    scale, zero = high - low, low
    bits = ((keys - zero) / scale.clamp(min=1e-30) > 0.5).float()
    step = (query.abs() @ scale[:, 0].T) / 32000
    off = SIGMAS * (keys.shape[2] / 12) ** 0.5 * step
    return torch.einsum("gd,ntd->gnt", query, bits * scale + zero), off[..., None]


def low_rank(query, keys, method, dtype):
    """Keys of the best rank that the index has, unquantised.

    Served are a mean of 8 bits, and coefficients and directions of 4; queries are rounded to 8 bits
    for these. Each value is at most half a step off, which is noise of a variance of step**2 / 12.
    """
    centre = keys.mean(1, keepdim=True)
    u, s, v = torch.linalg.svd(keys - centre, full_matrices=False)
    along, directions = (u * s[:, None])[..., : method.rank], v[:, : method.rank]
    tokens = query @ (centre + along @ directions).transpose(1, 2)  # [n, group, tokens]
    norm = query.square().sum(-1)[None, :, None]
    steps = directions.abs().amax(-1) / 7, along.abs().amax(1) / 7, centre.abs().amax(-1) / 127
    variance = norm * (along.square() @ steps[0].square()[..., None]).transpose(1, 2)
    across = (query @ directions.transpose(1, 2)).square() @ steps[1].square()[..., None]
    of_query = (query.abs().amax(-1)[:, None] / 127).square() * along.square().sum(-1)[:, None]
    variance = (variance + across + of_query + norm * steps[2][..., None].square()) / 12
    off = (torch.softmax(tokens, -1) * SIGMAS * variance.sqrt()).sum(-1)
    return tokens.logsumexp(-1).T, off.T


def mass(query, keys, method, dtype):
    """Logarithm of the attention that the keys get."""
    return torch.logsumexp(query @ keys.transpose(1, 2), -1).T, 0.0


def rounded(query, values, dtype):
    """How far products are off where values are rounded to ``dtype``."""
    return query.abs() @ values.abs().T * torch.finfo(dtype).eps / 2


INDEXES = {
    "min_max": bounds,
    "mean": mean,
    "mean_std": spread,
    "bounding": sphere,
    "representative": farthest,
    "one_bit": one_bit,
    "low_rank": low_rank,
    "exact": mass,
}


# ------------------------------------------------------------------------------------ pooling
# Of scores [group, entries], less what `NORMS` gives of all of them, [group, 1], one score per
# page; the exponential poolings give its logarithm.

NORMS: dict[str, Callable[[torch.Tensor], Any]] = {
    "mean_softmax": lambda scores: scores.logsumexp(-1, keepdim=True),  # FreeKV, section 3.2
    "relative": lambda scores: scores.amax(-1, keepdim=True),  # to each head's best entry
    "max": lambda scores: 0,
    "sum": lambda scores: 0,
}


def by_page(scores, parts, reduce):
    return torch.stack([reduce(page) for page in scores.split(parts, -1)], -1)


def added_up(scores, parts):
    return by_page(scores.exp().sum(0), parts, lambda page: page.sum(-1)).log()


POOLINGS = {
    "mean_softmax": added_up,
    "relative": added_up,
    "max": lambda scores, parts: by_page(scores.amax(0), parts, lambda page: page.amax(-1)),
    "sum": lambda scores, parts: by_page(scores.sum(0), parts, lambda page: page.amax(-1)),
}


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
        parts = self.page_size // size
        pooled, off = self._pool(scores - norms, off, parts, norms_off)
        pooled, off = pooled[sink:end], off[sink:end]
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
        """[group, d]; softmax attention over exactly the tokens attended to."""
        size = 1 if self.method.per_token else self.page_size
        tokens = torch.cat([torch.arange(step.length).split(size)[j] for j in step.attended[head]])
        keys, values = step.keys[head][tokens], step.values[head][tokens]
        return torch.softmax(step.query[head] @ keys.T * self.scale, -1) @ values


class RecordingWorker:
    """Mixed into the worker by vLLM (``worker_extension_cls``)."""

    retrieval_layers: dict[str, Any]
    retrieval_config: Any
    model_runner: Any
    requests: Any
    _steps: list[Step]
    _written: defaultdict[str, dict[int, tuple[torch.Tensor, torch.Tensor]]]

    def start_recording(self, layer_indices):
        """Record the given retrieval layers (counted among retrieval layers) afresh."""
        self._steps = []
        if hasattr(self, "_written"):  # installed already; what was written before stays cached
            return
        self._written = defaultdict(dict)
        names = list(self.retrieval_layers)
        for i in layer_indices:
            self._record(names[i], self.retrieval_layers[names[i]])

    def _record(self, name, impl):
        write, attend = impl.do_kv_cache_update, impl._attend_to_plan
        tokens = self._written[name]

        def do_kv_cache_update(layer, key, value, kv_cache, slot_mapping):
            for t, slot in enumerate(slot_mapping.tolist()):
                tokens[slot] = (key[t].float(), value[t].float())
            return write(layer, key, value, kv_cache, slot_mapping)

        def attend_to_plan(query, output, plan, method):
            attend(query, output, plan, method)
            self._steps += self._rows(name, query, output, plan, method.chooser, tokens)

        impl.do_kv_cache_update, impl._attend_to_plan = do_kv_cache_update, attend_to_plan

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
            keys, values = (torch.stack([tokens[s][i] for s in slots], 1) for i in (0, 1))
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
                output[place].float().reshape(shape).clone(), float(rows.threshold[r]), budget,
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
