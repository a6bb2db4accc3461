"""Build backend: scikit-build-core, or setuptools (Python files only) where that is not installed.

The fallback lets an offline machine that has no use for the CPU kernels install the package with
`pip install --no-index --no-deps --no-build-isolation .`. An isolated build always has
scikit-build-core, so it never takes the fallback by accident.
"""

# ruff: noqa: F403

try:
    from scikit_build_core.build import *
except ModuleNotFoundError as error:
    if error.name != "scikit_build_core":
        raise
    from setuptools.build_meta import *

    print("scikit-build-core is not installed: building without the CPU kernels")
