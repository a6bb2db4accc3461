"""Models with quantised weights, loaded by vLLM: each layer against the values of its weights."""

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import LlamaConfig, LlamaForCausalLM
from vllm.config import set_current_vllm_config
from vllm.distributed import (
    cleanup_dist_env_and_memory,
    init_distributed_environment,
    initialize_model_parallel,
)
from vllm.engine.arg_utils import EngineArgs
from vllm.model_executor import parameter
from vllm.model_executor.kernels.linear import _POSSIBLE_INT8_KERNELS, _POSSIBLE_KERNELS
from vllm.model_executor.layers import linear
from vllm.model_executor.model_loader import get_model
from vllm.platforms import PlatformEnum
from vllm.utils.network_utils import get_distributed_init_method, get_open_port

from tests.spec import quantised as reference
from tests.support.engine import random_mixture
from tests.support.quantised_models import FORMATS, SIZES, by_gptq, random_quantised
from vllm_kvretrieval.quantization.gptq import GPTQConfig
from vllm_kvretrieval.quantization.kernels import (
    KvrInt8ScaledMMLinearKernel,
    KvrWNA16LinearKernel,
    offer_kernels,
)
from vllm_kvretrieval.quantization.layers import kept
from vllm_kvretrieval.quantization.methods import Int4Config, Int8Config

MERGED = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}


@pytest.fixture(scope="module")
def load():
    """Loads a model in this process, as vLLM does."""
    method = get_distributed_init_method("127.0.0.1", get_open_port())
    started = False

    def load_model(path, **options):
        nonlocal started
        config = EngineArgs(
            model=str(path),
            max_model_len=256,
            enforce_eager=True,
            skip_tokenizer_init=True,
            **options,
        ).create_engine_config()
        with set_current_vllm_config(config):
            if not started:
                init_distributed_environment(1, 0, method, 0, "gloo")
                initialize_model_parallel(1, 1)
                started = True
            offer_kernels(first=True)
            return get_model(vllm_config=config)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.accelerator, "empty_cache", lambda: None)  # as vLLM's worker does
        yield load_model
        cleanup_dist_env_and_memory()


def check_layers(model, values):
    """Products of few tokens and many are those of every layer's weights, but for rounding."""
    found = 0
    for name, layer in model.named_modules():
        stem, _, last = name.rpartition(".")
        parts = MERGED.get(last, (last,))
        if f"{stem}.{parts[0]}" not in values:
            continue
        weight = torch.cat([values[f"{stem}.{part}"] for part in parts])
        for tokens in (7, 40):
            x = torch.randn(tokens, weight.shape[1]).bfloat16()
            exact = x.double() @ weight.double().T
            product = layer.quant_method.apply(layer, x).double()
            assert (product - exact).norm() / exact.norm() < 0.01, (name, tokens)
        found += 1
    assert found == 8, "two layers with four products each"


@pytest.mark.parametrize("name", FORMATS)
def test_checkpoints(load, tmp_path, name):
    """Every format gives the values that its tool has written."""
    values = random_quantised(tmp_path, name)
    check_layers(load(tmp_path, dtype="bfloat16"), values)


def random_llama(path, tied):
    """A small Llama in bfloat16, saved at ``path``."""
    torch.manual_seed(0)
    config = LlamaConfig(
        **SIZES, num_attention_heads=4, num_key_value_heads=2, head_dim=32, initializer_range=0.1,
        max_position_embeddings=512, tie_word_embeddings=tied,
    )  # fmt: skip
    model = LlamaForCausalLM(config).bfloat16()
    model.save_pretrained(path)
    return {name: tensor.detach().float() for name, tensor in model.state_dict().items()}


@pytest.mark.parametrize("method", ["kvr_int8", "kvr_int4"])
def test_an_output_layer_that_is_missing(load, tmp_path, method, monkeypatch):
    """With --mm-encoder-only vLLM loads the layers of images alone; all others have no weights."""
    random_llama(tmp_path, False)

    def missing(self, weights):
        for each in self.parameters():
            each.data.zero_()
        self.lm_head.weight = torch.nn.Parameter(self.lm_head.weight.to("meta"), False)
        return {name for name, _ in self.named_parameters()}

    monkeypatch.setattr("vllm.model_executor.models.llama.LlamaForCausalLM.load_weights", missing)
    model = load(tmp_path, dtype="bfloat16", quantization=method)
    assert not hasattr(model.lm_head, "packed_name")


@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
@pytest.mark.parametrize(
    ("method", "bits", "error"), [("kvr_int8", 8, 0.012), ("kvr_int4", 4, 0.1)]
)
def test_weights_of_16_bits_are_rounded(load, tmp_path, method, bits, error, tied):
    """Linear layers have 8 or 4 bits, the output layer 8, and so have tied embeddings."""
    weights = random_llama(tmp_path, tied)
    model = load(tmp_path, dtype="bfloat16", quantization=method)
    layer, embeddings = model.model.layers[1], model.model.embed_tokens
    gate_up, down = layer.mlp.gate_up_proj, layer.mlp.down_proj
    mlp = [weights[f"model.layers.1.mlp.{n}_proj.weight"] for n in ("gate", "up", "down")]
    head = weights["lm_head.weight"]
    for found, exact, own in (
        (gate_up, torch.cat(mlp[:2]), bits),
        (down, mlp[2], bits),
        (model.lm_head, head, 8),
    ):
        packed = kept(found)
        assert packed.bits == own
        assert packed.weights.nbytes == exact.numel() * own // 8
        x = torch.randn(3, exact.shape[1]).bfloat16()
        expected = x.double() @ exact.double().T
        product = found.quant_method.apply(found, x).double()
        assert (product - expected).norm() / expected.norm() < (error if own == bits else 0.012)
        same = reference.quantised_linear(x, packed)
        torch.testing.assert_close(product, same, rtol=5e-3, atol=1e-3)
    assert (model.lm_head is embeddings) == tied
    ids = torch.tensor([0, 5, 319])
    rows, exact = embeddings(ids), weights["model.embed_tokens.weight"][ids]
    assert rows.dtype == torch.bfloat16
    if tied:
        assert 0 < (rows.float() - exact).norm() / exact.norm() < 0.012
    else:
        assert torch.equal(rows.float(), exact)


def test_models_that_are_not_rounded(load, tmp_path):
    """Experts are refused before weights are read, and so are weights that are rounded already."""
    with pytest.raises(ValueError, match="mixtures of experts"):
        load(random_mixture(tmp_path / "mixture"), quantization="kvr_int8")
    random_quantised(tmp_path / "quantised", "W8A16")
    with pytest.raises(ValueError, match="does not match"):
        load(tmp_path / "quantised", quantization="kvr_int8")


def test_parts_in_unlike_orders_are_refused(load, tmp_path):
    """Merged layers take their inputs once, so q, k and v must have one order."""
    random_quantised(tmp_path, "GPTQ act-order")
    tensors = load_file(tmp_path / "model.safetensors")
    name = "model.layers.0.self_attn.v_proj.g_idx"
    tensors[name] = tensors[name].flip(0).contiguous()
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match="unlike each other"):
        load(tmp_path, dtype="bfloat16")


def test_groups_that_are_broken_are_refused(load, tmp_path):
    """Each group must have as many inputs as the configuration says."""
    random_quantised(tmp_path, "GPTQ act-order")
    tensors = load_file(tmp_path / "model.safetensors")
    name = "model.layers.1.mlp.down_proj.g_idx"
    tensors[name] = tensors[name].clamp(max=2)
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match="not 32 inputs"):
        load(tmp_path, dtype="bfloat16")


def test_the_first_kernel_that_serves():
    """Ours leads, or serves what vLLM's refuse."""
    for kernels, ours in (
        (_POSSIBLE_KERNELS, KvrWNA16LinearKernel),
        (_POSSIBLE_INT8_KERNELS, KvrInt8ScaledMMLinearKernel),
    ):
        found = kernels[PlatformEnum.CPU]
        for first in (False, True):
            offer_kernels(first=first)
            assert found.count(ours) == 1
            assert found.index(ours) == (0 if first else len(found) - 1)


@pytest.fixture
def ranks(load, tmp_path, monkeypatch):
    """Makes layers of a model as each of two ranks has them."""
    random_llama(tmp_path, False)
    load(tmp_path, dtype="bfloat16")  # which starts what layers ask for their rank

    def make(kind, *shape, config):
        for rank in (0, 1):
            for module in (linear, parameter):
                monkeypatch.setattr(module, "get_tensor_model_parallel_world_size", lambda: 2)
                monkeypatch.setattr(module, "get_tensor_model_parallel_rank", lambda own=rank: own)
            yield kind(
                *shape, bias=False, params_dtype=torch.bfloat16, quant_config=config, prefix="mlp.x"
            )

    return make


@pytest.mark.parametrize("config", [Int8Config, Int4Config])
def test_ranks_have_parts_of_a_layer(ranks, config):
    """Rows and columns are divided before they are rounded."""
    weight, x = torch.randn(96, 256).bfloat16(), torch.randn(3, 256).bfloat16()
    exact = x.double() @ weight.double().T
    products = []
    for kind in (linear.RowParallelLinear, linear.ColumnParallelLinear):
        for rank, layer in enumerate(ranks(kind, 256, 96, config=config())):
            layer.weight.weight_loader(layer.weight, weight)
            layer.quant_method.process_weights_after_loading(layer)
            of_rank = x.chunk(2, 1)[rank] if kind is linear.RowParallelLinear else x
            products.append(layer.quant_method.apply(layer, of_rank.contiguous()).double())
    for found in (products[0] + products[1], torch.cat(products[2:], 1)):
        assert (found - exact).norm() / exact.norm() < (0.015 if config is Int8Config else 0.12)


@pytest.mark.parametrize("given", [{"desc_act": True}, {"group_size": -1, "sym": False}], ids=str)
def test_groups_across_ranks_are_refused(ranks, given):
    """Whose inputs lie on several ranks; layers whose outputs are divided have all inputs."""
    config = GPTQConfig.from_config(by_gptq(4, 32, True, False).settings | given)
    with pytest.raises(ValueError, match="--tensor-parallel-size 1"):
        next(ranks(linear.RowParallelLinear, 256, 64, config=config))
    next(ranks(linear.ColumnParallelLinear, 256, 64, config=config))
