"""tfdist slurm, tfdist kubernetes: what a scheduler needs to run a job, made from its job.toml."""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys

from tfdist_ext.errors import LaunchError
from tfdist_ext.launch.schedulers.batch_script import batch_script
from tfdist_ext.launch.schedulers.job_file import read_job
from tfdist_ext.launch.schedulers.manifests import manifests_text

__all__ = [
    "KUBERNETES_EPILOG",
    "SLURM_EPILOG",
    "add_kubernetes_options",
    "add_slurm_options",
    "run_kubernetes_command",
    "run_slurm_command",
]

SLURM_EPILOG = """\
example:
  tfdist slurm job.toml > job.sbatch && sbatch job.sbatch

job.toml:
  command = "python train.py"
  nodes = 2
  [slurm]
  time = "04:00:00\""""

KUBERNETES_EPILOG = """\
example:
  tfdist kubernetes job.toml | kubectl apply -f -

job.toml:
  command = "python train.py"
  nodes = 2
  [kubernetes]
  image = "registry.example.com/train:1"
  memory = "16Gi"
  volume = { claim = "checkpoints", path = "/checkpoints" }"""


def add_slurm_options(parser: argparse.ArgumentParser) -> None:
    """Declare the options of `tfdist slurm`."""
    parser.add_argument("job", metavar="JOB.TOML", help="describes the job")
    parser.add_argument("--submit", action="store_true", help="give it to sbatch, too")


def run_slurm_command(options: argparse.Namespace, _: list[str]) -> int:
    """Print a batch script, or submit it."""
    script = batch_script(read_job(options.job), options.job)
    if not options.submit:
        print(script, end="")
        return 0
    if shutil.which("sbatch") is None:
        raise LaunchError("--submit must find sbatch on PATH, got none; run it where Slurm is")
    sys.stdout.flush()
    return subprocess.run(["sbatch"], input=script, text=True).returncode


def add_kubernetes_options(parser: argparse.ArgumentParser) -> None:
    """Declare the options of `tfdist kubernetes`."""
    parser.add_argument("job", metavar="JOB.TOML", help="describes the job")


def run_kubernetes_command(options: argparse.Namespace, _: list[str]) -> int:
    """Print manifests."""
    print(manifests_text(read_job(options.job), options.job), end="")
    return 0
