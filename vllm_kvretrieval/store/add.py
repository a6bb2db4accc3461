"""``vllm-kvretrieval store add``: read documents, so that servers answer about them at once."""

import argparse
import shlex
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tqdm import tqdm

from vllm_kvretrieval.command_inputs import read_text
from vllm_kvretrieval.command_line import serve_arguments
from vllm_kvretrieval.compat import default_chat_options
from vllm_kvretrieval.errors import RetrievalConfigError
from vllm_kvretrieval.options.engine import RetrievalConfig
from vllm_kvretrieval.options.table import CONFIG_KEY, DEFAULT_METHOD
from vllm_kvretrieval.retrieval.model_files import check_model
from vllm_kvretrieval.store.disk.changes import give_names, locked
from vllm_kvretrieval.store.disk.contexts import beside, contexts, id_of, reachable
from vllm_kvretrieval.store.disk.groups import Parts, groups_of, hash_size
from vllm_kvretrieval.store.disk.names import check_name
from vllm_kvretrieval.store.disk.ranks import name_of_all, open_ranks

if TYPE_CHECKING:
    from vllm import LLM

PIECE = 4096
"""Tokens that are read at once: what is interrupted goes on behind them, and progress shows."""
ENDS_S = 60.0
"""How long the engine may take to end."""
TAILS = "\n\nWhat", " 1?"
"""What may follow a document in a chat; what it has in common with all is the document."""


@contextmanager
def _refused() -> Iterator[None]:
    """Turn what vLLM refuses within the block into errors that a command prints."""
    from vllm.exceptions import VLLMValidationError

    try:
        yield
    except (VLLMValidationError, ValueError) as error:
        raise RetrievalConfigError(f"store add --chat: {error}") from None


class ServedChat:
    """Chats of one message, as ``vllm serve`` writes them.

    Args:
        served: The arguments of ``vllm serve``.

    Raises:
        RetrievalConfigError: The template that they name is none.
    """

    def __init__(self, served: argparse.Namespace) -> None:
        from vllm.renderers.chat_utils import load_chat_template

        with _refused():
            self._template = load_chat_template(served.chat_template)
        self._format = served.chat_template_content_format
        self._defaults = default_chat_options(served)

    def tokens(self, renderer: Any, model: Any, text: str) -> list[int]:
        """The tokens of a chat, with what the template puts behind the message.

        Args:
            renderer: vLLM's renderer of the engine.
            model: vLLM's configuration of the model.
            text: The message, a user's.

        Raises:
            RetrievalConfigError: vLLM has no template for this model, or needs none.
        """
        from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
        from vllm.utils.mistral import is_mistral_tokenizer

        if model.hf_config.model_type == "gpt_oss":
            raise RetrievalConfigError(
                "store add --chat: vLLM writes the date at the start of every chat of gpt-oss, so "
                "a document would be found on one day alone. Use prompts, and leave --chat out."
            )
        by_tokens = is_mistral_tokenizer(renderer.tokenizer) or model.enable_prompt_embeds
        defaults = self._defaults | {"tools": None, "tokenize": by_tokens}
        request = ChatCompletionRequest(messages=[{"role": "user", "content": text}])
        chat = request.build_chat_params(self._template, self._format).with_defaults(defaults)
        # No limit: who asks says better which document is too long.
        size = replace(request.build_tok_params(model), max_total_tokens=None)
        with _refused():
            _, (prompt,) = renderer.render_chat([request.messages], chat, size)
        return list(prompt["prompt_token_ids"])


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments to its parser."""
    parser.add_argument("model", metavar="MODEL", help="path, or name on a hub")
    parser.add_argument(
        "texts", metavar="TEXT", nargs="+", type=Path, help="a plain text file (UTF-8)"
    )
    parser.add_argument("--store", required=True, metavar="DIR", help="as --kv-retrieval.store")
    parser.add_argument(
        "--name",
        action="append",
        metavar="NAME",
        help="what a document is called in `ls`, once per TEXT (default: the file's name)",
    )
    parser.add_argument(
        "--chat",
        action="store_true",
        help="documents will begin the first message of a chat, not a prompt",
    )
    parser.add_argument("--salt", help="the `cache_salt` of the requests that may find them")
    parser.add_argument("--pin", action="store_true", help="never evict them")
    parser.set_defaults(run=add, engine=[])


def add(given: argparse.Namespace) -> None:
    """Read documents, and name them.

    Raises:
        RetrievalConfigError: Names or options of the engine are wrong, or a document is too long.
        OSError: A file cannot be read.
        ValueError: A file is no text.
    """
    names = given.name or [path.name for path in given.texts]
    if len(names) != len(given.texts) or len({*names}) != len(names):
        raise RetrievalConfigError(
            f"store add: {len(given.texts)} documents need as many names, each another one "
            f"(--name), not {', '.join(names)}."
        )
    for name in names:
        check_name(name)
    texts = [read_text(path) for path in given.texts]
    for name, text in zip(names, texts, strict=True):
        if "\r" in text:
            print(f"{name} has carriage returns (CR): clients find it if they send them, too.")
    check_model(given.model)
    served = serve_arguments([given.model, *given.engine, "--kv-retrieval.store", given.store])
    chat = ServedChat(served) if given.chat else None
    llm = _engine(served)
    try:
        documents = _documents(llm, texts, names, chat)
        _read(llm, documents, given.salt)
        algorithm = llm.llm_engine.vllm_config.cache_config.prefix_caching_hash_algo
        store = name_of_all(llm.collective_rpc("store_name")[0])
    finally:
        llm.llm_engine.engine_core.shutdown()
    with closing(open_ranks(given.store, store)) as opened:
        identity = opened.identity
    keys = {n: context_keys(t, identity, algorithm, given.salt) for n, t in documents.items()}
    _note(given.store, store, keys, given.pin)


def _engine(served: argparse.Namespace) -> "LLM":
    """The engine, as ``vllm serve`` would make it of the same options.

    If no method is named, it is our own: without one there is no store.
    """
    from vllm import EngineArgs
    from vllm.v1.attention.backends.registry import AttentionBackendEnum

    from vllm_kvretrieval.upstream.starting import start_engine

    parsed = EngineArgs.from_cli_args(served)
    if parsed.attention_backend is None and parsed.attention_config.backend is None:
        parsed.attention_backend = AttentionBackendEnum[DEFAULT_METHOD.upper()]
    return start_engine(parsed)


def _documents(
    llm: "LLM",
    texts: Sequence[str],
    names: Sequence[str],
    chat: ServedChat | None = None,
) -> dict[str, list[int]]:
    """Tokens of the documents, as requests will have them.

    Args:
        llm: The engine.
        texts, names: Texts and names of the documents.
        chat: Writes the chats whose first message texts will begin; None: they begin prompts.
    """
    tokenizer: Any = llm.get_tokenizer()
    documents = {}
    most = llm.llm_engine.model_config.max_model_len
    for name, text in zip(names, texts, strict=True):
        if chat is not None:
            of_engine = llm.renderer, llm.model_config
            tokens = _common(*(chat.tokens(*of_engine, text + tail) for tail in TAILS))
        else:
            tokens = list(tokenizer.encode(text))
        if len(tokens) >= most:
            raise RetrievalConfigError(
                f"store add: {name} has {len(tokens)} tokens, and a request {most} at most, with "
                "its answer; raise --max-model-len (behind --), or divide the document."
            )
        documents[name] = tokens
    return documents


def _common(one: list[int], other: list[int]) -> list[int]:
    """What two lists begin with."""
    end = next((i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), len(one))
    return one[:end]


def _read(llm: "LLM", documents: Mapping[str, list[int]], salt: str | None) -> None:
    """Compute the documents, piece by piece, exactly where the options of the engine allow it."""
    from vllm import SamplingParams

    config = RetrievalConfig.from_vllm(llm.llm_engine.vllm_config)
    assert config is not None
    exact = config.allow_exact and config.lets_set("exact")
    extra_args = {CONFIG_KEY: {"exact": True}} if exact else None
    params = SamplingParams(temperature=0, max_tokens=1, detokenize=False, extra_args=extra_args)
    total = sum(map(len, documents.values()))
    with tqdm(total=total, unit="token", unit_scale=True) as bar:
        for name, tokens in documents.items():
            bar.set_description(name)
            done = 0
            while done < len(tokens):
                end = min(done + PIECE, len(tokens))
                prompt: dict[str, Any] = {"prompt_token_ids": tokens[:end]}
                if salt is not None:
                    prompt["cache_salt"] = salt
                llm.generate(prompt, params, use_tqdm=False)
                bar.update(end - done)
                done = end


def context_keys(
    tokens: list[int], identity: Mapping[str, Any], algorithm: str, salt: str | None
) -> list[bytes]:
    """The keys of a document's blocks, of a store's first group, as vLLM hashes them.

    Args:
        tokens: The document's tokens.
        identity: The store's.
        algorithm: vLLM's name of the hash function.
        salt: The ``cache_salt`` of requests.
    """
    from vllm import SamplingParams
    from vllm.utils.hashing import get_hash_fn_by_name
    from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
    from vllm.v1.request import Request

    hash_function = get_hash_fn_by_name(algorithm)
    init_none_hash(hash_function)
    unit = hash_size(identity)
    hasher = get_request_block_hasher(unit, hash_function)
    request = Request(
        "document", tokens, SamplingParams(), None, cache_salt=salt, block_hasher=hasher
    )
    each = groups_of(identity)[0].size // unit
    return [bytes(key) for key in request.block_hashes[each - 1 :: each]]


def _note(directory: str, name: str, documents: Mapping[str, list[bytes]], pin: bool) -> None:
    """Name documents in the store that has them, and pin them.

    Args:
        directory: The directory of all stores.
        name: The store's name.
        documents: Keys of the blocks of each, see :func:`context_keys`.
        pin: Whether to pin them.

    Raises:
        RetrievalConfigError: One is not there.
    """
    with locked(directory, name, ENDS_S) as store:
        every, groups = store.records(), groups_of(store.identity)
        records = reachable(every)
        parts = Parts(groups, beside(every, records))
        found = {record.key for record in records.values()}
        paths = {n: keys[: parts.end(len(keys))] for n, keys in documents.items()}
        paths = {n: keys for n, keys in paths.items() if keys}
        whole = {n: parts.whole(keys) if keys[-1] in found else 0 for n, keys in paths.items()}
        kept = {n: keys[-1] for n, keys in paths.items() if whole[n]}
        older = give_names(store, kept, pin)
    last = {context.key for context in contexts(records)}
    for document, key in kept.items():
        longer = "" if key in last else ", as the beginning of another context"
        tokens = whole[document] * groups[0].size
        cut = whole[document] < len(paths[document])
        part = f"; requests find its first {tokens} tokens" if cut else ""
        print(f"{document} is in {name}{longer}{part}.")
        if document in older:
            id = id_of(older[document])
            print(
                f"An older version of {document} is there, too, without a name or pin; to forget "
                f"it: vllm-kvretrieval store drop {shlex.quote(directory)} {id}"
            )
    if missing := paths.keys() - kept:
        raise RetrievalConfigError(
            f"store add: {', '.join(sorted(missing))} could not be kept: the store is too small "
            "for all documents (--kv-retrieval.home_bytes), or could not be written, as the log "
            "says."
        )
    for document in documents.keys() - paths:
        print(f"{document} is shorter than a block; there is nothing to keep of it.")
