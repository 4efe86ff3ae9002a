"""Resources of this process on its machine: cores, GPU, bfloat16, torchvision."""

import contextlib
import ctypes
import functools
import importlib
import os
import platform
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any, Literal

import torch

from knnper.errors import ConfigError, DataError, Problem, RunError
from knnper.experiment import (
    Experiment,
    Precision,
    RunSettings,
)
from knnper.reasons import Code, SafeReason

# Schemas that `import torchvision` refers to. No project code calls these operators.
_OPERATOR_SCHEMAS = (
    "nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
    "qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
)

# Of glibc's malloc.h.
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
_KEPT_BYTES = 1 << 30

# Eight workspaces of 4 MiB for each stream, as cuBLAS needs to be reproducible.
_CUBLAS_WORKSPACES = ":4096:8"

# A convolution and a product as large as oneDNN's AMX code begins to take.
_IN_BFLOAT16 = """
import torch
from torch import nn
with torch.autocast("cpu", dtype=torch.bfloat16):
    hidden = nn.Conv2d(16, 16, 3)(torch.ones(8, 16, 18, 18)).mean((2, 3))
    nn.Linear(64, 64)(hidden.repeat(4, 4)).float().sum().backward()
"""


def import_torchvision() -> ModuleType:
    """Import ``torchvision``, also beside a build of torch that it was not made for.

    Beside another build (a CPU torch and a CUDA wheel, for instance), torchvision
    cannot load its compiled operators, and its import fails because
    ``torchvision::nms`` does not exist. The missing schemas are then declared and the
    import is repeated. Nothing is declared where torch already has the operator: a
    second declaration ends the process.

    Raises
    ------
    ImportError
        Torchvision is not installed.
    """
    try:
        return importlib.import_module("torchvision")
    except ModuleNotFoundError as error:
        if error.name != "torchvision":
            raise
        raise ImportError(
            "torchvision is not installed; install the project's dependencies: "
            "pip install knnper"
        ) from error
    except RuntimeError:
        if hasattr(torch.ops.torchvision, "nms"):
            raise
        _declare_operators()
        return importlib.import_module("torchvision")


def import_extra(module: str, extra: str, purpose: str) -> Any:
    """Import a module that an extra of this package installs.

    Parameters
    ----------
    module
        Such as ``pyarrow.parquet``.
    extra
        The extra's name in ``pip install 'knnper[EXTRA]'``.
    purpose
        The command or setting that needs it; the error begins with it.

    Raises
    ------
    DataError
        The package is not installed.
    """
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        package = module.partition(".")[0].replace("_", "-")
        raise DataError(
            f"{purpose} needs the package {package}, which is not installed; "
            f"pip install 'knnper[{extra}]'",
            reason=SafeReason(Code.MISSING_PACKAGE),
        ) from error


@functools.cache
def _declare_operators() -> torch.library.Library:
    """Declare the schemas; the cache keeps the library, and so the schemas, alive."""
    library = torch.library.Library(  # type: ignore[no-untyped-call]
        "torchvision", "DEF"
    )
    for schema in _OPERATOR_SCHEMAS:
        library.define(schema)  # type: ignore[no-untyped-call]
    return library


def usable_cores() -> int:
    """Return the number of CPU cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):  # not everywhere, as on macOS
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def num_workers(run: RunSettings) -> int:
    """Return the number of worker processes: as set, or one a usable CPU core."""
    return run.num_workers or usable_cores()


def num_threads(run: RunSettings) -> int:
    """Return the number of threads that torch may use in one process.

    As set, or an equal share of the usable cores for each process that runs clients.
    """
    if run.threads_per_worker != "auto":
        return run.threads_per_worker
    processes = 1 if run.engine == "serial" else num_workers(run)
    return max(1, usable_cores() // processes)


def with_fixed_threads(experiment: Experiment) -> Experiment:
    """Return the experiment with the number of threads that ``auto`` means here.

    Once, when a run begins: its last bits depend on the number, wherever and with
    however many workers it is resumed.
    """
    run = experiment.run
    return replace(experiment, run=replace(run, threads_per_worker=num_threads(run)))


def compute_device(run: RunSettings) -> torch.device:
    """Return where a process that runs clients computes."""
    if run.gpus_per_client == 0:
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise RunError(
            f"found no GPU that torch {torch.__version__} can use, expected one since "
            f"run.gpus_per_client is {run.gpus_per_client:g}; install the driver and a "
            "build of torch for CUDA, or set run.gpus_per_client to 0"
        )
    return torch.device("cuda")


def known_precision(precision: Precision | Literal["auto"]) -> Precision:
    """Return the precision; reject ``auto`` outside a simulation, which measures it."""
    if precision != "auto":
        return precision
    message = (
        "found auto, expected float32 or bfloat16: only a simulation measures which is "
        "faster. Real clients have a processor each, and the runs of a comparison have "
        "one precision"
    )
    raise ConfigError([Problem("training.precision", message)])


def require_precision(precision: Precision, device: torch.device) -> None:
    """Refuse bfloat16 on a CPU where it would kill the process.

    Some virtual machines name AMX among the processor's features and do not run it:
    the process ends with SIGILL in oneDNN. Whether it does is tried in another process.
    """
    if precision == "float32" or device.type != "cpu" or not cpu_is("amx_bf16"):
        return
    if (ended := _tried_in_bfloat16()) != 0:
        raise RunError(
            f"found training.precision = {precision}, with which oneDNN ends a process "
            f"on this CPU (exit status {ended}: it names AMX, and cannot run it), "
            "expected a CPU that can; set the environment variable "
            "ONEDNN_MAX_CPU_ISA=AVX512_CORE_FP16, or training.precision to float32"
        )


def cpu_is(word: str) -> bool:
    """Return whether Linux lists this word for the CPU: its maker, or a feature."""
    try:
        return word in Path("/proc/cpuinfo").read_text()
    except OSError:
        return False


@functools.cache
def _tried_in_bfloat16() -> int:
    command = [sys.executable, "-c", _IN_BFLOAT16]
    return subprocess.run(command, capture_output=True, check=False).returncode


def prepare_process(run: RunSettings, device: torch.device) -> None:
    """Set what torch takes from the whole process.

    The number of threads, since results are the same bits only for the same number,
    and on a GPU the algorithms that give the same numbers each time, with products in
    full float32. cuBLAS reads its workspaces, which LSTMs depend on, from the
    environment at the first product (NVIDIA, "cuBLAS", "Results Reproducibility").
    """
    torch.set_num_threads(num_threads(run))
    if device.type == "cuda":
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", _CUBLAS_WORKSPACES)
        torch.backends.cudnn.deterministic = True
        torch.backends.cudnn.allow_tf32 = False


def keep_freed_memory() -> None:
    """Let glibc keep up to 1 GiB of freed memory instead of returning it at once.

    Otherwise the kernel zeroes its pages again for each training step, up to a fifth of
    MobileNetV2's time. It works in the main thread only, in which workers compute.
    """
    if platform.libc_ver()[0] == "glibc":
        libc = ctypes.CDLL(None)
        libc.mallopt(_M_MMAP_THRESHOLD, _KEPT_BYTES)
        libc.mallopt(_M_TRIM_THRESHOLD, _KEPT_BYTES)


@contextlib.contextmanager
def huge_pages_for_workers() -> Iterator[None]:
    """Let glibc use huge pages in processes that start inside the block.

    The large tensors of a training step take a twentieth less time. It is a setting of
    the environment because glibc reads it when a process starts.
    """
    before = os.environ.get("GLIBC_TUNABLES")
    tunables = [before] if before else []
    os.environ["GLIBC_TUNABLES"] = ":".join([*tunables, "glibc.malloc.hugetlb=1"])
    try:
        yield
    finally:
        if before is None:
            del os.environ["GLIBC_TUNABLES"]
        else:
            os.environ["GLIBC_TUNABLES"] = before
