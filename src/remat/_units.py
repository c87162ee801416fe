"""Sizes in bytes: read as people write them, written as people read them."""

import re

_UNITS = {
    "": 1,
    "b": 1,
    **{f"{k}b": 1000**i for i, k in enumerate("kmgtp", start=1)},
    **{f"{k}ib": 1024**i for i, k in enumerate("kmgtp", start=1)},
}
_SIZE = re.compile(r"\s*([0-9]*\.?[0-9]+(?:e[+-]?[0-9]+)?)\s*([a-z]*|%)\s*", re.I)


def parse_bytes(size: int | float | str, *, whole: int | None = None) -> int:
    """Bytes meant by `size`: a number, or as in "4GiB", "512 MB", "1.5e9", "50%".

    Args:
        size: bytes, or text. GiB is 2**30 bytes, GB is 10**9.
        whole: what a percentage is of, in bytes; None where none makes sense.

    Raises:
        ValueError: it is none of these, or negative.
    """
    if isinstance(size, str):
        match = _SIZE.fullmatch(size)
        unit = match[2].lower() if match else None
        if match is None or (unit != "%" and unit not in _UNITS):
            raise ValueError(
                f'"{size}" is no size in bytes. Write a number and a unit, as in '
                '"4GiB", "512MiB" or "1.5e9" (bytes)'
                + (', or a percentage, as in "50%".' if whole is not None else ".")
            )
        if unit != "%":
            return int(float(match[1]) * _UNITS[unit])
        if whole is None:
            raise ValueError(
                f'"{size}" is a percentage, and there is nothing here that it could be '
                'of. Write bytes, as in "4GiB".'
            )
        return int(whole * float(match[1]) / 100)
    if isinstance(size, bool) or not isinstance(size, int | float):
        raise ValueError(
            f"{size!r} is no size in bytes. Give a number, or text such as "
            '"4GiB" or "512MiB".'
        )
    if not 0 <= size < float("inf"):
        raise ValueError(f"A size of {size} bytes makes no sense; give 0 or more.")
    return int(size)


def format_bytes(count: int) -> str:
    """A number of bytes in the largest unit that leaves it above one: `1.5 MiB`."""
    size = float(count)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if size < 1024:
            return f"{count} B" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:.1f} TiB"
