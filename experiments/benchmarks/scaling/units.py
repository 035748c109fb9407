"""Numbers with units, in readable form."""

PREFIXES = ["", "k", "M", "G", "T", "P"]


def scaled(value: float, unit: str) -> str:
    """Three digits and an SI prefix.

    >>> scaled(4_395_809_504, "B"), scaled(1152, "B"), scaled(0, "B"), scaled(999.7, "B")
    ('4.40 GB', '1.15 kB', '0 B', '1.00 kB')
    """
    step = 0
    while value >= 999.5 and step < len(PREFIXES) - 1:
        value, step = value / 1000, step + 1
    digits = 0 if value >= 99.95 or (not step and value == int(value)) else 1 if value >= 9.995 else 2
    return f"{value:.{digits}f} {PREFIXES[step]}{unit}"


def in_bytes(value: float) -> str:
    """A number of bytes.

    >>> in_bytes(1e7), in_bytes(172)
    ('10.0 MB', '172 B')
    """
    return scaled(value, "B")


def in_seconds(value: float) -> str:
    """A number of seconds.

    >>> in_seconds(0.0256), in_seconds(3e-6), in_seconds(0)
    ('25.6 ms', '3 µs', '0')
    """
    if not value:
        return "0"
    if value >= 0.9995:
        return f"{value:.3g} s"
    return f"{value * 1e3:.3g} ms" if value >= 0.9995e-3 else f"{value * 1e6:.3g} µs"


def in_percent(share: float) -> str:
    """A percentage with two digits.

    >>> in_percent(0.0312), in_percent(0.5), in_percent(2e-7)
    ('3.1 %', '50 %', '< 0.01 %')
    """
    percent = 100 * share
    if not percent:
        return "0"
    return "< 0.01 %" if 0 < percent < 0.01 else f"{percent:.{0 if percent >= 9.95 else 1 if percent >= 0.1 else 2}f} %"
