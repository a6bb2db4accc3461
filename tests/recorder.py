"""A worker extension that records what the layers saw and checks it against an oracle.

The oracle is written from the paper alone: raw keys and values as the model produced them, no page
index, no state tensors, requests told apart by their ids. It shares no code with the package.
"""

from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch


@dataclass
class Step:
    """One sparse decode step of one request in one layer."""

    request: str
    layer: str
    length: int
    pages: list[int]  # page ids of the context, in order
    query: torch.Tensor  # [kv_heads, group, d]
    attended: list[list[int]]  # per KV head, positions in the context of the pages attended to
    output: torch.Tensor  # [kv_heads, group, d]
    tau: float
    budget: tuple[int, int, int]  # sink, window, select; in pages
    keys: torch.Tensor  # [kv_heads, length, d]
    values: torch.Tensor


def bounds(query, keys):
    """FreeKV, section 3.2, and Quest: relu(q) @ kmax.T + min(q, 0) @ kmin.T."""
    return query.clamp(min=0) @ keys.amax(1).T + query.clamp(max=0) @ keys.amin(1).T


def spread(query, keys):
    """The mean, and one standard deviation in each channel's favour."""
    return query @ keys.mean(1).T + query.abs() @ keys.std(1, correction=0).T


def sphere(query, keys):
    """ArkVale: the best key that the smallest sphere around the mean may hold."""
    centre = keys.mean(1, keepdim=True)
    radius = (keys - centre).norm(dim=-1).amax(-1)
    return query @ centre[:, 0].T + query.norm(dim=-1, keepdim=True) * radius


def farthest(query, keys):
    """InfLLM: the mean score of four representative keys, here those farthest from the mean."""
    order = (keys - keys.mean(1, keepdim=True)).norm(dim=-1).argsort(-1, descending=True)
    chosen = torch.stack([k[o[:4]] for k, o in zip(keys, order, strict=True)])
    return (query @ chosen.transpose(1, 2)).mean(-1).T


def one_bit(query, keys):
    """FIER, section 3.2: keys rounded to the minimum or the maximum of their channel."""
    low, high = keys.amin(1, keepdim=True), keys.amax(1, keepdim=True)
    rounded = torch.where(keys - low > high - keys, high, low)
    return mass(query, rounded)


def low_rank(query, keys):
    """Keys of the best rank that the index has, unquantised."""
    mean = keys.mean(1, keepdim=True)
    u, s, v = torch.linalg.svd(keys - mean, full_matrices=False)
    rank = LowRank().rank
    return mass(query, mean + u[..., :rank] * s[:, None, :rank] @ v[:, :rank])


def mass(query, keys):
    """Logarithm of the attention that the keys get."""
    return torch.logsumexp(query @ keys.transpose(1, 2), -1).T


INDEXES = {
    "min_max": bounds,
    "mean": lambda query, keys: query @ keys.mean(1).T,
    "mean_std": spread,
    "bounding": sphere,
    "representative": farthest,
    "one_bit": one_bit,
    "low_rank": low_rank,
    "exact": mass,
}


def by_page(scores, parts, reduce):
    return torch.stack([reduce(page) for page in scores.split(parts, -1)], -1)


def mean_softmax(scores, parts):
    """FreeKV, section 3.2."""
    return by_page(torch.softmax(scores, -1).mean(0), parts, torch.sum)


def relative(scores, parts):
    """Each head's mass, relative to its best entry."""
    return by_page((scores - scores.amax(-1, keepdim=True)).exp().sum(0), parts, torch.sum)


POOLINGS = {
    "mean_softmax": mean_softmax,
    "relative": relative,
    "max": lambda scores, parts: by_page(scores.amax(0), parts, torch.amax),
    "sum": lambda scores, parts: by_page(scores.sum(0), parts, torch.amax),
}


@dataclass
class Oracle:
    """What FreeKV's algorithm attends to, request by request, with any index and pooling.

    ``score`` gives [group, entries] of queries [group, d] (times the softmax scale) and the keys of
    entries, [n, tokens, d]; ``pool`` makes the scores of pages of them, given the entries per page.
    """

    page_size: int
    entry_tokens: int
    scale: float
    score: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
    pool: Callable[[torch.Tensor, int], torch.Tensor]
    previous: dict[tuple[str, str], Step] = field(default_factory=dict)
    chosen: dict[tuple[str, str], list[list[int]]] = field(default_factory=dict)

    def scores(self, query: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
        """[pages]; unfinished entries count for FreeKV's bounds alone."""
        parts = keys.split(self.entry_tokens)
        if self.score is not INDEXES["min_max"]:
            parts = [part for part in parts if len(part) == self.entry_tokens]
        scores = torch.cat([self.score(query * self.scale, part[None]) for part in parts], 1)
        return self.pool(scores, self.page_size // self.entry_tokens)

    def expect(self, step: Step) -> tuple[list[list[int]], list[bool], list[float]]:
        """Per KV head: pages to attend to, whether corrected, and how clear the selection is.

        The margin is the relative distance between the last page chosen and the first one not.
        """
        key = (step.request, step.layer)
        before = self.previous.get(key)
        continues = before is not None and before.length == step.length - 1
        sink, window, select = step.budget
        count = len(step.pages)
        attended, corrected, margins, chosen = [], [], [], []
        for head, query in enumerate(step.query):
            scores = self.scores(query, step.keys[head])[sink : count - window]
            order = scores.argsort(descending=True)
            ours = sorted((order[:select] + sink).tolist())
            edge = scores[order[select - 1 : select + 1]]
            margins.append(float((edge[0] - edge[1]) / edge[0].abs()))
            turned = not continues
            if before is not None and continues:
                old = before.query[head]
                cosine = (query * old).sum(-1) / (query.norm(dim=-1) * old.norm(dim=-1))
                turned = bool(cosine.mean() < step.tau) or step.tau >= 1
            corrected.append(turned)
            middle = ours if turned else self.chosen[key][head]
            attended.append([*range(sink), *middle, *range(count - window, count)])
            chosen.append(ours)
        self.previous[key], self.chosen[key] = step, chosen
        return attended, corrected, margins

    def attention(self, step: Step, head: int) -> torch.Tensor:
        """[group, d]; softmax attention over exactly the tokens of the pages attended to."""
        tokens = torch.cat(
            [torch.arange(step.length).split(self.page_size)[j] for j in step.attended[head]]
        )
        keys, values = step.keys[head][tokens], step.values[head][tokens]
        return torch.softmax(step.query[head] @ keys.T * self.scale, -1) @ values


class RecordingWorker:
    """Mixed into the worker by vLLM (``worker_extension_cls``)."""

    retrieval_layers: dict[str, Any]
    model_runner: Any
    summary_size: int
    _steps: list[Step]
    _written: defaultdict[str, dict[int, tuple[torch.Tensor, torch.Tensor]]]

    def start_recording(self, layer_indices, summary_size):
        """Record the given retrieval layers (counted among retrieval layers) afresh."""
        self._steps, self.summary_size = [], summary_size
        if hasattr(self, "_written"):  # installed already; what was written before stays cached
            return
        self._written = defaultdict(dict)
        names = list(self.retrieval_layers)
        for i in layer_indices:
            self._record(names[i], self.retrieval_layers[names[i]])

    def _record(self, name, impl):
        write, attend = impl.do_kv_cache_update, impl._attend_to_pages
        tokens = self._written[name]

        def do_kv_cache_update(layer, key, value, kv_cache, slot_mapping):
            for t, slot in enumerate(slot_mapping.tolist()):
                tokens[slot] = (key[t].float(), value[t].float())
            return write(layer, key, value, kv_cache, slot_mapping)

        def attend_to_pages(query, output, plan, state):
            attend(query, output, plan, state)
            self._steps += self._rows(name, query, output, plan, state, tokens)

        impl.do_kv_cache_update, impl._attend_to_pages = do_kv_cache_update, attend_to_pages

    def _rows(self, name, query, output, plan, state, tokens):
        rows, heads, size = plan.rows, state.kv_heads, state.page_size
        for r, request in enumerate(self.model_runner.input_batch.req_ids[: len(rows)]):
            if rows.select_pages[r] < 0:
                continue
            length = int(rows.seq_lens[r])
            pages = rows.block_table[r, : -(-length // size)].tolist()
            slots = [pages[t // size] * size + t % size for t in range(length)]
            keys, values = (torch.stack([tokens[s][i] for s in slots], 1) for i in (0, 1))
            budget = (
                int(rows.sink_pages[r]),
                int(rows.window_pages[r]),
                int(rows.select_pages[r]),
            )
            position = {page: j for j, page in enumerate(pages)}
            attended = []
            for head in range(heads):
                entries = rows.page_table[r * heads + head, : sum(budget)].tolist()
                assert all(e % heads == head for e in entries), "pages of another head"
                attended.append([position[e // heads] for e in entries])
            shape = (heads, state.group, state.head_size)
            yield Step(
                request, name, length, pages, query[r].float().reshape(shape).clone(), attended,
                output[r].float().reshape(shape).clone(), float(rows.threshold[r]), budget, keys,
                values,
            )  # fmt: skip

    def check_recording(self):
        """Compare every recorded step with the oracle.

        Returns a summary: steps, heads compared, heads corrected, selections that differ although
        the margin is clear, near-ties skipped, and the largest error of attention relative to the
        largest value.
        """
        impl = next(iter(self.retrieval_layers.values()))
        oracle = Oracle(impl.state.page_size, self.summary_size, impl.scale)
        summary = dict.fromkeys(
            ("steps", "heads", "corrected", "differ", "near_ties", "page_moves"), 0
        )
        worst = 0.0
        unclear: set[tuple[str, str, int]] = (
            set()
        )  # (request, layer, head) whose last choice was a near-tie
        lengths = defaultdict(set)
        for step in self._steps:
            expected, corrected, margins = oracle.expect(step)
            summary["steps"] += 1
            lengths[step.request].add(step.length)
            for head, pages in enumerate(expected):
                key = (step.request, step.layer, head)
                close = margins[head] < 1e-5 if corrected[head] else key in unclear
                (unclear.add if margins[head] < 1e-5 else unclear.discard)(key)
                summary["heads"] += 1
                summary["corrected"] += corrected[head]
                summary["near_ties"] += close
                summary["differ"] += not close and pages != step.attended[head]
                error = (oracle.attention(step, head) - step.output[head]).abs().max()
                worst = max(worst, float(error / step.values[head].abs().max()))
        summary["page_moves"] = sum(
            any(length % impl.state.page_size == 1 for length in seen) for seen in lengths.values()
        )
        return {**summary, "worst_error": worst}
