"""The cores, the memory and the GPUs that this process may use, and the processor's name."""

import ctypes
import logging
import os
import platform
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

ONNX = "onnx"
PRECISIONS = {"torch": ("fp32", "bf16", "fp16"), ONNX: ("fp32", "int8")}  # by runtime
PROVIDERS = {"cpu": "CPUExecutionProvider", "cuda": "CUDAExecutionProvider"}
DRIVER = "libcuda.so.1"  # comes with the driver, never with a wheel
KERNEL_MODULE = Path("/proc/driver/nvidia/version")  # a container without GPUs has it, too
CGROUPS = Path("/sys/fs/cgroup")
CGROUP_OF_PROCESS = Path("/proc/self/cgroup")
MEMORY_INFO = Path("/proc/meminfo")
SHARED_MEMORY = Path("/dev/shm")  # where workers put their batches; 64 MB in Docker
# Why workers may fail, or wait forever
SHORTAGES = f"{SHARED_MEMORY} or TMPDIR may be full, or too many files open (ulimit -n)."

logger = logging.getLogger(__name__)


def usable_cores() -> int:
    """Count the cores that the affinity and the quotas of cgroups allow, at least one.

    `os.cpu_count()` counts the cores of the machine: for a job with 2 of 128 cores it returns 128.
    """
    limits = (file.read_text().split() for file in _cgroup_files("cpu.max"))  # in microseconds
    quotas = [int(quota) // int(period) for quota, period in limits if quota != "max"]
    for file in _cgroup_files("cpu.cfs_quota_us", controller="cpu"):
        quota = int(file.read_text())  # -1 if there is none
        if quota > 0:
            quotas.append(quota // int(file.with_name("cpu.cfs_period_us").read_text()))
    return max(1, min([allowed_cores(), *quotas]))


def allowed_cores() -> int:
    """Count the cores that this process may be scheduled on."""
    try:
        return len(os.sched_getaffinity(0))
    except AttributeError:  # not Linux
        return os.cpu_count() or 1


def available_memory() -> int:
    """Return the bytes that this process could still allocate; `sys.maxsize` without /proc."""
    version_1_files = _cgroup_files("memory.limit_in_bytes", controller="memory")
    free_bytes = [
        int(limit) - _used_memory(file.parent)
        for file in [*_cgroup_files("memory.max"), *version_1_files]
        if (limit := file.read_text().strip()) != "max"
    ]
    if MEMORY_INFO.exists():
        free = re.search(r"^MemAvailable: +(\d+) kB$", MEMORY_INFO.read_text(), re.MULTILINE)
        free_bytes += [1024 * int(free[1])] if free else []
    return min(free_bytes, default=sys.maxsize)


def _used_memory(group: Path) -> int:
    """Return the bytes that a cgroup uses, without cached files, which the kernel can drop."""
    files = (group / name for name in ("memory.current", "memory.usage_in_bytes", "memory.stat"))
    text = "\n".join(file.read_text() for file in files if file.exists())
    used, cached = (
        max(map(int, re.findall(rf"^{name}(\d+)$", text, re.MULTILINE)), default=0)
        for name in ("", "(?:total_)?inactive_file ")  # version 1 has a total of all groups below
    )
    return max(0, used - cached)


def _cgroup_files(name: str, *, controller: str = "") -> Iterator[Path]:
    """Yield the files of that name in this process's cgroup and its parents.

    Inside a container the process's own group appears as the root.

    controller: a controller of version 1, where each has its own tree of groups; "" for version 2.
    """
    membership = CGROUP_OF_PROCESS.read_text() if CGROUP_OF_PROCESS.exists() else ""
    for line in membership.splitlines():
        _, controllers, path = line.split(":", 2)
        if controller in controllers.split(","):
            group = CGROUPS / controller / path.lstrip("/")
            yield from filter(Path.exists, (parent / name for parent in (group, *group.parents)))


def cpu_name() -> str:
    """Return the processor's model name from Linux, else its architecture."""
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text(encoding="utf-8").splitlines() if cpuinfo.exists() else []
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.processor() or platform.machine())


@dataclass(frozen=True)
class NvidiaDriver:
    """The facts that NVIDIA's driver reports; an empty text stands for a missing fact."""

    version: str = ""  # of the kernel module
    cuda: str = ""  # the newest CUDA that the driver's library supports
    failure: str = ""  # why the driver shows no GPU to this process


def read_driver() -> NvidiaDriver | None:
    """Ask NVIDIA's driver, as torch and onnxruntime do; None if the machine has none."""
    text = KERNEL_MODULE.read_text() if KERNEL_MODULE.exists() else ""
    version = match[0] if (match := re.search(r"\d+\.[\d.]*\d", text)) else ""
    cuda, num_gpus, reason = ctypes.c_int(), ctypes.c_int(), ctypes.c_char_p()
    try:
        library = ctypes.CDLL(DRIVER)
        library.cuDriverGetVersion(ctypes.byref(cuda))  # 13020 for 13.2
        code = library.cuInit(0) or library.cuDeviceGetCount(ctypes.byref(num_gpus))
        library.cuGetErrorString(code, ctypes.byref(reason))
    except (OSError, AttributeError) as error:  # AttributeError: another library of that name
        is_missing = not version and "no such file" in str(error).lower()
        return None if is_missing else NvidiaDriver(version, failure=str(error))
    failure = "" if num_gpus.value else (reason.value or b"unknown error").decode()
    return NvidiaDriver(version, f"{cuda.value // 1000}.{cuda.value % 1000 // 10}", failure)


def why_no_cuda(runtime: str) -> str | None:
    """Return why a runtime cannot use an NVIDIA GPU; None if it can.

    The first sentence has no versions, because `/health/ready` shows it to everybody.
    """
    if runtime == ONNX:
        package, package_cuda = "onnxruntime-gpu", None
        if PROVIDERS["cuda"] in available_providers():
            package_cuda = getattr(sys.modules["onnxruntime"], "cuda_version", "")
    elif not has_torch():
        return "torch is not installed. Install it, or use the runtime onnx"
    else:
        import torch

        if torch.cuda.is_available():
            return None
        package, package_cuda = "torch", torch.version.cuda
    driver = read_driver() or NvidiaDriver(failure=f"{DRIVER} cannot be loaded")
    if not driver.cuda:
        advice = "Install one, or start the container with its GPUs"
        return f"there is no NVIDIA driver. {advice} ({driver.failure})"
    facts = f"driver {driver.version or 'of unknown version'} supports CUDA {driver.cuda}"
    newest = driver.cuda.partition(".")[0]
    install = f"install {package} for CUDA {newest}"
    if driver.failure:
        visible = os.environ.get("CUDA_VISIBLE_DEVICES", "not set") or "empty"
        facts += f", but says {driver.failure}; CUDA_VISIBLE_DEVICES is {visible}"
        return f"NVIDIA's driver shows no GPU. Compare `nvidia-smi` ({facts})"
    if package_cuda is None:
        cause = f"there is no {package} with CUDA, or another wheel hides it"
        return f"{cause}. Uninstall each, and {install} ({facts})"
    if package_cuda and int(package_cuda.partition(".")[0]) > int(newest):
        cause = f"NVIDIA's driver is too old for {package}"
        return f"{cause}. Update it, or {install} ({facts}, {package} needs {package_cuda})"
    if runtime == ONNX:
        return None
    return f"torch finds no GPU, but NVIDIA's driver does. Compare `nvidia-smi` ({facts})"


def warn_of_unused_gpu(runtime: str) -> str | None:
    """Log why a machine that seems to have a GPU uses its CPU; return the reason."""
    reason = why_no_cuda(runtime)
    if reason and read_driver():
        logger.warning(f"No GPU is used, because {reason}.")
        return reason
    return None


def available_providers() -> list[str]:
    """List the providers of the installed onnxruntime, if there is one."""
    try:
        import onnxruntime
    except ImportError:
        return []
    return [*onnxruntime.get_available_providers()]


def has_torch() -> bool:
    """Return whether torch is installed, without importing it."""
    return find_spec("torch") is not None
