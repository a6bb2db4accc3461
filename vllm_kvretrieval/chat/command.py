"""``vllm-kvretrieval chat``: read documents, and answer questions about them."""

import argparse
import contextlib
import fcntl
import itertools
import os
import secrets
import signal
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple
from urllib.error import URLError
from urllib.parse import quote

import openai
from tqdm import tqdm

from vllm_kvretrieval.chat.conversation import (
    BLOCK,
    UNREACHABLE,
    Conversation,
    ModelTooShortError,
    Passage,
    Reply,
    SourcesUnknownError,
    connect,
    remedy,
)
from vllm_kvretrieval.chat.documents import Document, read_document
from vllm_kvretrieval.chat.server import Server, ServerError
from vllm_kvretrieval.chat.sizes import Serving, TooLongError, folder_name, plan
from vllm_kvretrieval.command_inputs import count, printable
from vllm_kvretrieval.doctor.server import check_address
from vllm_kvretrieval.errors import RetrievalConfigError

EXAMPLES = """\
examples:
  vllm-kvretrieval chat report.pdf
  vllm-kvretrieval chat notes.md page.html --model Qwen/Qwen2.5-1.5B-Instruct
  vllm-kvretrieval chat report.pdf --question "Who wrote it?"
  vllm-kvretrieval chat report.pdf --url http://127.0.0.1:8000
  vllm-kvretrieval chat report.pdf -- --dtype float32

Options of `vllm serve` follow --."""
HELP = """\
/sources          the passages that the last answer attended to most
/full QUESTION    answer it by full attention, to the whole text
/budget N         let answers attend to N tokens from now on
/help             these lines
/quit             end, as Ctrl-D does

Ctrl-C ends an answer."""
ENDS = "/quit", "/exit"
MODELS = Path("models")
DEMO = ("SmolLM2-135M-Instruct", "SmolLM2-135M-Instruct-32K")
"""Models of a checkout; by default the first that is there, and holds the documents."""
MAX_TOKENS = 200
MOST_PASSAGES = 8
LINE_S = 10.0
"""How often the bar is written where it is no terminal's."""
AGAIN = "the same command goes on there"
FILES = ("*.safetensors", "*.json", "*.jinja", "*.model", "*.txt", "*.tiktoken")
"""Files of a model that are downloaded."""


def add_chat(commands: Any) -> None:
    """Add the subcommand to those of the command line."""
    about = "ask questions about PDF, text, Markdown and HTML files"
    parser: argparse.ArgumentParser = commands.add_parser(
        "chat",
        help=about,
        description=f"{about[0].upper()}{about[1:]}. Starts a server on this machine, lets it read "
        "the files, and keeps what it has read: the next time answers come at once.",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("files", metavar="FILE", nargs="+", type=Path)
    parser.add_argument(
        "--model", metavar="NAME_OR_PATH", help="default: the demo's model, in a checkout"
    )
    parser.add_argument("--url", help="ask this server, and start none")
    parser.add_argument(
        "--api-key",
        default=os.environ.get("VLLM_API_KEY"),
        help="of that server (default: VLLM_API_KEY of the environment)",
    )
    parser.add_argument("--budget", type=count, help="tokens that a step of an answer attends to")
    parser.add_argument(
        "--max-tokens", type=count, default=MAX_TOKENS, help="of an answer (default: %(default)s)"
    )
    parser.add_argument(
        "--question",
        action="append",
        metavar="TEXT",
        help="ask this, and end; may be given several times",
    )
    parser.add_argument(
        "--directory",
        type=Path,
        default=_directory(),
        help="where what was read is kept, and the server's log (default: %(default)s)",
    )
    parser.add_argument(
        "--page", action="store_true", help="say where a browser on this machine may ask, too"
    )
    parser.add_argument("--no-keep", action="store_true", help="keep nothing of what was read")
    parser.set_defaults(run=run, engine=[])


def _directory() -> Path | None:
    """Where what was read is kept; None: the user has no home, as in some containers."""
    data = os.environ.get("XDG_DATA_HOME")
    try:
        below = Path(data) if data else Path.home() / ".local" / "share"
    except RuntimeError:
        return None
    return below / "vllm-kvretrieval" / "chat"


def _make(directory: Path | None) -> None:
    """Make the directory where what was read is kept, and the server's log.

    Raises:
        RetrievalConfigError: No files can be made there.
    """
    if directory is None:
        raise RetrievalConfigError("chat: this user has no home; name a directory: --directory")
    try:
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=directory, buffering=0).close()
    except OSError as error:
        raise RetrievalConfigError(
            f"chat: no file can be made in {directory} ({error.strerror}); name another directory: "
            "--directory"
        ) from None


class Address(NamedTuple):
    """A server.

    Attributes:
        url: Its address.
        key: Its API key.
        kept: What becomes of what it has read, when this program ends.
    """

    url: str
    key: str
    kept: str


def run(given: argparse.Namespace) -> int:
    """Chat; returns the exit status.

    Raises:
        RetrievalConfigError: The model cannot read the documents here.
        OSError, ValueError: A file cannot be read; says what to do.
    """
    if given.url and (given.model or given.engine or given.no_keep):
        raise RetrievalConfigError(
            "chat: the server at --url has a model and options; leave --model, --no-keep and what "
            "follows -- out, or --url."
        )
    if given.url:
        check_address(given.url)
    documents = [_read(path) for path in given.files]
    try:
        with _server(given, documents) as address:
            return _chat(given, documents, address)
    except ServerError as error:
        raise RetrievalConfigError(str(error)) from None


def _read(path: Path) -> Document:
    document = read_document(path)
    if document.blank:
        _say(f"{path}: {document.blank} of {len(document.pages)} pages have no text, and are left")
        _say("out: they are scanned, or have pictures alone (ocrmypdf recognises text).")
    return document


@contextlib.contextmanager
def _server(given: argparse.Namespace, documents: Sequence[Document]) -> Iterator[Address]:
    if given.url:
        url = given.url.rstrip("/").removesuffix("/v1")
        yield Address(f"{url}/v1", given.api_key or "none", f"the server keeps them: {AGAIN}")
        return
    _say("looking at the model and this machine ...")
    _make(given.directory)
    model, serving = _plan(given, [document.text for document in documents])
    _tell(model, serving)
    from vllm_kvretrieval.upstream.defaults import forked_on_all_cores

    key = secrets.token_urlsafe()
    settings = {"VLLM_PLUGINS": "kvretrieval", **forked_on_all_cores()}
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, _end)  # not without the server
    kept = "nothing is kept of them"
    if serving.store is not None:
        kept = f"{serving.store} keeps them: {AGAIN}"
    with (
        own_log(serving.store, given.directory / folder_name(model)) as log,
        Server(model, serving.options, settings, log, {"VLLM_API_KEY": key}) as server,
    ):
        _say(f"$ {server.command}\n  log: {server.log}")
        starts = "the server starts: {elapsed}"
        with tqdm(bar_format=starts, leave=False, disable=not sys.stderr.isatty()) as bar:
            server.wait_ready(lambda _: bar.update())
        try:
            yield Address(f"{server.url}/v1", key, kept)
        except UNREACHABLE as error:
            raise server.error(f"it does not answer ({error})") from None


@contextlib.contextmanager
def own_log(store: Path | None, other: Path) -> Iterator[Path]:
    """The log of a server, which no other chat has meanwhile.

    Args:
        store: The store, beside which the log is; None: there is none.
        other: The beginning of the log's name then.

    Raises:
        RetrievalConfigError: Another chat has the store.
    """
    for number in itertools.count(1):
        beside = store or (other if number == 1 else Path(f"{other}-{number}"))
        path = beside.with_name(f"{beside.name}.log")
        with path.open("ab") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                if store is None:
                    continue
                raise RetrievalConfigError(
                    f"chat: another chat keeps what it reads in {store}, which one server can use; "
                    "end that chat, name another --directory, or add --no-keep."
                ) from None
            yield path
            return


def _end(number: int, _: Any) -> None:
    sys.exit(128 + number)


def _models(named: str | None) -> list[str]:
    """The models to try; one that is named as on a hub is downloaded, if it is not here."""
    if named is None:
        found = [MODELS / name for name in DEMO if (MODELS / name / "config.json").is_file()]
        if not found:
            raise RetrievalConfigError(
                "chat: name a model, by a directory or by its name on the Hugging Face Hub: "
                "--model Qwen/Qwen2.5-1.5B-Instruct. (In a checkout, after `make model`, that of "
                "the demo is there.)"
            )
        return [str(path) for path in found]
    if not Path(named).exists():
        from huggingface_hub import snapshot_download

        try:
            snapshot_download(named, allow_patterns=[*FILES])
        except (OSError, ValueError) as error:
            raise RetrievalConfigError(
                f"chat: there is no directory {named}, and the Hugging Face Hub does not have it "
                f"for us ({' '.join(str(error).split())})"
            ) from None
    return [named]


def _plan(given: argparse.Namespace, texts: Sequence[str]) -> tuple[str, Serving]:
    """The first of the models that holds the texts, and its server."""
    budget = [] if given.budget is None else ["--kv-retrieval.budget", str(given.budget)]
    options = [*budget, *given.engine], given.directory, not given.no_keep, given.max_tokens
    *models, last = _models(given.model)
    for model in models:
        with contextlib.suppress(TooLongError):
            return model, plan(model, texts, *options)
    return last, plan(last, texts, *options)


def _tell(model: str, serving: Serving) -> None:
    tokens, length = serving.tokens, serving.length
    _say(f"{model}: {tokens:,} tokens to read, and contexts of {length:,} at most.")
    for remark in serving.remarks:
        _say(remark)


def _chat(given: argparse.Namespace, documents: Sequence[Document], address: Address) -> int:
    options: dict[str, Any] = {"vllm_xargs": {}}
    if given.budget is not None:
        options["vllm_xargs"]["kv_retrieval_budget"] = given.budget
    try:
        client = connect(address.url, address.key)
        conversation = Conversation(client, documents, options, given.max_tokens)
        if conversation.tells_sources:
            options["vllm_xargs"]["kv_retrieval_sources"] = True
        if given.page:
            for document in documents:
                conversation.lend(document)
            root = address.url.removesuffix("/v1")
            _say(f"In a browser: {root}/kvretrieval#{quote(address.key)}")
        if not _read_all(conversation, address):
            return 130
        loop = Loop(conversation)
        asked = map(str.strip, given.question or loop.typed())
        for line in itertools.takewhile(lambda line: line not in ENDS, asked):
            loop.take(line)
        return 0
    except (ModelTooShortError, SourcesUnknownError) as error:
        raise RetrievalConfigError(f"chat: {str(error).rstrip('.')}.") from None
    except (openai.OpenAIError, URLError) as error:
        if isinstance(error, UNREACHABLE) and not given.url:
            raise  # its log says why
        raise RetrievalConfigError(f"chat: {remedy(error, address.url)}.") from None


def _read_all(conversation: Conversation, address: Address) -> bool:
    """Let the server read the documents, with a bar; False: Ctrl-C has ended it."""
    bar, read = None, 0

    def report(done: int, total: int, known: int) -> None:
        nonlocal bar, read
        if bar is None and done - known <= BLOCK:
            if done == total:
                _say(f"all {total:,} tokens were read before")
        elif bar is None:
            if read := max(read, known):
                _say(f"{read:,} of {total:,} tokens were read before")
            every = 0.1 if sys.stderr.isatty() else LINE_S
            bar = tqdm(total=total, initial=read, unit=" tokens", desc="reading", mininterval=every)
        if bar is not None:
            bar.update(done - read)
        read = done

    ended = False
    try:
        conversation.read(report)
    except KeyboardInterrupt:
        ended = True
    finally:
        if bar is not None:
            bar.close()
    if ended:
        _say(f"{read:,} tokens have been read; {address.kept}.")
    return not ended


class Loop:
    """Questions that are typed, and answers on the terminal.

    Args:
        conversation: The chat.
    """

    def __init__(self, conversation: Conversation) -> None:
        self._conversation = conversation
        self._last: Reply | None = None

    def typed(self) -> Iterator[str]:
        """The lines that are typed, until there are no more."""
        with contextlib.suppress(ImportError):
            import readline  # noqa: F401  (input() then edits lines)
        _say("Ask; /help shows more.")
        while True:
            try:
                line = _typed_line()
            except (EOFError, KeyboardInterrupt) as end:
                print(file=sys.stderr)
                if isinstance(end, EOFError) or not sys.stdin.isatty():
                    return
                _say("/quit or Ctrl-D ends the chat.")  # an answer may have ended just before
                continue
            yield line

    def take(self, line: str) -> None:
        """Answer a question, or obey a command."""
        if line.startswith("/") and not line.startswith("/full "):
            self._obey(line)
        elif line:
            self._answer(line)

    def _obey(self, line: str) -> None:
        command, _, value = line.partition(" ")
        if command == "/sources":
            self._show_sources()
        elif command == "/budget":
            self._set_budget(value.strip())
        elif command == "/help":
            _say(HELP)
        elif command == "/full":
            _say("/full wants a question behind it.")
        else:
            _say(f"There is no {command}.\n{HELP}")

    def _set_budget(self, value: str) -> None:
        try:
            budget = count(value)
        except argparse.ArgumentTypeError as error:
            _say(f"/budget wants a number of tokens: {error}.")
            return
        self._conversation.options["vllm_xargs"]["kv_retrieval_budget"] = budget
        _say(f"From now on answers attend to {budget:,} tokens.")

    def _show_sources(self) -> None:
        if self._last is None:
            _say("There is no answer yet.")
            return
        try:
            passages = self._conversation.sources(self._last, MOST_PASSAGES)
        except SourcesUnknownError as error:
            _say(f"{error}.")
            return
        for passage in passages:
            print(printable(described(passage)))
        if not passages:
            _say("The answer attended to no passage of the documents in particular.")

    def _answer(self, line: str) -> None:
        """Answer a question; what the server refuses is said, and the chat goes on."""
        question = line.removeprefix("/full ")
        options, before = self._conversation.options, dict(self._conversation.options)
        if question != line:
            exact = {**options["vllm_xargs"], "kv_retrieval_exact": True}
            self._conversation.options = {**options, "vllm_xargs": exact}
        try:
            reply = self._conversation.ask(question, _print)
        except openai.APIStatusError as error:
            _say(f"The server refuses: {error}")
            return
        finally:
            self._conversation.options = before
        print()
        if not reply.id:
            return
        self._last = reply
        each = 1000 * reply.decode_s / max(reply.tokens - 1, 1)
        _say(
            f"[first token after {reply.first_s:.2f} s, {reply.tokens} tokens, {each:.0f} ms each]"
        )


def _typed_line() -> str:
    """What is typed behind a prompt, which is not put into a file of answers."""
    if sys.stdin.isatty() and sys.stdout.isatty():
        return input("> ")
    if sys.stdin.isatty():
        print("> ", end="", file=sys.stderr, flush=True)
    return input()


def described(passage: Passage) -> str:
    """A passage as a line: its document, its page or place, how much attention it got, its text."""
    document, place, text, weight = passage
    page = document.page(place)
    part = f"{place / len(document.text):.0%} of the text" if page is None else f"page {page}"
    return f"{document.name}, {part}, {weight:.1%}: {' '.join(text.split())}"


def _print(piece: str) -> None:
    print(printable(piece), end="", flush=True)


def _say(text: str) -> None:
    """What is not an answer goes to the other stream, so that answers can be kept in a file."""
    print(printable(text), file=sys.stderr, flush=True)
