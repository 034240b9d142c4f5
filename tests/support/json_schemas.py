"""JSON schemas of our own, by name: what structured output must take, and what it must refuse by keyword.

Open ends are bounded (maxLength, maxItems, enums), so that an answer of any model ends within a few hundred tokens.
"""

from __future__ import annotations

from typing import Any

Schema = dict[str, Any]


def record(required: bool = True, **properties: Any) -> Schema:
    """An object of exactly these properties."""
    schema: Schema = {"type": "object", "properties": properties, "additionalProperties": False}
    return {**schema, "required": list(properties)} if required else schema


def text(most: int = 12, **rest: Any) -> Schema:
    return {"type": "string", "maxLength": most, **rest}


def integer(low: int = 0, high: int = 999) -> Schema:
    return {"type": "integer", "minimum": low, "maximum": high}


def array(items: Any, low: int = 0, high: int = 3) -> Schema:
    return {"type": "array", "items": items, "minItems": low, "maxItems": high}


def pattern(expression: str) -> Schema:
    return {"type": "string", "pattern": expression}


def formatted(name: str) -> Schema:
    return {"type": "string", "format": name}


POINT = record(x=integer(), y=integer())
COLOURS = {"enum": ["red", "green", "blue"]}
NULL = {"type": "null"}


def tree(depth: int) -> Schema:
    """A tree of given depth, each level a definition that refers to the next."""
    levels = {
        f"level{d}": record(name=text(6), children=array({"$ref": f"#/$defs/level{d + 1}"}, 0, 2)) for d in range(depth)
    }
    return {"$defs": {**levels, f"level{depth}": record(name=text(6))}, "$ref": "#/$defs/level0"}


SUPPORTED: dict[str, Schema] = {
    # scalars
    "boolean": {"type": "boolean"},
    "null": NULL,
    "integer range": integer(-40, 40),
    "integer exclusive": {"type": "integer", "exclusiveMinimum": 10, "exclusiveMaximum": 20},
    "number range": {"type": "number", "minimum": 0, "maximum": 1, "multipleOf": 0.01},
    "multiple of 5": {"type": "integer", "multipleOf": 5, "minimum": 0, "maximum": 500},
    "short text": text(20),
    "text of 3 to 5": {"type": "string", "minLength": 3, "maxLength": 5},
    "several types": {"type": ["boolean", "null", "integer"], "minimum": 0, "maximum": 9},
    "enum of texts": COLOURS,
    "enum of anything": {"enum": ["a", 1, 2.5, True, None, [1, 2], {"k": "v"}]},
    "constant text": {"const": "exactly this"},
    "constant object": {"const": {"a": [1, {"b": None}]}},
    "unicode enum": {"enum": ["naïve", "日本", "🚡 ropeway", 'quote " and \\ slash']},
    # patterns and formats
    "pattern postcode": pattern("^[0-9]{5}(-[0-9]{4})?$"),
    "pattern plate": pattern("^[A-Z]{2}-[0-9]{3}-[A-Z]{2}$"),
    "pattern words": pattern("^(up|down)( (slow|fast)){1,3}$"),
    "pattern hex colour": pattern("^#[0-9a-f]{6}$"),
    "pattern semver": pattern("^[0-9]{1,2}\\.[0-9]{1,2}\\.[0-9]{1,2}$"),
    "date": formatted("date"),
    "time": formatted("time"),
    "duration": {"enum": ["PT1H", "PT30M"]},
    "date-time": formatted("date-time"),
    "uuid": formatted("uuid"),
    "ipv4": formatted("ipv4"),
    "ipv6": formatted("ipv6"),
    # objects
    "point": POINT,
    "person": record(name=text(), age=integer(0, 120), is_member={"type": "boolean"}),
    "optional properties": record(required=False, a=integer(), b=COLOURS, c={"type": "boolean"}),
    "some required": {**record(required=False, id=integer(), note=text(8), tag=COLOURS), "required": ["id"]},
    "nested 4 deep": record(a=record(b=record(c=record(d=integer())))),
    "nullable property": record(value={"anyOf": [integer(), NULL]}, unit={"type": ["string", "null"], "maxLength": 4}),
    "pattern properties": {
        "type": "object",
        "patternProperties": {"^k[0-9]$": integer()},
        "additionalProperties": False,
        "maxProperties": 2,
    },
    "many properties": record(**{f"field_{number}": integer(0, 9) for number in range(15)}),
    "described": {**record(city=text(description="where"), zip=pattern("^[0-9]{4}$")), "title": "Address"},
    "property names that need escapes": record(**{'a "b"': integer(0, 9), "tab\t": integer(0, 9), "ä": integer(0, 9)}),
    "empty object": record(),
    # arrays
    "integers": array(integer(), 1, 5),
    "points": array(POINT, 1, 3),
    "matrix": array(array(integer(0, 9), 2, 2), 2, 2),
    "enum array": array(COLOURS, 2, 4),
    "tuple": {"type": "array", "prefixItems": [integer(), text(6), {"type": "boolean"}], "items": False, "minItems": 3},
    "tuple and rest": {"type": "array", "prefixItems": [COLOURS], "items": integer(), "minItems": 1, "maxItems": 3},
    "empty array": array(integer(), 0, 0),
    # references and recursion
    "definition": {"$defs": {"point": POINT}, **record(start={"$ref": "#/$defs/point"}, end={"$ref": "#/$defs/point"})},
    "old definitions": {"definitions": {"id": integer()}, **array({"$ref": "#/definitions/id"}, 1, 2)},
    "references of references": {
        "$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/c"}, "c": record(leaf=COLOURS)},
        **record(a={"$ref": "#/$defs/a"}),
    },
    "nested references": {
        "$defs": {
            "station": record(name=text(8), lift={"$ref": "#/$defs/lift"}),
            "lift": record(kind=COLOURS, cabins=array({"$ref": "#/$defs/cabin"}, 1, 2)),
            "cabin": record(seats=integer(1, 12)),
        },
        "$ref": "#/$defs/station",
    },
    "recursive list": {
        "$defs": {"node": record(value=integer(0, 9), next={"anyOf": [NULL, {"$ref": "#/$defs/node"}]})},
        "$ref": "#/$defs/node",
    },
    "recursive expression": {
        "$defs": {
            "expression": {
                "anyOf": [integer(0, 99), record(op=COLOURS, a={"$ref": "#/$defs/expression"}, b=integer(0, 9))]
            }
        },
        "$ref": "#/$defs/expression",
    },
    "tree of depth 3": tree(3),
    "reference to the root": {**record(required=False, id=integer(0, 9), parent={"$ref": "#"}), "required": ["id"]},
    # combinations
    "any of scalars": {"anyOf": [integer(), {"type": "boolean"}, text(5)]},
    "any of objects": {"anyOf": [POINT, record(radius=integer()), record(colour=COLOURS)]},
    "any of constants": {"anyOf": [{"const": "yes"}, {"const": "no"}, {"const": "it depends"}]},
    "nested any of": record(v={"anyOf": [{"anyOf": [integer(), NULL]}, array({"anyOf": [integer(), COLOURS]}, 1, 2)]}),
    "one of types": {"oneOf": [integer(), text(4), {"type": "boolean"}]},
    "one of by a constant": {
        "oneOf": [
            record(kind={"const": "circle"}, radius=integer()),
            record(kind={"const": "square"}, side=integer()),
        ]
    },
    "one of by reference": {
        "$defs": {
            "cat": record(type={"const": "cat"}, lives=integer(1, 9)),
            "dog": record(type={"const": "dog"}, tricks=array(text(5), 0, 2)),
        },
        **record(pet={"oneOf": [{"$ref": "#/$defs/cat"}, {"$ref": "#/$defs/dog"}]}),
    },
    "all of": {"allOf": [{"type": "string"}, {"minLength": 2}, {"maxLength": 6}]},
    "weather report": record(
        place=text(16),
        day=formatted("date"),
        readings=array(record(hour=integer(0, 23), celsius=integer(-40, 50), sky={"enum": ["clear", "cloud"]}), 1, 3),
    ),
    "invoice": record(
        number=pattern("^INV-[0-9]{4}$"),
        lines=array(record(article=text(10), quantity=integer(1, 99), cents=integer(1, 99999)), 1, 2),
        paid={"type": "boolean"},
        customer={"anyOf": [record(name=text(10)), NULL]},
    ),
}  # fmt: skip

# keyword -> a schema that is refused for it
REFUSED: dict[str, Schema] = {
    "not": {"type": "string", "not": {"const": "a"}},
    "uniqueItems": {**array(integer()), "uniqueItems": True},
    "if": {"type": "object", "if": {"required": ["a"]}, "then": {"required": ["b"]}},
    "dependentRequired": {"type": "object", "dependentRequired": {"a": ["b"]}},
    "unevaluatedProperties": {"type": "object", "unevaluatedProperties": False},
    "contains": {"type": "array", "contains": integer()},
    "oneOf": {"oneOf": [{"type": "integer"}, {"type": "number"}]},
    "pattern": pattern("(?=a)b"),
    "format": formatted("unknown-format"),
    "type": {"type": "nothing"},
    "$ref": {"$ref": "#/$defs/missing"},
    "minimun": {"type": "integer", "minimun": 3},
}
