"""What precision and skipping cost: perplexity, distance from the best tier, multiple choice."""

from orchestrator.lab.eval.run import EvalOptions, evaluate, render

__all__ = ["EvalOptions", "evaluate", "render"]
