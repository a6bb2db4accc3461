"""Check an installation of the package that has no vLLM beside it.

Run by the Python of an empty environment into which a wheel was installed, outside of a checkout.
"""

import importlib.util
import subprocess
import sys
from importlib.metadata import distribution
from pathlib import Path


def main() -> None:
    """Print what is installed; ends with an error if something is not as it should be."""
    package = distribution("vllm-kvretrieval")
    wanted = [line for line in package.requires or [] if "extra ==" not in line]
    assert not wanted, f"it requires {wanted}"
    assert importlib.util.find_spec("vllm") is None, "there is a vLLM"
    from vllm_kvretrieval import __version__, _cpu

    assert package.version == __version__
    assert Path(_cpu.__file__ or "").with_name("_cpu.pyi").exists(), "the types are missing"
    doctor = Path(sys.executable).with_name("vllm-kvretrieval")
    done = subprocess.run([doctor, "doctor"], capture_output=True, text=True, check=False)
    assert done.returncode == 1, done.stderr
    assert "vLLM is not installed" in done.stdout
    print(f"{package.version} under {sys.version.split()[0]}: kernels {', '.join(_cpu.isas())}")


if __name__ == "__main__":
    main()
