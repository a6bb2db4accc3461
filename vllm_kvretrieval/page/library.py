"""The texts of documents that a server has read, so that a browser can ask about them again."""

import contextlib
import hashlib
from collections import OrderedDict
from contextlib import closing
from typing import Annotated

from pydantic import BaseModel, Field, ValidationError

from vllm_kvretrieval.store.disk.files import Folder

MOST_CHARACTERS = 8_000_000
MOST_PAGES = 100_000
MOST_DOCUMENTS = 100
FOLDER = "texts"
"""The directory of texts, beside the stores in the directory of all stores."""


class Text(BaseModel):
    """The text of a document.

    Attributes:
        name: What it is called.
        text: The text.
        pages: Where each page begins in the text; empty if it has no pages.
    """

    name: str = Field(min_length=1, max_length=200)
    text: str = Field(min_length=1, max_length=MOST_CHARACTERS)
    pages: Annotated[list[int], Field(max_length=MOST_PAGES)] = Field(default_factory=list)

    @property
    def id(self) -> str:
        """A name of its own for each name and text; hexadecimal digits."""
        return hashlib.sha256(f"{self.name}\0{self.text}".encode()).hexdigest()[:32]


class Library:
    """Texts by their ids. With a store they are files beside it; else they end with the server.

    Args:
        directory: The directory of all stores; None: there is no store.

    Raises:
        RetrievalConfigError: Others may read or change the directory.
        OSError: It cannot be opened or made.
    """

    def __init__(self, directory: str | None) -> None:
        self._texts: OrderedDict[str, Text] = OrderedDict()
        self._folder: Folder | None = None
        if directory is not None:
            with closing(Folder.at(directory, make=True)) as root:
                there = FOLDER in root.names()
                self._folder = root.folder(FOLDER, make=not there)
            self._load()

    def _load(self) -> None:
        assert self._folder is not None
        for name in sorted(self._folder.names()):
            with contextlib.suppress(OSError, ValidationError, ValueError):
                text = Text.model_validate_json(self._folder.read(name))
                if f"{text.id}.json" == name:
                    self._texts[text.id] = text

    def all(self) -> list[Text]:
        """All texts, the oldest first."""
        return [*self._texts.values()]

    def get(self, id: str) -> Text | None:
        """The text with this id, if there is one; an id is never part of a path."""
        return self._texts.get(id)

    def add(self, text: Text) -> str:
        """Take in a text; returns its id. The oldest makes room."""
        if text.id not in self._texts and self._folder is not None:
            self._folder.replace(f"{text.id}.json", text.model_dump_json().encode())
        self._texts[text.id] = text
        while len(self._texts) > MOST_DOCUMENTS:
            self.remove(next(iter(self._texts)))
        return text.id

    def remove(self, id: str) -> bool:
        """Forget a text; whether there was one."""
        if self._texts.pop(id, None) is None:
            return False
        if self._folder is not None:
            with contextlib.suppress(FileNotFoundError):
                self._folder.unlink(f"{id}.json")
        return True
