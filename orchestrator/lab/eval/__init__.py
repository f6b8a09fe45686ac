"""Quality of a configuration: perplexity, KL divergence from the best tier, multiple choice."""

from orchestrator.lab.eval.run import EvalOptions, evaluate, render

__all__ = ["EvalOptions", "evaluate", "render"]
