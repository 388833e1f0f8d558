"""How hot the device is, and what that means for a batch. Sensors read; the governor decides, and remembers."""

import logging
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from enum import StrEnum
from importlib import import_module
from pathlib import Path
from typing import Any, Protocol

_log = logging.getLogger(__name__)

CPU_ZONES = ("x86_pkg_temp", "cpu", "coretemp", "k10temp", "soc")
"""Beginnings of the types of Linux thermal zones that belong to the processor."""


@dataclass(frozen=True, slots=True)
class ThermalReading:
    """`throttled_by` names the reasons for which the device slows itself down because of heat or power."""

    celsius: float
    throttled_by: tuple[str, ...] = ()


class ThermalSensor(Protocol):
    """Where a temperature comes from. Reading takes less than a few milliseconds."""

    name: str

    def read(self) -> ThermalReading | None:
        """None where it cannot be read now."""


class LinuxZones:
    """The hottest of the processor's thermal zones."""

    def __init__(self, root: Path = Path("/sys/class/thermal")) -> None:
        self.name = "Linux thermal zones"
        self._files = [file for file in sorted(root.glob("thermal_zone*/temp")) if _is_of_cpu(file)]

    @property
    def is_there(self) -> bool:
        return self.read() is not None

    def read(self) -> ThermalReading | None:
        degrees = [int(text) / 1000 for file in self._files if (text := _text(file)).lstrip("-").isdigit()]
        return ThermalReading(max(degrees)) if degrees else None


class NvmlSensor:
    """One NVIDIA device by `nvidia-ml-py`. Raises what that raises where there is no driver or no such device."""

    def __init__(self, index: int = 0, nvml: Any = None) -> None:
        self._nvml = import_module("pynvml") if nvml is None else nvml
        self._nvml.nvmlInit()
        self._device = self._nvml.nvmlDeviceGetHandleByIndex(index)
        self.name = f"NVML device {index}"

    def read(self) -> ThermalReading | None:
        nvml = self._nvml
        try:
            celsius = float(nvml.nvmlDeviceGetTemperature(self._device, nvml.NVML_TEMPERATURE_GPU))
            reasons = int(nvml.nvmlDeviceGetCurrentClocksThrottleReasons(self._device))
        except nvml.NVMLError:
            return None
        named = {
            "hardware heat": nvml.nvmlClocksThrottleReasonHwThermalSlowdown,
            "software heat": nvml.nvmlClocksThrottleReasonSwThermalSlowdown,
            "power brake": nvml.nvmlClocksThrottleReasonHwPowerBrakeSlowdown,
        }
        return ThermalReading(celsius, tuple(name for name, bit in named.items() if reasons & bit))


class ScriptedSensor:
    """Readings from a list, the last one for ever."""

    def __init__(self, readings: Iterable[ThermalReading | None]) -> None:
        self.name = "scripted"
        self._readings: Iterator[ThermalReading | None] = iter(readings)
        self._last: ThermalReading | None = None

    def read(self) -> ThermalReading | None:
        self._last = next(self._readings, self._last)
        return self._last


class Heat(StrEnum):
    COOL = "cool"
    WARM = "warm"
    HOT = "hot"


@dataclass(frozen=True, slots=True)
class ThermalPolicy:
    """WARM from `warn_celsius`, HOT from `limit_celsius` or when the device throttles itself; back only
    `hysteresis_celsius` below. A step has `warm_share` or `hot_share` of its tokens then."""

    warn_celsius: float = 78.0
    limit_celsius: float = 85.0
    hysteresis_celsius: float = 3.0
    warm_share: float = 0.75
    hot_share: float = 0.5
    every_seconds: float = 1.0

    def __post_init__(self) -> None:
        if not self.warn_celsius < self.limit_celsius:
            raise ValueError(f"thermal_warn_celsius must be below the limit, {self.limit_celsius}")

    def next_heat(self, heat: Heat, reading: ThermalReading) -> Heat:
        warn, limit = self.warn_celsius, self.limit_celsius
        if heat is Heat.HOT:
            limit -= self.hysteresis_celsius
        if heat is not Heat.COOL:
            warn -= self.hysteresis_celsius
        if reading.throttled_by or reading.celsius >= limit:
            return Heat.HOT
        return Heat.WARM if reading.celsius >= warn else Heat.COOL

    def budget_share(self, heat: Heat) -> float:
        return {Heat.COOL: 1.0, Heat.WARM: self.warm_share, Heat.HOT: self.hot_share}[heat]


class ThermalGovernor:
    """Looks at its sensor at most once in `every_seconds`; a reading that fails changes nothing."""

    def __init__(self, sensor: ThermalSensor, policy: ThermalPolicy) -> None:
        self.policy = policy
        self.heat = Heat.COOL
        self.celsius: float | None = None
        self._sensor = sensor
        self._next = 0.0

    def __repr__(self) -> str:
        return f"ThermalGovernor({self._sensor.name}, {self.celsius} degrees, {self.heat})"

    @property
    def budget_share(self) -> float:
        return self.policy.budget_share(self.heat)

    def look(self, now: float) -> None:
        """`now` is monotonic seconds."""
        if now < self._next:
            return
        self._next = now + self.policy.every_seconds
        reading = self._sensor.read()
        if reading is None:
            return
        heat = self.policy.next_heat(self.heat, reading)
        if heat is not self.heat:
            why = f", throttled by {', '.join(reading.throttled_by)}" if reading.throttled_by else ""
            _log.warning("the device is %s at %.0f degrees%s", heat, reading.celsius, why)
        self.heat, self.celsius = heat, reading.celsius


def _linux() -> ThermalSensor | None:
    zones = LinuxZones()
    return zones if zones.is_there else None


SENSORS: dict[str, Callable[[], ThermalSensor | None]] = {"cpu": _linux, "cuda": NvmlSensor}
"""By the kind of device."""


def find_governor(device: str, policy: ThermalPolicy) -> ThermalGovernor | None:
    """A governor for the device; None, said once, where its temperature cannot be read."""
    try:
        sensor = SENSORS[device]()
    except Exception as error:  # no library, no driver, no device, no right: whatever it is, the engine runs without
        _log.info("no thermal governor: the temperature of %s cannot be read (%s)", device, type(error).__name__)
        return None
    if sensor is None:
        _log.info("no thermal governor: this machine does not tell the temperature of %s", device)
        return None
    return ThermalGovernor(sensor, policy)


def _is_of_cpu(file: Path) -> bool:
    return _text(file.with_name("type")).lower().startswith(CPU_ZONES)


def _text(file: Path) -> str:
    try:
        return file.read_text(encoding="ascii", errors="replace").strip()
    except OSError:
        return ""
