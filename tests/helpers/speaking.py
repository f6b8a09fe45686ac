"""A function that a model may call, and its arguments."""


def object_of(**properties):
    """Return the schema of an object with exactly these properties."""
    needed = {"required": list(properties), "additionalProperties": False}
    return {"type": "object", "properties": properties, **needed}


ARGUMENTS = object_of(country={"enum": ["Norway", "Peru"]})
_SAID = {"name": "capital", "description": "The capital of a country."}
CAPITAL = {"type": "function", "function": {**_SAID, "parameters": ARGUMENTS}}
