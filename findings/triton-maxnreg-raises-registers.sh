#!/usr/bin/env bash
# Triton 3.9: maxnreg=255, an upper bound that changes nothing, gives a kernel more registers
#
# maxnreg says how many registers a thread may have at most; 255 is the most that the hardware has, so
# as a bound it forbids nothing. A kernel that is compiled to 79 registers for sm_80 without the option
# is compiled to 87 with 128 or 255, so that fewer warps fit a multiprocessor. Only a bound below what
# the kernel takes does what the name says. The count is read from the compiled code, so no GPU is
# needed.
#
# Expected: at most as many registers as without the option.
#
# Packages: triton==3.9.0
# Seen: 2026-11-28, Python 3.11, Linux x86-64. Exit code 0: still so; 1: changed.
# FINDING_PYTHON=/path/to/python uses an environment that already has the packages.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
if [ -z "${FINDING_PYTHON:-}" ]; then
  python3 -m venv "$folder/env"
  "$folder/env/bin/python" -m pip install -q triton==3.9.0
  FINDING_PYTHON=$folder/env/bin/python
fi
cd "$folder"
cat > registers.py <<'END_OF_PROGRAM'
import struct

import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource


@triton.jit
def product(x, y, out, B: tl.constexpr, D: tl.constexpr):
    rows, columns = tl.arange(0, B), tl.arange(0, D)
    a = tl.load(x + rows[:, None] * D + columns[None, :])
    b = tl.load(y + columns[:, None] * D + columns[None, :])
    tl.store(out + rows[:, None] * D + columns[None, :], tl.dot(a, b).to(tl.float32))


def registers(**options):
    """Of a thread, as the header of the kernel's section in the ELF file has it."""
    types = {"x": "*bf16", "y": "*bf16", "out": "*fp32", "B": "constexpr", "D": "constexpr"}
    source = ASTSource(fn=product, signature=types, constexprs={"B": 64, "D": 64})
    code = triton.compile(source, target=GPUTarget("cuda", 80, 32), options=options).asm["cubin"]
    (table,), (count, names) = struct.unpack_from("<Q", code, 0x28), struct.unpack_from("<HH", code, 0x3C)
    sections = [struct.unpack_from("<IIQQQQIIQQ", code, table + 64 * number) for number in range(count)]
    start = sections[names][4]
    named = {code[start + s[0] :].split(b"\0", 1)[0].decode(): s for s in sections}
    return named[".text.product"][7] >> 24


seen = {bound: registers(**({} if bound is None else {"maxnreg": bound})) for bound in (None, 64, 128, 255)}
print("maxnreg: registers", seen)
raise SystemExit(seen != {None: 79, 64: 64, 128: 87, 255: 87})
END_OF_PROGRAM
TRITON_CACHE_DIR=$folder/cache TRITON_DEFAULT_FP_FUSION=1 "$FINDING_PYTHON" registers.py
