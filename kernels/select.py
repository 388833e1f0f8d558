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


def _best_cpu(*, few_rows: bool) -> Kernels:
    ops = load_native()
    if isinstance(ops, str):
        return TorchKernels(f"no compiled operations: {ops}")
    return NativeKernels(ops, few_rows=few_rows)


KERNELS: dict[str, Callable[[], Kernels]] = {
    "cpu-native": _native,
    "cpu-torch": TorchKernels,
    "reference": ReferenceKernels,
}


def select_kernels(device: str, *, prefer: str | None = None, few_rows: bool = True) -> Kernels:
    """The best kernel set for a device ("cpu"), or the one named by `prefer`; its `note` says what was found.

    `few_rows` keeps int8 weights in a second layout for steps of one or two rows, where the set has one. Raises
    ValueError naming the choices, or why the preferred set cannot run here.
    """
    if prefer in KERNELS:
        return KERNELS[prefer]()
    if prefer is not None or device != "cpu":
        raise ValueError(f"no kernels for device {device!r}, prefer {prefer!r}: choose from {sorted(KERNELS)}")
    return _best_cpu(few_rows=few_rows)
