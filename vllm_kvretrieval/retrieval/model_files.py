"""Files of measurements of a model: how they are read, and to which model they belong."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from vllm_kvretrieval.errors import RetrievalConfigError
from vllm_kvretrieval.retrieval.files import contents, path_of, reason
from vllm_kvretrieval.values import shortened

SHAPE = (
    "model_type",
    "num_hidden_layers",
    "hidden_size",
    "num_attention_heads",
    "num_key_value_heads",
    "vocab_size",
)
"""Fields of a model's configuration that its fine-tunes share."""


@dataclass(frozen=True)
class ModelFile:
    """A file of measurements of one model.

    Attributes:
        model: The model's name, the last part of its path.
        shape: The fields of ``SHAPE`` in its configuration.
        path: Path of the file.
    """

    model: str
    shape: Mapping[str, Any]
    path: Path


File = TypeVar("File", bound=ModelFile)


@dataclass(frozen=True)
class Kind:
    """One kind of such files.

    Attributes:
        option: The option that names such a file.
        otherwise: Other values of the option, for messages.
        format: The value of the file's field of this name.
        command: The command that writes such files.
    """

    option: str
    otherwise: str
    format: str
    command: str

    def load(self, given: Any) -> Any:
        """The contents of a file, not yet checked.

        Args:
            given: See :func:`vllm_kvretrieval.retrieval.files.contents`.

        Raises:
            RetrievalConfigError: It cannot be read, or is no JSON.
        """
        return contents(given, lambda error: self._refuse(path_of(given), error))

    def _refuse(self, path: Path, error: Exception) -> RetrievalConfigError:
        if not isinstance(error, OSError | UnicodeDecodeError):
            return self.refuse(path, f"is not valid JSON ({error})")
        return RetrievalConfigError(
            f"{self.option}={shortened(str(path))} cannot be read ({reason(error)}); name a file "
            f"that {self.command} wrote, or {self.otherwise}."
        )

    def read(self, given: Any) -> dict[str, Any]:
        """A file's fields, after those of :class:`ModelFile` have been checked.

        Args:
            given: See :func:`vllm_kvretrieval.retrieval.files.contents`.

        Raises:
            RetrievalConfigError: There is no such file, or it is of another kind.
        """
        data, path = self.load(given), path_of(given)
        if not isinstance(data, dict) or data.get("format") != self.format:
            raise self.refuse(path, f"is no file of {self.option} (format {self.format!r})")
        if not isinstance(data.get("model"), str):
            raise self.refuse(path, "names no model")
        shape = data.get("shape")
        if not isinstance(shape, dict) or set(shape) != set(SHAPE):
            raise self.refuse(path, f"has no shape of a model ({', '.join(SHAPE)})")
        return data

    def refuse(self, path: Path, why: str) -> RetrievalConfigError:
        """The error for a file of another kind."""
        return RetrievalConfigError(
            f"{self.option}={shortened(str(path))} {why}; write it anew by {self.command}."
        )

    def check_model(self, file: ModelFile, model: str, config: Any) -> None:
        """Refuse a file of another model.

        Raises:
            RetrievalConfigError: The file is of another model; says in which fields they differ.
        """
        shape = shape_of(config)
        differing = [key for key in SHAPE if file.shape[key] != shape[key]]
        if differing:
            parts = (f"{key} {file.shape[key]}, not {shape[key]}" for key in differing)
            raise RetrievalConfigError(
                f"{self.option}={str(file.path)!r} was made for {file.model}, which is another "
                f"model than {model} ({'; '.join(parts)}); write one for it by {self.command}."
            )

    def of_model(
        self, files: Sequence[File], model: str, config: Any, known: str, or_else: str = ""
    ) -> File:
        """The file for a model's shape that has its name, or else the first for the shape.

        Args:
            files: The files of this package.
            model: The model's path, or its place on a hub.
            config: The model's configuration.
            known: What the files tell of a model, for messages.
            or_else: What a user can do instead of measuring, for messages.

        Raises:
            RetrievalConfigError: There is no such file.
        """
        if (file := self.find(files, model, config)) is None:
            raise RetrievalConfigError(
                f"the {known} of {model} are not known (known: "
                f"{', '.join(file.model for file in files)}). Measure them by '{self.command}', "
                f"and name the file that it writes as kv_retrieval.{self.option}{or_else}."
            )
        return file

    @staticmethod
    def find(files: Sequence[File], model: str, config: Any) -> File | None:
        """Call :meth:`of_model`; None: there is no such file."""
        shape, name = shape_of(config), name_of(model).lower()
        alike = [file for file in files if file.shape == shape]
        named = [file for file in alike if file.model.lower() == name]
        return (named + alike + [None])[0]


def shape_of(config: Any) -> dict[str, Any]:
    """The fields of ``SHAPE`` of a model's (text) configuration."""
    return {key: getattr(config, key, None) for key in SHAPE}


def check_model(model: str) -> None:
    """Refuse the path of a model that is not there, which a hub would take for a name of its own.

    Raises:
        RetrievalConfigError: It looks like a path, and there is nothing.
    """
    if "://" in model:
        return
    path = Path(model)
    is_path = path.is_absolute() or model.startswith((".", "~")) or len(path.parts) > 2
    # A hub's names are OWNER/NAME, as models/NAME would be.
    if (is_path or (len(path.parts) == 2 and path.parent.is_dir())) and not path.exists():
        raise RetrievalConfigError(
            f"the model {model} is not there: no such directory. Mend its path; a model of a hub "
            "is named OWNER/NAME."
        )


def name_of(model: str) -> str:
    """A model's name, from its path or its place on a hub."""
    return Path(model).name or Path(model).resolve().name
