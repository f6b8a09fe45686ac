"""Requests for plans, from settings and needs that are given together by name."""

from dataclasses import fields
from typing import Any

from orchestrator.config import Config
from orchestrator.plan.records import Needs, PlanRequest


def needs_in(given: dict[str, Any]) -> Needs:
    """The needs among what is given by name, which then holds settings only."""
    names = [each.name for each in fields(Needs) if each.name in given]
    return Needs(**{name: given.pop(name) for name in names})


def request_of(**given: Any) -> PlanRequest:
    needs = needs_in(given)
    return PlanRequest(Config.build(**given), needs)
