"""Numbers of things, as they are said."""


def counted(number: int, what: str) -> str:
    """With the plural where it is due.

    >>> counted(1, "document"), counted(1200, "step")
    ('1 document', '1,200 steps')
    """
    return f"{number:,} {what}" + ("" if number == 1 else "s")
