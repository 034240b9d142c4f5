"""The reasoning of models that think between <think> and </think>: split from the answer as it arrives."""

from __future__ import annotations

OPENER, CLOSER = "<think>", "</think>"


def thinks(template: str | None) -> bool:
    """Whether a chat template is of a model that thinks aloud."""
    return CLOSER in (template or "")


class ReasoningSplitter:
    """Splits one answer, however it is cut into pieces.

    starts_inside: the prompt opened the reasoning, so that the answer begins within it.
    """

    def __init__(self, *, starts_inside: bool) -> None:
        self._held = ""
        self._state = "inside" if starts_inside else "before"

    def push(self, text: str) -> tuple[str, str]:
        """(reasoning, answer) that the next piece of text adds."""
        self._held += text
        reasoning = answer = ""
        if self._state == "before":
            begun = self._held.lstrip()
            if OPENER.startswith(begun) and begun != OPENER:
                return "", ""
            self._state = "inside" if begun.startswith(OPENER) else "after"
            if self._state == "inside":
                self._held = begun.removeprefix(OPENER)
        if self._state == "inside":
            reasoning, found, after = self._held.partition(CLOSER)
            if found:
                self._held, self._state = after, "gap"
            else:
                num_kept = next((n for n in range(len(CLOSER) - 1, 0, -1) if reasoning.endswith(CLOSER[:n])), 0)
                reasoning, self._held = reasoning[: len(reasoning) - num_kept], reasoning[len(reasoning) - num_kept :]
        if self._state == "gap":  # the blank lines between reasoning and answer belong to neither
            self._held = self._held.lstrip("\n")
            self._state = "after" if self._held else "gap"
        if self._state == "after":
            answer, self._held = self._held, ""
        return reasoning, answer

    def finish(self) -> tuple[str, str]:
        """The rest, when no more text will come."""
        held, self._held = self._held, ""
        return (held, "") if self._state == "inside" else ("", held)
