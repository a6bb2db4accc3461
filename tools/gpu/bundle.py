"""vLLM for a GPU machine without network, small enough to carry there.

    python tools/gpu/bundle.py build .gpu/bundle       # with network; some minutes
    python tools/gpu/bundle.py unpack .gpu/bundle DIR  # on the GPU machine; seconds

`build` downloads vLLM's CUDA wheel and the wheels that the machine lacks besides, keeps of the
compiled libraries only the code for its GPU, and packs everything into some 30 MiB. It is made for
one kind of machine: Python 3.12, torch 2.11 with CUDA 13.0, Triton 3.6, transformers, a Hopper GPU
(sm_90).
vLLM's libraries load there although they were built beside another torch, since they use torch's
stable ABI alone. FlashAttention 3 is cut down to bf16 and head sizes 64 and 128.
"""

from __future__ import annotations

import argparse
import io
import lzma
import re
import struct
import subprocess
import sys
import tarfile
import tempfile
import time
import zipfile
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path

VLLM = "vllm==0.32.0"
DEPENDENCIES = """
annotated-types==0.8.0 apache-tvm-ffi==0.1.15.post2 cachetools==8.0.1 cbor2==6.2.1
compressed-tensors==0.17.0 dill==0.4.1 dnspython==2.9.2 email-validator==2.4.0 fastapi==0.136.3
httpcore2==2.16.2 httptools==0.9.0 httpx2==2.16.2 ijson==3.6.0 jiter==0.19.0 jmespath==1.1.0
llguidance==1.7.6 loguru==0.7.3 model-hosting-container-standards==0.1.16 msgspec==0.22.0
openai==3.54.0 opentelemetry-api==1.45.2 opentelemetry-sdk==1.45.2
opentelemetry-semantic-conventions==0.66b2 oss-harmony==0.0.11 partial-json-parser==0.2.1.1.post7
prometheus-fastapi-instrumentator==8.1.0 pybase64==1.5.1 pydantic==2.14.3 pydantic-core==2.50.4
pydantic-extra-types==2.11.1 python-multipart==0.0.34 pyzmq==27.3.0 setproctitle==1.3.8
sniffio==1.3.1 starlette==1.10.0 truststore==0.10.5 typing-inspection==0.4.5 uvicorn==0.54.0
watchfiles==1.3.0 websockets==17.4 xgrammar==0.2.8
""".split()
PYTHON = "3.12"
GLIBC = ("28", "27", "26", "24", "31", "34", "35", "17", "12", "5")
PLATFORMS = [*(f"manylinux_2_{minor}" for minor in GLIBC)]
PLATFORMS += ["manylinux2014", "manylinux2010", "manylinux1"]

ARCHITECTURE, OTHER_ARCHITECTURE = 90, 120
LIBRARIES = (
    "_C_stable_libtorch.abi3.so",
    "_moe_C_stable_libtorch.abi3.so",
    "cumem_allocator.abi3.so",
    "fs_io_C.abi3.so",
    "spinloop.abi3.so",
    "vllm_flash_attn/_vllm_fa3_C.abi3.so",
)
"""Libraries of vLLM that a dense bf16 model needs."""
LEFT_OUT = re.compile(
    r"(\.so$|/vllm-rs$|/__pycache__/|/third_party/(fmha_sm100|deep_gemm|tml_fa4)/"
    r"|/static/swagger|\.jpg$)"
)

FAT_BINARY = struct.pack("<I", 0xBA55ED50)
CUBIN = 2
ARCHITECTURE_OFFSET = 28


@dataclass(frozen=True)
class Image:
    """The code for one architecture in a fat binary: positions in the library's bytes."""

    start: int
    kind: int
    header: int
    payload: int
    architecture: int

    @property
    def end(self) -> int:
        return self.start + self.header + self.payload


def fat_binaries(library: bytes) -> Iterator[tuple[int, int, list[Image]]]:
    """Start, end and images of every fat binary that nvcc embedded in a library."""
    start = library.find(FAT_BINARY)
    while start >= 0:
        _, version, header, size = struct.unpack_from("<IHHQ", library, start)
        if (version, header) != (1, 16):  # the four bytes, but no fat binary
            start = library.find(FAT_BINARY, start + 4)
            continue
        position, end, images = start + header, start + header + size, []
        while position < end:
            kind, _, length, payload = struct.unpack_from("<HHIQ", library, position)
            (architecture,) = struct.unpack_from("<I", library, position + ARCHITECTURE_OFFSET)
            images.append(Image(position, kind, length, payload, architecture))
            position = images[-1].end
        yield start, end, images
        start = library.find(FAT_BINARY, end)


def prune(library: bytes, wanted: Callable[[bytes], bool]) -> bytes:
    """The library at its old size, in which only wanted code for our architecture is not zeros.

    A fat binary of which nothing is kept claims to be for another architecture, so that the driver
    says that there is no kernel image, instead of reading zeros.
    """
    pruned = bytearray(library)
    for start, end, images in fat_binaries(library):
        kept = [
            library[image.start : image.end]
            for image in images
            if (image.kind, image.architecture) == (CUBIN, ARCHITECTURE)
            and wanted(library[image.start + image.header : image.end])
        ]
        if kept:
            body = b"".join(kept)
            pruned[start + 16 : end] = body.ljust(end - start - 16, b"\0")
            struct.pack_into("<Q", pruned, start + 8, len(body))
            continue
        for image in images:
            pruned[image.start + image.header : image.end] = bytes(image.payload)
            struct.pack_into("<I", pruned, image.start + ARCHITECTURE_OFFSET, OTHER_ARCHITECTURE)
    return bytes(pruned)


def everything(payload: bytes) -> bool:
    """Keep all code for our architecture."""
    return True


def plain_attention(payload: bytes) -> bool:
    """Whether to keep a kernel of FlashAttention 3: forward ones for bf16, head size 64 or 128."""
    names = sorted(set(re.findall(rb"\.text\.(_Z\w*FlashAttnFwdSm90\w+)", payload)))
    if not names:
        return True  # none of the forward kernels
    command = ["c++filt", names[0].decode()]
    name = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    found = re.search(
        r"cute::C<(\d+)> >, (\d+), cutlass::(\w+), float, cutlass::arch::Sm90, \w+, \w+, (\w+)",
        name,
    )
    if found is None:
        return False
    key_size, value_size, dtype, capped = found.groups()
    return (
        key_size == value_size
        and key_size in ("64", "128")
        and (dtype, capped) == ("bfloat16_t", "false")
    )


def build(target: Path) -> None:
    """Download, cut and pack; writes `target`/*.xz."""
    target.mkdir(parents=True, exist_ok=True)
    for old in target.glob("*.xz"):
        old.unlink()
    with tempfile.TemporaryDirectory() as folder:
        _download(Path(folder) / "vllm", [VLLM])
        _download(Path(folder) / "dependencies", DEPENDENCIES)
        (vllm,) = (Path(folder) / "vllm").glob("*.whl")
        dependencies = sorted((Path(folder) / "dependencies").glob("*.whl"))
        parts = [
            (target / "vllm.tar.xz", _tar([vllm], lambda name: not LEFT_OUT.search(f"/{name}"))),
            (
                target / "dependencies.tar.xz",
                _tar(dependencies, lambda name: "/tests/" not in name and ".data/" not in name),
            ),
        ]
        with zipfile.ZipFile(vllm) as wheel:
            for name in LIBRARIES:
                wanted = plain_attention if "fa3" in name else everything
                library = prune(wheel.read(f"vllm/{name}"), wanted)
                parts.append((target / f"{name.replace('/', '__')}.xz", library))
    with ProcessPoolExecutor() as pool:
        for path, size in pool.map(_compress, parts):
            print(f"{path.name:40} {size / 2**20:6.1f} MiB", flush=True)
    total = sum(path.stat().st_size for path in target.glob("*.xz"))
    print(f"{target}: {total / 2**20:.1f} MiB")


def _download(folder: Path, requirements: list[str]) -> None:
    platforms = [item for name in PLATFORMS for item in ("--platform", f"{name}_x86_64")]
    options = ["--no-deps", "--only-binary=:all:", "--python-version", PYTHON, *platforms]
    command = [sys.executable, "-m", "pip", "download", "-q", "--implementation", "cp", *options]
    subprocess.run([*command, "-d", str(folder), *requirements], check=True)


def _tar(wheels: list[Path], wanted: Callable[[str], bool]) -> bytes:
    """The wanted files of some wheels, as one uncompressed archive."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w", format=tarfile.PAX_FORMAT) as archive:
        for path in wheels:
            with zipfile.ZipFile(path) as wheel:
                for name in wheel.namelist():
                    if not name.endswith("/") and wanted(name):
                        content = wheel.read(name)
                        entry = tarfile.TarInfo(name)
                        entry.size, entry.mode = len(content), 0o644
                        archive.addfile(entry, io.BytesIO(content))
    return buffer.getvalue()


def _compress(part: tuple[Path, bytes]) -> tuple[Path, int]:
    path, content = part
    return path, path.write_bytes(lzma.compress(content, preset=9))


def unpack(source: Path, site: Path) -> None:
    """Make `site` a folder for PYTHONPATH of what `build` packed into `source`."""
    parts = sorted(source.glob("*.xz"), key=lambda path: path.stat().st_size, reverse=True)
    if not parts:
        raise SystemExit(f"{source} holds no bundle: run tools/gpu/bundle.py build {source} first")
    start = time.perf_counter()
    # Beforehand: tarfile fails where another process makes a folder at the same time.
    for folder in {site, *(_library(path, site).parent for path in parts)}:
        folder.mkdir(parents=True, exist_ok=True)
    with ProcessPoolExecutor() as pool:
        list(pool.map(_unpack_part, parts, [site] * len(parts)))
    print(f"unpacked into {site} in {time.perf_counter() - start:.1f} s", flush=True)


def _unpack_part(path: Path, site: Path) -> None:
    content = lzma.decompress(path.read_bytes())
    if path.stem.endswith(".tar"):
        with tarfile.open(fileobj=io.BytesIO(content)) as archive:
            # Before Python 3.11.4 there are no filters, and the argument is unknown.
            archive.extraction_filter = getattr(tarfile, "data_filter", lambda member, _: member)
            archive.extractall(site)
        return
    _library(path, site).write_bytes(content)


def _library(path: Path, site: Path) -> Path:
    return site / "vllm" / path.stem.replace("__", "/")


def main() -> None:
    """Build or unpack."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("build").add_argument("bundle", type=Path)
    unpacking = commands.add_parser("unpack")
    unpacking.add_argument("bundle", type=Path)
    unpacking.add_argument("site", type=Path)
    arguments = parser.parse_args()
    if arguments.command == "build":
        build(arguments.bundle)
    else:
        unpack(arguments.bundle, arguments.site)


if __name__ == "__main__":
    main()
