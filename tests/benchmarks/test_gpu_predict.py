"""Predicted steps on a GPU, and the launches that they are made of: benchmarks/gpu/predict.py."""

from dataclasses import replace

import pytest

from benchmarks.common import read_json
from benchmarks.gpu import counted, predict
from vllm_kvretrieval.kernels import triton as kernels

AGAIN = "run python -m benchmarks.gpu.predict and python -m benchmarks.tables, and say why"


def of(home):
    """Options of an engine with freekv."""
    config = counted.served("freekv", home)
    assert config is not None
    return config


def test_the_committed_table_is_of_todays_launches():
    """Launches and bytes per preset and home, on the path and beside it, and the times by them."""
    stored, now = read_json(predict.OUTPUT), predict.predicted()
    assert stored is not None
    assert now["presets"] == stored["presets"], AGAIN
    assert now["results"] == stored["results"], AGAIN
    assert now["bus"] == stored["bus"], AGAIN
    assert now["dense_layers"] == stored["dense_layers"], AGAIN


def test_a_launch_more_is_seen(monkeypatch):
    stored, write = predict.predicted(), kernels.write_kv

    def twice(*args, **options):
        write(*args, **options)
        write(*args, **options)

    monkeypatch.setattr(kernels, "write_kv", twice)
    launched = predict.predicted()["presets"]["freekv"]["device"]["path"]["_write_kernel"][0]
    assert launched == stored["presets"]["freekv"]["device"]["path"]["_write_kernel"][0] + 1


def test_what_is_beside_the_model_is_counted_apart():
    launches = counted.decode_step(of("host"), batch=1, context=131072, units=132)
    beside = [launch.kernel for launch in launches if launch.side]
    assert beside == ["_select_kernel", "_resolve_kernel", "_recall_kernel"]
    path = [launch.kernel for launch in launches if not launch.side]
    assert path == ["_write_kernel", "_select_kernel", "_resolve_kernel", "_sparse_decode_kernel"]


def test_every_op_of_a_layer_is_predicted():
    """By the names under which a layer is measured."""
    near, far = (predict.op_us(home, 8, 131072) for home in ("device", "host"))
    assert set(near) == {"write_kv", "plan_decode", "select_ahead", "sparse_decode"}
    assert set(far) == {*near, "resolve", "resolve_ahead", "recall_ahead"}
    assert all(time > 0 for time in far.values())


@pytest.mark.parametrize("batch", [1, 2, 8, 32])
def test_short_contexts_are_attended_to_in_full_where_that_is_faster(batch):
    """By the length that follows from batch and budget, steps are no slower than the faster way."""
    model, config = predict.Model.read(predict.MODEL), of("device")
    for context in range(2048, 65536, 1024):
        found, *ways = (
            model.step_us(replace(config, exact_below=length), batch, context)
            for length in (None, 0, 1 << 20)
        )
        assert found <= 1.02 * min(ways), context


def test_what_gpus_refuse_is_not_predicted():
    served = {(name, home) for name, home, _ in counted.presets()}
    assert ("freekv", "host") in served
    assert ("fier", "device") in served
    assert not served & {
        ("oracle", "host"),
        ("razor", "host"),
        ("full", "host"),
        ("ttkv", "device"),
        ("kivi", "host"),
    }
    assert served > {(name, "host") for name in ("ttkv", "fier", "omnikv", "snapkv", "h2o")}


def test_encoded_pages_spare_the_bus():
    """TTKV's codec, to pages as the model made them; and every launch is one that is known."""
    shares = {name: one["share"] for name, one in predict.predicted()["bus"]["ttkv"].items()}
    assert shares["raw"] == 1
    assert shares["k8v4"] <= 0.4
    config = counted.served("ttkv", "host")
    assert config is not None
    launches = counted.decode_step(config, batch=1, context=1 << 17, units=9)
    assert [launch.kernel for launch in launches] == [
        "_write_kernel", "_write_open_kernel", "_select_kernel", "_resolve_kernel",
        "_recall_encoded_kernel", "_sparse_decode_kernel",
    ]  # fmt: skip


def test_what_lists_miss_comes_beside_what_slots_hold():
    """The longer of the two is what attention takes, and a single list has fewer programs."""
    sizes = predict.Sizes(of("host"), 8, predict.LONGEST, counted.Attention())
    (attends,) = (e for e in predict.launches_in(sizes) if e.kernel == "_sparse_decode_kernel")
    bus = predict.RECALL + predict.us(predict.recalled(attends, sizes), predict.BUS)
    slots = predict.us(predict.must_move(attends, sizes)) / predict.ATTEND_SHARE
    assert slots < bus < predict.launch_us(attends, sizes) < slots + bus
    alone = replace(sizes, batch=1, corrected=0.0)
    (attends,) = (e for e in predict.launches_in(alone) if e.kernel == "_sparse_decode_kernel")
    few = replace(attends, values=attends.values | {"SPLITS": 2})
    assert predict.launch_us(few, alone) > predict.launch_us(attends, alone)


RESOLVED = {"device": [], "host": ["_resolve_kernel"]}
"""What a home in host memory takes beside, where single tokens are attended to."""


def launched(method, home):
    """The launches of a layer's step, beside those of the dense half."""
    config = counted.served(method, home)
    assert config is not None
    launches = counted.decode_step(config, batch=1, context=131072, units=132)
    return [launch.kernel for launch in launches if launch.kernel != counted.DENSE_HALF]


@pytest.mark.parametrize("home", RESOLVED)
def test_layers_that_follow_a_filter_select_nothing(home):
    """They write, and attend: two launches."""
    attends = [*RESOLVED[home], "_sparse_decode_kernel"]
    assert launched("omnikv", home) == ["_write_kernel", *attends]


@pytest.mark.parametrize("home", RESOLVED)
def test_kept_tokens_are_listed_and_nothing_is_scored(home):
    attends = [*RESOLVED[home], "_sparse_decode_kernel"]
    assert launched("snapkv", home) == ["_write_kernel", "_list_kept_kernel", *attends]


@pytest.mark.parametrize("home", RESOLVED)
@pytest.mark.parametrize("method", ["h2o", "tova", "raas"])
def test_a_token_is_dropped_after_attention(method, home):
    attends = [*RESOLVED[home], "_sparse_decode_kernel", "_drop_kernel"]
    assert launched(method, home) == ["_write_kernel", "_list_kept_kernel", *attends]


@pytest.mark.parametrize("batch", [1, 8])
def test_predictions_are_plausible(batch):
    """No step is shorter than its bytes, and longer contexts take longer."""
    model = predict.Model.read(predict.MODEL)
    assert model.weights == pytest.approx(15.0e9, rel=0.01)
    for config in (None, of("device"), of("host")):
        times = [model.step_us(config, batch, context) for context in predict.LENGTHS]
        assert times == sorted(times)
        assert times[0] > predict.us(model.weights)
