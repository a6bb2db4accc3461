"""A worker extension that replays OmniKV from recorded queries and keys.

Written from the paper's sections 4.1 and 4.2 alone: raw queries, keys and values as the model
produced them, requests told apart by their ids, tokens by their positions. It shares no code with
the package.
"""

import re
from collections import defaultdict
from dataclasses import dataclass
from typing import Any

import torch

ROUNDING = 1e-4
"""How far a score may be off that is computed in float32, as a share of it."""

ALPHAS = {
    "last": lambda age: float(age == 0),
    "uniform": lambda age: float(age < 16),
    "exponential": lambda age: 2.0 ** -(age + 1) if age < 16 else 0.0,
}
"""Weight of the query that is so many tokens older than the last one."""


@dataclass
class Step:
    """One sparse decode step of one request in a layer that follows a filter."""

    request: str
    layer: int
    length: int
    slots: torch.Tensor  # of the cache, by position in the context
    budget: tuple[int, int, int]  # tokens of sink, window, and selected
    attended: list[list[int]]  # per KV head, positions in the context
    query: torch.Tensor  # [kv_heads, group, d]
    output: torch.Tensor


def number_of(layer_name):
    return int(re.findall(r"\.(\d+)\.", layer_name)[0])


def attended_rows(plan, size):
    """Of each row of tokens: its number and place in the batch, its tokens and pages, and per KV
    head the positions in the context of what its lists name."""
    rows, lists, heads = plan.rows, plan.lists, plan.lists.kv_heads
    for r, place in enumerate(range(len(rows)) if plan.index is None else plan.index.tolist()):
        length = int(rows.seq_lens[r])
        pages = rows.block_table[r, : -(-length // size)].tolist()
        position, attended = {page: j for j, page in enumerate(pages)}, []
        for head in range(heads):
            count = int(lists.lengths[r * heads + head])
            tokens = lists.entries[r * heads + head, :count].tolist()
            assert all(t // size % heads == head for t in tokens), "tokens of another head"
            attended.append([position[t // size // heads] * size + t % size for t in tokens])
        yield r, place, length, pages, attended


class OmniKVRecorder:
    """Mixed into the worker by vLLM (``worker_extension_cls``)."""

    retrieval_layers: dict[str, Any]
    vllm_config: Any
    model_runner: Any
    requests: Any
    retrieval_config: Any

    def start_recording(self, filters, observation):
        """Replay the steps to come; what was written before stays known.

        Args:
            filters: The layers that select.
            observation: The queries by whose attention they do.
        """
        self._filters, self._observation = filters, observation
        self._summary: defaultdict[str, Any] = defaultdict(float)
        self._seen: defaultdict[tuple[str, int], set[int]] = defaultdict(set)
        self._scores: tuple[Any, torch.Tensor] = (None, torch.empty(0))  # the latest
        if hasattr(self, "_written"):
            return
        # By layer: keys and values of each slot of the cache; and by request and position, queries.
        self._written: dict[int, torch.Tensor] = {}
        self._queries: defaultdict[int, dict[tuple[str, int], torch.Tensor]] = defaultdict(dict)
        layers = self.vllm_config.compilation_config.static_forward_context
        for name, layer in layers.items():
            if hasattr(layer.impl, "_attend_to_plan"):  # else a layer of another kind
                self._record(number_of(name), layer.impl)

    def _record(self, number, impl):
        write, forward, attend = impl.do_kv_cache_update, impl.forward, impl._attend_to_plan

        alone = impl._attend_alone

        def note(key, value, kv_cache, slot_mapping):
            if number not in self._written:
                slots = kv_cache.shape[0] * self.retrieval_config.page_size
                self._written[number] = torch.zeros(2, slots, *key.shape[1:])
            count = len(slot_mapping)
            self._written[number][:, slot_mapping] = torch.stack((key, value))[:, :count].float()

        def do_kv_cache_update(layer, key, value, kv_cache, slot_mapping):
            note(key, value, kv_cache, slot_mapping)
            return write(layer, key, value, kv_cache, slot_mapping)

        def attend_alone(query, key, value, slot_mapping, output, plan, layer):
            note(key, value, layer.cache, slot_mapping)
            alone(query, key, value, slot_mapping, output, plan, layer)

        def recorded_forward(layer, query, key, value, kv_cache, metadata, output, **rest):
            if metadata is not None and number in self._filters:
                starts = metadata.query_start_loc.tolist()
                for r, length in enumerate(metadata.seq_lens.tolist()):
                    request = self.requests.batch[r]
                    for back in range(1, min(16, starts[r + 1] - starts[r]) + 1):
                        token = query[starts[r + 1] - back].float().clone()
                        self._queries[number][request, length - back] = token
            return forward(layer, query, key, value, kv_cache, metadata, output, **rest)

        def attend_to_plan(query, output, plan, method):
            attend(query, output, plan, method)
            if list(self.retrieval_config.methods.values())[plan.method].selects_for_others:
                for step in self._steps(number, impl, query, output, plan):
                    self._check(step)

        impl.do_kv_cache_update, impl.forward = do_kv_cache_update, recorded_forward
        impl._attend_to_plan, impl._attend_alone = attend_to_plan, attend_alone

    def _steps(self, number, impl, query, output, plan):
        size = self.retrieval_config.page_size
        shape = (impl.num_kv_heads, impl.num_queries_per_kv, impl.head_size)
        for r, place, length, pages, attended in attended_rows(plan, size):
            slots = [pages[t // size] * size + t % size for t in range(length)]
            yield Step(
                self.requests.batch[place], number, length,
                torch.tensor(slots), self._budget(plan.rows, r), attended,
                query[place].float().reshape(shape), output[place].float().reshape(shape),
            )  # fmt: skip

    def _budget(self, rows, r):
        return int(rows.sink[r]), int(rows.window[r]), int(rows.select[r])

    def _check(self, step):
        """Hold a step against the paper."""
        last = max(f for f in self._filters if f < step.layer)
        key = step.request, step.length, last
        if self._scores[0] != key:
            self._scores = key, self._score(step, last)
        scores, summary = self._scores[1], self._summary
        sink, window, select = step.budget
        end = step.length - window
        best = set((scores[sink:end].argsort(descending=True)[:select] + sink).tolist())
        least = scores[list(best)].min() * (1 - ROUNDING)
        fixed = {*range(sink), *range(end, step.length)}
        self._seen[step.request, step.length].add(step.layer)
        summary["steps"] += 1
        keys, values = self._written[step.layer][:, step.slots].transpose(1, 2)
        for head, attended in enumerate(step.attended):
            chosen = set(attended) - fixed
            whole = len(set(attended)) == len(attended) == sum(step.budget)
            near = all(scores[t] >= least for t in chosen - best)
            summary["differ"] += not (whole and fixed <= set(attended) and near)
            summary["near_ties"] += len(chosen - best)
            summary["selected"] += select
            tokens = sorted(fixed | chosen)
            products = step.query[head] @ keys[head, tokens].T * keys.shape[-1] ** -0.5
            error = torch.softmax(products, -1) @ values[head, tokens] - step.output[head]
            summary["worst_error"] = max(summary["worst_error"], float(error.abs().max()))

    def _score(self, step, layer):
        """Equation 4: the highest attention of any head, summed over the window by alpha."""
        keys = self._written[layer][0, step.slots].transpose(0, 1).double()
        total = torch.zeros(step.length, dtype=torch.float64)
        for age in range(16):
            query = self._queries[layer].get((step.request, step.length - 1 - age))
            alpha = ALPHAS[self._observation](age)
            if query is None or not alpha:
                continue
            context = step.length - age
            q = query.view(len(keys), -1, keys.shape[-1]).double()
            scores = torch.einsum("hgd,htd->hgt", q, keys[:, :context])
            attention = (scores * keys.shape[-1] ** -0.5).softmax(-1)
            total[:context] += alpha * attention.amax((0, 1))
        return total

    def recording(self, layers):
        """A summary, given the number of the model's layers."""
        follow = {
            layer
            for layer in range(layers)
            if layer > self._filters[0] and not {layer, layer - 1} & set(self._filters)
        }
        return dict(self._summary) | {
            "all_follow": all(found == follow for found in self._seen.values()),
            "requests": len({request for request, _ in self._seen}),
        }
