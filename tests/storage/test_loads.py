"""Which pages are indexed in a step: those that a connector has filled, and copies of pages."""

import numpy as np
import torch

from tests.spec import ops as reference
from tests.support.kernel_checks import make_chooser
from tests.support.steps import Runner, request_table
from vllm_kvretrieval.attention.cpu.metadata import loaded_pages
from vllm_kvretrieval.engine.loads import LoadedPages
from vllm_kvretrieval.kernels import cpu
from vllm_kvretrieval.options.engine import RetrievalConfig

TABLE = torch.arange(256, dtype=torch.int32).view(2, 128)


def test_loaded_pages_are_indexed_once_whenever_a_request_comes():
    pages = LoadedPages(8)
    some = np.array([1, 2, 5])
    pages.begin_step([2, 3])
    assert pages.among(some).tolist() == [False, True, False]
    assert pages.among(some).tolist() == [False, True, False], "other layers, in the same step"
    pages.begin_step([])
    assert pages.among(some).tolist() == [False, False, False]
    assert pages.among(np.array([3])).tolist() == [True], "some steps later"
    pages.begin_step([2])
    assert pages.among(some).tolist() == [False, True, False], "loaded into again"


def loaded(table, lens, new):
    """Pages to be indexed, and tokens in each."""
    after, before = np.array(lens), np.array(lens) - np.array(new)
    pages = loaded_pages(table, after, before, TABLE[: len(lens)], table.config.page_size)
    return {} if pages is None else dict(zip(*(part.tolist() for part in pages), strict=True))


def test_arriving_requests_index_loaded_pages_and_copies():
    config, runner = RetrievalConfig.from_options("freekv", {}), Runner()
    table = request_table(config, 2, [1], runner)
    runner.batch("a", "b")
    table.begin_step({}, 0, dict(runner.notes))
    assert loaded(table, [100, 70], [36, 6]) == {}, "a hit of whole pages"
    assert loaded(table, [100, 70], [61, 3]) == {1: 32, 130: 6}, "copies, with the step's tokens"
    table.loaded = LoadedPages(256)
    table.loaded.begin_step([0, 1, 2, 129])
    assert loaded(table, [100, 70], [36, 6]) == {0: 32, 1: 32, 129: 32}
    table.loaded.begin_step([])
    assert loaded(table, [100, 70], [36, 6]) == {}
    table.begin_step({}, 0)
    table.loaded.begin_step([0])
    assert loaded(table, [100, 70], [36, 6]) == {}, "nothing arrives"


def test_bounds_of_a_copied_page_are_those_of_its_own_keys():
    """A copy on write within a page, whose index covers keys that are overwritten in the copy."""
    torch.manual_seed(0)
    store = make_chooser(4, 1, 2, 1, 64, torch.float32).store
    store.cache[3], store.records[3] = store.cache[1], store.records[1]
    key = torch.randn(10, 2, 64) / 9
    slots = torch.arange(3 * 32 + 16, 3 * 32 + 26)
    keys = store.cache.view(4, 2, 2, 64, 32)[3, :, 0]
    keys[..., 16:26] = key.permute(1, 2, 0)
    cpu.update_index(key, slots, store)
    own = reference.build(keys[..., :26].permute(2, 0, 1)[None].float(), store)[0]
    assert not torch.equal(store.records[3], own), "too wide"
    cpu.index_pages(torch.tensor([3]).int(), torch.tensor([26]).int(), store)
    assert torch.equal(store.records[3], own)
