"""Numbers with their units, for messages."""


def count(number: int, noun: str) -> str:
    """Returns a number with its noun: "1 message", "2,000 messages"."""
    return f"{number:,} {noun}" + ("" if number == 1 else "s")


def size(number: int) -> str:
    """Returns "256 MiB" if the number is a whole multiple of the unit, else the number of bytes."""
    for unit, name in ((1 << 50, "PiB"), (1 << 40, "TiB"), (1 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB")):
        if number and number % unit == 0:
            return f"{number // unit:,} {name}"
    return f"{number:,}"


def measure(setting: str, *, whole: bool) -> str:
    """Returns the kind of a setting's value: "a number of seconds". The last word of the setting's name is the unit."""
    unit = {"s": " of seconds", "ms": " of milliseconds", "bytes": " of bytes"}.get(setting.rpartition("_")[2], "")
    return ("a whole number" if whole else "a number") + unit
