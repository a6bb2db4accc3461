"""Repairs of vLLM itself, where it computes wrongly or slowly; they are not KV retrieval.

The files here change vLLM's models and its environment, and would serve without retrieval as well.
:data:`WORKAROUNDS` lists them and what stands elsewhere for vLLM's sake, so that a new release of
vLLM can be asked which of them it still needs.
"""

from typing import NamedTuple

from vllm_kvretrieval.compat import TESTED


class Workaround(NamedTuple):
    """Code of ours that a fault or a gap of vLLM needs.

    Attributes:
        code: The dotted path of it, within this package.
        why: The fault or gap.
        until: The change in vLLM after which the code can go.
        versions: Releases of vLLM that need it.
        reference: An issue or pull request of vLLM; empty where none is known.
    """

    code: str
    why: str
    until: str
    versions: tuple[str, ...] = TESTED
    reference: str = ""


WORKAROUNDS = (
    Workaround(
        "upstream.rotary.flatten_heads",
        "The CPU's rotary kernel takes each head of [tokens, heads, size] for a token, and reads "
        "positions and memory that are not its own (LFM2 with --enforce-eager).",
        "The kernel takes queries with a dimension of heads, or its caller flattens them.",
        reference="neighbours: pull requests 14667 and 31643",
    ),
    Workaround(
        "upstream.linear.widen_linear_layers",
        "On CPUs with AVX2 only oneDNN refuses 16 bits, and vLLM leaves linear layers to PyTorch's "
        "slow products.",
        "Products of 16 bits on such CPUs take the time of float32.",
    ),
    Workaround(
        "upstream.primitives.keep_few_primitives",
        "Products on CPUs have a kernel for each number of tokens, of which oneDNN keeps 1,024: "
        "the memory of a server grows for hours, by 0.5 GiB with SmolLM2-135M.",
        "vLLM's kernels serve any number of tokens, or it keeps them all itself.",
    ),
    Workaround(
        "upstream.compiled.load_compiled",
        "On CPUs a saved compiled model is not loaded, since torch's functions lack "
        "finalize_loading; and its key leaves out the CPU and the products of linear layers.",
        "vLLM loads what inductor has compiled, by a key with both.",
    ),
    Workaround(
        "upstream.compiled._probe_once",
        "At every start torch loads a library for each kind of the CPU's vectors in a process of "
        "its own, which takes a second.",
        "torch remembers what it has tried.",
    ),
    Workaround(
        "upstream.starting.interruptible",
        "A KeyboardInterrupt while an engine starts is forgotten (zmq_socket_ctx); its process has "
        "ended, and vLLM waits for it for ten minutes (VLLM_ENGINE_READY_TIMEOUT_S).",
        "The interrupt is raised again.",
    ),
    Workaround(
        "engine.cpu.processes.share_process",
        "On CPUs a worker that is alone has a process of its own, and all are spawned, since "
        "OpenMP reads its cores when a process starts.",
        "vLLM binds threads of a process that runs.",
    ),
    Workaround(
        "upstream.defaults.all_cores",
        "A core is kept back for the front end, half of a machine with two.",
        "The core is kept back on large machines only.",
    ),
    Workaround(
        "upstream.states.end_chunks_at_blocks",
        "With the prefix cache a chunk of a prompt may end behind the border of a block, where the "
        "kernel of Mamba-2 layers for CPUs gives no state: the step fails.",
        "The kernel gives states in the middle of a chunk, or the scheduler ends chunks at blocks.",
    ),
    Workaround(
        "quantization.layers.permit_tiles",
        "Attention on CPUs uses AMX without asking the system for it: it is permitted only once "
        "oneDNN has made a product, and without one a worker ends by an illegal instruction.",
        "Attention asks for AMX itself.",
    ),
    Workaround(
        "upstream.seeds.prompts_without_seeds",
        "On CPUs the engine ends at a request with a seed whose prompt takes several steps: the V1 "
        "runner takes back what it has drawn for the tokens that it drops.",
        "Nothing is drawn for these tokens, or a generator without offsets is set back.",
    ),
    Workaround(
        "upstream.verifying.verify_as_asked",
        "On CPUs the rejection sampler verifies drafts of requests that sample by temperatures, "
        "top_k and top_p that nobody has written: the function that repeats them for each draft "
        "writes floats and int32 into a copy. And in a step without drafts it verifies none at "
        "length, and fails at a request with top_k and without top_p. Everywhere it counts "
        "min_tokens without the drafts before a token.",
        "The output that the sampler has allocated holds what is repeated, of whatever type, and "
        "a step without drafts is sampled as in an engine without, and an answer may end behind "
        "drafts with which it is long enough.",
    ),
    Workaround(
        "upstream.rotations.keep_rotations",
        "--hf-overrides of rope_parameters replaces the whole field, the base of the rotations "
        "included.",
        "Overrides are merged into the field.",
    ),
    Workaround(
        "upstream.rotations.scale_longrope",
        "attention_factor and factor of a longrope model are not looked at.",
        "Its rotations are scaled by them, as in transformers.",
    ),
    Workaround(
        "upstream.rotations.check_override",
        "An override of rope_parameters without a rope_type ends in a KeyError.",
        "vLLM says what is missing, or reads type, as model cards have it.",
    ),
    Workaround(
        "upstream.rotations.check_rotations",
        "Lengths are served for which no rotations have been made.",
        "vLLM refuses such a --max-model-len.",
    ),
    Workaround(
        "attention.cpu.nixl.check_exchange",
        "Without its check at the handshake NIXL packs blocks of ours, which are packed, or takes "
        "blocks that are not.",
        "The layout of blocks is compared whatever enforce_handshake_compat says.",
    ),
    Workaround(
        "command_line.check_command_line",
        "Options of plug-ins are lost or misread in YAML files, and ignored with --config=FILE.",
        "vLLM reads both as it reads its own options.",
    ),
    Workaround(
        "platforms.http.RequestCheck",
        "What the engine refuses of a streamed request comes after the status 200, and fields "
        "that the server does not know are dropped.",
        "The platform's validate_request is asked before an answer begins.",
    ),
    Workaround(
        "platforms.draining.Ending",
        "A server that is told to end takes requests, and gives them an empty answer with status "
        "200, or a 500, while its health stays good.",
        "It answers them with a 503 from the beginning, and its health, too.",
    ),
    Workaround(
        "platforms.shared.RetrievalPlatform.validate_request",
        "All engines of a process share a platform, which is not told which of them asks, so the "
        "caller's frame is read.",
        "The hook gets the engine's configuration.",
    ),
    Workaround(
        "engine.reports.CARRIER",
        "Statistics have no field for counts of a plug-in, so they ride in one of a connector's.",
        "SchedulerStats takes counts of plug-ins.",
    ),
    Workaround(
        "compat.bound_warm_up",
        "The V2 runner warms up on CPUs with more requests than a worker may have room for.",
        "The warm-up keeps to the requests that the runner allows.",
        versions=("0.33",),
    ),
    Workaround(
        "plugin.NOT_ASKED_FOR",
        "Every start warns of endpoint plug-ins that nobody has asked for.",
        "The warning is left to servers that name endpoints.",
    ),
    Workaround(
        "plugin.NOT_MISSED",
        "Every process on a CPU warns that Triton is missing, which serves GPUs.",
        "Builds for CPUs do not look for Triton.",
    ),
)
"""Everything that goes once vLLM is mended."""
