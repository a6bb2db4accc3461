"""Tokens that engines keep of prompts: those of a CPU, and how others are compared with them."""


def last_seat(worker):
    """The seat of the last request, which was alone."""
    requests = worker.requests
    return next(iter(requests._seat_of.values()), requests._free[-1])


def on_a_cpu(worker):
    """See :func:`tests.support.device_engine.kept`."""
    requests, seat = worker.requests, last_seat(worker)
    return [
        [
            impl.methods[0].chooser.selection.chosen[seat, head, :count].tolist()
            for head, count in enumerate(requests.selected[seat, heads].tolist())
        ]
        for impl, heads in zip(
            worker.retrieval_layers.values(), requests.kept.heads.slices, strict=True
        )
    ]


def assert_same(found, expected):
    """As many tokens in each KV head, in rising order, and the same but for a rounded rating."""
    assert [[*map(len, heads)] for heads in found] == [[*map(len, heads)] for heads in expected]
    for ours, theirs in zip(found, expected, strict=True):
        for head, other in zip(ours, theirs, strict=True):
            assert head == sorted(head)
            assert len({*head} - {*other}) <= 1, "one rating may be rounded to that of another"
