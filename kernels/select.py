"""The one place where a kernel set is chosen."""

from collections.abc import Callable

from kernels.api import Kernels
from kernels.cpu.kernels import TorchKernels
from kernels.reference.kernels import ReferenceKernels

KERNELS: dict[str, Callable[[], Kernels]] = {"cpu-torch": TorchKernels, "reference": ReferenceKernels}
BEST: dict[str, str] = {"cpu": "cpu-torch"}


def select_kernels(device: str, *, prefer: str | None = None) -> Kernels:
    """The kernel set for a device ("cpu"), or the one named by `prefer`. Raises ValueError naming the choices."""
    name = prefer or BEST.get(device)
    if name is None or name not in KERNELS:
        raise ValueError(f"no kernels for device {device!r}, prefer {prefer!r}: choose from {sorted(KERNELS)}")
    return KERNELS[name]()
