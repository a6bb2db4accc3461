"""Files of what has been measured of a model: how they are read, and of which model they are."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from vllm_kvretrieval.errors import RetrievalConfigError
from vllm_kvretrieval.retrieval.files import contents, path_of

SHAPE = (
    "model_type",
    "num_hidden_layers",
    "hidden_size",
    "num_attention_heads",
    "num_key_value_heads",
    "vocab_size",
)
"""Fields of a model's configuration, by which its fine-tunes are the same model."""


@dataclass(frozen=True)
class ModelFile:
    """Of one model.

    Attributes:
        model: Its name, the last part of a path.
        shape: Of its configuration, the fields of ``SHAPE``.
        path: Where this was read.
    """

    model: str
    shape: Mapping[str, Any]
    path: Path


File = TypeVar("File", bound=ModelFile)


@dataclass(frozen=True)
class Kind:
    """What such files hold.

    Attributes:
        option: That names one; its value is what they hold.
        otherwise: What else it may be, for messages.
        format: Value of the field of this name.
        command: That writes them.
    """

    option: str
    otherwise: str
    format: str
    command: str

    def load(self, given: Any) -> Any:
        """What a file holds, whatever that is.

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
            f"{self.option}={str(path)!r} cannot be read ({error}); name a file that "
            f"{self.command} wrote, or {self.otherwise}."
        )

    def read(self, given: Any) -> dict[str, Any]:
        """A file's fields; those of :class:`ModelFile` are right.

        Args:
            given: See :func:`vllm_kvretrieval.retrieval.files.contents`.

        Raises:
            RetrievalConfigError: There is no such file, or it is none of these.
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
        """The error of a file that is none of these."""
        return RetrievalConfigError(
            f"{self.option}={str(path)!r} {why}; write it anew by {self.command}."
        )

    def check_model(self, file: ModelFile, model: str, config: Any) -> None:
        """Refuse a file of another model.

        Raises:
            RetrievalConfigError: Says in what they differ.
        """
        shape = shape_of(config)
        differing = [key for key in SHAPE if file.shape[key] != shape[key]]
        if differing:
            parts = (f"{key} {file.shape[key]}, not {shape[key]}" for key in differing)
            raise RetrievalConfigError(
                f"{self.option}={str(file.path)!r} was made for {file.model}, which is another "
                f"model than {model} ({'; '.join(parts)}); write one for it by {self.command}."
            )


def shape_of(config: Any) -> dict[str, Any]:
    """The fields of ``SHAPE`` of a model's (text) configuration."""
    return {key: getattr(config, key, None) for key in SHAPE}


def name_of(model: str) -> str:
    """A model's name of its path or of its place on a hub."""
    return Path(model).name


def best_known(files: Sequence[File], model: str, config: Any) -> File | None:
    """Of the files for a model's shape, the one of its name, or else the first."""
    shape = shape_of(config)
    alike = [file for file in files if file.shape == shape]
    named = [file for file in alike if file.model.lower() == name_of(model).lower()]
    return next(iter(named + alike), None)
