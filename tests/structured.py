"""What the demo model says of countries as JSON and as tool calls, in each precision and mix.

    python tests/structured.py [--countries 40] [--ram 145MiB]
    python tests/structured.py --model MODEL.gguf --max-loss 0.02 [--memory 40,60,80,100]

Every answer has to parse, by a schema or as a call of the tool that was asked for. How often it is
right is what is measured: the capital against the list below, and the country that a call is made
for. Each fact has a schema of its own, since the model learned to answer one question at a time.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(HERE))

from served import DEMO, server_library  # noqa: E402

FACTS = {
    "Norway": ("Oslo", "Europe"),
    "Peru": ("Lima", "South America"),
    "Japan": ("Tokyo", "Asia"),
    "Kenya": ("Nairobi", "Africa"),
    "Spain": ("Madrid", "Europe"),
    "Chile": ("Santiago", "South America"),
    "India": ("New Delhi", "Asia"),
    "Italy": ("Rome", "Europe"),
    "Egypt": ("Cairo", "Africa"),
    "Cuba": ("Havana", "North America"),
    "France": ("Paris", "Europe"),
    "Ghana": ("Accra", "Africa"),
    "Nepal": ("Kathmandu", "Asia"),
    "Poland": ("Warsaw", "Europe"),
    "Ecuador": ("Quito", "South America"),
    "Vietnam": ("Hanoi", "Asia"),
    "Zambia": ("Lusaka", "Africa"),
    "Greece": ("Athens", "Europe"),
    "Uruguay": ("Montevideo", "South America"),
    "Thailand": ("Bangkok", "Asia"),
    "Senegal": ("Dakar", "Africa"),
    "Finland": ("Helsinki", "Europe"),
    "Bolivia": ("La Paz", "South America"),
    "Mongolia": ("Ulaanbaatar", "Asia"),
    "Rwanda": ("Kigali", "Africa"),
    "Ireland": ("Dublin", "Europe"),
    "Colombia": ("Bogota", "South America"),
    "Jordan": ("Amman", "Asia"),
    "Angola": ("Luanda", "Africa"),
    "Austria": ("Vienna", "Europe"),
    "Paraguay": ("Asuncion", "South America"),
    "Pakistan": ("Islamabad", "Asia"),
    "Uganda": ("Kampala", "Africa"),
    "Hungary": ("Budapest", "Europe"),
    "Venezuela": ("Caracas", "South America"),
    "Iraq": ("Baghdad", "Asia"),
    "Mali": ("Bamako", "Africa"),
    "Portugal": ("Lisbon", "Europe"),
    "Jamaica": ("Kingston", "North America"),
    "Canada": ("Ottawa", "North America"),
}
# Without a bound the model goes on until the answer may be no longer, and that is no JSON.
TEXT = {"type": "string", "maxLength": 40}
CONTINENTS = ("Africa", "Asia", "Europe", "North America", "South America", "Australia")

# Each alone, and mixes as the policies make them.
ROWS: dict[str, dict[str, Any]] = {
    "q8_0": {"policy": "lru", "high_tier": "q8_0"},
    "q4_k": {"policy": "lru", "high_tier": "q4_k"},
    "q2_k": {"policy": "lru", "high_tier": "q2_k"},
    "dymoe 8/2, r = 0.75": {
        "policy": "dymoe",
        "high_tier": "q8_0",
        "low_tier": "q2_k",
        "retention": 0.75,
    },
    "dymoe 4/2, r = 0.75": {
        "policy": "dymoe",
        "high_tier": "q4_k",
        "low_tier": "q2_k",
        "retention": 0.75,
    },
    "dymoe 4/0, r = 0.75": {
        "policy": "dymoe",
        "high_tier": "q4_k",
        "low_tier": "skip",
        "retention": 0.75,
    },
    "dynaexq 4/2": {"policy": "dynaexq", "high_tier": "q4_k", "low_tier": "q2_k"},
    "context 8/4/2": {"policy": "context"},
}


def question(text: str, **more: Any) -> dict[str, Any]:
    return {
        "messages": [{"role": "user", "content": text}],
        "temperature": 0,
        "max_tokens": 200,
        **more,
    }


def with_schema(name: str, what: dict[str, Any]) -> dict[str, Any]:
    schema = {
        "type": "object",
        "properties": {name: what},
        "required": [name],
        "additionalProperties": False,
    }
    return {"type": "json_schema", "json_schema": {"name": name, "schema": schema}}


def tool_for(countries: list[str]) -> dict[str, Any]:
    parameters = {
        "type": "object",
        "properties": {"country": {"enum": countries}},
        "required": ["country"],
        "additionalProperties": False,
    }
    function = {"name": "capital", "description": "A country's capital.", "parameters": parameters}
    return {"type": "function", "function": function}


def measure(backend: Any, countries: list[str]) -> dict[str, int]:
    """How many answers parsed, and how many of them were right."""
    counts = dict.fromkeys(("parsed", "capital", "continent", "chosen", "calls", "called"), 0)

    def said(data: dict[str, Any]) -> dict[str, Any]:
        status, text = backend.request("/v1/chat/completions", json.dumps(data).encode()).whole()
        body = json.loads(text)
        if status != 200:
            sys.exit(f"status {status}: {body}")
        message: dict[str, Any] = body["choices"][0]["message"]
        return message

    def read(data: dict[str, Any], name: str) -> str:
        try:
            found = json.loads(said(data)["content"])[name]
        except (ValueError, KeyError, TypeError):
            return ""
        counts["parsed"] += 1
        return str(found)

    capitals = [FACTS[country][0] for country in countries]
    for at, country in enumerate(countries):
        capital, continent = FACTS[country]
        ask = f"What is the capital of {country}?"
        free = question(ask, response_format=with_schema("capital", TEXT))
        counts["capital"] += capital.lower() in read(free, "capital").lower()
        near = [capitals[(at + step) % len(capitals)] for step in range(4)]
        chosen = question(ask, response_format=with_schema("capital", {"enum": sorted(near)}))
        counts["chosen"] += read(chosen, "capital") == capital
        where = question(
            f"On which continent is {country}?",
            response_format=with_schema("continent", {"enum": list(CONTINENTS)}),
        )
        counts["continent"] += read(where, "continent") == continent
        four = sorted(countries[(at + step) % len(countries)] for step in range(4))
        calls = said(question(ask, tools=[tool_for(four)], tool_choice="required")).get(
            "tool_calls"
        )
        try:
            made = json.loads(calls[0]["function"]["arguments"])["country"] if calls else None
        except (ValueError, KeyError):
            made = None
        counts["calls"] += made in four
        counts["called"] += made == country
    return counts


def rows(asked: argparse.Namespace) -> Iterator[tuple[str, dict[str, Any]]]:
    """Name and settings of each row."""
    from gguf_tools.experts import ExpertModel
    from orchestrator.memory.footprint import model_shape
    from orchestrator.settings import parse_size

    if asked.max_loss is None:
        for name in asked.rows.split(";") if asked.rows else ROWS:
            yield name, {"ram": parse_size(asked.ram), **ROWS[name]}
        return
    with ExpertModel.open(asked.model) as model:
        whole = model_shape(model, (0,)).all_slot_bytes()
    for percent in map(int, asked.memory.split(",")):
        slots = whole * percent // 100
        yield f"{percent} %", {"expert_ram": slots, "max_loss": asked.max_loss}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--countries", type=int, default=len(FACTS))
    parser.add_argument("--ram", default="145MiB")
    parser.add_argument("--rows", help="names, with ; between")
    parser.add_argument("--model", type=Path, default=DEMO)
    parser.add_argument("--max-loss", type=float, help="nats a token, which chooses the plans")
    parser.add_argument("--memory", default="40,60,80,100", help="with it: shares in percent")
    asked = parser.parse_args()
    from orchestrator.config import Config
    from orchestrator.native.llama import Bindings
    from orchestrator.serve.backend import Backend
    from orchestrator.serve.settings import ServeSettings

    Bindings.load()
    library = server_library()
    countries = list(FACTS)[: asked.countries]
    n = len(countries)
    print(f"of {n} countries: schemas and calls that parse, then what is right in %")
    print(f"{'':22} parse  calls   capital  of four  continent  call's country")
    for name, settings in rows(asked):
        config = Config.build(model=asked.model, ctx=1024, threads=1, **settings)
        backend = Backend(config, ServeSettings(), library, lambda _done: None)
        try:
            counts = measure(backend, countries)
            plan = f"  {backend.engine.mode}" if asked.max_loss is not None else ""
        finally:
            backend.close()
        right = [100 * counts[key] / n for key in ("capital", "chosen", "continent", "called")]
        print(
            f"{name:22} {counts['parsed']:3}/{3 * n} {counts['calls']:3}/{n}"
            + "".join(f"{each:9.1f}" for each in right)
            + plan,
            flush=True,
        )


if __name__ == "__main__":
    main()
