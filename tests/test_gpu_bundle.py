"""The bundle for offline GPU machines: what it cuts out of a library, and what comes back."""

import struct
import zipfile

from tools.gpu import bundle


def image(architecture, payload, kind=bundle.CUBIN):
    header = struct.pack("<HHIQ", kind, 1, 64, len(payload)).ljust(28, b"h")
    return (header + struct.pack("<I", architecture)).ljust(64, b"h") + payload


def fat_binary(*images):
    body = b"".join(images)
    return bundle.FAT_BINARY + struct.pack("<HHQ", 1, 16, len(body)) + body


def code(library):
    """What the driver would find: per fat binary its (architecture, payload) pairs."""
    return [
        [(i.architecture, library[i.start + i.header : i.end]) for i in images]
        for _, _, images in bundle.fat_binaries(library)
    ]


def test_only_our_code_is_left():
    ours, foreign = image(90, b"ours" * 9), image(80, b"other" * 7)
    intermediate = image(90, b"text" * 5, kind=1)
    library = b"".join(
        [
            b"ELF" + bundle.FAT_BINARY + b"no fat binary",
            fat_binary(foreign, ours, intermediate),
            b"between",
            fat_binary(foreign),
            b"end",
        ]
    )
    pruned = bundle.prune(library, bundle.everything)
    assert len(pruned) == len(library)
    assert pruned.endswith(b"end")
    assert b"between" in pruned
    assert b"other" not in pruned
    assert code(pruned) == [[(90, b"ours" * 9)], [(120, bytes(35))]]
    unwanted = bundle.prune(library, lambda payload: b"ours" not in payload)
    assert [[architecture for architecture, _ in found] for found in code(unwanted)] == [
        [120, 120, 120],
        [120],
    ]


def test_files_come_back_where_they_were(tmp_path):
    wheel, packed, site = tmp_path / "a.whl", tmp_path / "bundle", tmp_path / "site"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr("vllm/engine.py", "text")
        archive.writestr("vllm/_C.abi3.so", "code")
    packed.mkdir()
    files = bundle._tar([wheel], lambda name: not bundle.LEFT_OUT.search(f"/{name}"))
    bundle._compress((packed / "vllm.tar.xz", files))
    bundle._compress((packed / "vllm_flash_attn___vllm_fa3_C.abi3.so.xz", b"library"))
    bundle.unpack(packed, site)
    assert (site / "vllm" / "engine.py").read_text() == "text"
    assert not (site / "vllm" / "_C.abi3.so").exists()
    assert (site / "vllm" / "vllm_flash_attn" / "_vllm_fa3_C.abi3.so").read_bytes() == b"library"
