"""The state of the GPU while it is measured: SM clock, power, temperature, reasons for slow-downs. No torch."""

from dataclasses import dataclass
from typing import Any

# Reasons for which the driver lowers the clock below the requested one; idle and application settings are not faults.
THROTTLE_REASONS = {
    0x4: "sw_power_cap",
    0x8: "hw_slowdown",
    0x20: "sw_thermal",
    0x40: "hw_thermal",
    0x80: "hw_power_brake",
}
# Running into the power limit is how large GPUs work under full load; heat and brakes are faults of the moment.
COOL_DOWN_REASONS = frozenset({"hw_slowdown", "sw_thermal", "hw_thermal", "hw_power_brake"})


@dataclass(frozen=True, slots=True)
class ClockReading:
    """SM clock, power, temperature and slow-down reasons at one moment; None if unknown, and everywhere on a CPU."""

    sm_clock_mhz: int | None = None
    power_mw: int | None = None
    temperature_c: int | None = None
    throttle: tuple[str, ...] = ()


class NoClocks:
    """The reader for a device without readable clocks."""

    def read(self) -> ClockReading:
        """An empty reading."""
        return ClockReading()


class NvmlClocks:
    """NVML's view of one GPU, by its UUID. Reading takes tens of microseconds and does not disturb the GPU."""

    def __init__(self, nvml: Any, uuid: str) -> None:
        self._nvml = nvml
        nvml.nvmlInit()
        self._handle = nvml.nvmlDeviceGetHandleByUUID(uuid)

    def read(self) -> ClockReading:
        """Clock, power, temperature and slow-down reasons now."""
        nvml = self._nvml
        mask = self._ask("nvmlDeviceGetCurrentClocksEventReasons")
        if mask is None:
            mask = self._ask("nvmlDeviceGetCurrentClocksThrottleReasons")
        return ClockReading(
            sm_clock_mhz=self._ask("nvmlDeviceGetClockInfo", nvml.NVML_CLOCK_SM),
            power_mw=self._ask("nvmlDeviceGetPowerUsage"),
            temperature_c=self._ask("nvmlDeviceGetTemperature", nvml.NVML_TEMPERATURE_GPU),
            throttle=throttle_reasons(mask or 0),
        )

    def _ask(self, question: str, *arguments: Any) -> int | None:
        ask = getattr(self._nvml, question, None)
        if ask is None:
            return None
        try:
            return int(ask(self._handle, *arguments))
        except self._nvml.NVMLError:
            return None


def throttle_reasons(mask: int) -> tuple[str, ...]:
    """The names of NVML's clock event bits that mean a slow-down."""
    return tuple(name for bit, name in THROTTLE_REASONS.items() if mask & bit)


def clocks_of(gpu_uuid: str | None) -> NoClocks | NvmlClocks:
    """A reader for the GPU with this UUID ('GPU-...'), or an empty one if NVML cannot be used."""
    if gpu_uuid is None:
        return NoClocks()
    try:
        import pynvml
    except ImportError:
        return NoClocks()
    try:
        return NvmlClocks(pynvml, gpu_uuid)
    except pynvml.NVMLError:
        return NoClocks()
