#!/usr/bin/env bash
# Build the extension for aarch64 on another machine, and load it in an emulated Python.
#
#   apt-get install g++-aarch64-linux-gnu qemu-user-static
#   PATH=.venv/bin:$PATH tools/packaging/aarch64.sh
#
# Debian's Python of that architecture is unpacked below build/aarch64; nothing is installed.
set -euo pipefail
cd "$(dirname "$0")/../.."
work=$PWD/build/aarch64
mkdir -p "$work/lists/partial" "$work/root" "$work/packages"

if [ ! -e "$work/root/usr/bin/python3.11" ]; then
  arm64=(-o Dir::State::Lists="$work/lists" -o APT::Architecture=arm64 -o APT::Architectures=arm64
    -o APT::Sandbox::User=root)
  apt-get -qq "${arm64[@]}" update
  (cd "$work/packages" && apt-get -qq "${arm64[@]}" download python3.11-minimal libexpat1 \
    libpython3.11-minimal libpython3.11-stdlib zlib1g libgomp1 libstdc++6 libgcc-s1 libc6)
  for package in "$work"/packages/*.deb; do dpkg -x "$package" "$work/root"; done
fi

# A Python of this machine serves, which is run as it is: its headers are the same for both.
cmake -S . -B "$work/build" -G Ninja -DCMAKE_BUILD_TYPE=Release \
  -DCMAKE_SYSTEM_NAME=Linux -DCMAKE_SYSTEM_PROCESSOR=aarch64 \
  -DCMAKE_CXX_COMPILER=aarch64-linux-gnu-g++ \
  -DCMAKE_CROSSCOMPILING_EMULATOR=/usr/bin/env \
  -DPython_EXECUTABLE="$(command -v python)" \
  -Dnanobind_DIR="$(python -m nanobind --cmake_dir)"
cmake --build "$work/build"
cp "$work/build"/_cpu*.so "$work/_cpu.so"
qemu-aarch64-static -L "$work/root" "$work/root/usr/bin/python3.11" -I -c "
import platform, sys
sys.path.insert(0, '$work')
import _cpu
print(f'{platform.machine()}: kernels {_cpu.isas()}, layouts {sorted(_cpu.LAYOUTS)}')
assert _cpu.isa() == 'portable'"
