"""Numbers in sentences."""


def count(number: int, noun: str) -> str:
    """ "1 message", "2,000 messages"."""
    return f"{number:,} {noun}" + ("" if number == 1 else "s")
