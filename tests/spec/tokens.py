"""The recall of single tokens in plain torch: its specification. Slow, and meant to be read."""

import torch

from vllm_kvretrieval.kernels.rows import DecodeRows


class TokenRecall:
    """See :class:`vllm_kvretrieval.kernels.tokens.TokenRecall`; reads home in place, at once.

    Args:
        homes: Of each layer, [pages, kv_heads, page_size, 2 * head_size]; its KV cache, of rows.
        memories: Each layer's memory, [S, kv_heads, capacity, 2 * head_size]; written.
        counts: int64 [S, 3]; per request, tokens (times KV heads and layers) attended to, missed,
            and read from home; added to. A step's own new tokens are no misses.
        shared: Whether one list is for all heads.
    """

    def __init__(
        self,
        homes: list[torch.Tensor],
        memories: list[torch.Tensor],
        counts: torch.Tensor,
        shared: bool,
    ) -> None:
        self.homes, self.memories, self.counts = homes, memories, counts
        self.pages, self.kv_heads, self.page_size, _ = homes[0].shape
        self.capacity = memories[0].shape[2]
        self.bytes_per_read = memories[0][0, 0, 0].nbytes
        self.together = self.kv_heads if shared else 1  # heads of a list
        # By seat and first head: position in the context -> its token in home, its place, its step.
        self._held: dict[tuple[int, int], dict[int, tuple[int, int, int]]] = {}
        # Of this step: seat, first head, tokens, places.
        self._wanted: list[tuple[int, int, torch.Tensor, torch.Tensor]] = []
        self._step = 0

    @property
    def used(self) -> int:
        """See :meth:`vllm_kvretrieval.kernels.tokens.TokenRecall.used`."""
        return sum(map(len, self._held.values())) * self.together * len(self.homes)

    def recall(self, rows: DecodeRows) -> None:
        """See :meth:`vllm_kvretrieval.kernels.tokens.TokenRecall.recall`."""
        self._step += 1
        self._wanted = []
        for r, seat in enumerate(rows.seats.tolist()):
            for head in range(0, self.kv_heads, self.together):
                self._recall(rows, r, seat, head)

    def _recall(self, rows: DecodeRows, r: int, seat: int, head: int) -> None:
        attended = self._attended(rows, r, head)
        held = {} if rows.fresh[r] else self._held.get((seat, head), {})
        hits = {t: (token, *held[t][1:]) for t, token in attended.items() if t in held}
        others = sorted(held.keys() - hits.keys(), key=lambda t: (-held[t][2], -t))
        kept = others[: self.capacity - len(attended)]
        free = [held[t][1] for t in sorted(others[len(kept) :])]
        free += range(len(held), self.capacity)
        now = {t: held[t] for t in kept}
        for t, token in attended.items():
            place = hits[t][1] if t in hits else free.pop(0)
            now[t] = token, place, self._step
        self._held[seat, head] = now
        new = attended.keys() - hits.keys()
        tokens, taken = (torch.tensor([now[t][i] for t in sorted(new)]).long() for i in (0, 1))
        self._wanted.append((seat, head, tokens, taken))
        copies = self.together * len(self.homes)
        missed = len(new - {int(rows.seq_lens[r]) - 1})
        self.counts[seat] += torch.tensor([len(attended), missed, missed]) * copies
        places = torch.tensor([now[t][1] for t in attended], dtype=torch.int32)
        for h in range(head, head + self.together):
            first = (seat * self.kv_heads + h) * self.capacity
            rows.lists[r * self.kv_heads + h, : len(places)] = first + places

    def _attended(self, rows: DecodeRows, r: int, head: int) -> dict[int, int]:
        """Positions of tokens in the context, rising, and their numbers in home."""
        size, length = self.page_size, int(rows.seq_lens[r])
        blocks = rows.block_table[r, : -(-length // size)].tolist()
        unit = 1 if rows.per_token else size
        count = -(-int(rows.lengths[r * self.kv_heads + head]) // unit)
        attended = {}
        for entry in rows.lists[r * self.kv_heads + head, :count].tolist():
            first = entry * unit
            position = blocks.index(first // size // self.kv_heads) * size + first % size
            for t in range(position, min(position + unit, length)):
                attended[t] = first + t - position
        return attended

    def wait(self, layer: int) -> None:
        """See :meth:`vllm_kvretrieval.kernels.tokens.TokenRecall.wait`."""
        home, memory = self.homes[layer].flatten(0, 2), self.memories[layer]
        for seat, head, tokens, places in self._wanted:
            for h in range(self.together):
                memory[seat, head + h, places] = home[tokens + h * self.page_size]

    def release(self, seat: int) -> None:
        """See :meth:`vllm_kvretrieval.kernels.tokens.TokenRecall.release`."""
        for head in range(self.kv_heads):
            self._held.pop((seat, head), None)

    def check(self) -> str:
        """See :meth:`vllm_kvretrieval.kernels.tokens.TokenRecall.check`."""
        for (seat, head), held in self._held.items():
            if sorted(place for _, place, _ in held.values()) != list(range(len(held))):
                return f"seat {seat}, KV head {head}: places taken twice, or others free"
            for token, place, _ in held.values():
                for home, memory in zip(self.homes, self.memories, strict=True):
                    for h in range(self.together):
                        at = token + h * self.page_size
                        if not memory[seat, head + h, place].equal(home.flatten(0, 2)[at]):
                            return f"place {place} of KV head {head + h} differs from token {at}"
        return ""
