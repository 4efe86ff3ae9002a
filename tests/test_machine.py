"""What a process may use: cores, threads, a GPU, memory."""

import contextlib
import ctypes
import os
import platform

import pytest
import torch

from knnper import process as machine
from knnper.errors import RunError
from knnper.experiment import RunSettings
from knnper.experiment_file import load_experiment
from knnper.process import (
    compute_device,
    huge_pages_for_workers,
    keep_freed_memory,
    num_threads,
    num_workers,
    prepare_process,
    require_precision,
    with_fixed_threads,
)
from knnper.simulation.catalogue import experiment_catalogue

CPU = torch.device("cpu")


def test_one_worker_a_core_unless_set(monkeypatch: pytest.MonkeyPatch) -> None:
    assert num_workers(RunSettings(num_workers=7)) == 7
    if hasattr(os, "sched_getaffinity"):
        monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0, 3, 5})
        assert num_workers(RunSettings()) == 3
        monkeypatch.delattr(os, "sched_getaffinity")
    monkeypatch.setattr(os, "cpu_count", lambda: 5)
    assert num_workers(RunSettings()) == 5


@pytest.mark.parametrize(
    ("run", "threads"),
    [
        (RunSettings(), 1),
        (RunSettings(threads_per_worker=3), 3),
        (RunSettings(threads_per_worker="auto"), 1),
        (RunSettings(threads_per_worker="auto", num_workers=3), 2),
        (RunSettings(threads_per_worker="auto", num_workers=100), 1),
        (RunSettings(threads_per_worker="auto", num_workers=3, engine="serial"), 8),
    ],
)
def test_threads_on_eight_cores(
    monkeypatch: pytest.MonkeyPatch, run: RunSettings, threads: int
) -> None:
    monkeypatch.setattr(machine, "usable_cores", lambda: 8)
    assert num_threads(run) == threads


def test_threads_are_fixed_when_a_run_begins(monkeypatch: pytest.MonkeyPatch) -> None:
    document = {
        "name": "x",
        "data": {"name": "digits"},
        "partition": {"name": "iid", "num_clients": 2},
        "model": {"name": "tiny_cnn"},
        "method": {"name": "fedavg"},
        "run": {"threads_per_worker": "auto", "num_workers": 2},
    }
    experiment = load_experiment(document, experiment_catalogue())
    monkeypatch.setattr(machine, "usable_cores", lambda: 8)
    assert with_fixed_threads(experiment).run.threads_per_worker == 4


def test_clients_compute_on_the_gpu_they_have_part_of(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    part = RunSettings(gpus_per_client=0.25)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert compute_device(RunSettings()) == CPU
    assert compute_device(part) == torch.device("cuda")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(RunError, match=r"found no GPU.*gpus_per_client is 0\.25"):
        compute_device(part)


@pytest.mark.parametrize(
    ("device", "before", "after"),
    [("cuda", None, ":4096:8"), ("cuda", ":16:8", ":16:8"), ("cpu", None, None)],
)
def test_the_process_gets_its_threads_and_the_same_numbers_each_time(
    monkeypatch: pytest.MonkeyPatch, device: str, before: str | None, after: str | None
) -> None:
    name, chosen = "CUBLAS_WORKSPACE_CONFIG", list[int]()
    environment = {} if before is None else {name: before}
    monkeypatch.setattr(os, "environ", environment)
    monkeypatch.setattr(torch, "set_num_threads", chosen.append)
    for flag in ("deterministic", "allow_tf32"):  # to be put back
        monkeypatch.setattr(torch.backends.cudnn, flag, False)
    prepare_process(RunSettings(threads_per_worker=3), torch.device(device))
    assert chosen == [3]
    assert environment.get(name) == after
    assert torch.backends.cudnn.deterministic == (device == "cuda")


@pytest.mark.parametrize(("libc", "calls"), [("glibc", 2), ("", 0)])
def test_memory_is_kept_where_glibc_allocates_it(
    monkeypatch: pytest.MonkeyPatch, libc: str, calls: int
) -> None:
    made: list[tuple[int, int]] = []

    class Library:
        def __init__(self, name: None) -> None:
            pass

        def mallopt(self, parameter: int, value: int) -> None:
            made.append((parameter, value))

    monkeypatch.setattr(platform, "libc_ver", lambda: (libc, "2.36"))
    monkeypatch.setattr(ctypes, "CDLL", Library)
    keep_freed_memory()
    # M_MMAP_THRESHOLD and M_TRIM_THRESHOLD of malloc.h.
    assert made == [(-3, 2**30), (-1, 2**30)][:calls]


@pytest.mark.parametrize("before", [None, "glibc.malloc.arena_max=1"])
def test_huge_pages_are_for_what_starts_meanwhile(
    monkeypatch: pytest.MonkeyPatch, before: str | None
) -> None:
    if before is None:
        monkeypatch.delenv("GLIBC_TUNABLES", raising=False)
    else:
        monkeypatch.setenv("GLIBC_TUNABLES", before)
    with huge_pages_for_workers():
        asked = os.environ["GLIBC_TUNABLES"].split(":")
        assert asked == [*([before] if before else []), "glibc.malloc.hugetlb=1"]
    assert os.environ.get("GLIBC_TUNABLES") == before


@pytest.mark.parametrize("dies", [True, False])
def test_bfloat16_is_refused_where_it_kills_a_process(
    monkeypatch: pytest.MonkeyPatch, dies: bool
) -> None:
    script = "import os, signal; os.kill(os.getpid(), signal.SIGILL)" if dies else ""
    monkeypatch.setattr(machine, "cpu_is", lambda _: True)
    monkeypatch.setattr(machine, "_IN_BFLOAT16", script)
    machine._tried_in_bfloat16.cache_clear()
    require_precision("float32", CPU)
    require_precision("bfloat16", torch.device("cuda"))
    with contextlib.ExitStack() as stack:
        if dies:
            message = "status -4.*ONEDNN_MAX_CPU_ISA=AVX512_CORE_FP16.*float32"
            stack.enter_context(pytest.raises(RunError, match=message))
        require_precision("bfloat16", CPU)
    machine._tried_in_bfloat16.cache_clear()


@pytest.mark.slow
def test_the_hint_for_bfloat16_helps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_FP16")
    machine._tried_in_bfloat16.cache_clear()
    assert machine._tried_in_bfloat16() == 0
    machine._tried_in_bfloat16.cache_clear()
