"""Names of leaves: path components joined by "/", escaped as in RFC 6901."""

from __future__ import annotations


def escape(component: str) -> str:
    if "/" in component or "~" in component:
        return component.replace("~", "~0").replace("/", "~1")
    return component


def unescape(component: str) -> str:
    return component.replace("~1", "/").replace("~0", "~") if "~" in component else component


def join(path: str, component: object) -> str:
    """The name of what `path` holds under `component`; the root's path is empty."""
    return f"{path}/{escape(str(component))}" if path else escape(str(component))
