"""Whether a model holds some documents here, and the server that reads them."""

import hashlib
import re
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from vllm_kvretrieval.doctor.lengths import own_length, read_model
from vllm_kvretrieval.doctor.logs import quiet
from vllm_kvretrieval.doctor.options import read_options, refusal, token_bytes
from vllm_kvretrieval.errors import RetrievalConfigError
from vllm_kvretrieval.options.engine import RetrievalConfig

ROOM = 1536
"""Tokens beside the documents, for questions and answers, at least."""
QUESTIONS = 512
"""The same beside the longest answer."""
PIECE = 1 << 20
"""Characters whose tokens are counted at once."""
STEP = 1024
"""Lengths of contexts that are not the model's longest are multiples of this."""
KEPT = 2
"""Contexts of the longest length whose KV cache is kept, at most."""
PART = 0.5
"""The share of the free memory, or disk, that the KV cache may take."""
FAST = 0.25
"""The share of the free memory for the fast part of a cache on disk."""
SEQUENCES = "4"
GIB, MIB = 1 << 30, 1 << 20
MOST_MIXED = 4 * GIB
"""The largest KV cache of a model whose layers differ."""
BACKEND = ("--attention-backend", "kvretrieval")
MEMORY = "--kv-cache-memory-bytes"


class TooLongError(RetrievalConfigError):
    """The documents are longer than the model reads."""


class Known(NamedTuple):
    """A model that reads long texts.

    Attributes:
        name: On the Hugging Face Hub.
        tokens: Its longest context, by its config.json.
        gib: GiB of its weights in 16 bits.
    """

    name: str
    tokens: int
    gib: float


KNOWN = (
    Known("Qwen/Qwen2.5-1.5B-Instruct", 32_768, 2.9),
    Known("meta-llama/Llama-3.2-1B-Instruct", 131_072, 2.3),
    Known("meta-llama/Llama-3.2-3B-Instruct", 131_072, 6.0),
    Known("Qwen/Qwen3-4B-Instruct-2507", 262_144, 7.5),
    Known("Qwen/Qwen2.5-7B-Instruct-1M", 1_010_000, 14.2),
)
"""Models to name where another is too short or too large, smallest first."""


class Serving(NamedTuple):
    """A server to start.

    Attributes:
        options: Options of ``vllm serve``.
        length: Tokens of its longest context.
        tokens: Tokens of the documents.
        store: The directory of the store; None: it has none.
        remarks: What the user should know.
    """

    options: list[str]
    length: int
    tokens: int
    store: Path | None
    remarks: list[str]


def plan(
    model: str,
    texts: Sequence[str],
    engine: Sequence[str],
    directory: Path,
    keep: bool = True,
    answer: int = 0,
) -> Serving:
    """The server that reads some texts, by what they take of memory and disk.

    Args:
        model: Path, or name on a hub; its files are here.
        texts: The texts of the documents.
        engine: Further options of ``vllm serve``, which win.
        directory: Where stores are made.
        keep: Whether to keep what is read.
        answer: Most tokens of an answer.

    Raises:
        TooLongError: The documents are longer than the model reads; says which model is not.
        RetrievalConfigError: The model is too large for this machine; says which is not.
        OSError: The model is not there.
    """
    try:
        config = read_model([model, *engine])
        vllm_config = read_options([model, *BACKEND, *engine])
    except ValueError as error:
        raise RetrievalConfigError(f"{model}: {refusal(error)}") from None
    # Of the options: --max-model-len in them is the longest.
    longest = min(own_length(config), int(vllm_config.model_config.max_model_len))
    tokens = count_tokens(vllm_config.model_config, texts, longest)
    room = max(ROOM, QUESTIONS + answer)
    needed = tokens + room
    if needed > longest:
        raise TooLongError(too_long(model, tokens, longest, room))
    retrieval = RetrievalConfig.from_vllm(vllm_config)
    each = None if retrieval is None else token_bytes(vllm_config, retrieval)
    free, weights = _free_memory(), weight_bytes(model)
    if weights > free:
        raise RetrievalConfigError(too_large(model, weights, 0, free, needed))
    free -= weights
    options = [*BACKEND, "--max-num-seqs", SEQUENCES, "--enable-prompt-tokens-details"]
    options += ["--kv-retrieval.sources", "true"]
    options += ["--enforce-eager"]  # compiling would take longer than many a text
    own = directory / folder_name(model) if keep else None
    if own is not None:
        own.mkdir(mode=0o700, parents=True, exist_ok=True)
    if each is None:
        length = min(longest, _rounded(needed))
        cache, store = _of_mixed_layers(own, free)
    else:
        fits = longest * (each.kv + each.indexed) <= PART * free
        length = longest if fits else min(longest, _rounded(needed))
        sizes = _Sizes(length, each.kv, each.indexed, free)
        found = sizes.cache(own)
        if found is None:
            free += weights
            raise RetrievalConfigError(too_large(model, weights, sizes.context, free, needed))
        cache, store = found
    remarks = []
    if store is not None:
        cache += ["--kv-retrieval.store", str(store)]
    elif own is not None:
        disk = shutil.disk_usage(own).free / GIB
        remarks.append(
            f"{disk:.1f} GiB of disk are free at {own}, too few to keep the KV cache: after a "
            "restart the documents are read again."
        )
    options += ["--max-model-len", str(length), *cache, *engine]
    return Serving(options, length, tokens, store, remarks)


class _Sizes(NamedTuple):
    """What contexts take.

    Attributes:
        length: Tokens of the longest.
        kv: Bytes of a token's keys and values.
        indexed: Bytes of a token in the page index.
        free: Bytes of free memory, less the weights.
    """

    length: int
    kv: float
    indexed: float
    free: float

    @property
    def context(self) -> float:
        """Bytes of the longest context."""
        return self.length * (self.kv + self.indexed)

    def cache(self, directory: Path | None) -> tuple[list[str], Path | None] | None:
        """Options for the KV cache, and the store that keeps it; None: there is no room.

        Args:
            directory: Where the model's stores are; None: none is wanted.
        """
        home, tokens = self._of_store(directory) if directory else (None, 0)
        store = directory / f"{home}-{tokens}" if directory and home else None
        if home is None:
            home, tokens = self._without_store()
        if home is None:
            return None
        size = str(int(tokens * self.kv))
        options = ["--kv-retrieval.home", home]
        if home == "device":
            return [*options, MEMORY, size], store
        fast = str(int(FAST * self.free))
        return [*options, "--kv-retrieval.home_bytes", size, MEMORY, fast], store

    def _without_store(self) -> tuple[str | None, int]:
        """The home, and how many tokens it holds; None: there is no room."""
        for tokens in (KEPT * self.length, self.length):
            if tokens * (self.kv + self.indexed) <= PART * self.free:
                return "device", tokens
            if self._fits_disk(tokens, Path("/var/tmp")):
                return "disk", tokens
        return None, 0

    def _of_store(self, directory: Path) -> tuple[str | None, int]:
        """The same for a store; one that is there is taken where it holds enough."""
        found = []
        for path in directory.iterdir():
            kind = re.fullmatch(r"(device|disk)-(\d+)", path.name)
            if kind and int(kind[2]) >= self.length:
                found.append((int(kind[2]), kind[1]))
        for tokens, home in sorted(found):
            if home == "disk" or tokens * (self.kv + self.indexed) <= PART * self.free:
                return home, tokens
        for tokens in (KEPT * self.length, self.length):
            if tokens * self.kv > PART * shutil.disk_usage(directory).free:
                continue
            in_memory = tokens * (self.kv + self.indexed) <= PART * self.free
            if in_memory or self._fits_disk(tokens, directory):
                return "device" if in_memory else "disk", tokens
        return None, 0

    def _fits_disk(self, tokens: int, directory: Path) -> bool:
        """Whether so many tokens have room on this disk, and their index in memory."""
        room = tokens * self.kv <= PART * shutil.disk_usage(directory).free
        return room and tokens * self.indexed <= FAST * self.free / 2


def _of_mixed_layers(directory: Path | None, free: float) -> tuple[list[str], Path | None]:
    """The same as :meth:`_Sizes.cache` for a model whose tokens have no size of their own.

    A store of it is a copy of the cache in memory, of the same size at each start.

    Args:
        directory: See there.
        free: Bytes of free memory, less the weights.
    """
    size, store = int(PART * free), None
    if directory is not None:
        found = [path.name.removeprefix("memory-") for path in directory.glob("memory-*")]
        held = [int(mib) * MIB for mib in found if mib.isdecimal() and int(mib) * MIB <= size]
        kept = max(held, default=min(1 << (size.bit_length() - 1), MOST_MIXED))
        if held or kept <= PART * shutil.disk_usage(directory).free:
            size, store = kept, directory / f"memory-{kept // MIB}"
    return ["--kv-retrieval.home", "device", MEMORY, str(size)], store


def _rounded(tokens: int) -> int:
    return -(-tokens // STEP) * STEP


def count_tokens(model_config: Any, texts: Sequence[str], most: int) -> int:
    """Tokens of texts, by the model's tokenizer.

    A tokenizer wants some hundred bytes for each token, so long texts are counted in pieces. Once
    they have too many, the rest is estimated by what was counted.

    Args:
        model_config: vLLM's configuration of the model.
        texts: The texts.
        most: Tokens beyond which they are too many.
    """
    from vllm.tokenizers import cached_tokenizer_from_config

    with quiet():
        tokenizer: Any = cached_tokenizer_from_config(model_config)
    pieces = (text[at : at + PIECE] for text in texts for at in range(0, len(text), PIECE))
    tokens = characters = 0
    for piece in pieces:
        tokens += len(tokenizer.encode(piece))
        characters += len(piece)
        if tokens > most:
            break
    return tokens * sum(map(len, texts)) // max(characters, 1)


def folder_name(model: str) -> str:
    """The name of a directory for a model; each model has its own."""
    path = Path(model)
    whole = str(path.resolve()) if path.exists() else model
    readable = re.sub(r"[^\w.-]+", "-", whole.rpartition("/")[2])[:40].lstrip(".-")
    return f"{readable}-{hashlib.sha256(whole.encode()).hexdigest()[:8]}"


def weight_bytes(model: str) -> int:
    """Bytes of the weights of a model that is on this machine."""
    folder = Path(model)
    if not folder.is_dir():
        from huggingface_hub import snapshot_download

        folder = Path(snapshot_download(model, local_files_only=True))
    files = {path.resolve() for path in folder.glob("*.safetensors")}
    return sum(path.stat().st_size for path in files)


def _free_memory() -> int:
    from vllm.utils.cpu_resource_utils import get_allowed_cpu_list, get_memory_node_info

    return int(get_memory_node_info(get_allowed_cpu_list()[0].numa_node).available_memory)


def too_long(model: str, tokens: int, longest: int, room: int) -> str:
    """Why documents cannot be asked about with a model, and with which they can.

    Args:
        model: The model.
        tokens: Tokens of the documents.
        longest: Tokens of its longest context.
        room: Tokens for questions and answers.
    """
    return (
        f"the documents have {tokens:,} tokens of this model, and {model} reads {longest:,}, less "
        f"{room:,} for questions and answers. Name fewer or shorter documents"
        f"{_others(tokens + room, None)}"
    )


def too_large(model: str, weights: float, context: float, free: float, needed: int) -> str:
    """Why a model cannot be served here, and which can.

    Args:
        model: The model.
        weights, context: Bytes of its weights, and of a context.
        free: Bytes of free memory.
        needed: Tokens of the documents, with room.
    """
    beside = f", and {context / GIB:.1f} GiB for its longest context" if context else ""
    return (
        f"{model} needs {weights / GIB:.1f} GiB for its weights{beside}, and {free / GIB:.1f} GiB "
        f"of memory are available. End other programs{_others(needed, free)}"
    )


def _others(tokens: int, free: float | None) -> str:
    """Models that read so many tokens, and whose weights fit in so many bytes."""
    free = _free_memory() if free is None else free
    fit = [known for known in KNOWN if known.tokens >= tokens and known.gib * GIB < PART * free]
    if not fit:
        return (
            ". No model that this command knows of reads as much here: "
            "`vllm-kvretrieval doctor --max-model-len N MODEL` says what another takes"
        )
    names = "; ".join(f"{known.name} ({known.tokens:,}; {known.gib} GiB)" for known in fit)
    return f", or a model that reads more (--model, by config.json; not tried here): {names}"
