"""The characters that may stand in JSON as they are and yet end a line for some readers. Knows nothing of its content.

`str.splitlines`, on which widely used readers of event streams and of JSON lines rest, ends a line at these; the others
at which it does are control characters, which JSON escapes anyhow.
"""

from __future__ import annotations

_LINE_ENDS = (
    (b"\xc2\x85", b"\\u0085"),
    (b"\xe2\x80\xa8", b"\\u2028"),
    (b"\xe2\x80\xa9", b"\\u2029"),
)


def escaped_line_ends(text: bytes) -> bytes:
    """UTF-8 text whose only characters beyond ASCII are within JSON strings, with every line end of those escaped."""
    if text.isascii():
        return text
    for character, escape in _LINE_ENDS:
        text = text.replace(character, escape)
    return text
