"""What heat does to a batch, and that a machine without a sensor runs as before."""

import logging
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from engine.thermal import (
    Heat,
    LinuxZones,
    NvmlSensor,
    ScriptedSensor,
    ThermalGovernor,
    ThermalPolicy,
    ThermalReading,
    find_governor,
)


def governed(*degrees: float | ThermalReading | None) -> list[Heat]:
    """The heat after each reading, a second apart."""
    readings = [ThermalReading(d) if isinstance(d, float) else d for d in degrees]
    governor = ThermalGovernor(ScriptedSensor(readings), ThermalPolicy())
    heats = []
    for second in range(len(readings)):
        governor.look(float(second))
        heats.append(governor.heat)
    return heats


def test_heat_rises_at_its_thresholds_and_falls_only_some_degrees_below() -> None:
    """A temperature that plays around a threshold does not switch back and forth."""
    assert governed(77.0, 78.0, 77.0, 76.0, 74.9) == [Heat.COOL, Heat.WARM, Heat.WARM, Heat.WARM, Heat.COOL]
    assert governed(86.0, 84.0, 83.0, 81.9, 76.0, 70.0) == [
        Heat.HOT,
        Heat.HOT,
        Heat.HOT,
        Heat.WARM,
        Heat.WARM,
        Heat.COOL,
    ]


def test_a_device_that_throttles_itself_is_hot_at_any_temperature_and_a_lost_reading_changes_nothing() -> None:
    """The device knows more than its core temperature."""
    throttled = ThermalReading(60.0, ("hardware heat",))
    assert governed(60.0, throttled, None, 60.0) == [Heat.COOL, Heat.HOT, Heat.HOT, Heat.COOL]


def test_the_sensor_is_asked_once_a_second() -> None:
    """However many steps there are."""
    governor = ThermalGovernor(ScriptedSensor([ThermalReading(50.0), ThermalReading(90.0)]), ThermalPolicy())
    for step in range(100):
        governor.look(10.0 + step / 101)
    assert governor.heat is Heat.COOL
    governor.look(11.0)
    assert governor.heat is Heat.HOT and governor.budget_share == 0.5


def test_the_hottest_zone_of_the_processor_counts(tmp_path: Path) -> None:
    """Zones of other parts, and files that cannot be read, are left out."""
    for number, (kind, text) in enumerate(
        (("x86_pkg_temp", "61000"), ("x86_pkg_temp", "67500"), ("iwlwifi_1", "99000"), ("cpu-thermal", "no"))
    ):
        zone = tmp_path / f"thermal_zone{number}"
        zone.mkdir()
        (zone / "type").write_text(kind)
        (zone / "temp").write_text(text)
    assert LinuxZones(tmp_path).read() == ThermalReading(67.5)
    assert not LinuxZones(tmp_path / "nothing").is_there


class FakeNvml(SimpleNamespace):
    """The few names of NVIDIA's library that the sensor uses."""

    class NVMLError(Exception):
        pass

    NVML_TEMPERATURE_GPU = 0
    nvmlClocksThrottleReasonHwThermalSlowdown = 64
    nvmlClocksThrottleReasonSwThermalSlowdown = 32
    nvmlClocksThrottleReasonHwPowerBrakeSlowdown = 128

    def __init__(self, celsius: int, reasons: int) -> None:
        super().__init__(celsius=celsius, reasons=reasons, broken=False)

    def nvmlInit(self) -> None:
        pass

    def nvmlDeviceGetHandleByIndex(self, index: int) -> int:
        return index

    def nvmlDeviceGetTemperature(self, device: int, kind: int) -> int:
        if self.broken:
            raise self.NVMLError
        return int(self.celsius)

    def nvmlDeviceGetCurrentClocksThrottleReasons(self, device: int) -> int:
        return int(self.reasons)


def test_reasons_of_an_nvidia_device_that_have_to_do_with_heat_are_named() -> None:
    """A clock that is low because the device idles (reason 1) is no heat."""
    fake: Any = FakeNvml(71, 1 | 32)
    sensor = NvmlSensor(0, fake)
    assert sensor.read() == ThermalReading(71.0, ("software heat",))
    fake.broken = True
    assert sensor.read() is None


def test_without_a_sensor_there_is_no_governor_and_the_log_says_so_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Whether there is none, or it raises."""

    def broken() -> None:
        raise PermissionError("no")

    monkeypatch.setattr("engine.thermal.SENSORS", {"cpu": lambda: None, "cuda": broken})
    with caplog.at_level(logging.INFO, logger="engine.thermal"):
        assert find_governor("cpu", ThermalPolicy()) is None
        assert find_governor("cuda", ThermalPolicy()) is None
    assert len(caplog.records) == 2
    with pytest.raises(ValueError, match="thermal_warn_celsius"):
        ThermalPolicy(warn_celsius=90)
