"""The one place where a kernel set is chosen."""

from collections.abc import Callable

from kernels.api import Kernels
from kernels.cpu.kernels import TorchKernels
from kernels.cpu.native import load_native
from kernels.cpu.native_kernels import NativeKernels
from kernels.reference.kernels import ReferenceKernels


def _native() -> Kernels:
    ops = load_native()
    if isinstance(ops, str):
        raise ValueError(f"the compiled operations cannot be used: {ops}")  # noqa: TRY004 (a reason, no wrong type)
    return NativeKernels(ops)


def _best_cpu() -> Kernels:
    ops = load_native()
    return TorchKernels(f"no compiled operations: {ops}") if isinstance(ops, str) else NativeKernels(ops)


KERNELS: dict[str, Callable[[], Kernels]] = {
    "cpu-native": _native,
    "cpu-torch": TorchKernels,
    "reference": ReferenceKernels,
}
BEST: dict[str, Callable[[], Kernels]] = {"cpu": _best_cpu}


def select_kernels(device: str, *, prefer: str | None = None) -> Kernels:
    """The kernel set for a device ("cpu"), or the one named by `prefer`; `note` of it says what was found. Raises
    ValueError naming the choices, or why the preferred one cannot run here."""
    make = BEST.get(device) if prefer is None else KERNELS.get(prefer)
    if make is None:
        raise ValueError(f"no kernels for device {device!r}, prefer {prefer!r}: choose from {sorted(KERNELS)}")
    return make()
