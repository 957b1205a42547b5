"""Numbers of things, as they are said."""


def counted(number: int, noun: str) -> str:
    """With the plural where it is due.

    >>> counted(1, "document"), counted(1200, "step")
    ('1 document', '1,200 steps')
    """
    return f"{number:,} {noun}" + ("" if number == 1 else "s")
