"""The page at /docs: an OpenAPI document as readable HTML, without scripts or anything from elsewhere."""

from __future__ import annotations

from collections.abc import Mapping
from html import escape
from typing import Any

_STYLE = """
body { font: 16px/1.5 system-ui, sans-serif; max-width: 60rem; margin: 2rem auto; padding: 0 1rem; }
code { font-family: ui-monospace, monospace; }
h2 { margin: 2.5rem 0 .25rem; font-size: 1.1rem; border-top: 1px solid #ccc; padding-top: 1rem; }
table { border-collapse: collapse; width: 100%; margin-top: .5rem; }
td, th { text-align: left; vertical-align: top; padding: .2rem .8rem .2rem 0; border-bottom: 1px solid #eee; }
.method { color: #06c; font-weight: 600; }
"""


def page_of(document: Mapping[str, Any]) -> str:
    """The whole page."""
    info, schemas = document["info"], document["components"]["schemas"]
    title = f"{info['title']} {info['version']}"
    operations = [
        _operation(method, path, operation, schemas)
        for path, methods in document["paths"].items()
        for method, operation in methods.items()
    ]
    return (
        f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>{escape(title)}</title>'
        f"<style>{_STYLE}</style></head><body><h1>{escape(title)}</h1>"
        '<p>The same for machines: <a href="openapi.json">openapi.json</a>.</p>'
        f"{''.join(operations)}</body></html>"
    )


def _operation(method: str, path: str, operation: Mapping[str, Any], schemas: Mapping[str, Any]) -> str:
    heading = f'<h2><span class="method">{method.upper()}</span> <code>{escape(path)}</code></h2>'
    body = operation.get("requestBody")
    if body is None:
        return f"{heading}<p>{escape(operation['summary'])}</p>"
    (content,) = body["content"].values()
    name = content["schema"]["$ref"].rsplit("/", 1)[1]
    return f"{heading}<p>{escape(operation['summary'])}</p>{_fields(schemas[name])}"


def _fields(schema: Mapping[str, Any]) -> str:
    required = set(schema.get("required", ()))
    rows = [
        f"<tr><td><code>{escape(name)}</code>{' (required)' if name in required else ''}</td>"
        f"<td>{escape(_type(field))}</td><td>{escape(field.get('description', ''))}</td></tr>"
        for name, field in schema.get("properties", {}).items()
    ]
    return f"<table><tr><th>field</th><th>type</th><th></th></tr>{''.join(rows)}</table>" if rows else ""


def _type(field: Mapping[str, Any]) -> str:
    """A type in words; that null is allowed goes without saying."""
    if "anyOf" in field:
        return " or ".join(dict.fromkeys(_type(each) for each in field["anyOf"] if each.get("type") != "null"))
    if "$ref" in field:
        return str(field["$ref"]).rsplit("/", 1)[1]
    if field.get("type") == "array":
        return f"list of {_type(field.get('items', {}))}"
    return str(field.get("type", "any"))
