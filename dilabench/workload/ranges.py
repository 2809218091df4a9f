"""The named sequence ranges: fixed lengths for one purpose."""

from collections.abc import Sequence

from dilabench.errors import ConfigError, unknown_name

RANGES: dict[str, tuple[int, ...]] = {
    "production": (1024, 2048, 4096, 8192, 12288, 16384),
    "medium": (32768, 49152, 65536, 98304, 131072),
    "long": (262144, 393216, 524288, 786432, 1048576),
    "document": (512, 1024, 2048, 4096),
    "context": (4096, 8192, 16384, 32768),
    "book": (50000, 100000, 200000),
}
ALL = "all"
CUSTOM = "custom"
RANGE_NAMES = (*RANGES, ALL, CUSTOM)


def range_lengths(name: str, custom: Sequence[int] = ()) -> tuple[int, ...]:
    """Return the lengths of a range in tokens; `all` is every length of every range, ascending and distinct.

    Raises ConfigError for an unknown range, for `custom` without lengths and for lengths together with a named range.
    """
    if name not in RANGE_NAMES:
        raise unknown_name("range", name, RANGE_NAMES)
    if name == CUSTOM:
        if not custom:
            raise ConfigError("range 'custom' has no lengths; write for example --range custom --lengths 2K,4K,8K")
        return tuple(custom)
    if custom:
        given = ",".join(map(str, custom))
        raise ConfigError(
            f"range {name!r} fixes its lengths but {given} are given too; use --range custom or omit one of the two"
        )
    if name == ALL:
        return tuple(sorted({length for lengths in RANGES.values() for length in lengths}))
    return RANGES[name]
