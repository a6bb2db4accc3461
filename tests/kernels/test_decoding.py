"""A layer's decode step in one op: writing, indexes, selection and attention."""

from dataclasses import replace

import pytest
import torch
from vllm import _custom_ops as ops

from tests.spec import ops as reference
from tests.support.covering import covering
from tests.support.isas import visited
from tests.support.kernel_checks import (
    DTYPES,
    PAGE,
    clone_rows,
    copy_of,
    make_chooser,
    make_rows,
)
from vllm_kvretrieval.kernels import DecodeLayer, cpu
from vllm_kvretrieval.retrieval.index import make_index

LENS = (1000, 33 * PAGE, 400, 40 * PAGE - 7)
KV_HEADS, GROUP = 2, 3
TOLERANCE = {torch.bfloat16: 2e-2, torch.float16: 2e-3, torch.float32: 1e-4}


class Setting:
    """A layer, rows that decode in it, and what they bring along."""

    def __init__(self, layout, dtype, index="min_max", *, head_size=64, remainder=0.0, **options):
        per_token = index == "one_bit"
        self.chooser = make_chooser(
            180, len(LENS), KV_HEADS, GROUP, head_size, dtype, index=make_index(index),
            layout=layout, means=remainder > 0, remainder=remainder, **options,
        )  # fmt: skip
        budget = (4, 40, 64) if per_token else (1, 2, 5)
        self.rows = make_rows(LENS, self.chooser, budget, fresh=1, per_token=per_token)
        self.rows.block_table = torch.randperm(180)[:164].view(4, 41).int()
        last = self.rows.seq_lens - 1
        page = self.rows.block_table[torch.arange(len(LENS)), last // PAGE]
        self.slots = (page * PAGE + last % PAGE).long()
        fused = torch.randn(len(LENS) + 1, KV_HEADS * (GROUP + 2), head_size).to(dtype)
        self.query, key, value = fused.split([KV_HEADS * GROUP, KV_HEADS, KV_HEADS], 1)
        self.new = key, value

    def run(self, decode_layer):
        """What a step leaves behind by an op, all of it new."""
        cache = self.chooser.store.cache.clone()
        chooser = copy_of(self.chooser)
        chooser.store = replace(chooser.store, cache=cache)
        layout, output = chooser.store.layout, torch.zeros_like(self.query)
        layer = DecodeLayer(cache, layout, GROUP, [chooser.store], chooser.scale)
        rows = clone_rows(self.rows)
        decode_layer(self.query, *self.new, self.slots, output, rows, chooser, layer)
        kept = [cache, rows.lengths, chooser.selection.chosen, chooser.selection.query]
        if chooser.store.index.grows:  # means are summed in other orders
            kept.append(chooser.store.records)
        return output, kept


@covering(
    layout=["vec", "amx", "token_major"],
    dtype=DTYPES,
    index=["min_max", "landmark", "exact"],
    head_size=[64, 80, 128],
)
def test_it_is_four_ops_in_turn(layout, dtype, index, head_size):
    if layout == "amx" and dtype == torch.float32:
        pytest.skip("no layout for it")
    torch.manual_seed(1)
    setting = Setting(layout, dtype, index, head_size=head_size)
    output, kept = setting.run(reference.decode_layer)
    for isa in visited():
        ours, others = setting.run(cpu.decode_layer)
        tolerance = TOLERANCE[dtype]
        torch.testing.assert_close(ours, output, atol=tolerance, rtol=tolerance, msg=isa)
        for actual, expected in zip(others, kept, strict=True):
            assert torch.equal(actual, expected), isa


@pytest.mark.parametrize("layout", ["vec", "amx"])
def test_with_a_remainder(layout):
    torch.manual_seed(2)
    setting = Setting(layout, torch.bfloat16, "exact", remainder=1.0)
    output, _ = setting.run(reference.decode_layer)
    setting.chooser.remainder, without = 0.0, setting.chooser
    plain, _ = setting.run(reference.decode_layer)
    without.remainder = 1.0
    assert (output - plain).abs().max() > 0.1
    for isa in visited():
        ours, _ = setting.run(cpu.decode_layer)
        torch.testing.assert_close(ours, output, atol=3e-2, rtol=3e-2, msg=isa)


def test_single_tokens():
    torch.manual_seed(3)
    setting = Setting("token_major", torch.bfloat16, "one_bit")
    output, kept = setting.run(reference.decode_layer)
    ours, others = setting.run(cpu.decode_layer)
    torch.testing.assert_close(ours, output, atol=2e-2, rtol=2e-2)
    assert all(torch.equal(a, b) for a, b in zip(others, kept, strict=True))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("layout", ["vec", "vec16", "amx"])
def test_tokens_are_written_as_vllm_writes_them(layout, dtype):
    if layout == "amx" and (dtype != torch.bfloat16 or not torch.cpu._is_amx_tile_supported()):
        pytest.skip("no layout for it here")
    torch.manual_seed(4)
    caches = [torch.zeros(9, 2, PAGE, 2 * 96).to(dtype) for _ in "abc"]
    fused = torch.randn(140, 6, 96).to(dtype)
    key, value = fused[:, :2], fused[:, 2:4]
    slots = torch.randperm(9 * PAGE)[:135]
    slots[[4, 130]] = -1
    cpu.write_cache(key, value, slots, caches[0], layout)
    reference.write_cache(key, value, slots, caches[1], layout)
    halves = caches[2].view(9, 2, -1, 96).chunk(2, dim=2)
    new = key[:135].contiguous(), value[:135].contiguous()
    ops.cpu_attn_reshape_and_cache(*new, *halves, slots, layout, 1.0, 1.0, "auto")
    assert torch.equal(caches[0], caches[1])
    assert torch.equal(caches[0], caches[2])


def test_what_does_not_fit_is_refused():
    setting = Setting("vec", torch.bfloat16)
    chooser, rows, (key, value) = setting.chooser, setting.rows, setting.new
    cache, output = chooser.store.cache, torch.zeros_like(setting.query)
    before = cache.clone()

    def decode(why, **changed):
        layer = DecodeLayer(cache, "vec", GROUP, [chooser.store], 0.1)
        step = {
            "query": setting.query, "key": key, "value": value, "slot_mapping": setting.slots,
            "output": output, "rows": rows, "chooser": chooser, "layer": layer,
        }  # fmt: skip
        with pytest.raises(ValueError, match=why):
            cpu.decode_layer(**step | changed)

    elsewhere = DecodeLayer(cache.clone(), "vec", GROUP, [], 0.1)
    decode("selects in another cache", layer=elsewhere)
    decode("selects in another cache", layer=DecodeLayer(cache, "amx", GROUP, [], 0.1))
    decode("selects in another cache", layer=DecodeLayer(cache, "vec", 2, [], 0.1))
    decode("scale=-1", layer=DecodeLayer(cache, "vec", GROUP, [], -1.0))
    decode("neon", layer=DecodeLayer(cache, "neon", GROUP, [], 0.1))
    decode("query must be", query=setting.query[:2])
    decode("query must be", query=setting.query.half())
    decode("key must be", key=key[:, :1])
    decode("value must be", value=value[:3])
    decode("output must be", output=output.float())
    decode(r"slot_mapping\[1\] is 5760", slot_mapping=torch.tensor([0, 180 * PAGE, 1, 2]))
    drafts = replace(rows, starts=torch.tensor([0, 1, 2, 3, 4]).int(), handle=None)
    decode("rows have drafts", rows=drafts)
    outside = replace(rows, seats=rows.seats + 99, handle=None)
    decode("seat", rows=outside)
    assert torch.equal(cache, before)
    assert output.eq(0).all()
