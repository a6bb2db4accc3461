#!/usr/bin/env bash
# Make the sdist and wheels in dist: wheels.sh PYTHON..., one of 3.11 and one of 3.12 or newer.
#
# A wheel gets the oldest manylinux tag that its symbols allow. What is published is made by
# cibuildwheel in the image of manylinux_2_28, of which pyproject.toml has the settings.
set -euo pipefail
cd "$(dirname "$0")/../.."
rm -rf build/wheels && mkdir -p build/wheels dist && rm -f dist/*

for python in "$@"; do
  version=$("$python" -c 'import sys; print("%d%d" % sys.version_info[:2])')
  venv=build/wheels/venv$version
  echo "wheels: Python $version"
  "$python" -m venv "$venv"
  "$venv/bin/pip" install -q --no-deps -r requirements/build.txt -r requirements/wheels.txt
  "$venv/bin/pip" wheel -q --no-deps --no-build-isolation -w "build/wheels/raw$version" \
    -C build-dir="build/wheels/cp$version" .
  PATH="$PWD/$venv/bin:$PATH" "$venv/bin/auditwheel" repair --exclude libgomp.so.1 -w dist \
    "build/wheels/raw$version"/*.whl
done
"$venv/bin/python" -m build -q --sdist --no-isolation -o dist .
for wheel in dist/*-abi3-*.whl; do "$venv/bin/abi3audit" --strict "$wheel"; done
ls -l dist
