"""Filters observe a request's latest queries, of which rejected drafts are none."""

import numpy as np
import torch

from vllm_kvretrieval.kernels import Contexts, DecodeRows
from vllm_kvretrieval.methods.observation import LatestQueries, Observation

WINDOW, DRAFTS, SEATS = 4, 3, 2
WEIGHTS = (0.25, 0.5, 0.75, 1.0)


def test_rejected_queries_are_not_observed():
    """Against the definition, over prompts in chunks, drafts, and seats that change hands."""
    random = np.random.default_rng(0)
    ends, begins = np.zeros(SEATS, dtype=np.int32), np.zeros(SEATS, dtype=np.int32)
    observation = Observation(WEIGHTS, ends, begins, DRAFTS)
    latest = LatestQueries(SEATS, WINDOW, 1, 1, torch.float32, DRAFTS)
    known: list[dict[int, float]] = [{}, {}]  # the queries that are certain, by position
    lens, rejected, short = [0, 0], 0, 0
    for step in range(400):
        if random.integers(25) == 0:
            seat = int(random.integers(SEATS))
            lens[seat] = int(random.integers(9))  # behind a prefix in the cache
            known[seat], ends[seat], begins[seat] = {}, 0, 0
        drafts = random.integers(0, DRAFTS + 1, SEATS)
        new = 1 + drafts
        if random.integers(10) == 0:
            new = random.integers(1, 12, SEATS)
            drafts = np.zeros(SEATS, dtype=np.int64)
        starts = np.concatenate([[0], new.cumsum()]).astype(np.int32)
        query = torch.tensor(random.random(starts[-1]), dtype=torch.float32)[:, None, None]
        after, seats = (lens + new).astype(np.int32), np.arange(SEATS, dtype=np.int32)
        latest.take(query, observation.observe(seats, after, starts))
        certain = (after - drafts).astype(np.int32)
        contexts = Contexts(
            torch.zeros(SEATS, 99, dtype=torch.int32),
            torch.from_numpy(after),
            torch.from_numpy(seats),
            torch.from_numpy(np.concatenate([[0], (1 + drafts).cumsum()]).astype(np.int32)),
        )
        found = latest.of(DecodeRows.whole(contexts, torch.empty(0, 9, dtype=torch.int32)))
        weights = observation.weights_of(seats, certain)
        for seat in range(SEATS):
            of_seat = query[starts[seat] : starts[seat + 1], 0, 0].tolist()
            known[seat] |= dict(enumerate(of_seat[: new[seat] - drafts[seat]], lens[seat]))
            for j in range(WINDOW):
                position = int(certain[seat]) - WINDOW + j
                if position in known[seat]:
                    assert weights[seat, j] == WEIGHTS[j], (step, seat, j)
                    assert found[seat * WINDOW + j, 0, 0] == np.float32(known[seat][position])
                else:
                    assert weights[seat, j] == 0
                    short += 1
            accepted = int(random.integers(0, drafts[seat] + 1))
            known[seat] |= dict(
                enumerate(of_seat[: len(of_seat) - drafts[seat] + accepted], lens[seat])
            )
            lens[seat] = int(certain[seat]) + accepted
            rejected += accepted < drafts[seat]
    assert rejected > 100
    assert short > 20
