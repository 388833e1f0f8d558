"""Text of others on a person's terminal: it may not move the cursor, change the title or hide what comes after it."""


def shown_text(text: str, *, keep: str = "") -> str:
    """`text` with control characters, but for those to `keep`, as escapes; other characters stay as they are."""
    if text.isprintable():
        return text
    return "".join(
        char if char.isprintable() or char in keep or not _is_control(char) else char.encode("unicode_escape").decode()
        for char in text
    )


def _is_control(char: str) -> bool:
    """C0, DEL, C1, and the marks that turn the direction of text around."""
    code = ord(char)
    return code < 0x20 or 0x7F <= code < 0xA0 or 0x202A <= code <= 0x202E or 0x2066 <= code <= 0x2069
