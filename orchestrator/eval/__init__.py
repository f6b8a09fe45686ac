"""What precision and skipping cost: perplexity, distance from the best tier, multiple choice,
and the studies of DyMoE's and DynaExq's figures and tables."""

from orchestrator.eval.report import render
from orchestrator.eval.run import EvalOptions, evaluate
from orchestrator.eval.studies import STUDIES, run_study

__all__ = ["STUDIES", "EvalOptions", "evaluate", "render", "run_study"]
