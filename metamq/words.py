"""Numbers in sentences."""


def count(number: int, noun: str) -> str:
    """ "1 message", "2,000 messages"."""
    return f"{number:,} {noun}" + ("" if number == 1 else "s")


def size(number: int) -> str:
    """ "256 MiB" where it is a whole number of the unit, else bytes."""
    for unit, name in ((1 << 50, "PiB"), (1 << 40, "TiB"), (1 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB")):
        if number and number % unit == 0:
            return f"{number // unit:,} {name}"
    return f"{number:,}"


def measure(setting: str, *, whole: bool) -> str:
    """What a setting of this name is given as: "a number of seconds", by its last word, which is its unit."""
    unit = {"s": " of seconds", "ms": " of milliseconds", "bytes": " of bytes"}.get(setting.rpartition("_")[2], "")
    return ("a whole number" if whole else "a number") + unit
