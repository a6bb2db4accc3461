"""A worker extension that replays methods which drop tokens, from recorded queries and keys.

Written from the papers alone: whole attention matrices in float64, of raw queries and keys as the
model produced them; requests are told apart by their ids, tokens by their positions. It shares no
code with the package.
"""

from collections import defaultdict
from dataclasses import dataclass
from typing import Any

import torch

from tests.support.growing import Growing
from tests.support.omnikv_recorder import attended_rows, number_of

ROUNDING = 2e-4
"""How far a rating may be off that is computed in float32, as a share of the highest."""


@dataclass(frozen=True)
class Rule:
    """What a paper says.

    Attributes:
        window: Last queries of a prompt that count; None: all.
        per_layer: Whether all heads of a layer keep the same.
        sink, recent: Tokens kept without a rating; ``recent`` below 1 is a share of the budget.
        smooth: Tokens over which the highest counts.
        evicts: Whether each step evicts.
        latest: Whether only the latest query counts.
        by_entropy: Whether layers' budgets follow their entropies.
        stamps: Whether tokens are rated by the latest query that gave them more than 1e-4, in pages
            of 16.
        slides: Whether each step evicts the earliest of the recent tokens.
    """

    window: int | None = None
    per_layer: bool = False
    sink: int = 0
    recent: float = 0
    smooth: int = 1
    evicts: bool = False
    latest: bool = False
    by_entropy: bool = False
    stamps: bool = False
    slides: bool = False


def clipped(numbers, least, most):
    """Shares in proportion to numbers, within bounds and 1 on average. Others get what a bound cuts
    off."""
    shares: dict[int, float] = {}
    free = set(range(len(numbers)))
    while True:
        factor = (len(numbers) - sum(shares.values())) / sum(numbers[i] for i in free)
        wanted = {i: numbers[i] * factor for i in free}
        low = {i: least for i in free if wanted[i] < least}
        high = {i: most for i in free if wanted[i] > most}
        lack = sum(least - wanted[i] for i in low)
        surplus = sum(wanted[i] - most for i in high)
        fixed = high if surplus > lack else low  # the stronger side is certain
        if not fixed:
            return [(shares | wanted)[i] for i in range(len(numbers))]
        shares |= fixed
        free -= fixed.keys()


class KeepingRecorder:
    """Mixed into the worker by vLLM (``worker_extension_cls``)."""

    retrieval_layers: dict[str, Any]
    model_runner: Any
    requests: Any
    retrieval_config: Any

    def start_recording(self):
        """Record all layers afresh."""
        # By layer and request: by position, [heads, d]; and the same, keys and values.
        self._queries: Any = defaultdict(lambda: Growing(torch.float64))
        self._keys: Any = defaultdict(lambda: Growing(torch.float64))
        self._steps: list[Any] = []
        self._prompts: dict[str, int] = {}
        self._entropies: dict[Any, list[float]] = {}
        if not getattr(self, "_installed", False):
            self._installed = True
            for name, impl in self.retrieval_layers.items():
                self._record(number_of(name), impl)

    def _record(self, number, impl):
        forward, attend = impl.forward, impl._attend_to_plan

        def recorded_forward(layer, query, key, value, kv_cache, metadata, output, **rest):
            if metadata is not None:
                starts = metadata.query_start_loc.tolist()
                for r, length in enumerate(metadata.seq_lens.tolist()):
                    request = self.requests.batch[r]
                    self._prompts.setdefault(request, self.requests.notes[request].tokens)
                    new = slice(starts[r], starts[r + 1])
                    positions = torch.arange(length - (new.stop - new.start), length)
                    self._queries[number, request].put(positions, query[new])
                    pairs = torch.stack((key[new], value[new]), 1)
                    self._keys[number, request].put(positions, pairs)
            return forward(layer, query, key, value, kv_cache, metadata, output, **rest)

        def attend_to_plan(query, output, plan, method):
            attend(query, output, plan, method)
            if hasattr(method, "watch"):  # else its method drops nothing
                self._steps += self._rows(number, impl, output, plan)

        impl.forward, impl._attend_to_plan = recorded_forward, attend_to_plan

    def _rows(self, number, impl, output, plan):
        method = list(self.retrieval_config.methods)[plan.method]
        shape = (impl.num_kv_heads, impl.num_queries_per_kv, impl.head_size)
        size = self.retrieval_config.page_size
        for _, place, length, _, attended in attended_rows(plan, size):
            request = self.requests.batch[place]
            yield method, request, number, length, attended, output[place].double().reshape(shape)

    def check_recording(self, rules, budget, layers):
        """Hold every step of some layers against the papers.

        Args:
            rules: By the name of the method.
            budget: Tokens per KV head, on average.
            layers: Which layers.

        Returns:
            By method: steps, lists compared, those that differ although rounding does not explain
            it, tokens kept, those of them that near ties explain, the largest error of attention,
            the smallest and largest number of tokens kept of a prompt, tokens that came back.
        """
        summaries: dict[str, Any] = {}
        states: dict[Any, Any] = {}
        for method, request, number, length, attended, output in self._steps:
            if number not in layers:
                continue
            rule = rules[method]
            summary = summaries.setdefault(
                method, defaultdict(float, {"least": 1e9, "most": 0, "worst_error": 0})
            )
            summary["steps"] += 1
            received, error = self._attend(number, request, length, attended, output)
            summary["worst_error"] = max(summary["worst_error"], error)
            end = self._prompts[request]
            fresh = (number, request, 0) not in states
            if fresh:
                of_prompt = self._ratings(rule, number, request, end)
                wanted = self._budget(rule, number, request, budget)
            for head, tokens in enumerate(attended):
                kept = set(tokens) - {length - 1}
                if fresh:
                    ratings = of_prompt[head]
                    summary["least"] = min(summary["least"], len(kept))
                    summary["most"] = max(summary["most"], len(kept))
                    good, ties = self._keeps(rule, ratings, kept, end, wanted)
                    slides = self._stay(rule, ratings, kept, end, wanted, budget)
                else:
                    before, ratings, slides = states[number, request, head]
                    summary["came_back"] += len(kept - before)
                    if rule.slides:
                        good, ties = self._slides(before, kept, *slides), 0
                    else:
                        span = length, end
                        good, ties = self._follows(rule, ratings, before, kept, span, budget)
                summary["lists"] += 1
                summary["differ"] += not (good and tokens == sorted(set(tokens)))
                summary["kept"] += len(kept)
                summary["near_ties"] += ties
                ratings = self._rated(rule, ratings, received, head, length)
                states[number, request, head] = set(tokens), ratings, slides
        return {name: dict(summary) for name, summary in summaries.items()}

    def _attention(self, rule, number, request, end):
        """[heads, queries, tokens]; of the prompt's queries that count."""
        first = max(end - rule.window, 0) if rule.window else 0
        queries = self._queries[number, request].at(torch.arange(first, end)).transpose(0, 1)
        keys = self._keys[number, request].at(torch.arange(end))[:, 0].transpose(0, 1)
        keys = keys.repeat_interleave(len(queries) // len(keys), 0)
        scores = queries @ keys.transpose(1, 2) * keys.shape[-1] ** -0.5
        later = torch.arange(end) > torch.arange(first, end)[:, None]
        return scores.masked_fill(later, -torch.inf).softmax(-1)

    def _ratings(self, rule, number, request, end):
        """Per KV head, of the prompt's tokens."""
        observed = self._attention(rule, number, request, end)
        kv_heads = self._keys[number, request].at(torch.arange(1)).shape[2]
        if rule.stamps:
            positions = torch.arange(end - observed.shape[1], end)
            high = (observed > 1e-4).unflatten(0, (kv_heads, -1)).any(1) * positions[:, None]
            return high.amax(1).double()
        by_head = observed.sum(1).unflatten(0, (kv_heads, -1)).sum(1)
        return by_head.sum(0).expand(kv_heads, -1) if rule.per_layer else by_head

    def _budget(self, rule, number, request, budget):
        """Tokens that a head of this layer keeps of the prompt."""
        if rule.by_entropy:
            end = self._prompts[request]
            key = request, rule.window
            if key not in self._entropies:
                layers = range(len(self.retrieval_layers))
                found = [self._entropy(rule, layer, request, end) for layer in layers]
                self._entropies[key] = found
            entropies = self._entropies[key]
            return clipped(entropies, 0.125, 2.0)[number] * budget - rule.evicts
        return budget - 1 if rule.evicts else budget

    def _entropy(self, rule, layer, request, end):
        observed = self._attention(rule, layer, request, end)
        return float(-torch.special.xlogy(observed, observed).sum(-1).mean())

    def _keeps(self, rule, ratings, kept, end, wanted):
        """Whether this is what a prompt leaves."""
        if rule.stamps:
            return self._keeps_pages(rule, ratings, kept, end, wanted)
        if end <= wanted:
            return kept == set(range(end)), 0
        count = len(kept)
        recent = int(rule.recent if rule.recent >= 1 else rule.recent * count)
        fixed = {*range(rule.sink), *range(end - recent, end)}
        rated = ratings[: end - recent]
        if rule.smooth > 1:
            half = rule.smooth // 2
            around = [rated[max(t - half, 0) : t + half + 1] for t in range(len(rated))]
            rated = torch.stack([part.max() for part in around])
        best = {*fixed, *(rated.argsort(descending=True)[: count - recent]).tolist()}
        ties = kept - best
        least = min((float(rated[t]) for t in best - fixed), default=0.0)
        near = all(rated[t] >= least - ROUNDING * float(rated.max()) for t in ties)
        good = abs(count - wanted) < 1 + 1e-3 * wanted and fixed <= kept <= set(range(end)) and near
        return good, len(ties)

    def _keeps_pages(self, rule, ratings, kept, end, wanted):
        pages = {t // 16 for t in kept}
        whole = kept == {t for page in pages for t in range(16 * page, min(16 * page + 16, end))}
        if end <= wanted:
            return kept == set(range(end)), 0
        rated = [float(part.max()) for part in ratings.split(16)]
        others = [rated[page] for page in range(-(-end // 16)) if page not in pages]
        last = {(end - 1) // 16}
        worst = min(rated[page] for page in pages - last)
        good = whole and last <= pages and max(others) <= worst and len(kept) > wanted - 16
        return good and len(kept) <= wanted, 0

    def _follows(self, rule, ratings, before, kept, span, budget):
        """Whether this is what a step before leaves."""
        if not rule.evicts:
            return kept == before, 0
        gone = before - kept
        if len(before) < budget:
            return not gone, 0
        length, end = span
        recent = int(rule.recent if rule.recent >= 1 else rule.recent * budget)
        open_ = sorted(t for t in before if t < length - 1 - recent)
        if rule.stamps:
            pages = {t // 16 for t in open_ if 16 * (t // 16) + 15 < length - 1 - recent}
            prompt = -(-end // 16)
            if prompt + 2 <= budget // 16:  # one page of the answer can go beside the latest
                pages -= {*range(prompt)}
            rated = {p: max(float(ratings[t]) for t in before if t // 16 == p) for p in pages}
            left = {t // 16 for t in gone}
            least = {page for page in pages if rated[page] == min(rated.values())}
            return len(gone) == 16 and len(left) == 1 and left <= least, 0
        worst = min(float(ratings[t]) for t in open_)
        near = all(float(ratings[t]) <= worst * (1 + 1e-3) + 1e-7 for t in gone)
        tie = near and all(float(ratings[t]) != worst for t in gone)
        return len(gone) == 1 and gone <= set(open_) and near, int(tie)

    @staticmethod
    def _stay(rule, ratings, kept, end, wanted, budget):
        """Tokens of a prompt that never leave where the others slide; and how many fill a head."""
        if end > wanted:
            first = end - int(rule.recent * len(kept))
            return {t for t in kept if t < first}, len(kept) + 1
        others = ratings[rule.sink :].argsort(descending=True) + rule.sink
        best = [*range(rule.sink), *others.tolist()]
        return {*best[: budget - int(rule.recent * budget)]}, budget

    @staticmethod
    def _slides(before, kept, stay, full):
        """Whether the earliest of the tokens that do not stay has gone, if there was no room."""
        gone = {min(before - stay)} if len(before) >= full else set()
        return before - kept == gone

    def _attend(self, number, request, length, attended, output):
        """[kv_heads, group, length], the weights of all tokens; and the error of attention."""
        pairs = self._keys[number, request].at(torch.arange(length))
        (query,) = self._queries[number, request].at(torch.arange(length - 1, length))
        query = query.unflatten(0, (pairs.shape[2], -1))
        weights = torch.zeros(*query.shape[:2], length, dtype=torch.float64)
        error = 0.0
        for head, tokens in enumerate(attended):
            keys, values = pairs[tokens, 0, head], pairs[tokens, 1, head]
            found = (query[head] @ keys.T * keys.shape[-1] ** -0.5).softmax(-1)
            weights[head][:, tokens] = found
            error = max(error, float((found @ values - output[head]).abs().max()))
        return weights, error

    def _rated(self, rule, ratings, received, head, length):
        """The ratings of the tokens of a context after a step."""
        ratings = torch.nn.functional.pad(ratings, (0, length - len(ratings)))
        if rule.stamps:
            high = (received[head] > 1e-4).any(0)
            return torch.where(high, float(length - 1), ratings)
        got = received.sum((0, 1)) if rule.per_layer else received[head].sum(0)
        return got if rule.latest else ratings + got
