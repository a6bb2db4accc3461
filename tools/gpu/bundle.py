"""vLLM for a GPU machine without network, small enough to carry there.

    python tools/gpu/bundle.py build .gpu/bundle                # with network; some minutes
    python tools/gpu/bundle.py build --vllm 0.33 .gpu/bundle    # of another vLLM
    python tools/gpu/bundle.py unpack .gpu/bundle DIR           # on the GPU machine; seconds

`build` downloads vLLM's CUDA wheel and the wheels that the machine lacks besides, as a lock file
pins them (requirements/cuda-*.txt), keeps of the compiled libraries only the code for its GPU, and
packs everything into some 30 MiB. It is made for one kind of machine: Python 3.12, torch 2.11 with
CUDA 13.0, Triton 3.6, transformers, a Hopper GPU (sm_90).
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

LOCKS = Path(__file__).resolve().parents[2] / "requirements"
RELEASES = tuple(sorted(path.stem.removeprefix("cuda-") for path in LOCKS.glob("cuda-*.txt")))
"""Releases of vLLM that there are lock files for."""
VLLM = RELEASES[0]
"""The one that is bundled by default."""
DEPENDENCIES = """
annotated-types apache-tvm-ffi cachetools cbor2 compressed-tensors dill dnspython email-validator
fastapi httpcore2 httptools httpx2 ijson jiter jmespath llguidance loguru
model-hosting-container-standards msgspec openai opentelemetry-api opentelemetry-sdk
opentelemetry-semantic-conventions orjson oss-harmony partial-json-parser
prometheus-fastapi-instrumentator pybase64 pydantic pydantic-core pydantic-extra-types
python-multipart pyzmq setproctitle sniffio starlette truststore typing-inspection uvicorn
watchfiles websockets xgrammar
""".split()
"""Distributions that vLLM of one release or another imports, and the machine lacks."""
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


def pinned(release: str) -> tuple[str, list[str]]:
    """The requirements of a bundle: vLLM's, and those of what it needs.

    Args:
        release: Of vLLM, one of `RELEASES`.
    """
    lines = (LOCKS / f"cuda-{release}.txt").read_text().splitlines()
    pins = dict(line.split("==") for line in lines if not line.startswith("#"))
    needed = [f"{name}=={pins[name]}" for name in DEPENDENCIES if name in pins]
    return f"vllm=={pins['vllm']}", needed


def build(target: Path, release: str) -> None:
    """Download, cut and pack a release of vLLM; writes `target`/*.xz."""
    target.mkdir(parents=True, exist_ok=True)
    for old in target.glob("*.xz"):
        old.unlink()
    with tempfile.TemporaryDirectory() as folder:
        requirement, needed = pinned(release)
        _download(Path(folder) / "vllm", [requirement])
        _download(Path(folder) / "dependencies", needed)
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
    print(f"{target}: {requirement}, {total / 2**20:.1f} MiB")


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
    building = commands.add_parser("build")
    building.add_argument("bundle", type=Path)
    building.add_argument("--vllm", choices=RELEASES, default=VLLM, help="default: %(default)s")
    unpacking = commands.add_parser("unpack")
    unpacking.add_argument("bundle", type=Path)
    unpacking.add_argument("site", type=Path)
    arguments = parser.parse_args()
    if arguments.command == "build":
        build(arguments.bundle, arguments.vllm)
    else:
        unpack(arguments.bundle, arguments.site)


if __name__ == "__main__":
    main()
