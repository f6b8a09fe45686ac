"""An lm_eval model that runs moe-edge (EleutherAI's harness, extra `eval`).

lm_eval knows only models that are registered before it parses its arguments. This module registers
`moe-edge` and then starts lm_eval's command line:

    python -m orchestrator.lab.eval.harness run --model moe-edge --model_args model=FILE --tasks ...

A Python program can import this module instead. The model arguments are settings of
`orchestrator.config.Config`, with sizes written as on the command line. Log-likelihoods use decode
steps of one token, and each expert is computed in exactly the tier that the policy chose. Text is
generated in the same way as a chat answer.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from contextlib import closing
from typing import Any

try:
    from lm_eval.api.model import TemplateLM
    from lm_eval.api.registry import register_model
    from lm_eval.utils import get_rolling_token_windows, make_disjoint_window
except ImportError as error:
    raise ImportError(
        "lm_eval is missing: install it with `pip install 'moe-edge[eval]'`"
    ) from error

from orchestrator.config import Config
from orchestrator.errors import ConfigError
from orchestrator.lab.eval.judge import Judge
from orchestrator.runtime.answering import Answering
from orchestrator.runtime.runtime import Runtime

_MAX_GEN_TOKENS = 256


@register_model("moe-edge")
class MoeEdgeLM(TemplateLM):
    """A loaded model for lm_eval (EleutherAI's evaluation harness).

    It computes log-likelihoods of texts and generates texts.
    """

    def __init__(
        self,
        batch_size: Any = None,
        max_batch_size: Any = None,
        device: Any = None,
        **settings: Any,
    ) -> None:
        """Load the model.

        `settings` are those of Config; `model` is required. batch_size, max_batch_size and device
        are arguments that lm_eval always passes. They have no effect, because one sequence is
        evaluated at a time, on the CPU. Raises MoeEdgeError.
        """
        super().__init__()
        for name, declared in Config.declared().items():
            if name in settings and declared.unit is not None:
                settings[name] = declared.parse(str(settings[name]))
        settings.setdefault("exact_tiers", True)
        config = Config.build(**settings)
        config = config.with_changes(threads=config.n_threads)
        self.runtime = Runtime.open(config, answering=Answering())
        self._begin = self._tokenize("")

    def _tokenize(self, text: str) -> list[int]:
        return self.runtime.vocabulary.tokenize(text, add_special=True, parse_special=True)

    @property
    def max_length(self) -> int:
        """Maximum length of a context and its continuation together, in tokens."""
        return self.runtime.about.n_ctx

    @property
    def eot_token_id(self) -> int:
        """Return the end-of-text token. Raises ConfigError if the model file has none."""
        for name in ("eot", "eos"):
            token = self.runtime.model.metadata.get(f"tokenizer.ggml.{name}_token_id")
            if isinstance(token, int):
                return token
        raise ConfigError(
            f"{self.runtime.config.model} has no end-of-text token: its metadata needs "
            f"tokenizer.ggml.eot_token_id or tokenizer.ggml.eos_token_id"
        )

    @property
    def prefix_token_id(self) -> int:
        """The token that is used as the context if a context is empty.

        This is the BOS token if the model uses one, otherwise the end-of-text token.
        """
        return self._begin[0] if self._begin else self.eot_token_id

    def tok_encode(
        self, string: str, add_special_tokens: bool | None = None, **_: Any
    ) -> list[int]:
        """Tokenize a text. Names of control tokens in the text become control tokens.

        With add_special_tokens=False, the BOS token is left out.
        """
        tokens = self._tokenize(string)
        return tokens[len(self._begin) :] if add_special_tokens is False else tokens

    def _loglikelihood_tokens(
        self,
        requests: Sequence[tuple[Any, list[int], list[int]]],
        disable_tqdm: bool = False,
        **_: Any,
    ) -> list[tuple[float, bool]]:
        # Sort the requests, so that those with the same context are adjacent and evaluate it only
        # once.
        order = sorted(range(len(requests)), key=lambda i: requests[i][1])
        results: dict[int, tuple[float, bool]] = {}
        with self.runtime.evaluator() as evaluator:
            judge = Judge(evaluator)
            for i in order:
                name, context, continuation = requests[i]
                if len(continuation) >= self.max_length:
                    raise ConfigError(
                        f"a continuation of {len(continuation)} tokens does not fit the context of "
                        f"{self.max_length} tokens: increase ctx"
                    )
                logp, greedy = judge.continuation(context, continuation)
                results[i] = float(logp.sum()), greedy
                if name is not None:
                    self.cache_hook.add_partial("loglikelihood", name, results[i])
        return [results[i] for i in range(len(requests))]

    def loglikelihood_rolling(self, requests: Any, disable_tqdm: bool = False) -> list[float]:
        """Return the log-likelihood of each text, cut into parts that fit the context.

        The parts do not overlap.
        """
        results = []
        for (text,) in (request.args for request in requests):
            windows = get_rolling_token_windows(
                token_list=self.tok_encode(text, add_special_tokens=False),
                prefix_token=self.prefix_token_id,
                max_seq_len=self.max_length - 1,
                context_len=1,
            )
            pairs = [(None, *make_disjoint_window(window)) for window in windows]
            total = sum(logp for logp, _ in self._loglikelihood_tokens(pairs))
            results.append(total)
            self.cache_hook.add_partial("loglikelihood_rolling", (text,), total)
        return results

    def generate_until(self, requests: Any, disable_tqdm: bool = False) -> list[str]:
        """Generate a text for each request, up to the first stop string of the request.

        Sampling is greedy unless the request sets do_sample.
        """
        results = []
        for context, given in (request.args for request in requests):
            until = given.get("until") or []
            until = [until] if isinstance(until, str) else list(until)
            most = int(given.get("max_gen_toks", _MAX_GEN_TOKENS))
            sampled = given.get("do_sample", False)
            n_context = self.max_length - min(most, self.max_length // 2)
            body = {
                "prompt": self.tok_encode(context)[-n_context + 1 :] or [self.prefix_token_id],
                "n_predict": most,
                "temperature": float(given.get("temperature", 1.0)) if sampled else 0.0,
                "stop": [stop for stop in until if stop],
            }
            with closing(self.runtime.submit(json.dumps(body).encode(), "/completion")) as answer:
                text = "".join(part["content"] for part in answer)
            results.append(text)
            self.cache_hook.add_partial("generate_until", (context, given), text)
        return results


def main() -> None:
    """Run lm_eval's command line with the model "moe-edge" registered."""
    from lm_eval.__main__ import cli_evaluate

    cli_evaluate()


if __name__ == "__main__":
    # lm_eval may import this module by its name, which would register the model a second time.
    sys.modules["orchestrator.lab.eval.harness"] = sys.modules["__main__"]
    main()
