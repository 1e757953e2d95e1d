"""What this machine has, probe by probe, and what to do about what is missing: for ``quickseek doctor``."""

import ctypes
import platform
import resource
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch

from quickseek.decode.requirements import CHECKED_FEATURES, LEAST_CAPABILITY, feature_is_checked, installed

MULTICAST_SUPPORTED = 132
"""CU_DEVICE_ATTRIBUTE_MULTICAST_SUPPORTED of the CUDA driver."""
OPTIONAL = {
    "nvidia-cutlass-dsl": "the kernels on a GPU: pip install 'quickseek[gpu]'",
    "triton": "the kernels on a GPU: it comes with torch's CUDA build",
    "xgrammar": "structured output: pip install 'quickseek[serve]'",
    "fastapi": "the server: pip install 'quickseek[serve]'",
}
TIMEOUT_S = 20


@dataclass(frozen=True)
class Probe:
    """One finding; ``advice``: what to do about it, None where it is as it should be."""

    name: str
    found: str
    advice: str | None = None

    def __str__(self) -> str:
        line = f"{self.name + ':':<24}{self.found}"
        return line if self.advice is None else f"{line}\n{'':<24}-> {self.advice}"


def probes() -> Iterator[Probe]:
    """Every finding of this machine, cheapest first; a probe that fails says so and the next one goes on."""
    yield Probe("python", platform.python_version())
    yield from _libraries()
    yield from _host()
    yield from _gpus()
    for name, feature in CHECKED_FEATURES.items():
        versions = " or ".join(feature.versions) or "no version yet"
        advice = None if feature_is_checked(name) else feature.instead
        yield Probe(name, f"{feature.library} {installed(feature.library)}, checked with {versions}", advice)


def _libraries() -> Iterator[Probe]:
    build = f"CUDA {torch.version.cuda}" if torch.version.cuda else "CPU build"
    yield Probe("torch", f"{torch.__version__} ({build})")
    for package, purpose in OPTIONAL.items():
        version = installed(package)
        yield Probe(package, version or "not installed", None if version else f"needed for {purpose}")


def _host() -> Iterator[Probe]:
    yield Probe("processor", f"{platform.machine()}, torch uses {torch.get_num_threads()} threads")
    try:
        fields = dict(line.split(":", 1) for line in Path("/proc/meminfo").read_text().splitlines())
        total, free = (int(fields[key].split()[0]) / (1 << 20) for key in ("MemTotal", "MemAvailable"))
        yield Probe("host memory", f"{free:.1f} of {total:.1f} GiB available")
    except (OSError, KeyError, ValueError) as error:
        yield Probe("host memory", f"unknown ({error})")
    soft, hard = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    unlimited = soft == resource.RLIM_INFINITY
    advice = None
    if not unlimited and torch.cuda.is_available():
        advice = "Engram tables in pinned host memory need 'ulimit -l unlimited' (a container: --ulimit memlock=-1)"
    yield Probe("locked memory limit", "unlimited" if unlimited else f"{soft} bytes (hard limit {hard})", advice)
    shared = Path("/dev/shm")
    if shared.is_dir():
        yield Probe("/dev/shm", f"{shutil.disk_usage(shared).free / (1 << 30):.1f} GiB free")


def _gpus() -> Iterator[Probe]:
    if not torch.cuda.is_available():
        yield Probe("GPU", "none that torch can use", "quickseek runs on the CPU (device='cpu')")
        return
    yield Probe("driver", _command("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader").splitlines()[0])
    count = torch.cuda.device_count()
    for index in range(count):
        capability = torch.cuda.get_device_capability(index)
        free, total = torch.cuda.mem_get_info(index)
        memory = f"{free / (1 << 30):.1f} of {total / (1 << 30):.1f} GiB free"
        old = capability < LEAST_CAPABILITY
        advice = "the specialized decode needs compute capability 9.0 or newer" if old else None
        name = f"{torch.cuda.get_device_name(index)}, {capability[0]}.{capability[1]}"
        yield Probe(f"GPU {index}", f"{name}, {memory}", advice)
    yield Probe("multicast", _multicast(count))
    if count > 1:
        yield _peers(count)
        yield Probe("links", "\n" + _command("nvidia-smi", "topo", "-m"))


def too_few_gpus(ranks: int) -> list[str]:
    """The need that a host with fewer GPUs than ranks leaves unmet, or nothing."""
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    return [f"{ranks} GPUs, one for each rank (found {count})"] if count < ranks else []


def _multicast(count: int) -> str:
    """What the driver reports of each GPU; the library of the driver is there whenever torch can use a GPU."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError as error:
        return f"unknown ({error})"
    told = []
    for index in range(count):
        value = ctypes.c_int(0)
        failed = driver.cuDeviceGetAttribute(ctypes.byref(value), MULTICAST_SUPPORTED, index)
        told.append("unknown" if failed else ("reported" if value.value else "not reported"))
    return ", ".join(f"GPU {index} {state}" for index, state in enumerate(told)) + " (not needed)"


def _peers(count: int) -> Probe:
    """Whether every GPU may reach every other, and whether what one sends is what arrives."""
    pairs = [(a, b) for a in range(count) for b in range(count) if a != b]
    closed = [pair for pair in pairs if not torch.cuda.can_device_access_peer(*pair)]
    wrong = []
    for source, target in pairs:
        word = torch.full((1024,), 1000 * source + target, device=f"cuda:{source}")
        if not bool((word.to(f"cuda:{target}").cpu() == 1000 * source + target).all()):
            wrong.append((source, target))
    if wrong:
        return Probe("peer copies", f"wrong between GPUs {wrong}", "the links or the IOMMU settings are broken")
    if closed:
        advice = "tensor parallelism of the specialized decode needs NVLink, or PCIe peer access enabled"
        return Probe("peer access", f"none between GPUs {closed}", advice)
    return Probe("peer access", f"all {count} GPUs reach each other; copies arrive as sent")


def _command(*arguments: str) -> str:
    try:
        done = subprocess.run(arguments, capture_output=True, text=True, timeout=TIMEOUT_S, check=True)
    except (OSError, subprocess.SubprocessError) as error:
        return f"unknown ({error})"
    return done.stdout.rstrip() or "unknown (no output)"
