"""A function that a model may call, and what it takes, for tests that speak to a server."""


def object_of(**properties):
    """The schema of an object that has these properties, and no others."""
    needed = {"required": list(properties), "additionalProperties": False}
    return {"type": "object", "properties": properties, **needed}


ARGUMENTS = object_of(country={"enum": ["Norway", "Peru"]})
_SAID = {"name": "capital", "description": "The capital of a country."}
CAPITAL = {"type": "function", "function": {**_SAID, "parameters": ARGUMENTS}}
